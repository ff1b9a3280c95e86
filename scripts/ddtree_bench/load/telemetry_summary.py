"""What samples of a machine say of the time in which a cell was measured: energy, power, clocks, heat, throttling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

COLUMNS: Mapping[str, str] = {
    "time": "Moment of the sample, s of time.perf_counter of the measuring process.",
    "unix_time": "The same by the calendar of the machine that was watched, s since 1970.",
    "device": "`gpu0`, `gpu1`, ... in the driver's order, or `cpu`: all processors together.",
    "power_w": "Power, W, which the driver averages over its last moments (a second on newer GPUs).",
    "energy_j": "Counter of energy, J, from anywhere: only differences mean something.",
    "clock_mhz": "Clock of a GPU's SMs; mean clock of the processors. MHz.",
    "memory_clock_mhz": "Clock of a GPU's memory, MHz.",
    "temperature_c": "Temperature of a GPU, degrees Celsius.",
    "memory_temperature_c": "Temperature of its memory, degrees Celsius.",
    "throttled_by": "Why a GPU's clocks are not higher: names as of nvidia-smi with spaces between; empty for nothing.",
    "utilization_percent": "Share of the time since the sample before (GPU: of the driver's last period) in use, %.",
    "memory_used_mib": "Memory of a GPU in use, MiB.",
    "load_average": "Processes that run or wait to, mean over the last minute.",
}
"""Columns of telemetry.parquet: one row a moment and device; a value that a device does not have is null."""

TEXTS = ("device", "throttled_by")

NOT_HELD_DOWN = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}
"""What the driver calls reasons, but which is nothing to do, or a setting: no throttling."""

USED_FROM_MIB = 1024
"""A GPU with as much memory in use in the measured time is taken as one of the server's: a context and weights need
more, and the lease keeps others away. One of which that is not known is taken as one of them."""

NOT_USED = f"no GPU had {USED_FROM_MIB} MiB of memory in use in the measured time"
NOT_COVERED = "the samples of the counter do not cover the measured time, or it went back"
NO_SAMPLE = "no sample was taken in the measured time"


def measured_window(requests: pd.DataFrame) -> tuple[float, float] | None:
    """Return the first request's send and the last answer's end, s; None when nothing was sent.

    `requests` are the raw rows of a cell, columns as in requests_table.SCHEMA.
    """
    if requests.empty:
        return None
    return float(requests["t_send"].min()), float(requests["t_end"].max())


def summarize(frame: pd.DataFrame, missing: Mapping[str, str], begin: float, end: float) -> dict[str, Any]:
    """Return what a machine did in the time from `begin` to `end`, as JSON has it.

    Parameters
    ----------
    frame : DataFrame
        Samples in the columns of COLUMNS.
    missing : mapping
        Why values are not in them, by device and column, such as `gpu0.energy_j`; `gpus` for all of them.
    begin, end : float
        The measured time, s of the column `time`.

    `gpus` has the GPUs by device, `used_gpus` those of the server together, which have USED_FROM_MIB of memory in use,
    `all_gpus` the energy and power of all of the machine, `cpu` the processors. Energy is the difference of the
    counter, taken as linear between the two samples around each end of the time; all else is of the samples in it.
    None is what is not known; `missing` says why.
    """
    devices = list(dict.fromkeys(frame["device"]))
    by_device = {device: frame[frame["device"] == device] for device in devices}
    gpus = {device: _gpu(of, begin, end) for device, of in by_device.items() if device != "cpu"}
    used = {device: gpu for device, gpu in gpus.items() if _is_used(gpu)}
    cpu = _cpu(by_device["cpu"], begin, end) if "cpu" in by_device else None
    within = frame[frame["time"].between(begin, end)]
    return {
        "window_s": end - begin,
        "samples": int(within["time"].nunique()),
        "gpus": gpus,
        "used_gpus": _together(used, within) if used else None,
        "all_gpus": _sums(gpus) if gpus else None,
        "cpu": cpu,
        "missing": {
            **dict(_reasons(by_device, missing, begin, end)),
            **({"used_gpus": NOT_USED} if gpus and not used else {}),
        },
    }


def _gpu(samples: pd.DataFrame, begin: float, end: float) -> dict[str, Any]:
    within = samples[samples["time"].between(begin, end)]
    known = within["throttled_by"].dropna()
    return {
        "energy_j": energy_j(samples, begin, end),
        "power_w_mean": _stat(within["power_w"], "mean"),
        "power_w_max": _stat(within["power_w"], "max"),
        "clock_mhz_min": _stat(within["clock_mhz"], "min"),
        "clock_mhz_median": _stat(within["clock_mhz"], "median"),
        "memory_clock_mhz_min": _stat(within["memory_clock_mhz"], "min"),
        "throttled_share": float(known.map(_held_down).mean()) if len(known) else None,
        "throttled_by": _shares(known) if len(known) else None,
        "utilization_percent_mean": _stat(within["utilization_percent"], "mean"),
        "temperature_c_max": _stat(within["temperature_c"], "max"),
        "memory_temperature_c_max": _stat(within["memory_temperature_c"], "max"),
        "memory_used_mib_max": _stat(within["memory_used_mib"], "max"),
    }


def _cpu(samples: pd.DataFrame, begin: float, end: float) -> dict[str, Any]:
    within = samples[samples["time"].between(begin, end)]
    return {
        "energy_j": energy_j(samples, begin, end),
        "utilization_percent_mean": _stat(within["utilization_percent"], "mean"),
        "clock_mhz_mean": _stat(within["clock_mhz"], "mean"),
        "load_average_max": _stat(within["load_average"], "max"),
    }


def _is_used(gpu: Mapping[str, Any]) -> bool:
    used_mib = gpu["memory_used_mib_max"]
    return used_mib is None or used_mib >= USED_FROM_MIB


def _together(gpus: Mapping[str, Mapping[str, Any]], within: pd.DataFrame) -> dict[str, Any]:
    """Some GPUs: sums of energy and power, the extremes of the rest, and when any of them was throttled."""
    known = within[within["device"].isin(list(gpus))].dropna(subset=["throttled_by"])
    held_down = known["throttled_by"].map(_held_down).astype(bool).groupby(known["time"]).any()
    return {
        "devices": list(gpus),
        **_sums(gpus),
        "clock_mhz_min": _over(gpus, "clock_mhz_min", min),
        "clock_mhz_median": _over(gpus, "clock_mhz_median", np.median),
        "throttled_share": float(held_down.mean()) if len(held_down) else None,
        "utilization_percent_mean": _over(gpus, "utilization_percent_mean", np.mean),
        "temperature_c_max": _over(gpus, "temperature_c_max", max),
    }


def _sums(gpus: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    return {name: _over(gpus, name, sum) for name in ("energy_j", "power_w_mean")}


def _over(gpus: Mapping[str, Mapping[str, Any]], name: str, function: Callable[[list[Any]], Any]) -> float | None:
    """A function of one value of each GPU; None as soon as one is not known."""
    values = [gpu[name] for gpu in gpus.values()]
    return None if None in values else float(function(values))


def energy_j(samples: pd.DataFrame, begin: float, end: float) -> float | None:
    """Return the energy that a device used from `begin` to `end`, J; None when the samples do not tell.

    They must have a counter at or before the begin and one at or after the end, and it may not have gone back.
    """
    known = samples.dropna(subset=["energy_j"]).sort_values("time")
    times, counter = known["time"].to_numpy(dtype=float), known["energy_j"].to_numpy(dtype=float)
    if not len(times) or times[0] > begin or times[-1] < end or (np.diff(counter) < 0).any():
        return None
    first, last = np.interp([begin, end], times, counter)
    return float(last - first)


def _reasons(
    by_device: Mapping[str, pd.DataFrame], missing: Mapping[str, str], begin: float, end: float
) -> Iterator[tuple[str, str]]:
    """Why values are not known, by device and column."""
    if "gpus" in missing or by_device.keys() <= {"cpu"}:
        yield "gpus", missing.get("gpus", "no sample came from the machine of the server")
    for device, samples in by_device.items():
        if energy_j(samples, begin, end) is None:
            had = samples["energy_j"].notna().any()
            yield f"{device}.energy_j", NOT_COVERED if had else missing.get(f"{device}.energy_j", NO_SAMPLE)
        within = samples[samples["time"].between(begin, end)]
        if within.empty:
            yield device, NO_SAMPLE
        for column in within.columns[within.isna().all()].drop("energy_j", errors="ignore"):
            if f"{device}.{column}" in missing:
                yield f"{device}.{column}", missing[f"{device}.{column}"]


def _held_down(reasons: str) -> bool:
    return bool(set(reasons.split()) - NOT_HELD_DOWN)


def _shares(known: pd.Series) -> dict[str, float]:
    """The share of the samples with each reason."""
    names = dict.fromkeys(name for reasons in known for name in reasons.split())
    return {name: float(known.map(lambda reasons, name=name: name in reasons.split()).mean()) for name in names}


def _stat(values: pd.Series, name: str) -> float | None:
    known = values.dropna()
    return float(getattr(known, name)()) if len(known) else None
