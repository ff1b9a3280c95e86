"""The store and the views: whole or not at all, never overwritten, and aware of changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.config import validate
from ddtree_bench.plan import Run
from ddtree_bench.records.store import RECORD, Attempt, Store, StoreError
from ddtree_bench.records.views import cell_view, read_view, write_run_views

HOST_KEY = "b" * 64


@pytest.fixture
def run(tmp_path: Path) -> Run:
    root = write_project(tmp_path)
    return plan.build(*validate(tree(), root), root, {("local", "reference"): "e" * 64}).runs[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def record(run: Run, **changes: Any) -> dict[str, Any]:
    cell = run.cells[0]
    fixed = {"plan_key": cell.key, "host_key": HOST_KEY, "identity": cell.identity, "status": "ok", "reason": None}
    start = {"start_id": "s1", "block": "x-r1", "started_at": "t", "ready_s": 1.5, "warmup": {"seconds": 1.0}}
    return fixed | start | changes


def write(text: str) -> Any:
    def fill(folder: Path) -> None:
        (folder / "server.log").write_text(text)

    return fill


def add(store: Store, run: Run, text: str = "log", **changes: Any) -> Attempt:
    return store.add(record(run, **changes), write(text))


def test_the_latest_attempt_counts_and_earlier_ones_stay(store: Store, run: Run) -> None:
    key = run.cells[0].key
    assert store.latest(key, HOST_KEY) is None
    first = add(store, run, status="failed", reason="crash")
    second = add(store, run)
    latest = store.latest(key, HOST_KEY)
    assert latest is not None
    assert latest.folder == second.folder
    assert latest.record["attempt"] == 2
    assert first.failed and not latest.failed
    assert (first.folder / "server.log").read_text() == "log"
    assert list(store.problems()) == []


def test_attempts_on_other_hosts_do_not_count(store: Store, run: Run) -> None:
    add(store, run)
    assert store.latest(run.cells[0].key, "c" * 64) is None


def test_an_attempt_that_was_cut_short_is_none(store: Store, run: Run) -> None:
    def fail(folder: Path) -> None:
        (folder / "server.log").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.add(record(run), fail)
    assert store.latest(run.cells[0].key, HOST_KEY) is None
    assert add(store, run).record["attempt"] == 1


def test_two_writers_never_share_a_number(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, run, "first")
    seen = iter([[], [1]])
    monkeypatch.setattr(Store, "_numbers", staticmethod(lambda attempts: next(seen)))
    assert add(store, run, "second").record["attempt"] == 2
    monkeypatch.undo()
    assert [json.loads((f / RECORD).read_text())["attempt"] for f in store.entries()] == [1, 2]
    assert [(f / "server.log").read_text() for f in store.entries()] == ["first", "second"]


def test_verify_names_what_was_changed(store: Store, run: Run) -> None:
    attempt = add(store, run)
    (attempt.folder / "server.log").write_text("edited")
    assert list(store.problems()) == [f"{attempt.folder / 'server.log'}: has been changed since it was measured"]
    (attempt.folder / "server.log").unlink()
    assert list(store.problems()) == [f"{attempt.folder / 'server.log'}: is missing"]


def test_verify_names_identities_that_do_not_fit(store: Store, run: Run) -> None:
    attempt = add(store, run)
    path = attempt.folder / RECORD
    content = json.loads(path.read_text())
    content["identity"]["repeat"] = 99
    path.write_text(json.dumps(content))
    assert "does not have the plan key of its folder" in next(iter(store.problems()))


def test_a_record_that_cannot_be_read_is_named(store: Store, run: Run) -> None:
    attempt = add(store, run)
    (attempt.folder / RECORD).write_text("{")
    with pytest.raises(StoreError, match=str(attempt.folder / RECORD)):
        store.latest(run.cells[0].key, HOST_KEY)


def test_views_name_the_entry_they_stand_for(store: Store, run: Run, tmp_path: Path) -> None:
    attempt = add(store, run)
    write_run_views(run, {run.cells[0]: attempt}, store, tmp_path / "results")
    view = read_view(tmp_path / "results" / run.cells[0].view)
    assert store.root / view["entry"] == attempt.folder
    assert view["content_sha256"] == attempt.content_sha256
    assert view["labels"] == run.cells[0].labels
    warmup = read_view(tmp_path / "results" / run.warmup_view)
    assert [start["start_id"] for start in warmup["starts"]] == ["s1"]


def test_the_content_digest_follows_the_content(store: Store, run: Run) -> None:
    one, two = add(store, run, "a"), add(store, run, "b")
    assert (
        cell_view(run.cells[0], one, store)["content_sha256"] != cell_view(run.cells[0], two, store)["content_sha256"]
    )


def test_a_file_that_is_no_view_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("")
    with pytest.raises(StoreError, match=r"x\.json: is no view"):
        read_view(tmp_path / "x.json")
