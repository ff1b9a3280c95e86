"""What the machine of the server did during a cell: columns of `cells` from the summary of its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_bench.metrics import definitions
from ddtree_bench.metrics.cells import Scalars


def machine(
    telemetry: Mapping[str, Any] | None, cell: Mapping[str, Any], probed: Sequence[Mapping[str, Any]]
) -> Scalars:
    """Return the columns of `definitions.MACHINE`; all are None without telemetry, as in records of earlier versions.

    `telemetry` is the summary that load.telemetry makes, `cell` the metrics of the cell, `probed` the machine's GPUs as
    its record has them, in the order of the driver.
    """
    if telemetry is None:
        return dict.fromkeys(definitions.MACHINE)
    gpus, cpu = telemetry["used_gpus"] or {}, telemetry["cpu"] or {}
    whole = telemetry["all_gpus"] or {}
    energy, tokens = gpus.get("energy_j"), cell["output_tokens"]
    return {
        "gpus_used": len(gpus["devices"]) if gpus else None,
        "energy_j": energy,
        "energy_j_per_token": energy / tokens if energy is not None and tokens else None,
        "gpu_power_w_mean": gpus.get("power_w_mean"),
        "gpu_power_w_idle": _idle_power_w(gpus.get("devices", ()), probed),
        "machine_gpu_energy_j": whole.get("energy_j"),
        "machine_gpu_power_w_mean": whole.get("power_w_mean"),
        "gpu_utilization_percent_mean": gpus.get("utilization_percent_mean"),
        "sm_clock_mhz_min": gpus.get("clock_mhz_min"),
        "sm_clock_mhz_median": gpus.get("clock_mhz_median"),
        "throttled_share": gpus.get("throttled_share"),
        "gpu_temperature_c_max": gpus.get("temperature_c_max"),
        "cpu_utilization_percent_mean": cpu.get("utilization_percent_mean"),
        "cpu_energy_j": cpu.get("energy_j"),
        "telemetry_missing": "; ".join(_reasons(telemetry)) or None,
    }


def _idle_power_w(devices: Sequence[str], probed: Sequence[Mapping[str, Any]]) -> float | None:
    """What the GPUs, `gpu0` and so on, drew together when the host was probed; None when one of them is not known."""
    drawn = {f"gpu{index}": gpu.get("power_draw_w") for index, gpu in enumerate(probed)}
    known = [watts for device in devices if (watts := drawn.get(device)) is not None]
    return sum(known) if known and len(known) == len(devices) else None


def _reasons(telemetry: Mapping[str, Any]) -> list[str]:
    """Each reason once, with what it is the reason for: devices of one kind mostly share theirs."""
    what: dict[str, dict[str, None]] = {}
    for name, why in telemetry["missing"].items():
        device, _, column = name.partition(".")
        kind = device.rstrip("0123456789").replace("_", " ").upper()
        what.setdefault(why, {})[f"{kind} {column}".strip()] = None
    return [f"{', '.join(names)}: {why}" for why, names in what.items()] + list(telemetry["errors"])
