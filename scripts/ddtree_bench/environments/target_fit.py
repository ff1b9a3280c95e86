"""See that a target can take an environment, before a byte of it is sent: platform, driver, rights, room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree_bench.environments.needs import Needs
from ddtree_bench.environments.recipes import EnvironmentFailed
from ddtree_bench.targets.launcher import Launcher

PROGRAM = Path(__file__).with_suffix(".sh")
TIMEOUT_S = 90.0
GIB = 2**30


@dataclass(frozen=True)
class TargetFacts:
    """What a target has. `driver` is NVIDIA's, as its version is written, "" where there is none.

    `refused` says why nothing can be written below the root; else `free_bytes` and `free_files` are what its file
    system has left, `free_files` None where it sets no limit. `left_bytes` is what an earlier try takes there.
    """

    platform: str
    glibc: str
    driver: str
    refused: str | None
    free_bytes: int = 0
    free_files: int | None = None
    left_bytes: int = 0


def require_fit(launcher: Launcher, root: str, folder: str, needs: Needs) -> None:
    """See that the target can take an environment in `folder` below `root`, which is made if it is not there.

    Raises EnvironmentFailed, which says what the target lacks and what to do.
    """
    found = list(problems(ask(launcher, root, folder), root, needs, driver_may_be_missing=launcher.shares_files))
    if found:
        raise EnvironmentFailed("\n".join(found))


def ask(launcher: Launcher, root: str, folder: str) -> TargetFacts:
    """Ask a target what it has for an environment; both paths are absolute. Raises EnvironmentFailed."""
    result = launcher.run_command(["sh", "-s", "--", root, folder], timeout_s=TIMEOUT_S, stdin=PROGRAM.read_text())
    values = dict(line.partition(" ")[::2] for line in result.stdout.splitlines())
    if not {"refused", "room"} & values.keys():
        raise EnvironmentFailed(
            f"{root}: the target did not say what room there is: {(result.stderr or result.stdout).strip()[-300:]}; "
            "it needs a POSIX shell and the GNU core utilities"
        )
    facts = TargetFacts(values["platform"], values["glibc"], values["driver"], values.get("refused"))
    if facts.refused is not None:
        return facts
    blocks, block_size, free_files, all_files = map(int, values["room"].split())
    return replace(
        facts,
        free_bytes=blocks * block_size,
        free_files=free_files if all_files else None,
        left_bytes=int(values["left"]) * 1024,
    )


def problems(facts: TargetFacts, root: str, needs: Needs, driver_may_be_missing: bool) -> Iterator[str]:
    """Why a target with these facts cannot take an environment, each with the remedy."""
    yield from _platform(facts, needs)
    yield from _driver(facts, needs, driver_may_be_missing)
    if facts.refused is not None:
        yield f"{root}: nothing can be written there: {facts.refused}; set `root` of the target to a folder of yours"
    else:
        yield from _room(facts, root, needs)


def _platform(facts: TargetFacts, needs: Needs) -> Iterator[str]:
    other = next((wheel for wheel, machine in needs.machines.items() if facts.platform != f"Linux {machine}"), None)
    if other is not None:
        yield (
            f"{other}: is for Linux {needs.machines[other]}, but the target is {facts.platform}; deploy from a machine "
            "of its kind, or choose another target"
        )
    elif needs.glibc_wheel and needs.glibc > _version(facts.glibc):
        has = f"glibc {facts.glibc}" if facts.glibc else "no glibc"
        yield (
            f"{needs.glibc_wheel}: needs glibc {_words(needs.glibc)} or newer, but the target has {has}; choose a "
            "target with a newer system"
        )


def _driver(facts: TargetFacts, needs: Needs, may_be_missing: bool) -> Iterator[str]:
    if needs.driver is None or (may_be_missing and not facts.driver):
        return
    if not facts.driver or _version(facts.driver)[0] < needs.driver:
        yield (
            f"driver: the environment's CUDA needs NVIDIA's driver {needs.driver} or newer, but the target has "
            f"{facts.driver or 'none'}; install it there, or choose another `sglang_build` or target"
        )


def _room(facts: TargetFacts, root: str, needs: Needs) -> Iterator[str]:
    remedy = "make room, `snakemake prune` removes old environments, or set `root` of the target to a larger disk"
    free = facts.free_bytes + facts.left_bytes
    if free < needs.n_bytes:
        yield f"{root}: needs {needs.n_bytes / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; {remedy}"
    elif facts.free_files is not None and facts.free_files < needs.n_files:
        yield f"{root}: needs {needs.n_files} files (inodes), but {facts.free_files} are free; {remedy}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _words(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
