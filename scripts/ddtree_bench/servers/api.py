"""The calls to a server that are not requests under measurement: health, identity, flush, a first answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests

from ddtree_bench.servers.own_words import hide

TIMEOUT_S = 10.0
NO_HEADERS: Mapping[str, str] = {}


NOT_OFFERED = (404, 405)
"""Statuses that say that a server has no such page."""


class ApiError(RuntimeError):
    """A server answered one of these calls wrongly or not at all; `status` is that of an answer other than 200."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def not_offered(self) -> bool:
        """Whether the server has no such page."""
        return self.status in NOT_OFFERED


class Unreachable(ApiError):
    """No answer came at all."""


def health(base_url: str, timeout_s: float = 2.0) -> bool:
    """True when the server says that it serves; False while it does not answer."""
    try:
        return _request("GET", f"{base_url}/health", timeout_s).status_code == 200
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


def flush_cache(base_url: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
    """Empty the server's prefix cache. Raises ApiError when it refuses, as it does while requests run."""
    _call("POST", f"{base_url}/flush_cache", None, TIMEOUT_S, headers)


def first_completion(base_url: str, model: str, timeout_s: float) -> int:
    """Ask for one short greedy completion; returns the number of tokens answered. Raises ApiError."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = _json("POST", f"{base_url}/v1/completions", body, timeout_s)
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
        shown = hide(str(answer), secrets_of(headers))[:200]
        raise ApiError(f"POST {base_url}{path}: the answer has no choices: {shown}")


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
        raise ApiError(f"{method} {url}: the answer is no JSON: {_start(response, headers)!r}") from error
    if not isinstance(content, dict):
        raise ApiError(f"{method} {url}: the answer is no JSON object: {_start(response, headers)!r}")
    return content


def _call(
    method: str, url: str, body: dict[str, Any] | None, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS
) -> requests.Response:
    try:
        response = _request(method, url, timeout_s, body, headers)
    except requests.RequestException as error:
        raise Unreachable(f"{method} {url}: {error}") from error
    if response.status_code != 200:
        text = _start(response, headers)
        raise ApiError(f"{method} {url}: status {response.status_code}: {text}", response.status_code)
    return response


def _request(
    method: str,
    url: str,
    timeout_s: float,
    body: dict[str, Any] | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> requests.Response:
    """Ask without the proxies and the .netrc of the environment: the requests under measurement use neither."""
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, json=body, timeout=timeout_s, headers=dict(headers))


def _start(response: requests.Response, headers: Mapping[str, str]) -> str:
    return str(hide(response.text, secrets_of(headers)))[:200]


def secrets_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return what of a request's headers must be told nobody: the key of a bearer token."""
    return tuple(value.split(" ", 1)[-1] for name, value in headers.items() if name.lower() == "authorization")
