"""A real SGLang server on this machine's CPU for tests: started, asked, and ended with all of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

READY_SECONDS = 180
ANSWER_SECONDS = 280
END_SECONDS = 10
TAIL_LINES = 30

# Metrics, grammar and warm-up are off because most tests need none; `extra_args` come later on the line and win.
ARGUMENTS = (
    *("--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--attention-backend", "triton"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--max-total-tokens", "8192", "--mem-fraction-static", "0.5", "--grammar-backend", "none"),
    *("--skip-server-warmup", "--sleep-on-idle"),
)
# One thread is fastest for models this small. With the health check's own generation off, /health is 200 as soon as
# the scheduler has said that it is up; a server that cannot generate is found by the test's first request.
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "no_proxy": "127.0.0.1",
}
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

# Would choose another platform, or filter our plugins out of the server.
UNSET = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE")


class ServerDied(RuntimeError):
    """The server's process ended before it was healthy; the message has the end of its log."""


class SGLangServer:
    """A server as a context manager: healthy inside the block, gone with every process of its group after it.

    Args:
        model_path: target model, in Hugging Face form.
        drafter_path: DFlash drafter.
        algorithm: `--speculative-algorithm`; None for AR.
        budget: `--speculative-ddtree-budget`.
        topk_cap: `--speculative-ddtree-topk-cap`.
        extra_args: further options of `sglang.launch_server`.
        env: environment variables beside those of this process and ENVIRONMENT.
        log_path: file for stdout and stderr of all its processes.

    Raises:
        ServerDied: on entry, when the process ends before /health answers 200.
        TimeoutError: on entry, when it does neither for READY_SECONDS.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        drafter_path: Path | str | None = None,
        algorithm: str | None = None,
        budget: int | None = None,
        topk_cap: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path,
    ) -> None:
        self.log_path = log_path
        self.ready_seconds = 0.0
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        options = {
            "--speculative-algorithm": algorithm,
            "--speculative-draft-model-path": drafter_path,
            "--speculative-ddtree-budget": budget,
            "--speculative-ddtree-topk-cap": topk_cap,
        }
        named = [part for name, value in options.items() if value is not None for part in (name, str(value))]
        self._command = [str(sglang_python()), "-m", "sglang.launch_server", "--model-path", str(model_path)]
        self._command += ["--port", str(self._port), *ARGUMENTS, *named, *extra_args]
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        self._environment = kept | ENVIRONMENT | dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group's too."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def __enter__(self) -> Self:
        started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (takes no lock: one system call)
            )
        try:
            self._wait_until_healthy(started + READY_SECONDS)
        except BaseException:
            self._end()
            raise
        self.ready_seconds = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def generate(
        self,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        **fields: Any,
    ) -> Any:
        """POST /generate for one prompt (a list of ids) or a batch (a list of lists).

        Returns:
            The answer's JSON: an object with `output_ids` and `meta_info`, or a list of them for a batch.

        Raises:
            requests.HTTPError: the server refused the request; `.response` has its status and text.
        """
        body = {"input_ids": input_ids, "sampling_params": sampling_params, **fields}
        answer = self.post("/generate", body)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> requests.Response:
        """POST a JSON body, whatever the status of the answer."""
        return requests.post(self.url + path, json=body, timeout=ANSWER_SECONDS, **options)

    def get(self, path: str) -> requests.Response:
        """GET a path, whatever the status of the answer."""
        return requests.get(self.url + path, timeout=30)

    def server_info(self) -> dict[str, Any]:
        """GET /server_info: the resolved arguments and the scheduler's state."""
        answer = self.get("/server_info")
        answer.raise_for_status()
        info: dict[str, Any] = answer.json()
        return info

    def log(self) -> str:
        """What all its processes have written so far."""
        return self.log_path.read_text(errors="replace")

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no healthy server after {READY_SECONDS} s; {self._tail()}")
            time.sleep(0.2)
        raise ServerDied(f"the server ended with exit code {self._process.returncode}; {self._tail()}")

    def _tail(self) -> str:
        return f"{self.log_path} ends with:\n" + "\n".join(self.log().splitlines()[-TAIL_LINES:])

    def _end(self) -> None:
        """End every process of the group.

        SGLang's own way out takes ten seconds and more. Killed, the server takes the scheduler and the detokenizer with
        it (they ask the kernel for that), and Python's resource tracker, which is left, removes their shared memory.
        """
        if self._process is None:
            return
        self._process.kill()
        if self._gone_within(END_SECONDS):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self._gone_within(END_SECONDS):
            raise RuntimeError(f"process group {self._process.pid} of the SGLang server is still there after SIGKILL")

    def _gone_within(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()
            if not living_members(self._process.pid):
                return True
            time.sleep(0.05)
        return False


def sglang_python() -> Path:
    """The interpreter with SGLang: DDTREE_BENCH_SGLANG_PYTHON if set, else that of the environment under test."""
    named = os.environ.get("DDTREE_BENCH_SGLANG_PYTHON")
    if named:
        return Path(named)
    import environment

    return Path(environment.sglang_python())


def living_members(group: int) -> list[int]:
    """Process ids of a process group's members that are not zombies."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The fields after the command's name in brackets: state, parent, group (proc_pid_stat(5)).
            state, _, member_of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state != "Z":
                members.append(int(folder.name))
    return members


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Have the kernel end the server should the tests be killed; its children end with it by SGLang's own means."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
