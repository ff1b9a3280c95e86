"""Types of command line arguments: each returns the value, or says what is wrong and what to give."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

LARGEST = 2**53 - 1
"""The largest whole number that every reader of JSON takes as it is."""

MOST_REQUESTS = 10**6
"""Each is a row in memory."""

_ENDPOINTS = ("/chat/completions", "/completions")


def text(given: str) -> str:
    """Return a text that is not empty and can be sent."""
    if not given.strip():
        raise ArgumentTypeError("is empty; give a text")
    if not _is_utf8(given):
        raise ArgumentTypeError(f"{given!r} is not UTF-8; give a text that is")
    return given


def folder(given: str) -> Path:
    """Return the path of a folder for results; parquet files cannot be written below one that is not UTF-8."""
    return Path(text(given))


def count(given: str) -> int:
    """Return a whole number of at least 1."""
    return _integer(given, 1)


def requests(given: str) -> int:
    """Return a number of requests, from 1 to MOST_REQUESTS."""
    return _integer(given, 1, MOST_REQUESTS)


def whole(given: str) -> int:
    """Return a whole number of at least 0."""
    return _integer(given, 0)


def top_k(given: str) -> int:
    """Return a top_k: -1 (no limit) or more."""
    return _integer(given, -1)


def number(least: float, *, above: bool = False, most: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers from `least` (or above it) to `most`."""
    limits = f"{'above' if above else 'of at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")

    def convert(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or value > most or (above and value == least):
            raise ArgumentTypeError(f"{given!r}; give a number {limits}")
        return value

    return convert


def base_url(given: str) -> str:
    """Return a server's URL without a trailing slash and without /v1."""
    url = given.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        # A host that no name server can be asked for raises a UnicodeError, which is a ValueError.
        usable = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not _is_utf8(given):
        raise ArgumentTypeError(f"{given!r} is no URL; give one such as http://localhost:8000")
    if parts.username or parts.password:
        raise ArgumentTypeError("holds a user or a password; give the key in an environment variable, --api-key-env")
    if parts.query or parts.fragment or parts.path.endswith(_ENDPOINTS):
        raise ArgumentTypeError(f"{given!r}; give the part before /v1")
    return url


def _integer(given: str, least: int, most: int = LARGEST) -> int:
    try:
        value = int(given)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        limit = f" and at most {most}" if value > most or most < LARGEST else ""
        raise ArgumentTypeError(f"{given!r}; give a whole number of at least {least}{limit}")
    return value


def _is_utf8(given: str) -> bool:
    """Whether a text is all of characters: an argument's bytes that are no UTF-8 come as lone surrogates."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True
