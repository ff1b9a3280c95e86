"""Warm-up: requests with the shapes of the cells that follow, so that none of them pays for compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ddtree_bench.load import cell
from ddtree_bench.load.exchange import DEFAULT_LIMITS, Limits
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Load, Workload

_SHORTEST_CLASS = 64


@dataclass(frozen=True)
class Shape:
    """A shape to warm up: `concurrency` requests at once, prompts of about `prompt_chars` characters."""

    workload: Workload
    concurrency: int
    prompt_chars: int


def shapes(cells: Iterable[tuple[Workload, int, Sequence[Prompt]]], max_tokens: int) -> tuple[Shape, ...]:
    """Return the distinct shapes of cells given as (workload, concurrency, prompts), in the order first met.

    Prompts fall into length classes by powers of two characters, from 64 up; a cell has one shape a class. Answers end
    at `max_tokens` where the workload would go on: kernels are compiled and graphs captured by the batch, not by the
    length of an answer. Workloads that differ in nothing that a server could notice are one.
    """
    found: dict[tuple[object, ...], Shape] = {}
    for workload, concurrency, prompts in cells:
        short = replace(workload, max_tokens=min(workload.max_tokens, max_tokens))
        sampling = (short.temperature, short.top_p, short.top_k, short.ignore_eos, short.endpoint, short.max_tokens)
        for chars in sorted({_length_class(prompt.text) for prompt in prompts}):
            found.setdefault((sampling, concurrency, chars), Shape(short, concurrency, chars))
    return tuple(found.values())


def _length_class(text: str) -> int:
    return max(_SHORTEST_CLASS, 1 << (len(text) - 1).bit_length())


def warm_up(
    base_url: str,
    model: str,
    cells: Iterable[tuple[Workload, int, Sequence[Prompt]]],
    prompts: Sequence[Prompt],
    *,
    requests: int = 2,
    max_tokens: int = 64,
    abort: Callable[[], str | None] = lambda: None,
    limits: Limits = DEFAULT_LIMITS,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Answer every shape of the cells (workload, concurrency, prompts) once before any of them is measured.

    A shape is sent max(requests, concurrency) times, `concurrency` at once. `prompts` are the warm-up prompts, disjoint
    from all measured ones; they are numbered, so that no request is served from another's prefix, and repeated up to
    the length wanted.

    Returns `{"shapes": [...], "aborted": reason or None}` of plain JSON types. An entry holds workload, concurrency,
    max_tokens, prompt_chars, ok (requests that succeeded), first_event_s and latency_s (lists by request, seconds from
    sending to the first event and to the end of the stream; None where there was no event) and errors (the distinct
    messages). After a shape that was aborted no further one is sent.
    """
    records: list[dict[str, Any]] = []
    for number, shape in enumerate(shapes(cells, max_tokens)):
        n = max(requests, shape.concurrency)
        sized = tuple(_sized(prompts[i % len(prompts)], f"{number}.{i}", shape.prompt_chars) for i in range(n))
        measured = cell.measure(
            base_url, shape.workload, sized, Load(shape.concurrency), model, abort=abort, limits=limits, headers=headers
        )
        records.append(_record(shape, measured.requests))
        if measured.aborted:
            return {"shapes": records, "aborted": measured.aborted}
    return {"shapes": records, "aborted": None}


def _sized(prompt: Prompt, number: str, chars: int) -> Prompt:
    """The prompt with a number in front, repeated until it fills three quarters of its length class or more."""
    text = f"({number}) {prompt.text}"
    while 4 * len(text) < 3 * chars:
        text = f"{text} {prompt.text}"
    return replace(prompt, id=f"{prompt.id}-{number}", text=text[:chars])


def _record(shape: Shape, requests: pd.DataFrame) -> dict[str, Any]:
    first = [
        float(times[0] - sent) if len(times) else None for times, sent in _columns(requests, "event_times", "t_send")
    ]
    return {
        "workload": shape.workload.name,
        "concurrency": shape.concurrency,
        "max_tokens": shape.workload.max_tokens,
        "prompt_chars": shape.prompt_chars,
        "ok": int((requests["status"] == "ok").sum()),
        "first_event_s": first,
        "latency_s": [float(end - sent) for end, sent in _columns(requests, "t_end", "t_send")],
        "errors": sorted({str(error) for error in requests["error"].dropna()}),
    }


def _columns(requests: pd.DataFrame, *names: str) -> Iterable[tuple[Any, ...]]:
    return requests[list(names)].itertuples(index=False, name=None)
