"""Why a unit ended, in words. The logs are what SGLang 0.5.23, PyTorch, uvicorn and argparse print, shortened."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_bench.targets.ssh.reasons import reason
from ddtree_bench.targets.ssh.unit import Unit
from ddtree_bench.targets.unit_state import UnitState

UNIT = Unit("ddtree-bench-x.service", "d", ("/opt/env/bin/python", "-m", "sglang.launch_server"), stop_grace_s=10.0)
LIMITED = Unit(**{**UNIT.__dict__, "memory_max_bytes": 3 << 29, "start_timeout_s": 900.0, "user": "ann"})


def failed(**values: Any) -> UnitState:
    """The state of a unit that ran and failed."""
    known: dict[str, Any] = {"name": UNIT.name, "description": "d", "load_state": "loaded", "active_state": "failed"}
    known |= {"sub_state": "failed", "result": "exit-code", "main_pid": None, "exit_code": None, "signal": None}
    return UnitState(**{**known, "started_us": 1, "was_active": True, "invocation_id": "0" * 32, **values})


EXITED = failed(exit_code=1)
KILLED = failed(result="signal", signal="SIGKILL")
OOM = failed(result="oom-kill", signal="SIGKILL")

ENDS_ITSELF = """\
[2026-11-30 07:35:01] Received sigquit from a child process. It usually means the child failed.
[2026-11-30 07:35:01] kill_process_tree called: parent_pid=21441, include_parent=True, pid=21441"""

NO_WEIGHTS = f"""\
    hf_folder, hf_weights_files, use_safetensors = self._prepare_weights(
                                                   ^^^^^^^^^^^^^^^^^^^^^^
  File "sglang/srt/model_loader/loader.py", line 580, in _prepare_weights
    raise RuntimeError(
RuntimeError: Cannot find any model weights with `/models/empty`

{ENDS_ITSELF}"""

ALLOCATE = "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of 95.00 GiB of which 1.2 GiB"

CAPTURE = f"""\
[2026-11-30 07:31:00 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=33
Traceback (most recent call last):
  File "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py", line 603, in __init__
    raise Exception(
Exception: Capture cuda graph failed: {ALLOCATE} is free.
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)

{ENDS_ITSELF}"""

IN_CAPTURE = f"""\
[07:31:00 TP0] Capture target verify CUDA graph begin. backend=full, bs=[1, 2]
[07:31:20 TP0] Capture target verify CUDA graph end. elapsed=20.0 s, mem usage=1.00 GB
[07:31:20 TP0] Capture prefill CUDA graph begin. backend=breakable
torch.OutOfMemoryError: {ALLOCATE}
{ENDS_ITSELF}"""

AFTER_CAPTURE = f"""\
[07:31:00 TP0] Capture target verify CUDA graph begin. backend=full, bs=[1, 2]
[07:31:20 TP0] Capture target verify CUDA graph end. elapsed=20.0 s, mem usage=1.00 GB
torch.OutOfMemoryError: {ALLOCATE}"""

PORT = """\
ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 18477): address already in use
[2026-11-30 07:34:40] post-warmup freeze_gc failed
requests.exceptions.HTTPError: 501 Server Error: Unsupported method ('POST') for url: http://127.0.0.1:18477/freeze_gc
[2026-11-30 07:34:40] The server is fired up and ready to roll!"""

PORT_OF_TORCH = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 50459, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)

NO_MODEL = """\
    raise OSError(f"{e}") from e
OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such'. Use `repo_type` argument"""

ARGUMENT = "sglang serve: error: argument --dtype: invalid choice: 'x' (choose from 'auto', 'half', 'float16')"

CAPTURE_WORDS = "CUDA out of memory at the capture of CUDA graphs"
ITSELF = "ended itself after one of its processes had failed"


@pytest.mark.parametrize(
    ("state", "log", "words"),
    [
        (KILLED, NO_WEIGHTS, f"{ITSELF}: the model at /models/empty has no weights"),
        (KILLED, CAPTURE, f"{ITSELF}: {CAPTURE_WORDS}"),
        (KILLED, IN_CAPTURE, f"{ITSELF}: {CAPTURE_WORDS}"),
        (EXITED, AFTER_CAPTURE, "ended with exit status 1: CUDA out of memory: Tried to allocate 448.00 MiB"),
        (EXITED, "torch.AcceleratorError: CUDA error: out of memory", "ended with exit status 1: CUDA out of memory"),
        (
            EXITED,
            "Exception: Capture cuda graph failed: an illegal memory access was encountered",
            "ended with exit status 1: the capture of CUDA graphs failed: an illegal memory access was encountered",
        ),
        (
            KILLED,
            f"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n{ENDS_ITSELF}",
            f"{ITSELF}: no GPU memory is left for the KV cache",
        ),
        (KILLED, ENDS_ITSELF, ITSELF),
        (failed(exit_code=3), PORT, "ended with exit status 3: port 18477 is in use"),
        (EXITED, PORT_OF_TORCH, "ended with exit status 1: port 50459 is in use"),
        (
            EXITED,
            "ValueError: detokenizer_port at 30105 is not available in 30 seconds. detokenizer_port is used",
            "ended with exit status 1: port 30105 is in use",
        ),
        (EXITED, "OSError: [Errno 98] Address already in use", "ended with exit status 1: its port is in use"),
        (
            failed(exit_code=2),
            "usage: sglang serve\nsglang serve: error: unrecognized arguments: --bad-flag 3",
            "ended with exit status 2: unrecognized arguments: --bad-flag 3",
        ),
        (
            failed(exit_code=2),
            ARGUMENT,
            "ended with exit status 2: argument --dtype: invalid choice: 'x' (choose from 'auto', 'half', 'float16')",
        ),
        (EXITED, NO_MODEL, "ended with exit status 1: there is no model at /no/such"),
        (
            EXITED,
            "OSError: models/kimi is not a local folder and is not a valid model identifier listed on the Hub",
            "ended with exit status 1: there is no model at models/kimi",
        ),
        (
            EXITED,
            "FileNotFoundError: [Errno 2] No such file or directory: '/models/it is/config.json'",
            "ended with exit status 1: there is no file /models/it is/config.json",
        ),
        (
            EXITED,
            "ModuleNotFoundError: No module named 'torchvision'",
            "ended with exit status 1: its environment has no module torchvision",
        ),
        (
            EXITED,
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU",
            "ended with exit status 1: the driver is too old: CUDA 12020",
        ),
        (
            EXITED,
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error",
            "ended with exit status 1: NCCL error: ProcessGroupNCCL.cpp:3356, unhandled system error",
        ),
        (
            EXITED,
            "RuntimeError: NCCL error: unhandled system error",
            "ended with exit status 1: NCCL error: unhandled system error",
        ),
        (
            EXITED,
            "ValueError: first\nduring it\n[2026-11-30 07:34:40] KeyError: 'second'\n  indented: Error: no",
            "ended with exit status 1: KeyError: 'second'",
        ),
        (EXITED, "nothing of note\nINFO: all is well", "ended with exit status 1"),
        (EXITED, "", "ended with exit status 1"),
    ],
)
def test_what_a_log_names_as_the_cause_is_told(state: UnitState, log: str, words: str) -> None:
    assert reason(state, f"INFO: starting\n{log}\n", LIMITED) == words


def test_an_oom_kill_is_told_with_the_limit_and_nothing_else() -> None:
    words = "killed by the kernel for want of memory (OOM kill): it went over its limit of 1.5 GiB (memory_max_gib)"
    assert reason(OOM, NO_MODEL, LIMITED) == words
    assert reason(OOM, "", UNIT) == "killed by the kernel for want of memory (OOM kill): the machine had none left"


def test_a_kill_that_nobody_explains_is_not_explained() -> None:
    assert reason(KILLED, "", UNIT) == "killed by SIGKILL"
    assert reason(KILLED, "", LIMITED) == (
        "killed by SIGKILL, as the kernel does to a unit over its memory limit of 1.5 GiB (memory_max_gib)"
    )
    assert reason(failed(result="signal", signal="SIGTERM"), "", LIMITED) == "killed by SIGTERM"


def test_a_crash_is_told_by_its_signal() -> None:
    state = failed(result="core-dump", signal="SIGSEGV")
    assert reason(state, "", LIMITED) == "killed by SIGSEGV, which left a core dump"
    assert reason(failed(result="signal", signal="SIGABRT"), PORT_OF_TORCH, LIMITED) == (
        "killed by SIGABRT: port 50459 is in use"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "not started: its working directory / cannot be entered (200/CHDIR)"),
        (203, "not started: its program /opt/env/bin/python is not there or cannot be executed (203/EXEC)"),
        (216, "not started: the group of its user ann cannot be taken on (216/GROUP)"),
        (217, "not started: there is no user ann (217/USER)"),
        (226, "not started: its file system namespace cannot be made (226/NAMESPACE)"),
    ],
)
def test_what_kept_systemd_from_executing_a_program_is_told(status: int, words: str) -> None:
    assert reason(failed(exit_code=status, was_active=False), "", LIMITED) == words
    # A program that ran may end with the same status, and means something else.
    assert reason(failed(exit_code=status), "", LIMITED) == f"ended with exit status {status}"


def test_times_that_ran_out_are_told() -> None:
    state = failed(result="timeout", signal="SIGTERM", was_active=False)
    assert reason(state, "", LIMITED) == "did not start within 900 s"
    assert reason(failed(result="timeout", signal="SIGKILL"), "", UNIT) == "killed, since it did not stop within 10 s"


def test_a_unit_without_its_files_is_told() -> None:
    assert reason(failed(result="resources"), "", UNIT) == (
        "not started: systemd could not read or set up what its unit names"
    )
    gone = failed(active_state="inactive", sub_state="dead", result="success")
    assert reason(gone, "", UNIT) == "not running: ddtree-bench-x.service is inactive, dead"
