"""SGLang's CPU environment: installed from the wheelhouse alone, known to the server, adopted, patched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import environment
import pytest

from ddtree_bench.environments import Environment
from ddtree_bench.environments import manifest as manifests
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.key import PATCHES
from ddtree_bench.environments.variables import engine_variables
from ddtree_bench.environments.wheel_patch import STRIP, patched_wheel
from ddtree_bench.targets.local import LocalLauncher

pytestmark = pytest.mark.sglang

PATCH = """\
diff --git a/python/sglang/srt/plugins/__init__.py b/python/sglang/srt/plugins/__init__.py
--- a/python/sglang/srt/plugins/__init__.py
+++ b/python/sglang/srt/plugins/__init__.py
@@ -1,1 +1,2 @@
+# A first line that the release does not have.
 {first}
"""


@pytest.fixture(scope="module")
def wheelhouse() -> Path:
    return environment.wheelhouse()


@pytest.fixture(scope="module")
def sglang_wheel(wheelhouse: Path) -> Path:
    (wheel,) = (wheelhouse / "wheels").glob("sglang-0*.whl")
    return wheel


def test_the_release_and_our_packages_are_installed_and_a_second_time_does_nothing(
    wheelhouse: Path, tmp_path: Path
) -> None:
    python = environment.sglang_python()
    receipt = json.loads((python.parents[1] / "receipt.json").read_text())
    wheels = manifests.read(wheelhouse).versions
    installed = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in receipt["versions"].items()}
    assert {re.sub(r"[-_.]+", "-", name): version for name, version in wheels.items()}.items() <= installed.items()
    assert wheels["sglang"] == "0.5.23" and wheels["torch"].startswith("2.13.0") and wheels["triton"] == "3.7.0"
    assert {"sglang-ddtree", "sglang-cpu-platform", "xgrammar", "llguidance"} <= set(wheels)

    said: list[str] = []
    build(environment.CPU, environment.ENGINES, wheelhouse, said.append)
    launcher = LocalLauncher(tmp_path / "leases", "test")
    again = deploy(launcher, wheelhouse, str(wheelhouse.parent / "installed"), report=said.append)
    assert again == receipt and "already built" in said[0] and "already deployed" in said[1] and len(said) == 2


def test_the_server_knows_the_algorithm_and_its_options() -> None:
    variables = {**os.environ, **engine_variables("sglang", "cpu")}
    argv = [environment.sglang_python(), "-m", "sglang.launch_server", "--help"]
    shown = subprocess.run(argv, env=variables, capture_output=True, text=True, check=True)
    assert "DDTREE" in shown.stdout
    assert {"--speculative-ddtree-budget", "--speculative-ddtree-topk-cap"} <= set(shown.stdout.split())


def test_the_plugin_names_the_files_of_this_release(sglang_wheel: Path, wheelhouse: Path) -> None:
    (plugin,) = (wheelhouse / "wheels").glob("sglang_ddtree-*.whl")
    with zipfile.ZipFile(plugin) as ours, zipfile.ZipFile(sglang_wheel) as theirs:
        table = json.loads(ours.read("sglang_ddtree/release.json"))
        assert table["release"] == sglang_wheel.name.split("-")[1] and table["files"]
        for name, digest in table["files"].items():
            assert hashlib.sha256(theirs.read(name)).hexdigest() == digest, name


def test_it_can_be_adopted(tmp_path: Path) -> None:
    """The deployed environment stands in for one that somebody else made."""
    theirs = environment.sglang_python().parents[1]
    adopting = Environment("sglang", "adopted-cpu")
    folder = tmp_path / "wheelhouse"
    assert len(build(adopting, environment.ENGINES, folder).wheels) == 2
    launcher = LocalLauncher(tmp_path / "leases", "test")
    receipt = deploy(launcher, folder, str(tmp_path / "installed"), adopt=str(theirs))
    assert receipt["adopted"]["version"] == "0.5.23" and receipt["versions"]["torch"].startswith("2.13.0")
    assert not (Path(receipt["folder"]) / "lib" / "sglang").exists()


def test_the_real_wheel_is_patched_into_the_same_bytes_twice(sglang_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(sglang_wheel) as archive:
        first = archive.read("sglang/srt/plugins/__init__.py").decode().splitlines()[0]
    patch = tmp_path / "0001-a-line.patch"
    patch.write_text(PATCH.format(first=first))
    digests, names = set(), set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        made = patched_wheel(sglang_wheel, [patch], folder)
        digests.add(hashlib.sha256(made.read_bytes()).hexdigest())
        names.add(made.name)
    assert len(digests) == len(names) == 1 and names.pop().startswith("sglang-0.5.23+ddtree.")


def test_the_patches_of_the_repository_are_in_the_real_wheel(sglang_wheel: Path, tmp_path: Path) -> None:
    """They applied when the wheelhouse was built, so in the opposite order they come out again."""
    patches = sorted((environment.ENGINES / "sglang" / PATCHES).glob("*.patch"))
    assert set(manifests.read(sglang_wheel.parents[1]).patches) == {f"{PATCHES}/{patch.name}" for patch in patches}
    assert ("+ddtree." in sglang_wheel.name) == bool(patches)
    with zipfile.ZipFile(sglang_wheel) as archive:
        archive.extractall(tmp_path)
    for patch in reversed(patches):
        subprocess.run(["git", "apply", "--reverse", f"-p{STRIP}", str(patch)], cwd=tmp_path, check=True)
