"""Ask NVIDIA's driver about GPUs: through nvidia-ml-py where this Python has it, else through nvidia-smi.

What cannot be had is not left out in silence: each answer says of every field that it lacks why. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

SMI = "nvidia-smi"
SMI_TIMEOUT_S = 60.0

NO_VALUE = re.compile(r"\[.+\]|N/A|")
"""What nvidia-smi prints where there is no value, such as [N/A] or [Unknown Error]."""

NOT_TOLD = f"{SMI} does not tell it; nvidia-ml-py, where Python has it, does"

UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')


class Unavailable(Exception):
    """Nothing can be asked about GPUs; the message says why."""


@dataclass(frozen=True)
class Field:
    """One thing to ask about a GPU, in both ways; its value is the same in both.

    `smi` are nvidia-smi's names for it, the present one first; without a name it cannot tell. `read` makes a value of
    its text. `nvml` asks nvidia-ml-py, given the module and the GPU's handle. Both raise ValueError for what they
    cannot read, as of a newer driver.
    """

    smi: tuple[str, ...]
    read: Callable[[str], Any]
    nvml: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Answer:
    """What was asked, by name: None where there is no value, and then `missing` says why."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, why: str) -> None:
        """Set a value; `why` is the reason if it is None."""
        self.values[name] = value
        self.missing.pop(name, None)
        if value is None:
            self.missing[name] = why


def nvml_module() -> Any | None:
    """Return the module nvidia-ml-py; None where this Python does not have it."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextmanager
def nvml_session(nvml: Any) -> Iterator[None]:
    """Keep the driver's library open. Raises Unavailable where there is no driver, or for what it refuses meanwhile."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unavailable(f"no NVIDIA driver: {error}") from error
    try:
        yield
    except nvml.NVMLError as error:
        raise Unavailable(f"the NVIDIA driver does not answer: {error}") from error
    finally:
        nvml.nvmlShutdown()


def nvml_handles(nvml: Any) -> list[Any]:
    """Return the handles of all GPUs, in the driver's order."""
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def ask_nvml(nvml: Any, gpu: Any, fields: Mapping[str, Field]) -> Answer:
    """Ask nvidia-ml-py for fields of one GPU."""
    answer = Answer()
    for name, asked in fields.items():
        try:
            answer.put(name, asked.nvml(nvml, gpu), "the driver gives no value")
        except nvml.NVMLError as error:
            answer.put(name, None, f"the driver says: {error}")
        except AttributeError as error:
            answer.put(name, None, f"nvidia-ml-py is too old: {error}")
        except ValueError as error:
            answer.put(name, None, f"the driver says {error}")
    return answer


class Smi:
    """Asks nvidia-smi for fields of all GPUs; what a release does not know is asked for once and then left out."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._names = {name: list(asked.smi) for name, asked in fields.items()}

    def ask(self) -> list[Answer]:
        """Return the answer of each GPU, in nvidia-smi's order. Raises Unavailable."""
        while True:
            asked = {name: names[0] for name, names in self._names.items() if names}
            query = f"--query-gpu={','.join(asked.values())}"
            result = run_smi(query, "--format=csv,noheader,nounits")
            if result.returncode == 0:
                return [self._answer(asked, line) for line in result.stdout.splitlines() if line.strip()]
            if not self._leave_out(UNKNOWN_FIELD.findall(result.stdout + result.stderr)):
                raise Unavailable(f"nvidia-smi failed: {_said(result)}")

    def _leave_out(self, unknown: Sequence[str]) -> bool:
        """Take away names that nvidia-smi does not know; whether there were any."""
        before = sum(map(len, self._names.values()))
        for names in self._names.values():
            names[:] = [name for name in names if name not in unknown]
        return sum(map(len, self._names.values())) < before

    def _answer(self, asked: Iterable[str], line: str) -> Answer:
        texts = [text.strip() for text in line.split(",")]
        names, answer = list(asked), Answer(dict.fromkeys(self._fields), dict.fromkeys(self._fields, NOT_TOLD))
        if len(texts) != len(names):
            raise Unavailable(f"{SMI} printed {line!r}")
        for name, text in zip(names, texts, strict=True):
            answer.put(name, _read(self._fields[name], text), f"{SMI} says {text}")
        return answer


def _read(asked: Field, text: str) -> Any | None:
    if NO_VALUE.fullmatch(text):
        return None
    with suppress(ValueError):
        return asked.read(text)
    return None


def run_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nvidia-smi to its end. Raises Unavailable where it is not on the PATH or hangs."""
    if shutil.which(SMI) is None:
        raise Unavailable(f"{SMI} is not on the PATH")
    try:
        return subprocess.run([SMI, *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{SMI} gave no answer within {SMI_TIMEOUT_S:.0f} s") from error


def smi_text(*arguments: str) -> str:
    """Return what nvidia-smi prints. Raises Unavailable, also when it fails."""
    result = run_smi(*arguments)
    if result.returncode != 0:
        raise Unavailable(f"{' '.join((SMI, *arguments))} failed: {_said(result)}")
    return result.stdout


def _said(result: subprocess.CompletedProcess[str]) -> str:
    return " ".join((result.stdout + result.stderr).split())[:300] or f"exit status {result.returncode}"
