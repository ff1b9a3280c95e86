"""HTTP/1.1 on the wire (RFC 9112): a request as bytes, where an answer ends, and an answer without its framing.

The reading thread asks `AnswerEnd` one question a read; everything else is worked out after the measurement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from ddtree_bench.load.exchange import Exchange

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(r"\r?\n")
_MOST_OF_A_LINE = 65536
"""Longest size line of a chunk, bytes: what goes on longer is no HTTP."""


_MOST_DIGITS = 19


class WireError(ValueError):
    """Bytes that are no HTTP/1.1 answer; the message says what is wrong with them."""


def request_bytes(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Return a POST of `body` as JSON, ready to be sent. Raises requests' own ValueErrors for an unusable URL."""
    fixed = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Connection": "keep-alive"}
    given = {name: value for name, value in headers.items() if name.lower() != "host"}
    prepared = requests.Request("POST", url, json=dict(body), headers={**fixed, **given}).prepare()
    content = prepared.body if isinstance(prepared.body, bytes) else str(prepared.body).encode()
    lines = [f"POST {prepared.path_url} HTTP/1.1", f"Host: {urlsplit(str(prepared.url)).netloc.rpartition('@')[2]}"]
    lines += [f"{name}: {value}" for name, value in prepared.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


@dataclass(frozen=True)
class Head:
    """The head of an answer. `length` is the body's in bytes; None when it is chunked or ends with the connection."""

    status: int
    content_type: str
    chunked: bool
    length: int | None
    keep_alive: bool


def read_head(data: bytes) -> tuple[Head, bytes] | None:
    """Return the head of an answer and what follows it; None as long as it is not complete.

    Informational answers (1xx) before it are passed over. Raises WireError for what is no HTTP.
    """
    while match := _HEAD_END.search(data):
        head, data = _parse_head(data[: match.start()]), data[match.end() :]
        if head.status >= 200:
            return head, data
    if data and not data.startswith(b"HTTP/"[: len(data)]):
        raise WireError(f"not an HTTP answer: {data[:60]!r}")
    return None


def _parse_head(raw: bytes) -> Head:
    first, *lines = _LINE_END.split(raw.decode("latin-1"))
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise WireError(f"not the status line of an HTTP/1 answer: {first[:60]!r}")
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    status, chunked = int(rest[:3]), "chunked" in fields.get("transfer-encoding", "").lower()
    given = fields.get("content-length", "")
    length = int(given) if given.isdecimal() and len(given) < _MOST_DIGITS and not chunked else None
    closes = "close" in fields.get("connection", "").lower() or version == "HTTP/1.0"
    return Head(
        status=status,
        content_type=fields.get("content-type", ""),
        chunked=chunked,
        length=0 if status in (204, 304) else length,
        keep_alive=not closes and (chunked or length is not None),
    )


class Chunks:
    """Takes the framing off a chunked body that is fed in pieces of any size; `ended` after the last chunk."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""
        self._left = 0
        self._in_trailers = False

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes of the body that `piece` brought. Raises WireError where the framing is broken."""
        data, body = self._rest + piece, []
        self._rest = b""
        while data and not self.ended:
            if self._left > 2:
                body.append(data[: self._left - 2])
            if self._left:
                taken = min(self._left, len(data))
                self._left, data = self._left - taken, data[taken:]
                continue
            line, newline, after = data.partition(b"\n")
            if not newline:
                if len(data) > _MOST_OF_A_LINE:
                    raise WireError("a chunk's size line has no end")
                self._rest = data
                break
            data = after
            self._take_line(line.removesuffix(b"\r"))
        return b"".join(body)

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.ended = not line
            return
        length = _chunk_size(line)
        self._in_trailers = length == 0
        # The line break after the chunk belongs to it.
        self._left = length + 2 if length else 0


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise WireError(f"not a chunk's size: {line[:40]!r}") from error
    if size < 0:
        raise WireError(f"not a chunk's size: {line[:40]!r}")
    return size


class ChunkSkipper:
    """Goes from chunk to chunk by their sizes, to find the last; a third of the time that taking them apart takes."""

    def __init__(self) -> None:
        self._rest = b""
        self._skip = 0

    def ended(self, new: bytes) -> bool:
        """Take the next bytes; return whether the body is complete. Raises WireError for what is no chunk's size."""
        data, start = self._rest + new, self._skip
        while (line_end := data.find(b"\r\n", start)) >= 0:
            try:
                size = int(data[start:line_end], 16)
            except ValueError:
                size = _chunk_size(data[start:line_end])
            if size < 0:
                raise WireError(f"not a chunk's size: {size}")
            if not size:
                # The empty line follows at once, or after the trailers.
                self._rest, self._skip = data[start:], 0
                return data.find(b"\r\n\r\n", line_end) >= 0
            start = line_end + size + 4
        self._rest, self._skip = data[start:], max(0, start - len(data))
        return False


class AnswerEnd:
    """Finds the end of an answer while it is read; it looks at the bytes of a chunked body only when asked.

    `head` is the answer's head as soon as it is complete, `seen` the number of reads that were looked at.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.seen = 0
        self._start = b""
        self._chunks = ChunkSkipper()
        self._left = 0

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection can carry another request after this answer."""
        return self.head is not None and self.head.keep_alive

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body has no other end than that of the connection."""
        return self.head is not None and not self.head.chunked and self.head.length is None

    def reached(self, reads: Sequence[tuple[float, bytes, bytes]]) -> bool:
        """Return whether the answer is complete with these reads, (moment, bytes, stamp) in order from its first.

        May be asked after any read, with all of them so far. Raises WireError for what is no HTTP.
        """
        new = b"".join(read[1] for read in reads[self.seen :])
        self.seen = len(reads)
        if self.head is None:
            self._start += new
            found = read_head(self._start)
            if found is None:
                return False
            self.head, new = found
            self._left = self.head.length or 0
        if self.head.chunked:
            return self._chunks.ended(new)
        if self.head.length is None:
            return False
        self._left -= len(new)
        return self._left <= 0


@dataclass(frozen=True)
class Answer:
    """An answer without its framing.

    `body` holds (moment of the read, its lag, bytes of the body it brought), in order; `broken` says what is wrong
    with the framing, in which case the body ends there.
    """

    http_status: int | None
    content_type: str
    body: list[tuple[float, float, bytes]]
    broken: str | None = None


def parse_answer(exchange: Exchange) -> Answer:
    """Return what came back in an exchange; nothing that a server can send makes this raise."""
    reads = list(zip(exchange.times, exchange.lags, exchange.pieces, strict=True))
    start = b""
    try:
        for number, (time, lag, piece) in enumerate(reads):
            start += piece
            if found := read_head(start):
                head, rest = found
                return _unframed(head, [(time, lag, rest), *reads[number + 1 :]])
    except WireError as error:
        return Answer(None, "", [], str(error))
    return Answer(None, "", [])


def _unframed(head: Head, reads: list[tuple[float, float, bytes]]) -> Answer:
    if not head.chunked:
        left = head.length
        body = []
        for time, lag, piece in reads:
            body.append((time, lag, piece if left is None else piece[:left]))
            left = None if left is None else max(0, left - len(piece))
        return Answer(head.status, head.content_type, [one for one in body if one[2]])
    chunks, body, broken = Chunks(), [], None
    for time, lag, piece in reads:
        try:
            content = chunks.feed(piece)
        except WireError as error:
            broken = str(error)
            break
        if content:
            body.append((time, lag, content))
    return Answer(head.status, head.content_type, body, broken)
