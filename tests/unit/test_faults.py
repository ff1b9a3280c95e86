"""Every fault that was seen in public tools, played by a server: the client and the metrics must give the right values.

Counts and texts must be right however an answer is framed and cut into packets. Moments are held against the server's
own stamps of what it sent, and the values of the schedule are computed once more without a network, exactly.
"""

from __future__ import annotations

import gc
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fault_files
import numpy as np
import pandas as pd
import pytest
from fault_files import Fault
from scripted_server import Script, ScriptedServer, by_number, prompt_of, usage

from ddtree_bench import metrics
from ddtree_bench.load import reader, requests_table, server_samples
from ddtree_bench.load.cell import Measurement, measure
from ddtree_bench.load.exchange import Exchange, Limits
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Load, ModelRef, Server, Workload
from ddtree_bench.servers import api
from ddtree_bench.servers.identity import wanted_identity
from ddtree_bench.servers.ready import wait_until_ready
from ddtree_bench.targets.launcher import ServerState

ROOT = Path(__file__).parents[2]
FAULTS = fault_files.read_all()
PLAYED = [fault for fault in FAULTS if fault.answers]
TIMED = [fault for fault in PLAYED if "timed" in fault.right]
CASES = [
    pytest.param(fault, endpoint, framing, packets, id=f"{fault.name}-{endpoint}-{framing}-{packets}")
    for fault in PLAYED
    for endpoint in fault.endpoints
    for framing in fault.framings
    for packets in fault.packets
]

LATE_S = 0.05
"""How late a stamp may be on a busy machine with two cores; the mean over many tokens is held that much tighter."""

CLIENT: dict[str, float | int | bool | None] = {
    "wall_s": 1.0,
    "cpu_s": 0.0,
    "events_read": 1,
    "reader_cpu_s": 0.0,
    "reader_wait_s": 0.0,
    "reader_slices": 1,
    "run_queue_wait_s": 0.0,
    "kernel_stamps": True,
    "clock_stepped": False,
    "connections_preopened": 1,
    "server_sample_errors": None,
}


def workload(fault: Fault, endpoint: Any) -> Workload:
    return Workload("faults", "none", None, fault.n, "", fault.max_tokens, 0.6, 0.9, 40, 7, False, False, endpoint)


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", 1, "code", f"prompt {i}") for i in range(n)]


def played(fault: Fault, endpoint: str, framing: str, packets: str) -> tuple[Measurement, ScriptedServer]:
    """The fault as it comes over a connection."""
    scripts = fault.scripts(endpoint, framing, packets)
    with ScriptedServer(by_number(scripts), fault.admits) as server:
        found = measure(
            server.base_url,
            workload(fault, endpoint),
            prompts(fault.n),
            Load(fault.concurrency),
            "m",
            sample=(lambda: {k: float(n) for k, n in server.counters().items()}) if fault.admits < fault.n else None,
            limits=Limits(**{"idle_s": 5.0, "connect_retries": 0} | dict(fault.limits)),
        )
    return found, server


def on_schedule(fault: Fault, endpoint: str) -> pd.DataFrame:
    """The rows that a network and a client without any delay would give; one request after another."""
    rows, start = [], 0.0
    for index, script in enumerate(fault.scripts(endpoint, "chunked", "pieces")):
        exchange = _exchange(script, start)
        sent = requests_table.Sent(index, prompts(index + 1)[index], 0, exchange)
        rows.append(requests_table.row(sent, fault.max_tokens))
        start = exchange.t_end
    return requests_table.to_frame(rows)


def _exchange(script: Script, start: float) -> Exchange:
    sends = script.sends()
    times = start + np.cumsum([pause for pause, _ in sends])
    lags = array("d", [0.0] * len(sends))
    return Exchange(start, start, float(times[-1]), array("d", times), lags, [piece for _, piece in sends], None)


def hold(found: Any, wanted: Any, name: str) -> None:
    """Assert a right value: null is unknown, a text may be given by a part of it or as one of several."""
    if isinstance(wanted, Mapping):
        assert found in wanted["one_of"] if "one_of" in wanted else wanted["contains"] in found, f"{name}: {found!r}"
    elif wanted is None:
        assert pd.isna(found), f"{name}: {found!r}"
    elif isinstance(wanted, float | list):
        assert found == pytest.approx(wanted, rel=1e-5), name
    elif isinstance(found, float) and isinstance(wanted, int):
        assert found == pytest.approx(wanted, rel=1e-12), name
    else:
        assert found == wanted, f"{name}: {found!r}"


def hold_all(
    right: Mapping[str, Any], rows: pd.DataFrame, fault: Fault, client: Mapping[str, Any], samples: pd.DataFrame
) -> None:
    """Assert the values of requests, cell and document that a file gives."""
    load = Load(fault.concurrency)
    by_request = metrics.request_metrics(rows)
    assert len(rows) == fault.n
    for index, wanted in enumerate(right.get("requests", ())):
        values = rows.iloc[index].to_dict() | by_request.iloc[index].to_dict()
        for name, value in wanted.items():
            hold(values[name], value, f"request {index}, {name}")
    cell = metrics.cell_metrics(rows, load, None)
    for name, value in right.get("cell", {}).items():
        hold(cell[name], value, name)
    document = metrics.document(rows, load, dict(client), samples, None, fault.n, None)
    for path, value in right.get("document", {}).items():
        found: Any = document
        for name in path.split("."):
            found = found[name]
        hold(found, value, path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of cells of a few milliseconds: none waits for what a real cell does ten times a second."""
    monkeypatch.setattr(server_samples, "EVERY_S", 0.02)
    monkeypatch.setattr(reader, "SWEEP_S", 0.005)


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    """Each cell begins with a collection of garbage, which would look through all that pandas has loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("fault", "endpoint", "framing", "packets"), CASES)
def test_fault(fault: Fault, endpoint: str, framing: str, packets: str) -> None:
    """Counts and texts are right in every framing and cut; moments are the server's where each event is a packet."""
    found, server = played(fault, endpoint, framing, packets)
    hold_all(fault.right, found.requests, fault, found.client, found.server_samples)
    for name, value in fault.right.get("sent", {}).items():
        assert [body[name] for body in server.requests] == [value] * fault.n, name
    for name, value in fault.right.get("server_load", {}).items():
        hold(metrics.server_load(found.server_samples)[name], value, name)
    assert found.client["wall_s"] < fault.right.get("within_s", float("inf"))
    if "connections" in fault.right:
        assert server.connections == fault.right["connections"]
    if fault in TIMED and packets == "pieces":
        hold_times(fault, found.requests, list(_stamps(fault, endpoint, server)))


def hold_times(fault: Fault, rows: pd.DataFrame, stamps: list[np.ndarray]) -> None:
    """Assert that events are stamped when the server sent them, and that what is computed from it agrees.

    `stamps` are, by request, the moments at which the server sent each event.
    """
    stamped = rows.copy()
    stamped["event_times"] = pd.Series(stamps, dtype=object)
    for measured, sent in zip(rows["event_times"], stamped["event_times"], strict=True):
        late = np.asarray(measured) - sent
        assert late.min() >= 0
        assert np.median(late) < LATE_S
        # A client that hands events on in groups makes gaps of nothing (and others twice as long).
        gaps = np.diff(sent) >= 2 * LATE_S
        assert not np.any(np.diff(measured)[gaps] < np.diff(sent)[gaps] / 2), "a gap is less than half of what was sent"
    found, true = metrics.request_metrics(rows), metrics.request_metrics(stamped)
    for index, wanted in enumerate(fault.right["timed"].get("requests", ())):
        tolerances = _tolerances(true.iloc[index])
        for name in set(wanted) & set(tolerances):
            value = found.iloc[index][name]
            assert value == pytest.approx(true.iloc[index][name], abs=tolerances[name]), name
            # The pauses of the script are the least that the server waits.
            assert value > wanted[name] - tolerances[name], name


def _stamps(fault: Fault, endpoint: str, server: ScriptedServer) -> Iterator[np.ndarray]:
    """By request, when each event was sent."""
    sent = {int(prompt_of(one.body).split()[-1]): one.sent[1:-1] for one in server.played}
    are_events = fault.is_event(endpoint)
    for index in range(fault.n):
        flags = are_events[min(index, len(are_events) - 1)]
        yield np.array([at for at, is_event in zip(sent[index], flags, strict=True) if is_event])


def _tolerances(row: Mapping[str, Any]) -> dict[str, float]:
    """How far a value may be off when its first and its last stamp may be LATE_S late."""
    tokens = LATE_S if pd.isna(row["n1"]) else LATE_S / max(1, row["output_tokens"] - row["n1"])
    return {
        "ttft_s": LATE_S,
        "e2e_s": LATE_S,
        "tpot_s": tokens,
        "itl_mean_s": tokens,
        "icl_mean_s": LATE_S / max(1, row["token_events"] - 1),
        "icl_p50_s": LATE_S,
    }


def in_groups(times: np.ndarray, size: int) -> np.ndarray:
    """The moments of events as a buffer hands them on, when `size` of them are full or the stream ends."""
    return np.array([times[min(i - i % size + size, len(times)) - 1] for i in range(len(times))])


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_client_that_has_fault_7_is_caught(size: int) -> None:
    (fault,) = (one for one in FAULTS if one.kind == 7)
    rows = on_schedule(fault, "chat")
    stamps = [np.asarray(times) for times in rows["event_times"]]
    hold_times(fault, rows, stamps)
    rows["event_times"] = pd.Series([in_groups(times, size) for times in stamps], dtype=object)
    with pytest.raises(AssertionError):
        hold_times(fault, rows, stamps)


@pytest.mark.parametrize("endpoint", fault_files.ENDPOINTS)
@pytest.mark.parametrize("fault", TIMED, ids=[fault.name for fault in TIMED])
def test_the_values_of_the_schedule(fault: Fault, endpoint: str) -> None:
    if endpoint in fault.endpoints:
        rows = on_schedule(fault, endpoint)
        hold_all(fault.right["timed"], rows, fault, CLIENT, server_samples.frame([]))


def test_all_23_kinds_have_a_file() -> None:
    assert {fault.kind for fault in FAULTS} - {None} == set(range(1, 24))
    assert all(fault.title and fault.elsewhere for fault in FAULTS)


def test_what_a_transcript_cannot_show_is_shown_by_a_test_that_exists() -> None:
    for fault in FAULTS:
        assert fault.tests or (fault.answers and fault.right), fault.name
        for name in fault.tests:
            path, _, function = name.partition("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {function}\(", source, re.MULTILINE), f"{fault.name}: {name} does not exist"


def test_every_file_is_played_on_both_endpoints_unless_it_says_why() -> None:
    """Only what completions do not have, and what would take seconds, is left to chat."""
    chat_only = {fault.name for fault in PLAYED if tuple(fault.endpoints) == ("chat",)}
    assert chat_only == {
        "03-all-text-in-reasoning-content",
        "03-thinking-then-answer",
        "05-peak-of-tokens",
        "wire-no-http",
    }


def test_fault_12_ready_is_a_completion_that_was_answered() -> None:
    """Health and the list of models are answered at once, the first completion after 0.3 s."""
    server = Server("ar", "local", "reference", "e" * 64, ModelRef("toy", "1"), None, "AR")
    answer = {"choices": [{"text": "a", "message": {"content": "a"}}], "usage": usage(1)}
    script = Script([(0.3, json.dumps(answer).encode())], content_type="application/json", framing="length")
    with ScriptedServer(lambda _: script, info=wanted_identity(server, "s1")) as http:
        assert api.health(http.base_url)
        ready = wait_until_ready(
            lambda: http.base_url,
            server,
            "s1",
            state=lambda: ServerState(True),
            log_tail=lambda _: "",
            timeout_s=10,
            progress=lambda _: None,
        )
    assert ready.seconds >= 0.3
    assert len(http.requests) == 1
