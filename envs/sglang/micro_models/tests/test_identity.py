"""The digest that names a model: computed without torch, changed by what decides the weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_micro_models import identity

PACKAGE = Path(identity.__file__).parent


def test_every_choice_changes_the_digest_and_repeating_it_does_not() -> None:
    choices = [("plain", 8, 0), ("mla_moe", 8, 0), ("plain", 10, 0), ("plain", 8, 1)]
    digests = [identity.digest(*choice) for choice in choices]
    assert len(set(digests)) == len(choices)
    assert digests == [identity.digest(*choice) for choice in choices]


def test_a_changed_source_file_changes_the_digest(tmp_path: Path) -> None:
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert _digest_of(tmp_path) == identity.digest("plain")
    (copy / "language.py").write_text((copy / "language.py").read_text() + "# changed\n")
    assert _digest_of(tmp_path) != identity.digest("plain")


def test_the_digest_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not wanted here')\n")
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name)
    assert _digest_of(tmp_path) == identity.digest("plain")


@pytest.mark.parametrize(
    ("kind", "block_size", "named"),
    [("dense", 8, "--kind dense"), ("plain", 1, "--block-size 1"), ("plain", 33, "--block-size 33")],
)
def test_what_does_not_exist_is_refused_by_its_option_and_value(kind: str, block_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        identity.digest(kind, block_size)


def test_a_folder_is_named_by_kind_block_seed_and_digest() -> None:
    chosen = identity.Identity("plain", 16, 3)
    assert identity.folder_name(chosen) == f"plain-b16-s3-{identity.digest('plain', 16, 3)}"


def _digest_of(path: Path) -> str:
    command = [sys.executable, "-m", "sglang_micro_models", "--kind", "plain", "--digest"]
    environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=True).stdout.strip()
