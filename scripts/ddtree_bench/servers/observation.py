"""What a server says it has done so far, under names with one meaning, and what it did between two such moments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_bench.servers import observation_embedded, observation_sglang
from ddtree_bench.servers.observation_names import MOMENTS, TOTALS
from ddtree_bench.servers.pages import Pages, Unanswered
from ddtree_bench.servers.sglang_releases import release_of

__all__ = ["Observation", "difference", "interpret", "observe"]

OBSERVE_S = 5.0
INFO, METRICS, LOADS = "/server_info", "/metrics", "/v1/loads?include=core"


@dataclass(frozen=True)
class Observation:
    """What a server told at one moment, or how much more it told at the second of two.

    Attributes
    ----------
    values : dict
        Numbers by the names of observation_names.
    missing : dict
        The names that are not in `values`, and why.
    release : str or None
        The version as the server says it.
    source : str
        The engine and the pages that were read, e.g. `sglang: /server_info, /metrics`; "" when none could be.
    started : str or None
        What changes with the server's next start, if it tells such a thing.
    notes : tuple
        What a reader of the values should know.
    """

    values: dict[str, float]
    missing: dict[str, str]
    release: str | None
    source: str
    started: str | None = None
    notes: tuple[str, ...] = field(default=())


Page = bytes | Unanswered


def observe(base_url: str, timeout_s: float = OBSERVE_S, headers: Mapping[str, str] | None = None) -> Observation:
    """Ask a server what it has done so far; `timeout_s` holds for each of three pages.

    Nothing is raised: what cannot be had is in `missing` with the reason.
    """
    found: dict[str, Page] = {}
    with Pages(base_url, timeout_s, headers) as pages:
        for path in (INFO, METRICS, LOADS):
            try:
                found[path] = pages.get(path)
            except Unanswered as error:
                found[path] = error
                if error.gone:
                    break
    return interpret(found)


def interpret(pages: Mapping[str, Page]) -> Observation:
    """Return what the pages INFO, METRICS and LOADS say; one that is not given is taken as the last failure."""
    failures = [page for page in pages.values() if isinstance(page, Unanswered)]
    absent = failures[-1] if failures else Unanswered("not asked")
    info, metrics, loads = (pages.get(path, absent) for path in (INFO, METRICS, LOADS))
    told, text = _json(INFO, info), _text(metrics)
    if isinstance(told, dict) and isinstance(told.get("counters"), dict):
        return _embedded(told, text)
    if (isinstance(told, dict) and "internal_states" in told) or (isinstance(text, str) and "\nsglang:" in text):
        return _sglang(told, text, _json("/v1/loads", loads))
    reasons = "; ".join(dict.fromkeys(str(one) for one in (told, text) if isinstance(one, Unanswered)))
    reason = reasons or "neither /server_info nor /metrics is one of SGLang or of the embedded engine"
    return Observation({}, dict.fromkeys((*TOTALS, *MOMENTS), reason), None, "")


def _embedded(told: dict[str, Any], text: str | Unanswered) -> Observation:
    values, missing = observation_embedded.read(told, text)
    version, started = told.get("version"), told.get("start_id")
    return Observation(
        values,
        missing,
        version if isinstance(version, str) else None,
        _source("embedded", {INFO: told, METRICS: text}),
        str(started) if started else None,
    )


def _sglang(told: Any, text: str | Unanswered, loads: Any) -> Observation:
    version = told.get("version") if isinstance(told, dict) else None
    release = release_of(version if isinstance(version, str) else None)
    found = observation_sglang.read(release, told, text, loads)
    return Observation(
        found.values,
        found.missing,
        version if isinstance(version, str) else None,
        _source("sglang", {INFO: told, METRICS: text, "/v1/loads": loads}),
        found.started,
        found.notes,
    )


def _source(engine: str, pages: Mapping[str, Any]) -> str:
    return f"{engine}: {', '.join(path for path, page in pages.items() if not isinstance(page, Unanswered))}"


def _json(path: str, page: Page) -> Any:
    if isinstance(page, Unanswered):
        return page
    try:
        return json.loads(page)
    except ValueError:
        return Unanswered(f"{path}: the answer is no JSON")


def _text(page: Page) -> str | Unanswered:
    return page if isinstance(page, Unanswered) else page.decode("utf-8", errors="replace")


def difference(before: Observation, after: Observation) -> Observation:
    """Return what a server did between two moments: the totals' differences, and the share of graph passes.

    `decode_graph_share` is the share of the decode steps between the two that ran in a CUDA graph. Values of one moment
    and averages over the server's life have no difference and are not there. A total that fell, another version or
    another start show a restart: then no total of the two belongs to one count, and all are missing.
    """
    restart = _restart(before, after)
    values, missing = {}, {}
    for name in TOTALS:
        if restart:
            missing[name] = restart
        elif name in before.values and name in after.values:
            values[name] = after.values[name] - before.values[name]
        else:
            missing[name] = _why_no_difference(name, before, after)
    _add_graph_share(values, missing)
    notes = tuple(dict.fromkeys(before.notes + after.notes))
    return Observation(values, missing, after.release, after.source or before.source, after.started, notes)


def _restart(before: Observation, after: Observation) -> str | None:
    for what, one, other in (("version", before.release, after.release), ("start", before.started, after.started)):
        if one is not None and other is not None and one != other:
            return f"the server was restarted in between: its {what} was {one} and is {other}"
    for name in TOTALS:
        if name in before.values and after.values.get(name, before.values[name]) < before.values[name]:
            fall = f"{name} fell from {before.values[name]:g} to {after.values[name]:g}"
            return f"the server's counters were reset in between: {fall}"
    return None


def _why_no_difference(name: str, before: Observation, after: Observation) -> str:
    reasons = {when: one.missing.get(name) for when, one in (("before", before), ("after", after))}
    known = {when: reason for when, reason in reasons.items() if reason}
    if not known:
        return "the server has no such counter"
    if len(set(known.values())) == 1 and len(known) == 2:
        return known["before"]
    return "; ".join(f"{when} the cell: {reason}" for when, reason in known.items())


def _add_graph_share(values: dict[str, float], missing: dict[str, str]) -> None:
    graph, eager = "decode_graph_passes_total", "decode_eager_passes_total"
    absent = next((missing[name] for name in (graph, eager) if name in missing), None)
    if absent is None and not values[graph] + values[eager]:
        absent = "no decode step in between"
    if absent is None:
        values["decode_graph_share"] = values[graph] / (values[graph] + values[eager])
    else:
        missing["decode_graph_share"] = absent
