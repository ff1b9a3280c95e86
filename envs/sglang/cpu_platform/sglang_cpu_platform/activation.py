"""The entry point: whether this platform is the one to use, and what must happen before SGLang imports on."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from sglang_cpu_platform import torchvision_window

RELEASE = "0.5.23"
ENTRY_POINT = "cpu_interpreter"
PLATFORM_CLASS = "sglang_cpu_platform.platform.InterpretedCpuPlatform"

logger = logging.getLogger(__name__)


def activate() -> str | None:
    """Name the platform class, or return None to leave the choice to SGLang.

    The platform is active when `TRITON_INTERPRET=1` is in the environment and the machine has no accelerator, or
    when `SGLANG_PLATFORM=cpu_interpreter` asks for it. SGLang calls this once in every process, when
    `sglang.srt.platforms.current_platform` is first read, which is before anything imports torchvision.

    Returns:
        The qualified name of the platform class when it is active, else None.

    Raises:
        SystemExit: the platform is to be used, but with another release than the one its workarounds are made for,
            without the interpreter, or together with SGLang's own CPU engine. SGLang logs any other exception and
            goes on without the platform.
    """
    asked_for = os.environ.get("SGLANG_PLATFORM") == ENTRY_POINT
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not asked_for and _accelerator_available():
        return None
    if not interpreted:
        if asked_for:
            raise SystemExit(
                f"SGLANG_PLATFORM={ENTRY_POINT} runs SGLang's Triton kernels on the CPU: set TRITON_INTERPRET=1 "
                "before the process starts"
            )
        logger.warning("sglang-cpu-platform is installed but not active: it needs TRITON_INTERPRET=1")
        return None
    found = version("sglang")
    if found != RELEASE:
        raise SystemExit(
            f"sglang-cpu-platform is made for SGLang {RELEASE}, not for {found}: install sglang=={RELEASE}, "
            "or unset TRITON_INTERPRET and SGLANG_PLATFORM to do without this platform"
        )
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise SystemExit(
            "SGLANG_USE_CPU_ENGINE=1 needs SGLang's CPU kernel package, which sglang-cpu-platform does without: "
            "unset SGLANG_USE_CPU_ENGINE"
        )
    # Convolution states of hybrid models are bfloat16 by default, whatever --dtype says (`configs/mamba_utils.py:68`).
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    torchvision_window.install()
    return PLATFORM_CLASS


def _accelerator_available() -> bool:
    import torch

    return torch.accelerator.is_available()
