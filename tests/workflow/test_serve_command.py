"""`python -m ddtree_bench serve`: one configured server in the foreground, and the list of commands."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import yaml
from clone import CONFIG, REPOSITORY, Clone, eventually

from ddtree_bench.commands import COMMANDS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_what_was_asked_for_until_a_signal(deployed: None, tmp_path: Path, number: int) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["targets"]["local"]["lease_dir"] = str(tmp_path / "leases")
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ddtree_bench", "serve", "--config", str(tmp_path / "toy.yaml"), "--model", "toy"]
    process = subprocess.Popen(
        [*command, "--method", "DDTREE", "--budget", "6", "--topk-cap", "3"],
        cwd=tmp_path,
        env=Clone(tmp_path, tmp_path / "store", tmp_path / "leases").environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        info = requests.get(f"{url}/server_info", timeout=10).json()
        assert (info["speculative_algorithm"], info["speculative_ddtree_budget"]) == ("DDTREE", 6)
        assert info["speculative_ddtree_topk_cap"] == 3
        body = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
        assert answer["usage"]["completion_tokens"] >= 1
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=2)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not Clone(tmp_path, tmp_path, tmp_path).processes(), 20, "no process left")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddtree_bench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    for name in [*COMMANDS, "serve", "generate"]:
        assert re.search(rf"^    {name}( |$)", shown, re.MULTILINE)


def test_errors_name_the_key_and_the_file(tmp_path: Path) -> None:
    missing = run("plan", "--config", str(tmp_path / "absent.yaml"))
    assert missing.returncode == 1
    assert f"{tmp_path / 'absent.yaml'}: cannot be read" in missing.stderr
    (tmp_path / "bad.yaml").write_text("sweap: []")
    bad = run("plan", "--config", str(tmp_path / "bad.yaml"))
    assert bad.returncode == 1
    assert "sweap: unknown key; did you mean 'sweep'?" in bad.stderr


def test_several_servers_are_named() -> None:
    refused = run("serve", "--method", "DDTREE")
    assert refused.returncode == 1
    assert (
        "several servers are meant: smollm2-ddtree-b4-k4, smollm2-ddtree-b8-k8, smollm2-ddtree-b16-k8" in refused.stderr
    )


def test_a_budget_that_is_none_is_refused() -> None:
    refused = run("serve", "--method", "DDTREE", "--budget", "0")
    assert refused.returncode == 1
    assert "sweep[0].budget[0]: 0 is not allowed" in refused.stderr
