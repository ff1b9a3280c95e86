"""Readiness: the server that was started, alive, and one real answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.plan import ModelRef, Server
from ddtree_bench.servers import api
from ddtree_bench.servers.identity import differences, start_variables, wanted_identity
from ddtree_bench.servers.loading import loading_line
from ddtree_bench.servers.ready import Ready, ServerFailed, WrongServer, see_again, wait_until_ready
from ddtree_bench.targets.launcher import LINK_LOST, Launch, ServerState, TargetError
from ddtree_bench.targets.local import LocalLauncher

TINY = Path(__file__).with_name("tiny_server.py")
MODEL, DRAFTER = ModelRef("toy", "1"), ModelRef("toy-dflash", "1")
TREE = Server("tree", "local", "reference", "e" * 64, MODEL, DRAFTER, "DDTREE", 16, 8, 8)
AR = Server("ar", "local", "reference", "e" * 64, MODEL, None, "AR")

SGLANG_TREE = replace(TREE, engine="sglang", tensor_parallel=2, expert_parallel=2)

Wait = Callable[..., Ready]


@pytest.fixture
def wait(launcher: LocalLauncher, tmp_path: Path) -> Wait:
    """Start the tiny server with the arguments given and wait until it is ready as `server`."""

    def start_and_wait(server: Server, *arguments: str, timeout_s: float = 20, said: list[str] | None = None) -> Ready:
        port = launcher.free_port()
        argv = (sys.executable, str(TINY), "--port", str(port), *arguments)
        launcher.start(Launch("tiny", argv, port, tmp_path / "server.log", stop_grace_s=1))
        return wait_until_ready(
            launcher.base_url,
            server,
            "s1",
            state=launcher.state,
            log_tail=launcher.log_tail,
            timeout_s=timeout_s,
            progress=(said if said is not None else []).append,
        )

    return start_and_wait


def info(server: Server, **other: Any) -> tuple[str, str]:
    return "--info", json.dumps({**wanted_identity(server, "s1"), **other})


def test_ready(wait: Wait) -> None:
    said: list[str] = []
    ready = wait(TREE, *info(TREE, version="x"), "--load-s", "0.5", said=said)
    assert ready.server_info["version"] == "x" and ready.seconds >= 0.5
    assert said and "ready after" in said[-1]


def test_what_a_server_must_show() -> None:
    assert wanted_identity(AR, "s1")["speculative_num_draft_tokens"] is None
    assert wanted_identity(TREE, "s1") == {
        "start_id": "s1",
        "served_model_name": "toy",
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 16,
        "speculative_ddtree_topk_cap": 8,
        "speculative_dflash_block_size": 8,
        "speculative_num_draft_tokens": 17,
        "max_running_requests": 1,
    }


def test_sglang_tells_its_start_by_what_our_plugin_repeats() -> None:
    wanted = wanted_identity(SGLANG_TREE, "s1")
    assert wanted["ddtree_start_id"] == "s1" and "start_id" not in wanted
    assert (wanted["tp_size"], wanted["ep_size"]) == (2, 2)
    assert start_variables(SGLANG_TREE, "s1") == {"SGLANG_DDTREE_START_ID": "s1"}
    assert start_variables(TREE, "s1") == {}


def test_sglang_may_tell_it_in_its_first_state_and_the_top_comes_first() -> None:
    told = wanted_identity(SGLANG_TREE, "s1")
    start = told.pop("ddtree_start_id")
    assert differences(SGLANG_TREE, "s1", {**told, "internal_states": [{"ddtree_start_id": start}]}) == []
    below = {"tp_size": 1, "ddtree_start_id": start}
    assert differences(SGLANG_TREE, "s1", {**told, "internal_states": [below]}) == []
    assert differences(SGLANG_TREE, "s1", {**told, "internal_states": []}) == [
        "ddtree_start_id: wanted 's1', seen None"
    ]
    assert differences(SGLANG_TREE, "s1", {**told, "tp_size": 1, "internal_states": [below]}) == [
        "tp_size: wanted 2, seen 1"
    ]


def test_a_tree_that_sglang_cut_is_a_difference() -> None:
    told = {**wanted_identity(SGLANG_TREE, "s1"), "speculative_ddtree_budget": 7, "speculative_num_draft_tokens": 8}
    assert differences(SGLANG_TREE, "s1", told) == [
        "speculative_ddtree_budget: wanted 16, seen 7",
        "speculative_num_draft_tokens: wanted 17, seen 8",
    ]


def test_each_difference_is_named(wait: Wait) -> None:
    with pytest.raises(WrongServer) as refused:
        wait(TREE, *info(TREE, start_id="another", speculative_num_draft_tokens=8))
    message = str(refused.value)
    assert "start_id: wanted 's1', seen 'another'" in message
    assert "speculative_num_draft_tokens: wanted 17, seen 8" in message
    assert "budget: wanted" not in message


def test_an_unwanted_speculation_is_a_difference(wait: Wait) -> None:
    with pytest.raises(WrongServer, match="speculative_algorithm: wanted None, seen 'DFLASH'"):
        wait(AR, *info(AR, speculative_algorithm="DFLASH"))


def test_a_dead_server_ends_the_wait_at_once_with_its_log(wait: Wait) -> None:
    with pytest.raises(ServerFailed) as failed:
        wait(AR, "--exit", "3", timeout_s=300)
    assert "exit status 3" in failed.value.reason
    assert failed.value.log_tail.splitlines()[-1] == "out of memory while capturing graphs"


def test_a_slow_server_runs_into_its_limit(wait: Wait) -> None:
    with pytest.raises(ServerFailed, match=r"not ready within 1 s.*targets.local.start_timeout_s") as failed:
        wait(AR, *info(AR), "--load-s", "60", timeout_s=1)
    assert failed.value.log_tail == "loading weights"


def test_progress_shows_the_last_line_of_the_log(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_bench.servers.ready.PROGRESS_EVERY_S", 0.2)
    said: list[str] = []
    wait(AR, *info(AR), "--load-s", "1", said=said)
    assert "of at most 20 s: loading weights" in said[0]


SHARDS = (
    "\rLoading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]"
    "\rLoading safetensors checkpoint shards:  45% Completed | 29/64 [01:10<01:25,  2.43s/it]"
)
CAPTURE = (
    "\r  0%|          | 0/4 [00:00<?, ?it/s]"
    "\rCapturing batches (bs=4 avail_mem=70.12 GB):  50%|█████     | 2/4 [00:03<00:03,  1.52s/it]"
)


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (SHARDS, "Loading safetensors checkpoint shards: 45 % (29 of 64)"),
        (f"begin\n{SHARDS}\nTP1 allocates", "Loading safetensors checkpoint shards: 45 % (29 of 64); TP1 allocates"),
        (f"{SHARDS}\n{CAPTURE}", "Capturing batches: 50 % (2 of 4)"),
        (
            "\rMulti-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 4.49it/s]\n\n",
            "Multi-thread loading shards: 100 % (1 of 1)",
        ),
        (
            "Loading shards:  50% Completed | 1/2 [00:03<00:03,  3.00s/it]\n"
            "Capturing batches (bs=4 avail_mem=70.12 GB):   0%|          | 0/4 [00:00<?, ?it/s]\n",
            "Capturing batches: 0 % (0 of 4)",
        ),
        ("accept rate: 50%, #queue: 3/4 [x]\n", "accept rate: 50%, #queue: 3/4 [x]"),
        ("\r  0%|          | 0/4 [00:00<?, ?it/s]", "0%|          | 0/4 [00:00<?, ?it/s]"),
        ("", ""),
    ],
)
def test_what_a_log_says_of_a_server_that_loads(log: str, told: str) -> None:
    assert loading_line(log) == told


def test_an_answer_without_tokens_is_no_answer(wait: Wait) -> None:
    with pytest.raises(ServerFailed, match="first completion with no token"):
        wait(AR, *info(AR), "--tokens", "0")


def test_a_server_that_others_end_is_not_at_fault(wait: Wait, launcher: LocalLauncher) -> None:
    wait(AR, *info(AR))
    launcher.stop()
    with pytest.raises(TargetError, match="requested"):
        wait_until_ready(
            launcher.base_url, AR, "s1", state=launcher.state, log_tail=launcher.log_tail, timeout_s=9, progress=print
        )


def test_what_ended_a_server_is_said_in_words(launcher: LocalLauncher) -> None:
    seen = ServerState(False, exit_code=1, reason="exited", why="was killed: out of memory (limit 2 GiB)")
    with pytest.raises(
        ServerFailed, match=r"server ar was killed: out of memory \(limit 2 GiB\) after .*, before it was"
    ):
        unready(launcher, lambda: seen, 60)


def test_a_server_out_of_reach_is_waited_for_and_not_at_fault(launcher: LocalLauncher) -> None:
    began = time.monotonic()
    with pytest.raises(TargetError, match="was not ready within 1 s, and the link to it is lost") as caught:
        unready(launcher, lambda: ServerState(True, reason=LINK_LOST), 1)
    assert not isinstance(caught.value, ServerFailed) and time.monotonic() - began >= 1


def test_a_server_that_does_not_answer_again_is_named_with_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    url, log = f"http://127.0.0.1:{launcher.free_port()}", tmp_path / "server.log"
    with pytest.raises(
        TargetError,
        match=r"^targets\.local: server ar does not answer .* \(running\): .*; see its log, .*/server\.log, and",
    ):
        see_again(url, AR, "s1", state=lambda: ServerState(True), log_path=log, timeout_s=0.3)


def unready(launcher: LocalLauncher, state: Callable[[], ServerState], timeout_s: float) -> Ready:
    url = f"http://127.0.0.1:{launcher.free_port()}"
    return wait_until_ready(
        lambda: url, AR, "s1", state=state, log_tail=lambda _: "", timeout_s=timeout_s, progress=print
    )


def test_calls(wait: Wait, launcher: LocalLauncher) -> None:
    wait(AR, *info(AR, counters={"requests_total": 3}))
    url = launcher.base_url()
    assert api.health(url) and api.server_info(url)["counters"] == {"requests_total": 3}
    api.flush_cache(url)
    launcher.stop()
    assert not api.health(url)
    with pytest.raises(api.ApiError, match=r"POST .*/flush_cache"):
        api.flush_cache(url)
