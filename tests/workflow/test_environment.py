"""The reference engine's environment: built into a wheelhouse, deployed, and serving from there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from clone import ENVIRONMENTS, Clone
from foreground import TREE

from ddtree_bench.environments import Environment, EnvironmentFailed, environment_key, manifest, python_tag
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.recipes import environment_name
from ddtree_bench.servers import api
from ddtree_bench.servers.command_line import Place
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.local import LocalLauncher

ENGINES = Path(__file__).parents[2] / "envs"
REFERENCE = Environment("reference")


def own_wheel(folder: Path) -> Path:
    (wheel,) = (folder / "wheels").glob("ddtree_reference-*.whl")
    return wheel


@pytest.mark.slow
def test_build_deploy_and_serve(tmp_path: Path) -> None:
    wheelhouse, root = tmp_path / "wheelhouse", tmp_path / "installed"
    launcher = LocalLauncher(tmp_path / "leases", "test")
    said: list[str] = []

    built = build(REFERENCE, ENGINES, wheelhouse, said.append)
    assert built.key == environment_key(REFERENCE, ENGINES)
    assert {"torch", "ddtree-reference", "tokenizers"} <= set(built.versions)
    assert [path.name for path in sorted((wheelhouse / "wheels").iterdir())] == sorted(w.file for w in built.wheels)
    assert {path.name for path in wheelhouse.iterdir()} == {"manifest.json", "wheels"}
    first = own_wheel(wheelhouse).read_bytes()

    assert build(REFERENCE, ENGINES, wheelhouse, said.append) == built
    assert "already built" in said[-1]

    own_wheel(wheelhouse).write_bytes(first + b"damaged")
    with pytest.raises(EnvironmentFailed, match="installing the wheels failed"):
        deploy(launcher, wheelhouse, str(root), report=said.append)
    assert build(REFERENCE, ENGINES, wheelhouse, said.append) == built
    assert own_wheel(wheelhouse).read_bytes() == first, "the same source must give the same wheel"

    # The folder of the failed installation has no receipt, so it is made anew.
    receipt = deploy(launcher, wheelhouse, str(root), report=said.append)
    assert any("half made" in line for line in said)
    assert receipt["versions"]["torch"] == built.versions["torch"]
    assert receipt["folder"] == str(root / f"reference-{built.key[:12]}-{built.python}")
    assert deploy(launcher, wheelhouse, str(root), report=said.append) == receipt
    assert "already deployed" in said[-1]

    serves_from(receipt, launcher, tmp_path)

    # What is no longer installed is noticed, though the receipt is there.
    shutil.rmtree(next(Path(receipt["folder"]).rglob("uvicorn-*.dist-info")))
    again = deploy(launcher, wheelhouse, str(root), report=said.append)
    assert again["versions"] == receipt["versions"] and "deployed in" in said[-1]


def test_a_complete_wheelhouse_is_kept_when_its_rule_runs_again(fresh: Clone, tmp_path: Path) -> None:
    name = environment_name(REFERENCE, environment_key(REFERENCE, ENGINES), python_tag())
    wheelhouse = tmp_path / "environments" / name
    wheelhouse.mkdir(parents=True)
    (wheelhouse / "wheels").symlink_to(ENVIRONMENTS / name / "wheels")
    shutil.copy(ENVIRONMENTS / name / "manifest.json", wheelhouse)
    before = manifest.read(wheelhouse)
    offline = {"DDTREE_BENCH_ENVIRONMENTS": str(wheelhouse.parent), "PIP_NO_INDEX": "1"}
    said = fresh.snakemake("--forcerun", "build_environment", "--", str(wheelhouse / "manifest.json"), env=offline)
    assert "already built" in said and manifest.read(wheelhouse) == before


def serves_from(receipt: dict[str, Any], launcher: LocalLauncher, folder: Path) -> None:
    assert Path(receipt["python"]).resolve() == Path(sys.executable).resolve()
    with launcher.acquire("test", 0, print):
        try:
            place = Place(receipt["python"], launcher.free_port(), "s1")
            log_path = folder / "server.log"
            start_server(launcher, TREE, place, log_path=log_path, stop_grace_s=5, timeout_s=120, progress=print)
            assert api.server_info(launcher.base_url())["start_id"] == "s1"
        finally:
            launcher.stop()
