import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_ddtree.device_time import write_time
source = ASTSource(write_time, signature={"out": "*i64", "place": "i32"})
print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_the_kernel_reads_the_devices_time_and_compiles_for_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert "%globaltimer" in done.stdout, done.stderr


def test_the_time_is_that_of_the_sampler_and_no_view_of_what_the_next_replay_writes(monkeypatch):
    from sglang_ddtree import device_time

    class Sampler:
        def __call__(self, hidden, input_ids):
            calls.append((hidden, input_ids))

        def read(self, batch):
            return batch

    class Kernel:
        def __getitem__(self, grid):
            return self.write

        def write(self, out, place):
            out[place] = 100 * len(calls) + clock[0]

    calls, clock = [], [5]
    monkeypatch.setattr(device_time, "write_time", Kernel())
    timed = device_time.TimedSampler(Sampler(), "cpu")
    timed("hidden", "ids")
    first = timed.nanoseconds()
    timed._times.zero_()
    assert calls == [("hidden", "ids")]
    assert torch.equal(first, torch.tensor([100]))
    assert timed.read(3) == 3
