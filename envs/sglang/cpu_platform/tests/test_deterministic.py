"""Draws by a seed on a CPU: the release's hash, computed where its CPU package is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

DRAWS = """
import torch
from sglang.srt.layers import sampler
from sglang_cpu_platform import deterministic

deterministic.allow_on_cpu()
deterministic.allow_on_cpu()
seeds = torch.tensor([7, 7, 7, 2**40 + 5, 0]).to(torch.uint64)
positions = torch.tensor([3, 3, 4, 4, 100])
hashed = deterministic.murmur_hash32(seeds, positions, torch.arange(317))
draws = sampler.multinomial_with_seed(torch.zeros(5, 317), seeds, positions).flatten().tolist()
print(repr((hashed[:, [0, 316]].tolist(), draws)))
"""


def rotated(x: int, bits: int) -> int:
    return (x << bits | x >> 32 - bits) & 0xFFFFFFFF


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86 32 of 32-bit words with seed 0, on Python's integers."""
    h = 0
    for word in words:
        h ^= rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotated(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_hashes_are_murmur3_and_draws_depend_on_seed_and_position_alone() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", DRAWS], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    hashed, draws = eval(done.stdout.splitlines()[-1])
    cases = [(7, 3), (7, 3), (7, 4), (2**40 + 5, 4), (0, 100)]
    assert hashed == [
        [murmur3([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in (0, 316)] for seed, position in cases
    ]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
