"""What the configuration of a host over SSH must say, and what it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.client_machine import LIMIT, client_units
from ddtree_bench.config import ConfigError
from ddtree_bench.launchers import REMOTE_TTL_S, host_place
from ddtree_bench.project import Project, open_project

SSH = {"launcher": "ssh", "engine": "reference", "ssh_host": "h.example", "scope": "user"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with prompts and the engines' sources."""
    return write_project(tmp_path)


def opened(root: Path, target: dict[str, Any], **more: Any) -> Project:
    changed = tree()
    changed["targets"]["local"] = target
    return open_project({**changed, **more}, root, root / "results")


def problems(root: Path, target: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        opened(root, target, **more)
    return list(refused.value.problems)


@pytest.mark.parametrize("key", ["ssh_host", "scope"])
def test_what_is_never_guessed_must_be_given(root: Path, key: str) -> None:
    (problem,) = problems(root, {name: value for name, value in SSH.items() if name != key})
    assert problem.startswith(f"targets.local.{key}: is missing; ")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ssh_host": "-oProxyCommand=touch x"}, "targets.local.ssh_host: '-oProxyCommand=touch x' is no host"),
        ({"ssh_host": "a b"}, "targets.local.ssh_host: 'a b' is no host"),
        ({"ssh_host": ""}, "targets.local.ssh_host: '' is no host"),
        ({"host": "0.0.0.0"}, "targets.local.host: '0.0.0.0' would open the servers to the network"),
        ({"host": "::1"}, "targets.local.host: '::1' is an IPv6 address"),
        ({"lease_ttl_s": 6.0}, "targets.local.lease_ttl_s: 6 is shorter than a link may take to be found again"),
        ({"root": "/a:b"}, "targets.local.root: '/a:b' has a colon"),
        ({"root": "somewhere"}, "targets.local.root: 'somewhere' is not absolute"),
        ({"lease_dir": "~/leases"}, "targets.local.lease_dir: '~/leases' is not absolute"),
    ],
)
def test_values_of_a_host_are_refused_with_the_key_and_a_remedy(
    root: Path, change: dict[str, Any], expected: str
) -> None:
    (problem,) = problems(root, SSH | change)
    assert problem.startswith(expected)
    assert re.search("; (give|leave|choose)", problem)


@pytest.mark.parametrize("key", ["ssh_host", "ssh_config", "scope", "client", "reconnect_s", "keep_environments"])
def test_keys_of_ssh_targets_are_refused_elsewhere(root: Path, key: str) -> None:
    value = {"scope": "user", "client": "target", "reconnect_s": 1.0, "keep_environments": 1}.get(key, "x")
    (problem,) = problems(root, {"launcher": "local", "engine": "reference", key: value})
    assert problem == f"targets.local.{key}: is for `launcher: ssh` alone, and this one is local; take it out"


def test_paths_of_models_on_a_host_are_absolute(root: Path) -> None:
    changed = tree()
    changed["models"]["toy"]["paths"] = {"local": "models/toy"}
    (problem,) = problems(root, SSH, models=changed["models"])
    assert problem.startswith("models.toy.paths.local: 'models/toy' is not absolute; ")


def test_a_host_has_defaults_of_its_own(root: Path) -> None:
    place = host_place(opened(root, SSH), "local")
    assert (place.root, place.lease_ttl_s, place.address) == ("~/ddtree-bench", REMOTE_TTL_S, "127.0.0.1")
    assert (place.memory_max_bytes, place.ssh_config) == (None, None)
    given = host_place(opened(root, SSH | {"lease_ttl_s": 17.0, "memory_max_gib": 0.5, "ssh_config": "/x"}), "local")
    assert (given.lease_ttl_s, given.memory_max_bytes, given.ssh_config) == (17.0, 2**29, Path("/x"))


def test_the_way_from_the_client_to_the_server_is_part_of_a_cell(root: Path) -> None:
    local = opened(root, {"launcher": "local", "engine": "reference"})
    here, there = opened(root, SSH), opened(root, SSH | {"client": "target"})
    assert "client" not in local.plan.cells[0].server.identity
    assert here.plan.cells[0].server.identity["client"] == "here"
    assert there.plan.cells[0].server.identity["client"] == "target"
    keys = [{cell.key for cell in project.plan.cells} for project in (local, here, there)]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_a_client_on_the_target_has_an_environment_there_and_takes_nothing_of_this_machine(root: Path) -> None:
    here, there = opened(root, SSH), opened(root, SSH | {"client": "target"})
    assert [path.name.split("-")[1] for path in there.receipts("local")] == ["reference", "client"]
    assert [path.name.split("-")[1] for path in here.receipts("local")] == ["reference"]
    assert client_units(here.config.targets["local"]) == 1
    assert client_units(there.config.targets["local"]) == 0
    assert client_units(opened(root, {"launcher": "local", "engine": "reference"}).config.targets["local"]) == LIMIT


def test_experts_are_split_within_the_tensor_parallel_ranks(root: Path) -> None:
    changed = tree()
    changed["models"]["toy"]["paths"] = {"local": "/models/toy"}
    changed["models"]["toy"]["drafter"]["paths"] = {"local": "/models/drafter"}
    changed["sweep"][0]["expert_parallel"] = [8]
    wrong = problems(root, SSH | {"engine": "sglang"}, models=changed["models"], sweep=changed["sweep"])
    assert wrong[0].startswith("sweep[0].expert_parallel: 8 does not divide tensor_parallel, which is 1; ")
