"""A clone of this repository with a small configuration of its own, and what its workflow did there."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / "results" / "environments"
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
CONFIG: dict[str, Any] = {
    "repeats": 1,
    "targets": {"local": {"launcher": "local", "engine": "reference", "start_timeout_s": 60, "stop_grace_s": 5}},
    "models": {
        "toy": {"name": "toy", "revision": "1", "drafter": {"name": "toy-drafter", "revision": "1", "block_size": 8}}
    },
    "workloads": {
        "first": {"prompts": "config/prompts/heldout.jsonl", "blocks": [1], "n_min": 4, "max_tokens": 24},
        "second": {"prompts": "config/prompts/heldout.jsonl", "blocks": [2], "n_min": 4, "max_tokens": 24},
    },
    "warmup": {"prompts": "config/prompts/warmup.jsonl", "max_tokens": 4},
    "sweep": [
        {
            "target": "local",
            "model": "toy",
            "method": ["AR", "DFLASH", "DDTREE"],
            "budget": [4],
            "topk_cap": 8,
            "workload": ["first"],
            "max_running_requests": 1,
        }
    ],
}


NOT_SOURCE = {".git", ".venv", ".snakemake", "results", "build", "__pycache__"}


def source_files() -> list[str]:
    """The repository's files as a clone would have them, changes that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]
    # An exported tree, or one that belongs to somebody else, which git does not read.
    paths = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*") if path.is_file())
    return [str(path) for path in paths if not NOT_SOURCE & set(path.parts)]


@dataclass
class Clone:
    """A folder with the repository's files; `config` is written anew by every call of snakemake."""

    root: Path
    store: Path
    lease_dir: Path
    config: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(CONFIG))
    comment: str = ""

    @classmethod
    def make(cls, folder: Path, store: Path | None = None, lease_dir: Path | None = None) -> Clone:
        """Copy the repository into `folder`; store and lease folder are its own unless they are shared."""
        for name in source_files():
            destination = folder / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, destination)
        return cls(folder, store or folder / "results" / "store", lease_dir or folder / "leases")

    def duplicate(self, folder: Path) -> Clone:
        """Copy this clone, results included."""
        shutil.copytree(self.root, folder)
        return Clone(folder, folder / "results" / "store", folder / "leases", copy.deepcopy(self.config))

    @property
    def block(self) -> dict[str, Any]:
        """The sweep's one block."""
        block: dict[str, Any] = self.config["sweep"][0]
        return block

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the workflow's process."""
        shared = {"DDTREE_BENCH_STORE": str(self.store), "DDTREE_BENCH_ENVIRONMENTS": str(ENVIRONMENTS)}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DDTREE_")}
        return {**inherited, **shared, **(extra or {})}

    def write_config(self) -> None:
        """Write config/config.yaml."""
        for target in self.config["targets"].values():
            target["lease_dir"] = str(self.lease_dir)
        (self.root / "config" / "config.yaml").write_text(self.comment + yaml.safe_dump(self.config, sort_keys=False))

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start snakemake in the background, in a process group of its own."""
        self.write_config()
        return subprocess.Popen(
            [str(SNAKEMAKE), *arguments],
            cwd=self.root,
            env=self.environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run snakemake to its end, see that it ends with `status`, and return what it printed."""
        process = self.start(*arguments, env=env)
        try:
            output, _ = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"snakemake did not end:\n{output}") from None
        assert process.returncode == status, output
        return output

    def measure(self, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run snakemake as far as the tables, without figures and report."""
        return self.snakemake(*arguments, "--", "measure", "make_tables", status=status, env=env)

    def starts(self) -> set[str]:
        """The server starts so far, by the name of their logs."""
        return {path.name for path in (self.root / "results" / "logs" / "servers").glob("*/*.log")}

    def records(self) -> list[dict[str, Any]]:
        """Every attempt in the store."""
        return [json.loads(path.read_text()) for path in sorted(self.store.glob("*/*/attempts/*/record.json"))]

    def views(self) -> dict[str, dict[str, Any]]:
        """The views of cells by file name."""
        paths = (self.root / "results" / "cells").glob("*/*/*.json")
        return {path.name: json.loads(path.read_text()) for path in paths if not path.name.startswith("warmup-")}

    def processes(self) -> list[psutil.Process]:
        """Every living process that works for this clone: by working folder or command line."""
        found = []
        for process in psutil.process_iter(["cwd", "cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            place = process.info["cwd"] or ""
            if process.info["status"] != psutil.STATUS_ZOMBIE and str(self.root) in f"{place} {words}":
                found.append(process)
        return found


def eventually(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait for a condition to hold and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return result


def labels(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """Server, workload and repeat of each record, sorted."""
    return sorted((r["labels"]["server"], r["labels"]["workload"], r["identity"]["repeat"]) for r in records)
