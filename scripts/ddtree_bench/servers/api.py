"""The calls to a server that are not requests under measurement: health, identity, counters, flush, a first answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests

TIMEOUT_S = 10.0
NO_HEADERS: Mapping[str, str] = {}


class ApiError(RuntimeError):
    """A server answered one of these calls wrongly or not at all."""


class Unreachable(ApiError):
    """No answer came at all."""


def health(base_url: str, timeout_s: float = 2.0, headers: Mapping[str, str] = NO_HEADERS) -> bool:
    """True when the server says that it serves; False while it does not answer."""
    try:
        return requests.get(f"{base_url}/health", timeout=timeout_s, headers=dict(headers)).status_code == 200
    except requests.RequestException:
        return False


def server_info(base_url: str, headers: Mapping[str, str] = NO_HEADERS) -> dict[str, Any]:
    """What the server says of itself: model, algorithm, widths, counters. Raises ApiError."""
    return _json("GET", f"{base_url}/server_info", headers=headers)


def models(base_url: str, headers: Mapping[str, str] = NO_HEADERS) -> list[str]:
    """The names of the models that the server says it serves. Raises ApiError."""
    listed = _json("GET", f"{base_url}/v1/models", headers=headers).get("data")
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
        raise ApiError(f"GET {base_url}/v1/models: the answer is no list of models")
    return [str(one["id"]) for one in listed]


def counters(base_url: str, headers: Mapping[str, str] = NO_HEADERS) -> dict[str, float]:
    """The server's own totals since its start (requests, tokens, verify calls, accepted drafts). Raises ApiError."""
    found = server_info(base_url, headers).get("counters")
    if not isinstance(found, dict):
        raise ApiError(f"GET {base_url}/server_info: the answer has no counters")
    return found


def flush_cache(base_url: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
    """Empty the server's prefix cache. Raises ApiError when it refuses, as it does while requests run."""
    _call("POST", f"{base_url}/flush_cache", None, TIMEOUT_S, headers)


def first_completion(base_url: str, model: str, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS) -> int:
    """Ask for one short greedy completion; returns the number of tokens answered. Raises ApiError."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = _json("POST", f"{base_url}/v1/completions", body, timeout_s, headers)
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    if not isinstance(tokens, int):
        raise ApiError(f"POST {base_url}/v1/completions: the answer has no usage.completion_tokens")
    return tokens


def first_answer(
    base_url: str, path: str, body: dict[str, Any], timeout_s: float, headers: Mapping[str, str] = NO_HEADERS
) -> None:
    """Send one request and see that an answer with a choice comes back. Raises ApiError."""
    answer = _json("POST", f"{base_url}{path}", body, timeout_s, headers)
    if not answer.get("choices"):
        raise ApiError(f"POST {base_url}{path}: the answer has no choices: {str(answer)[:200]}")


def _json(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    headers: Mapping[str, str] = NO_HEADERS,
) -> dict[str, Any]:
    response = _call(method, url, body, timeout_s, headers)
    try:
        content = response.json()
    except requests.JSONDecodeError as error:
        raise ApiError(f"{method} {url}: the answer is no JSON: {response.text[:200]!r}") from error
    if not isinstance(content, dict):
        raise ApiError(f"{method} {url}: the answer is no JSON object: {response.text[:200]!r}")
    return content


def _call(
    method: str, url: str, body: dict[str, Any] | None, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS
) -> requests.Response:
    try:
        response = requests.request(method, url, json=body, timeout=timeout_s, headers=dict(headers))
    except requests.RequestException as error:
        raise Unreachable(f"{method} {url}: {error}") from error
    if response.status_code != 200:
        raise ApiError(f"{method} {url}: status {response.status_code}: {response.text[:200]}")
    return response
