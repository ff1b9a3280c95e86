"""An external endpoint: its lease, its state, its answer, and its own words held against the plan."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.config import validate
from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.external_endpoint import external_endpoint
from ddtree_bench.hosts import confirm_host, record_host
from ddtree_bench.launchers import target_launcher
from ddtree_bench.plan import Server
from ddtree_bench.project import Folders, Project
from ddtree_bench.servers.endpoint import Endpoint, check_plan, see_answer
from ddtree_bench.servers.ready import WrongServer
from ddtree_bench.targets.external import ExternalLauncher, lease_name, plain_url
from ddtree_bench.targets.launcher import Launch, TargetError
from ddtree_bench.targets.lease import TargetBusy
from ddtree_bench.targets.probe import HostChanged, host_key

TREE_INFO: dict[str, Any] = {
    "version": "0.5.23",
    "speculative_algorithm": "DDTREE",
    "speculative_ddtree_budget": 8,
    "speculative_ddtree_topk_cap": 8,
    "speculative_dflash_block_size": 8,
    "speculative_num_draft_tokens": 9,
    "max_running_requests": 4,
    "tp_size": 1,
    "last_gen_throughput": 12.5,
}


@dataclass
class Somebodys:
    """An endpoint of somebody else: what it says, and the requests that it got."""

    url: str = ""
    models: list[str] | None = field(default_factory=lambda: ["toy"])
    info: dict[str, Any] | None = field(default_factory=lambda: dict(TREE_INFO))
    completion: tuple[int, dict[str, Any]] = (200, {"choices": [{"message": {"content": "x"}}]})
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    without_info: int = 404

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models" and self.models is not None:
            return 200, {"data": [{"id": name} for name in self.models]}
        if path == "/server_info":
            return (self.without_info, {}) if self.info is None else (200, self.info)
        return self.completion if method == "POST" else (404, {})


@pytest.fixture
def somebodys() -> Iterator[Somebodys]:
    state = Somebodys()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.seen.append((self.command, self.path, self.headers.get("Authorization")))
            status, content = state.answer(self.command, self.path)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def project(root: Path, url: str, **target: Any) -> Project:
    config = tree()
    spec = {"launcher": "external", "engine": "sglang", "url": url, "lease_dir": str(root / "leases")} | target
    config["targets"] = {"there": spec}
    config["sweep"][0] |= {"target": "there", "method": "DDTREE", "budget": 8, "max_running_requests": 4}
    validated, points = validate(config, write_project(root))
    return Project(validated, plan.build(validated, points, root, {}), Folders.below(root / "results"), root, {})


def planned(tmp_path: Path) -> Server:
    return project(tmp_path, "http://127.0.0.1:1").plan.servers[0]


def see(somebodys: Somebodys, server: Server) -> Any:
    body = {"messages": []}
    endpoint = Endpoint(somebodys.url, "toy", {"Authorization": "Bearer k"})
    return see_answer(endpoint, server, path="/v1/chat/completions", body=body, timeout_s=5, progress=print)


def test_what_the_server_says_confirms_the_plan(somebodys: Somebodys, tmp_path: Path) -> None:
    answered = see(somebodys, planned(tmp_path))
    assert answered.server_info == TREE_INFO and answered.started is None
    assert set(answered.confirmed) == set(TREE_INFO) - {"version", "last_gen_throughput"}
    assert answered.not_confirmed == ("ep_size",)
    assert ("POST", "/v1/chat/completions", "Bearer k") in somebodys.seen


def test_a_server_that_says_nothing_confirms_nothing(somebodys: Somebodys, tmp_path: Path) -> None:
    somebodys.info, somebodys.models = None, None
    answered = see(somebodys, planned(tmp_path))
    assert (answered.server_info, answered.confirmed) == (None, ())
    assert "speculative_algorithm" in answered.not_confirmed


@pytest.mark.parametrize(
    ("name", "told", "message"),
    [
        ("speculative_algorithm", None, "speculative_algorithm: planned 'DDTREE', the endpoint says None"),
        ("speculative_ddtree_budget", 32, "speculative_ddtree_budget: planned 8, the endpoint says 32"),
        ("tp_size", 8, "tp_size: planned 1, the endpoint says 8"),
    ],
)
def test_another_launch_configuration_is_named_with_the_planned_one(
    somebodys: Somebodys, tmp_path: Path, name: str, told: Any, message: str
) -> None:
    assert somebodys.info is not None
    somebodys.info[name] = told
    with pytest.raises(WrongServer, match=r"targets\.there: http://.* is not server toy-ddtree-b8-k8") as caught:
        see(somebodys, planned(tmp_path))
    assert message in str(caught.value)
    assert not any(method == "POST" for method, _, _ in somebodys.seen)


def test_flags_are_held_against_what_the_server_says(tmp_path: Path) -> None:
    flags = (("attention-backend", "triton"), ("disable-radix-cache", ""), ("threads", "2"))
    server = replace(planned(tmp_path), flags=flags)
    info = {"attention_backend": "triton", "disable_radix_cache": True, "threads": 2}
    confirmed, silent = check_plan(server, info, "there")
    assert confirmed == ["attention_backend", "disable_radix_cache", "threads"] and "tp_size" in silent
    with pytest.raises(WrongServer, match="disable_radix_cache: planned True, the endpoint says False"):
        check_plan(server, info | {"disable_radix_cache": False}, "there")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("0.50", 0.5),
        ("1e3", 1000),
        ("8", "8"),
        ("true", True),
        ("False", False),
        ("", "true"),
        ("FA3", "fa3"),
    ],
)
def test_a_value_is_the_same_however_it_is_written(tmp_path: Path, flag: str, told: Any) -> None:
    server = replace(planned(tmp_path), flags=(("a-flag", flag),))
    assert "a_flag" in check_plan(server, {"a_flag": told}, "there")[0]
    with pytest.raises(WrongServer, match="a_flag: planned"):
        check_plan(server, {"a_flag": 7}, "there")


def test_a_switch_is_no_number_and_an_empty_text_is_nothing(tmp_path: Path) -> None:
    server = replace(planned(tmp_path), flags=(("a-flag", ""),))
    with pytest.raises(WrongServer, match="a_flag: planned True, the endpoint says 1"):
        check_plan(server, {"a_flag": 1}, "there")
    assert "a_flag" in check_plan(server, {"a_flag": ""}, "there")[1]
    plain = replace(planned(tmp_path), method="AR", budget=None, topk_cap=None, block_size=None, drafter=None)
    assert "speculative_algorithm" in check_plan(plain, {"speculative_algorithm": ""}, "there")[0]


def test_a_value_that_the_server_chose_and_does_not_tell_is_not_confirmed(tmp_path: Path) -> None:
    confirmed, silent = check_plan(planned(tmp_path), TREE_INFO | {"max_running_requests": None}, "there")
    assert "max_running_requests" in silent and "max_running_requests" not in confirmed


def test_a_plain_server_is_confirmed_by_its_null(tmp_path: Path) -> None:
    plain = replace(planned(tmp_path), method="AR", budget=None, topk_cap=None, block_size=None, drafter=None)
    assert "speculative_algorithm" in check_plan(plain, {"speculative_algorithm": None}, "there")[0]
    with pytest.raises(WrongServer, match="planned None, the endpoint says 'EAGLE'"):
        check_plan(plain, {"speculative_algorithm": "EAGLE"}, "there")


def test_a_model_that_it_does_not_serve_is_named_with_those_it_does(somebodys: Somebodys, tmp_path: Path) -> None:
    somebodys.models = ["other/model"]
    with pytest.raises(WrongServer, match=r"wanted the model 'toy', and .* serves other/model; name one"):
        see(somebodys, planned(tmp_path))


def test_an_endpoint_that_refuses_or_is_not_there_is_the_targets_fault(somebodys: Somebodys, tmp_path: Path) -> None:
    server = planned(tmp_path)
    somebodys.completion = (401, {"error": "no key"})
    with pytest.raises(TargetError, match=r"targets\.there\.url: .* does not answer a completion of toy: .*401"):
        see(somebodys, server)
    somebodys.completion = (200, {"choices": []})
    with pytest.raises(TargetError, match="has no choices"):
        see(somebodys, server)
    somebodys.url = "http://127.0.0.1:1"
    with pytest.raises(TargetError, match=r"targets\.there\.url: .* does not answer: .*; start the server"):
        see(somebodys, server)


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_server_that_will_not_say_what_it_is_says_not_that_it_is_nothing(
    somebodys: Somebodys, tmp_path: Path, status: int
) -> None:
    opened = project(tmp_path, somebodys.url)
    somebodys.without_info, somebodys.info = status, None
    with pytest.raises(TargetError, match=rf"targets\.there\.url: .* does not say what it is: .* status {status}"):
        record_host(opened, "there", print)
    somebodys.without_info = 405
    assert record_host(opened, "there", print)["endpoint"]["server"] == {}


def test_an_endpoint_that_is_down_leaves_no_record(tmp_path: Path) -> None:
    opened = project(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(TargetError, match=r"targets\.there\.url: http://127\.0\.0\.1:1 does not answer"):
        record_host(opened, "there", print)
    assert not opened.host_record("there").exists()


def test_the_key_comes_from_the_environment(
    somebodys: Somebodys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = project(tmp_path, somebodys.url + "/v1/", served_model="alias", api_key_env="THEIR_KEY")
    server = opened.plan.servers[0]
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(TargetError, match=r"targets\.there\.api_key_env: the variable THEIR_KEY is not set"):
        external_endpoint(opened, server)
    monkeypatch.setenv("THEIR_KEY", "word")
    assert external_endpoint(opened, server) == Endpoint(somebodys.url, "alias", {"Authorization": "Bearer word"})


def test_the_host_record_holds_the_endpoints_words_and_no_machine(somebodys: Somebodys, tmp_path: Path) -> None:
    opened = project(tmp_path, somebodys.url)
    said: list[str] = []
    record = record_host(opened, "there", said.append)
    assert record["endpoint"]["url"] == somebodys.url
    assert record["endpoint"]["server"] == {k: v for k, v in TREE_INFO.items() if k != "last_gen_throughput"}
    assert (record["gpus"], record["cpu"]["model"], record["driver"]) == (None, None, None)
    assert record["client"]["cpu"]["cores"] >= 1
    assert said == [f"there: {somebodys.url}, an external endpoint: nothing is known of its machine"]
    receipt = confirm_deployment(opened, target_launcher(opened, "there"), "there", "sglang", print)
    assert (receipt["key"], receipt["python"]) == ("external", None)


def test_an_endpoint_that_changed_stops_the_run(somebodys: Somebodys, tmp_path: Path) -> None:
    opened = project(tmp_path, somebodys.url)
    launcher, server = target_launcher(opened, "there"), opened.plan.servers[0]
    before = record_host(opened, "there", print)
    assert somebodys.info is not None
    somebodys.info["last_gen_throughput"] = 99.0
    now = confirm_host(opened, launcher, server, {"python": None})
    assert host_key(now, "toy", "toy-drafter") == host_key(before, "toy", "toy-drafter")
    somebodys.info |= {"version": "0.5.24"}
    with pytest.raises(HostChanged, match=r"version: was 0\.5\.23, is 0\.5\.24"):
        confirm_host(opened, launcher, server, {"python": None})
    del somebodys.info["version"]
    with pytest.raises(HostChanged, match=r"version: was 0\.5\.23, is none"):
        confirm_host(opened, launcher, server, {"python": None})


def test_nothing_is_started_stopped_or_copied(somebodys: Somebodys, tmp_path: Path) -> None:
    launcher = ExternalLauncher(tmp_path, somebodys.url)
    assert launcher.base_url() == somebodys.url
    for call in (
        lambda: launcher.start(Launch("x", ("x",), 1, tmp_path / "log")),
        launcher.free_port,
        lambda: launcher.run_command(["nvidia-smi"], timeout_s=1),
        lambda: launcher.copy_in(tmp_path, "/x"),
        lambda: launcher.copy_out("/x", tmp_path),
    ):
        with pytest.raises(TargetError, match="is an external endpoint, so"):
            call()
    assert launcher.state().alive and launcher.stop().alive
    assert (launcher.stop_all(), launcher.log_tail()) == ([], "")
    assert somebodys.seen == []


def test_an_endpoint_that_takes_no_connections_is_gone_whoever_is_at_fault(tmp_path: Path) -> None:
    state = ExternalLauncher(tmp_path, "http://127.0.0.1:1").state()
    assert not state.alive and not state.ended_by_itself
    assert str(state) == "accepts no connections any more"


def test_one_lease_an_endpoint_however_its_url_is_written(tmp_path: Path) -> None:
    one, same = (ExternalLauncher(tmp_path, f"http://{host}:8000/v1") for host in ("localhost", "127.0.0.1"))
    other = ExternalLauncher(tmp_path, "http://127.0.0.1:8001")
    with one.acquire("first", 0, print):
        with pytest.raises(TargetBusy, match="run first"):
            same.acquire("second", 0, print)
        with other.acquire("third", 0, print):
            pass


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://API.example.com", "endpoint-api.example.com-443-"),
        ("http://127.0.0.1:8000/a/b/", "endpoint-127.0.0.1-8000-a-b-"),
        ("http://[::1]:9/v1", "endpoint-1-9-"),
    ],
)
def test_names_of_leases_are_names_of_files(url: str, name: str) -> None:
    assert re.fullmatch(re.escape(name) + "[0-9a-f]{8}", lease_name(url))
    assert plain_url(url).rstrip("/") == plain_url(url)


def test_endpoints_whose_urls_look_alike_have_leases_of_their_own() -> None:
    urls = ("http://h:1/a-b", "http://h:1/a/b", "http://h:1/A/b", "http://h-1:1/a/b")
    assert len({lease_name(url) for url in urls}) == 4
    assert lease_name("http://LOCALHOST:80/v1/") == lease_name("http://127.0.0.1")
