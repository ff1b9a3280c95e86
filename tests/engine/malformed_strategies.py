"""Requests that are malformed, nearly valid or valid, for hypothesis; and what every answer to them must be like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ddtree_reference.protocol import UNSUPPORTED, ChatRequest, CompletionRequest

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
FIELDS = sorted(
    {*UNSUPPORTED, *ChatRequest.model_fields, *CompletionRequest.model_fields, "user", "metadata", "priority"}
)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


text = st.text(max_size=20) | st.text(st.characters(categories=["Cs", "Cc", "So"]), max_size=6)
numbers = st.sampled_from(
    [-1, 0, 1, 2, 16, 17, 20, 21, 2047, 2048, 2**31, 2**63, 10**30, -(10**30), 0.5, 1.5, -0.0, 1e-9, 1e308, 1e-320]
)
scalars = st.none() | st.booleans() | numbers | st.integers() | st.floats() | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=8
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text") | text, "text": text}), max_size=3)
roles = st.sampled_from(["user", "assistant", "system", "tool"]) | text
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": text | parts}), max_size=3)
likely = {
    "messages": messages,
    "prompt": text | st.lists(st.integers(-1, 260), max_size=6),
    "max_tokens": st.integers(1, 12),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "seed": st.integers(-(2**63), 2**63),
    "n": st.integers(1, 3),
    "stop": text | st.lists(text, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "ignore_eos": st.booleans(),
    "return_spec_tokens_details": st.booleans(),
    "model": st.sampled_from(["toy", "toy", "toy", "gpt"]) | text,
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body, some optional fields of it likely ones, then up to three fields replaced, added or removed."""
    body: dict[str, Any] = {"max_tokens": 4, "stream": draw(st.booleans())}
    body |= {"prompt": "hi"} if path == TEXT_PATH else {"messages": [{"role": "user", "content": "hi"}]}
    for name in draw(st.lists(st.sampled_from(sorted(likely)), max_size=5)):
        body[name] = draw(likely[name])
    if draw(st.booleans()):
        return body
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        if draw(st.integers(0, 4)):
            body[name] = draw(values)
        elif name != "max_tokens":  # an answer of the default length takes too long for thousands of requests
            body.pop(name, None)
    return body


@st.composite
def encoded(draw: st.DrawFn, path: str) -> bytes:
    """A body as bytes: JSON as it should be most of the time, else damaged, in another form, or anything."""
    kind = draw(st.sampled_from(["json"] * 24 + ["twice", "cut", "spliced", "utf-16", "bom", "deep", "value", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "deep":
        opening = draw(st.sampled_from(['{"messages":', "[", '{"user":[', '{"tools":[', '{"prompt":[[']))
        return opening.encode() * draw(st.integers(10, 3000))
    value = draw(values) if kind == "value" else draw(bodies(path))
    data = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if kind == "twice" and data.endswith(b"}"):
        repeated = draw(st.sampled_from(["max_tokens", "messages", "prompt", "stream"]))
        return data[:-1] + f',"{repeated}":{json.dumps(draw(values))}}}'.encode()
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "spliced":
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
    if kind == "utf-16":
        return data.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass")
    return b"\xef\xbb\xbf" + data if kind == "bom" else data


header_names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.~!#$%&'*+^`|", min_size=1, max_size=12)
visible = st.characters(min_codepoint=33, max_codepoint=126) | st.characters(min_codepoint=161, max_codepoint=255)
header_values = st.text(visible, max_size=20)
content_types = st.sampled_from(
    ["application/json"] * 60
    + ["application/json; charset=utf-16", "Application/JSON", "text/plain", "application/jsonx", "multipart/x", ""]
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request, most often a POST of JSON to an endpoint that generates."""
    path = draw(st.sampled_from([CHAT_PATH, TEXT_PATH]))
    headers = [("content-type", draw(content_types))] if draw(st.integers(0, 20)) else []
    own = {"content-length", "transfer-encoding", "connection", "upgrade", "host", "content-type", "expect"}
    extra = draw(st.lists(st.tuples(header_names, header_values), max_size=2)) if draw(st.integers(0, 3)) == 0 else []
    headers += [(name, value) for name, value in extra if name not in own]
    headers += draw(st.sampled_from([[]] * 6 + [[("content-encoding", "gzip")], [("accept", "text/html")]]))
    body = draw(encoded(path))
    if draw(st.integers(0, 40)):
        return Request("POST", path, tuple(headers), body)
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"]))
    elsewhere = st.sampled_from(
        ["/", "/v1", "/v1/", "/v1/models/x", CHAT_PATH + "/", "/docs", "/%00", "/v1/../server_info"]
    )
    return Request(method, draw(elsewhere | st.just(path)), tuple(headers), body)


def complaint(status: int, headers: Mapping[str, str], body: bytes, head: bool = False) -> str | None:
    """What is wrong with an answer: it must be a whole 200, or an error object with a status of 4xx."""
    if status == 200:
        if headers.get("content-type", "").startswith("text/event-stream"):
            ends = body.endswith(b"data: [DONE]\n\n") and b'"error"' not in body.split(b"\n\n")[-3]
            return None if ends else "a stream that does not end well"
        return None if "choices" in json.loads(body) else "a 200 without choices"
    if not 400 <= status < 500:
        return f"status {status}"
    if head:
        return None
    try:
        (name, error), *more = json.loads(body).items()
    except (ValueError, AttributeError):
        return "an error that is no JSON object"
    if more or name != "error" or set(error) != {"message", "type", "param", "code"}:
        return "an error of another form"
    return None if error["code"] == status and error["message"] else "an error that contradicts its status"
