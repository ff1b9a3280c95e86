"""What the GPUs of this machine do at a moment: power, energy, clocks and what holds them down, heat, use.

Standard library only, but for nvidia-ml-py where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ddtree_bench.targets.nvidia import (
    Answer,
    Field,
    Smi,
    ask_nvml,
    nvml_handles,
    nvml_module,
    nvml_session,
)

MIB = 2**20

REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Why clocks are not higher, by NVML's bit, under the names that nvidia-smi has for them."""


def reasons(mask: int) -> list[str]:
    """Return the names of the bits of a mask; 0x400 for one that has none here."""
    bits = (1 << position for position in range(mask.bit_length()))
    return [REASONS.get(bit, hex(bit)) for bit in bits if mask & bit]


def _memory_temperature(nvml: Any, gpu: Any) -> int:
    (told,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_MEMORY_TEMP])
    if told.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(told.nvmlReturn)
    return int(told.value.uiVal)


FIELDS: Mapping[str, Field] = {
    "power_w": Field(("power.draw",), float, lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "energy_j": Field((), float, lambda n, gpu: n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
    "clock_mhz": Field(("clocks.sm",), int, lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM)),
    "memory_clock_mhz": Field(("clocks.mem",), int, lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM)),
    "temperature_c": Field(
        ("temperature.gpu",), int, lambda n, gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU)
    ),
    "memory_temperature_c": Field(("temperature.memory",), int, _memory_temperature),
    "throttled_by": Field(
        ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
        lambda text: reasons(int(text, 16)),
        lambda n, gpu: reasons(n.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
    ),
    "utilization_percent": Field(
        ("utilization.gpu",), float, lambda n, gpu: float(n.nvmlDeviceGetUtilizationRates(gpu).gpu)
    ),
    "memory_used_mib": Field(
        # The older form of the answer counts what the driver has reserved for itself, which nvidia-smi does not.
        ("memory.used",),
        int,
        lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu, n.nvmlMemory_v2).used // MIB,
    ),
}
"""What is sampled of a GPU. `power_w` is what the driver averages over its last moments, a second on newer GPUs."""


class Gpus(Protocol):
    """The GPUs while they are watched."""

    source: str
    """What is asked about them."""

    def sample(self) -> list[Answer]:
        """Return what each does now. Raises Unavailable."""


class _NvmlGpus:
    source = "nvidia-ml-py"

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = nvml_handles(nvml)

    def sample(self) -> list[Answer]:
        return [ask_nvml(self._nvml, gpu, FIELDS) for gpu in self._handles]


class _SmiGpus:
    source = "nvidia-smi"

    def __init__(self) -> None:
        self._smi = Smi(FIELDS)

    def sample(self) -> list[Answer]:
        return self._smi.ask()


@contextmanager
def watched_gpus() -> Iterator[Gpus]:
    """Give the GPUs of this machine, to be sampled until the context ends. Raises Unavailable."""
    nvml = nvml_module()
    if nvml is None:
        yield _SmiGpus()
    else:
        with nvml_session(nvml):
            yield _NvmlGpus(nvml)
