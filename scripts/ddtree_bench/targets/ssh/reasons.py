"""Why a unit ended, in words: how systemd saw it end, and what its log names as the cause."""

from __future__ import annotations

import re

from ddtree_bench.targets.ssh.unit import Unit
from ddtree_bench.targets.unit_state import UnitState

GIB = 1 << 30

FAILED_CHILD = "Received sigquit from a child process"
"""SGLang's words before it kills itself, because one of its processes has failed."""

CAPTURE = r"Capture [^\n]*graph"

CAUSES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), words)
    for pattern, words in (
        (CAPTURE + r" failed: [^\n]*out of memory", "CUDA out of memory at the capture of CUDA graphs"),
        # Captures that SGLang does not wrap: one has begun, none has ended, and memory has run out.
        (CAPTURE + r" begin(?!.*graph end).*CUDA out of memory", "CUDA out of memory at the capture of CUDA graphs"),
        (CAPTURE + r" failed: (?P<what>[^\n]+)", "the capture of CUDA graphs failed: {what}"),
        (r"CUDA out of memory\. (?P<what>Tried to allocate [\d.]+ \w+)", "CUDA out of memory: {what}"),
        (r"CUDA (?:error: )?out of memory", "CUDA out of memory"),
        (r"Not enough memory\. Please try to increase --mem-fraction-static", "no GPU memory is left for the KV cache"),
        (r"error while attempting to bind on address \('[^']*', (?P<what>\d+)", "port {what} is in use"),
        (r"port: (?P<what>\d+)[^\n]*name: EADDRINUSE", "port {what} is in use"),
        (r"port at (?P<what>\d+) is not available", "port {what} is in use"),
        (r"Address already in use", "its port is in use"),
        (r"error: (?P<what>unrecognized arguments: [^\n]+)", "{what}"),
        (r"error: (?P<what>argument [^\n]+)", "{what}"),
        (r"error: (?P<what>the following arguments are required: [^\n]+)", "{what}"),
        (r"Repo id must be in the form [^\n]*?: '(?P<what>[^']+)'", "there is no model at {what}"),
        (r"(?P<what>\S+) is not a local folder", "there is no model at {what}"),
        (r"Incorrect path_or_model_id: '(?P<what>[^']+)'", "there is no model at {what}"),
        (r"Cannot find any model weights with `(?P<what>[^`\n]+)`", "the model at {what} has no weights"),
        (r"No such file or directory: '(?P<what>[^'\n]+)'", "there is no file {what}"),
        (r"No space left on device", "the disk is full"),
        (r"ModuleNotFoundError: No module named '(?P<what>[^']+)'", "its environment has no module {what}"),
        (r"driver on your system is too old \(found version (?P<what>\d+)\)", "the driver is too old: CUDA {what}"),
        (r"driver version is insufficient for CUDA runtime version", "the driver is too old for its CUDA"),
        (r"Found no NVIDIA driver|No CUDA GPUs are available", "it finds no GPU"),
        (r"no kernel image is available for execution on the device", "its kernels are not built for this GPU"),
        (r"NCCL error(?: in)?: (?P<what>[^\n]+)", "NCCL error: {what}"),
        (r"CUDA error: (?P<what>[^\n]+)", "CUDA error: {what}"),
    )
)
"""What logs of SGLang, torch, uvicorn and Python say, first the most telling, and the words for it.

Texts as SGLang 0.5.14 to 0.5.23, PyTorch 2.x and argparse print them.
"""

LAST_ERROR = re.compile(r"^(?:\[[^\]\n]*\] )?(?P<what>[A-Za-z_][\w.]*(?:Error|Exception|Exit): \S[^\n]*)", re.MULTILINE)

NOT_STARTED = {
    200: "its working directory {unit.working_directory} cannot be entered (200/CHDIR)",
    203: "its program {unit.argv[0]} is not there or cannot be executed (203/EXEC)",
    205: "its resource limits cannot be set (205/LIMITS)",
    209: "its output cannot be connected to the journal (209/STDOUT)",
    216: "the group of its user {unit.user} cannot be taken on (216/GROUP)",
    217: "there is no user {unit.user} (217/USER)",
    219: "its cgroup cannot be made (219/CGROUP)",
    226: "its file system namespace cannot be made (226/NAMESPACE)",
}
"""Exit statuses of systemd itself for a program that it could not execute (systemd.exec(5))."""


def reason(state: UnitState, log_tail: str, unit: Unit) -> str:
    """Say in words why a unit is no longer, or was never, up.

    `log_tail` is the end of what it wrote, the longer the better; a cause that it names comes after how the unit ended.
    No more is said than is known: under cgroups of version 1 an OOM kill cannot be told from another SIGKILL.
    """
    cause = None if state.oom else _cause(log_tail)
    if FAILED_CHILD in log_tail and state.signal == "SIGKILL":
        return f"ended itself after one of its processes had failed{_after_colon(cause)}"
    return f"{_ending(state, unit, known=cause is not None)}{_after_colon(cause)}"


def _ending(state: UnitState, unit: Unit, *, known: bool) -> str:
    if state.oom:
        return f"killed by the kernel for want of memory (OOM kill): {_limit(unit)}"
    if state.result == "timeout":
        return _timeout(state, unit)
    if state.exit_code is not None:
        if not state.was_active and state.exit_code in NOT_STARTED:
            return f"not started: {NOT_STARTED[state.exit_code].format(unit=unit)}"
        return f"ended with exit status {state.exit_code}"
    if state.signal is not None:
        core = ", which left a core dump" if state.result == "core-dump" else ""
        return f"killed by {state.signal}{core}{'' if known else _perhaps_memory(state, unit)}"
    if state.result == "resources":
        return "not started: systemd could not read or set up what its unit names"
    return f"not running: {state}"


def _limit(unit: Unit) -> str:
    if unit.memory_max_bytes is None:
        return "the machine had none left"
    return f"it went over its limit of {unit.memory_max_bytes / GIB:g} GiB (memory_max_gib)"


def _timeout(state: UnitState, unit: Unit) -> str:
    if state.stop_timeout:
        return f"killed, since it did not stop within {unit.stop_grace_s:g} s"
    return f"did not start within {unit.start_timeout_s or 0:g} s"


def _perhaps_memory(state: UnitState, unit: Unit) -> str:
    if state.signal != "SIGKILL" or unit.memory_max_bytes is None:
        return ""
    return (
        f", as the kernel does to a unit over its memory limit of {unit.memory_max_bytes / GIB:g} GiB (memory_max_gib)"
    )


def _cause(log: str) -> str | None:
    for pattern, words in CAUSES:
        if found := pattern.search(log):
            return words.format(**{name: value.strip() for name, value in found.groupdict().items()})
    errors = LAST_ERROR.findall(log)
    return errors[-1].strip() if errors else None


def _after_colon(cause: str | None) -> str:
    return "" if cause is None else f": {cause}"
