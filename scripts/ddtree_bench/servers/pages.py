"""What a server tells on its pages: GETs over one kept connection, bounded in time and size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

import requests

MAX_BYTES = 32 * 2**20
"""No page that is read here comes near it; an endpoint that streams for ever must end somewhere."""

_CHUNK = 2**18


class Unanswered(RuntimeError):
    """A page that cannot be had; the message says why. `gone`: the server itself does not answer, on any page."""

    def __init__(self, reason: str, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class Pages:
    """The pages of one server.

    Parameters
    ----------
    base_url : str
        Address up to and without `/v1`.
    timeout_s : float
        Limit in s for the connect, for each wait, and for a whole page once it has begun.
    headers : mapping
        Sent with every call, e.g. the one with the key.

    Proxies and .netrc of the environment are not used: the requests under measurement do not use them either.
    """

    def __init__(self, base_url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.headers.update(headers or {})

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection up; the next call opens another."""
        self._session.close()

    def get(self, path: str) -> bytes:
        """Return the body of a page. Raises Unanswered."""
        try:
            with self._session.get(f"{self._base_url}{path}", timeout=self._timeout_s, stream=True) as response:
                # A body that is not read, that of an error too, would cost the connection.
                body = self._body(path, response)
                if response.status_code != 200:
                    raise Unanswered(f"{path}: status {response.status_code}")
                return body
        except (requests.ConnectTimeout, requests.ReadTimeout) as error:
            raise Unanswered(f"{path}: no answer within {self._timeout_s:g} s", gone=True) from error
        except requests.ConnectionError as error:
            raise Unanswered(f"{path}: no connection ({_cause(error)})", gone=True) from error
        except requests.RequestException as error:
            raise Unanswered(f"{path}: {type(error).__name__}: {error}") from error

    def _body(self, path: str, response: requests.Response) -> bytes:
        ends, parts, size = time.monotonic() + self._timeout_s, [], 0
        for part in response.iter_content(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise Unanswered(f"{path}: more than {MAX_BYTES // 2**20} MiB")
            if time.monotonic() > ends:
                raise Unanswered(f"{path}: not complete after {self._timeout_s:g} s")
        return b"".join(parts)


def _cause(error: BaseException) -> str:
    """What lies beneath, in the system's words: the layers above repeat each other at length."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return type(error).__name__
