"""Runs on an external endpoint: what is stored of them, and what is the endpoint's own business and is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project
from scripted_server import Script, ScriptedServer, words

from ddtree_bench import plan
from ddtree_bench.config import validate
from ddtree_bench.hosts import record_host
from ddtree_bench.project import Folders, Project
from ddtree_bench.records.store import Attempt, Store
from ddtree_bench.run import measure_run
from ddtree_bench.servers import api
from ddtree_bench.targets import external
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.probe import HostChanged

INFO: dict[str, Any] = {
    "data": [{"id": "toy"}],
    "version": "0.5.21",
    "speculative_algorithm": None,
    "max_running_requests": 1,
    "start_id": "first",
}
WHOLE = Script([(0, json.dumps({"choices": [{"text": "x"}]}).encode())], content_type="application/json")
HALF = replace(words(3), pieces=words(3).pieces[:2], end="silence")
FAILED = Script([(0, b'{"error": "no"}')], status=500, content_type="application/json")


def project(root: Path, url: str, repeats: int = 1, **target: Any) -> Project:
    root.mkdir(exist_ok=True)
    config = tree()
    spec = {"launcher": "external", "engine": "sglang", "url": url, "lease_dir": str(root / "leases")} | target
    config |= {"targets": {"there": spec}, "repeats": repeats, "max_restarts": 0}
    config["sweep"][0] |= {"target": "there", "method": "AR", "budget": None}
    validated, points = validate(config, write_project(root))
    return Project(validated, plan.build(validated, points, root, {}), Folders.below(root / "results"), root, {})


class Endpoint:
    """A scripted endpoint: warm-up and first completion are answered, `measured` answers the n-th request of a cell."""

    def __init__(self, measured: Callable[[int], Script] = lambda _: words(3), **info: Any) -> None:
        self.info = {**INFO, **info}
        self.asked = 0
        self._measured = measured
        self.server = ScriptedServer(self._answer, info=self.info)
        self.server._info = self.info

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    def leave(self) -> None:
        """Be gone, in a thread of its own: the one that answers cannot wait for itself."""
        threading.Thread(target=self.server.__exit__).start()

    def _answer(self, body: dict[str, Any]) -> Script:
        if not body.get("stream"):
            return WHOLE
        if "warming" in json.dumps(body["messages"]):
            return words(1)
        self.asked += 1
        return self._measured(self.asked)


def measured(opened: Project) -> list[Attempt]:
    """Measure all runs of a project and return what its store holds."""
    record_host(opened, "there", lambda _: None)
    for run in opened.plan.runs:
        measure_run(opened, run, lambda _: None)
    return stored(opened)


def stored(opened: Project) -> list[Attempt]:
    return list(Store(opened.folders.store).readable())


def test_no_key_is_written_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, admin = "key-that-nobody-may-see", "admin-key-of-the-server"
    monkeypatch.setenv("THEIR_KEY", key)
    told = Script(
        [(0, f'{{"error": "{key} is over its quota"}}'.encode())], status=429, content_type="application/json"
    )
    said = {"api_key": key, "admin_api_key": admin, "launch_command": f"serve --api-key {key}", "revision": f"of {key}"}
    with Endpoint(lambda n: told if n == 2 else words(3), **said) as endpoint:
        opened = project(tmp_path, endpoint.server.base_url, api_key_env="THEIR_KEY")
        (attempt,) = measured(opened)
        assert endpoint.server.headers[-1]["authorization"] == f"Bearer {key}"
    info = attempt.record["server_info"]
    assert (info["version"], info["revision"]) == ("0.5.21", "of (key)")
    assert not {"api_key", "admin_api_key", "launch_command"} & set(info)
    assert attempt.record["request_statuses"] == {"ok": 3, "http_error": 1}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "requests.parquet" for path in written) and len(written) > 8
    for path in written:
        assert key.encode() not in path.read_bytes() and admin.encode() not in path.read_bytes(), path


def test_the_key_is_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "key-that-nobody-may-see")
    refusal = Script([(0, b"key-that-nobody-may-see is not known")], status=401)
    with ScriptedServer(lambda _: refusal, info=INFO) as server:
        opened = project(tmp_path, server.base_url, api_key_env="THEIR_KEY")
        with pytest.raises(TargetError, match=r"status 401: \(key\) is not known") as caught:
            measured(opened)
    assert "nobody-may-see" not in str(caught.value)


def test_repeats_on_one_running_server_are_one_start(tmp_path: Path) -> None:
    with Endpoint() as endpoint:
        attempts = measured(project(tmp_path, endpoint.server.base_url, repeats=3))
        assert len(attempts) == 3 and len({one.record["start_id"] for one in attempts}) == 1
        assert {one.record["ready_s"] for one in attempts} == {None}
        endpoint.info["start_id"] = "second"
        more = measured(project(tmp_path, endpoint.server.base_url, repeats=4))
    assert len(more) == 4 and len({one.record["start_id"] for one in more}) == 2


def test_an_endpoint_that_tells_no_start_is_one_start(tmp_path: Path) -> None:
    with Endpoint(start_id=None) as endpoint:
        attempts = measured(project(tmp_path, endpoint.server.base_url, repeats=2))
    assert len({one.record["start_id"] for one in attempts}) == 1


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"version": "0.5.22"}, HostChanged, r"version: was 0\.5\.21, is 0\.5\.22"),
        ({"disable_cuda_graph": True}, HostChanged, "disable_cuda_graph: was none, is True"),
        ({"start_id": "second"}, TargetError, "was started again meanwhile"),
    ],
)
def test_a_cell_in_which_the_endpoint_changed_is_not_stored(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    def answer(_: int) -> Script:
        endpoint.info.update(changed)
        return words(3)

    with Endpoint(answer) as endpoint:
        opened = project(tmp_path, endpoint.server.base_url)
        with pytest.raises(error, match=message):
            measured(opened)
    assert stored(opened) == []


def test_what_a_server_works_out_anew_at_each_start_is_no_change(tmp_path: Path) -> None:
    def answer(n: int) -> Script:
        endpoint.info.update(max_total_num_tokens=1000 + n, random_seed=n)
        return words(3)

    with Endpoint(answer) as endpoint:
        (attempt,) = measured(project(tmp_path, endpoint.server.base_url))
    assert attempt.record["status"] == "ok"


def test_what_was_answered_before_an_endpoint_went_away_is_kept_as_broken_off(tmp_path: Path) -> None:
    def answer(n: int) -> Script:
        if n < 3:
            return words(3)
        endpoint.leave()
        return HALF

    endpoint = Endpoint(answer)
    opened = project(tmp_path, endpoint.server.base_url)
    with pytest.raises(TargetError, match=r"targets\.there\.url: .*the server accepts no connections any more"):
        measured(opened)
    (attempt,) = stored(opened)
    assert attempt.record["status"] == "ok" and "accepts no connections any more" in str(attempt.aborted)
    assert attempt.record["request_statuses"]["ok"] == 2


def test_an_endpoint_that_goes_away_before_any_answer_leaves_nothing(tmp_path: Path) -> None:
    def answer(_: int) -> Script:
        endpoint.leave()
        return HALF

    endpoint = Endpoint(answer)
    opened = project(tmp_path, endpoint.server.base_url)
    with pytest.raises(TargetError, match="accepts no connections any more"):
        measured(opened)
    assert stored(opened) == []


def test_a_warm_up_that_fails_is_no_result(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Script:
        return FAILED if body.get("stream") else WHOLE

    with ScriptedServer(answer, info=INFO) as server:
        opened = project(tmp_path, server.base_url)
        with pytest.raises(TargetError, match=r"targets\.there\.url: .*the warm-up failed: .*see to the endpoint"):
            measured(opened)
    assert stored(opened) == []


def test_answers_that_all_fail_are_a_result(tmp_path: Path) -> None:
    with Endpoint(lambda _: FAILED) as endpoint:
        (attempt,) = measured(project(tmp_path, endpoint.server.base_url))
    assert (attempt.record["status"], attempt.record["reason"]) == (
        "failed",
        "no request succeeded: 4 x http_error",
    )


def flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Exception | None], **target: Any) -> Any:
    """What the record says of the cache, and how often it was to be emptied; `answers` are those of the endpoint."""
    asked: list[str] = []

    def flush_cache(url: str, _: object) -> None:
        asked.append(url)
        answer = answers[min(len(asked), len(answers)) - 1]
        if answer is not None:
            raise answer

    monkeypatch.setattr(api, "flush_cache", flush_cache)
    monkeypatch.setattr("ddtree_bench.running_server.FLUSH_S", 1.0)
    with Endpoint() as endpoint:
        (attempt,) = measured(project(tmp_path, endpoint.server.base_url, **target))
    return attempt.record["cache_not_flushed"], len(asked)


def test_somebodys_cache_is_emptied_only_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flushed(tmp_path, monkeypatch, [None]) == ("targets.there.flush_cache is not set", 0)


def test_a_busy_endpoint_is_asked_again_to_empty_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, none = api.ApiError("status 400: requests run", 400), api.ApiError("status 404", 404)
    assert flushed(tmp_path / "a", monkeypatch, [busy, busy, None], flush_cache=True) == (None, 3)
    assert flushed(tmp_path / "b", monkeypatch, [none], flush_cache=True) == ("status 404", 1)
    reason, asked = flushed(tmp_path / "c", monkeypatch, [busy], flush_cache=True)
    assert reason == "status 400: requests run" and asked >= 3


def test_a_cache_that_is_emptied_from_now_on_is_another_host(tmp_path: Path) -> None:
    with Endpoint() as endpoint:
        opened = project(tmp_path, endpoint.server.base_url)
        before = record_host(opened, "there", lambda _: None)
        asking = project(tmp_path, endpoint.server.base_url, flush_cache=True)
        with pytest.raises(HostChanged, match="prefix cache emptied: was False, is True"):
            record_host(asking, "there", lambda _: None)
        assert record_host(asking, "there", lambda _: None, accept=True)["endpoint"] != before["endpoint"]


def test_several_looks_in_vain_say_that_an_endpoint_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LOOK_EVERY_S", 0.0)
    failures: list[Exception | None] = []

    def create_connection(*_: object) -> Any:
        if failures and (failure := failures.pop(0)):
            raise failure
        return nullcontext()

    monkeypatch.setattr("socket.create_connection", create_connection)
    launcher = external.ExternalLauncher(tmp_path, "http://somewhere:9")
    slow, unknown = TimeoutError(), OSError("name not known")
    failures[:] = [slow, unknown, None, slow, slow, unknown]
    assert [launcher.state().alive for _ in range(6)] == [True, True, True, True, True, False]
    failures[:] = [None, ConnectionRefusedError()]
    assert [launcher.state().alive for _ in range(2)] == [True, False]
