"""What clients on a target leave there when nobody fetches it, and what the next run makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import words
from test_external_runs import FAILED, Endpoint
from test_on_target import OnTarget, on_target, rewrite

from ddtree_bench import run
from ddtree_bench.collect import collect
from ddtree_bench.load.on_target import REQUEST
from ddtree_bench.load.outcome import DONE, OUTCOME
from ddtree_bench.records.files import write_json
from ddtree_bench.records.store import SERVER_LOG, Attempt
from ddtree_bench.spool import Spool
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.failures import LinkLost

LOST = "the host was not reached again"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as made:
        yield made


@pytest.fixture
def there(tmp_path: Path, endpoint: Endpoint) -> Iterator[OnTarget]:
    with on_target(tmp_path, endpoint) as made:
        yield made


def lose(there: OnTarget, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measure until the client is at work, then be lost; it measures on. Returns its entry."""
    lose_at(there, monkeypatch, there.launcher, "client_state")
    (entry,), (name, client) = there.entries(), list(there.launcher.clients.items())[-1]
    assert client.wait(30) is not None and name.startswith(entry.name)
    return entry


def lose_at(there: OnTarget, monkeypatch: pytest.MonkeyPatch, asked: object, name: str) -> None:
    """Measure until something is asked of the target; then it is not reached any more."""
    with monkeypatch.context() as patched:

        def lost(*_: object) -> None:
            raise LinkLost(LOST)

        patched.setattr(asked, name, lost)
        with pytest.raises(LinkLost, match=LOST):
            there.measure()


def collected(there: OnTarget, secrets: tuple[str, ...] = ()) -> list[Attempt]:
    """Collect for the run's cells and return what the store holds."""
    collect(there.spool, there.run.cells, there.store, secrets, there.said.append)
    return list(there.store.readable())


def test_what_was_measured_while_nobody_was_there_is_stored_once(
    there: OnTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = lose(there, monkeypatch)
    kept = tmp_path / "kept"
    there.launcher.copy_out(str(entry), kept)
    assert list(there.store.readable()) == []
    (attempt,) = collected(there)
    (cell,) = there.run.cells
    assert attempt.record["plan_key"] == cell.key and attempt.record["status"] == "ok"
    assert attempt.record["request_statuses"] == {"ok": 4} and attempt.record["labels"]["server"] == "toy-ar"
    assert attempt.record["spooled"] == json.loads((kept / REQUEST).read_text())["id"]
    assert list(there.store.problems()) == [] and not entry.exists()
    assert "is now in the store" in there.said[-1]
    kept.rename(entry)  # as if the machine had been lost between storing it and removing it
    assert len(collected(there)) == 1 and not entry.exists()
    assert "was stored before" in there.said[-1]


@pytest.mark.parametrize("asked", ["the client", "whether it has done", "the outcome"])
def test_a_link_that_is_lost_takes_nothing_from_a_client_on_the_target(
    there: OnTarget, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    places: dict[str, tuple[object, str]] = {
        "the client": (there.launcher, "client_state"),
        "whether it has done": (Spool, "finished"),
        "the outcome": (there.launcher, "copy_out"),
    }
    lose_at(there, monkeypatch, *places[asked])
    (client,) = there.launcher.clients.values()
    assert client.wait(30) == 0 and there.launcher.stopped == []
    (attempt,) = collected(there)
    assert attempt.record["status"] == "ok" and "link" not in attempt.record
    assert attempt.record["request_statuses"] == {"ok": 4} and endpoint.asked == 4


def test_a_run_stores_first_what_is_there_and_measures_it_no_more(
    there: OnTarget, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(there, monkeypatch)
    monkeypatch.setattr(run, "target_launcher", lambda *_: there.launcher)
    asked = endpoint.asked
    run.measure_run(there.project, there.run, there.said.append)
    assert len(list(there.store.readable())) == 1 and endpoint.asked == asked
    (cell,) = there.run.cells
    view = json.loads((there.project.folders.results / cell.view).read_text())
    assert view["request_statuses"] == {"ok": 4} and view["client_place"] == "target"


def test_what_is_stored_already_is_not_overwritten(there: OnTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = there.measure()
    lose(there, monkeypatch)
    assert [one.record["attempt"] for one in collected(there)] == [1, 2]
    assert (first.folder / "record.json").exists() and list(there.store.problems()) == []


def test_keys_are_in_nothing_that_is_collected(
    tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, log = "key-that-nobody-may-see", tmp_path / "log"
    log.write_text(f"the server was started with {key}\n")
    with on_target(tmp_path, endpoint, log=log) as there:
        entry = lose(there, monkeypatch)
        assert key in (entry / SERVER_LOG).read_text()
        (attempt,) = collected(there, (key,))
    assert (attempt.folder / SERVER_LOG).read_text() == "the server was started with (key)\n"
    assert all(key.encode() not in path.read_bytes() for path in attempt.folder.iterdir())


def test_entries_of_other_cells_stay(there: OnTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = lose(there, monkeypatch)
    other = entry.with_name(f"0123456789ab-{entry.name.partition('-')[2]}")
    entry.rename(other)
    assert collected(there) == [] and (other / DONE).exists()


def test_what_another_workflow_asked_for_is_left_to_it(
    there: OnTarget, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = lose(there, monkeypatch)
    owner = json.loads((entry / REQUEST).read_text())["owner"]
    assert (owner["workflow"], owner["run"]) == (str(Path.cwd()), "test") and owner["since"]
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        assert collected(there) == []
        assert f"{entry} on the target is another workflow's, and left to it" in there.said[-1]
        assert len(there.measure()) == 1 and endpoint.asked == 8
    assert (entry / DONE).exists() and len(collected(there)) == 2


def test_a_client_that_did_not_come_to_its_end_has_measured_nothing(
    there: OnTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = lose(there, monkeypatch)
    (entry / DONE).unlink()
    assert collected(there) == [] and not entry.exists()
    assert "ended before it had done; it is measured again" in there.said[-1]


@pytest.mark.parametrize("damage", ["cut", "other cell", "no request", "error", "other release", "no draft", "no host"])
def test_a_damaged_entry_is_moved_aside(there: OnTarget, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    entry = lose(there, monkeypatch)
    told = json.loads((entry / REQUEST).read_text())
    if damage == "cut":
        path = entry / OUTCOME
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "other cell":
        told["draft"]["identity"]["repeat"] = 9
        write_json(entry / REQUEST, told)
    elif damage == "other release":
        rewrite(entry, OUTCOME, b'{"results": []}')
    elif damage == "no draft":
        write_json(entry / REQUEST, told | {"draft": []})
    elif damage == "no host":
        write_json(entry / REQUEST, told | {"draft": {**told["draft"], "host_key": 7}})
    elif damage == "no request":
        (entry / REQUEST).write_text("{}")
    else:
        write_json(entry / DONE, {"error": "OSError: disk full", "files": {}})
    assert collected(there) == []
    assert not entry.exists() and (entry.parent / "damaged" / entry.name / REQUEST).exists()
    assert "is damaged" in there.said[-1]
    assert len(there.measure()) == 1, "the cell can be measured again"


def test_of_a_server_that_ended_unwatched_nothing_is_stored(there: OnTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = lose(there, monkeypatch)
    told = json.loads((entry / OUTCOME).read_text()) | {"server_ended": "has ended (process 7 is gone)"}
    rewrite(entry, OUTCOME, json.dumps(told).encode())
    assert collected(there) == [] and not entry.exists()
    assert "the server has ended (process 7 is gone) while nobody watched" in there.said[-1]


def test_a_cell_without_an_answer_is_not_judged_unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [FAILED, FAILED, FAILED, FAILED]
    with Endpoint(lambda _: answers.pop() if answers else words(3)) as endpoint, on_target(tmp_path, endpoint) as there:
        lose(there, monkeypatch)
        assert collected(there) == []
        (attempt,) = there.measure()
    assert attempt.record["request_statuses"] == {"ok": 4}


def test_a_spool_that_is_not_there_holds_nothing(there: OnTarget) -> None:
    assert collected(there) == [] and there.said == []


def test_a_spool_that_cannot_be_read_is_not_taken_for_an_empty_one(there: OnTarget) -> None:
    folder = Path(there.spool.folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    with pytest.raises(TargetError, match=rf"{folder}: sh failed: .*; see to its rights and disk"):
        collected(there)
