"""External targets in a configuration: their keys, and that one endpoint is one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.config import ConfigError, validate

URL = "http://127.0.0.1:30000"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def external(target: dict[str, Any] | None = None, **block: Any) -> dict[str, Any]:
    config = tree()
    config["targets"] = {"there": {"launcher": "external", "engine": "sglang", "url": URL} | (target or {})}
    config["sweep"][0] |= {"target": "there", "method": "DDTREE", "budget": 8} | block
    return config


def only_problem(config: dict[str, Any], root: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config, root)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_one_speculative_endpoint_needs_no_baseline_beside_it(root: Path) -> None:
    _, points = validate(external(concurrency=[1, 2], max_running_requests=8, workload="short"), root)
    assert [(p.method, p.concurrency) for p in points] == [("DDTREE", 1), ("DDTREE", 2)]


def test_an_external_engine_may_be_another_and_serve_any_model(root: Path) -> None:
    config = external({"engine": "other"}, method="AR")
    config["models"]["toy"]["name"] = "Somebody/Model"
    validate(config, root)
    config["targets"]["there"]["engine"] = "reference"
    validate(config, root)


def test_two_servers_at_one_endpoint_are_refused_by_name(root: Path) -> None:
    assert only_problem(external(method=["AR", "DDTREE"], budget=[4, 8]), root) == (
        "sweep[0].target: there is an external endpoint, which is one launch configuration, but 3 servers are planned "
        "there (toy AR, toy DDTREE budget 4, cap 4, toy DDTREE budget 8, cap 8); keep the one that it is, "
        "and give every other endpoint a target of its own"
    )


def test_two_endpoints_are_two_targets(root: Path) -> None:
    config = external(method="AR")
    config["targets"]["here"] = {**config["targets"]["there"], "url": "http://127.0.0.1:30001"}
    config["sweep"].append({**config["sweep"][0], "target": "here", "method": "DDTREE"})
    assert {p.target for p in validate(config, root)[1]} == {"there", "here"}


@pytest.mark.parametrize("url", [f"{URL}/v1", "http://LOCALHOST:30000/"])
def test_one_endpoint_under_two_targets_is_refused(root: Path, url: str) -> None:
    config = external(method="AR")
    config["targets"]["here"] = {**config["targets"]["there"], "url": url}
    config["sweep"].append({**config["sweep"][0], "target": "here", "method": "DDTREE"})
    assert only_problem(config, root) == (
        f"targets.here.url: {url} with the model toy is the endpoint of targets.there as well, and one endpoint is one "
        "launch configuration; keep one target for it"
    )
    config["targets"]["here"]["served_model"] = "another behind the same gateway"
    validate(config, root)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        (None, "is missing; give the address of the endpoint"),
        ("127.0.0.1:30000", "is no address of a server; write it as http://HOST:PORT"),
        ("ftp://127.0.0.1", "is no address of a server"),
        ("http://", "is no address of a server"),
        ("http://h:99999", "is no address; write it as http://HOST:PORT"),
        ("http://h/?a=1", "without a query"),
        ("http://me:word@h", "holds a user or a password"),
    ],
)
def test_addresses_that_are_none(root: Path, url: str | None, part: str) -> None:
    message = only_problem(external({"url": url}), root)
    assert message.startswith("targets.there.url: ") and part in message
    assert "word@" not in message


@pytest.mark.parametrize("url", ["http://h", "https://h:8443/", "http://[::1]:30000", "http://h/prefix/v1"])
def test_addresses_as_people_write_them(root: Path, url: str) -> None:
    validate(external({"url": url}), root)


@pytest.mark.parametrize("key", ["url", "served_model", "api_key_env"])
def test_keys_of_endpoints_are_refused_elsewhere(root: Path, key: str) -> None:
    config = tree()
    config["targets"]["local"][key] = URL
    assert only_problem(config, root) == (
        f"targets.local.{key}: is for `launcher: external` alone, and this one is local; take it out"
    )


def test_another_engine_cannot_be_started(root: Path) -> None:
    config = tree()
    config["sweep"][0]["engine"] = "other"
    assert "engine: 'other' cannot be started on local by launcher local" in only_problem(config, root)
