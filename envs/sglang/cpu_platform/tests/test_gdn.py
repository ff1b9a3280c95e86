"""The delta rule's own kernels in float32 under the interpreter, against the recurrence written out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

PACKAGE = Path(__file__).parents[1]
# In a process of its own: Triton reads TRITON_INTERPRET when it is imported.
SCRIPT = """
import torch
from sglang_cpu_platform import autotuner, device_context, gdn, interpreted_math

device_context.add_for_cpu()
autotuner.take_first_configuration()
gdn.allow_float32_on_cpu()
interpreted_math.look_up_late()
interpreted_math.look_up_late()
torch.manual_seed(0)
tokens, heads, dim, slot = 70, 2, 32, 2  # 70: more than one chunk of 64
q, k, v = torch.randn(3, 1, tokens, heads, dim)
decay, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
states = torch.randn(4, heads, dim, dim)
state = states[slot].clone()
out, _, _ = gdn.chunk_gated_delta_rule(
    q=q, k=k, v=v, g=decay, beta=beta, initial_state=states, head_first=False, use_qk_l2norm_in_kernel=True,
    initial_state_indices=torch.tensor([slot], dtype=torch.int32), inplace_update=True,
    cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
)
unit_q, unit_k = (torch.nn.functional.normalize(x[0], dim=-1) for x in (q, k))
for i in range(tokens):
    state = state * decay[0, i].exp()[:, None, None]
    change = (v[0, i] - torch.einsum("hvk,hk->hv", state, unit_k[i])) * beta[0, i][:, None]
    state = state + change[:, :, None] * unit_k[i][:, None, :]
    wanted = torch.einsum("hvk,hk->hv", state, unit_q[i]) * dim**-0.5
    assert torch.allclose(out[0, i], wanted, atol=1e-5), i
assert torch.allclose(states[slot], state, atol=1e-5)
"""


def test_the_chunked_kernels_equal_the_recurrence_in_float32() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PACKAGE)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
