"""Telemetry: the sampler as it runs on a target, what is collected of it, and what is said of the measured time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_nvidia
import pandas as pd
import psutil
import pytest
from fake_nvidia import GPUS, use_smi, write_smi
from processes import eventually
from store_factory import SMALL, build

from ddtree_bench.load.telemetry import PROGRAM, Telemetry, program
from ddtree_bench.load.telemetry_summary import COLUMNS, NOT_USED, energy_j, measured_window, summarize
from ddtree_bench.metrics import definitions, machine
from ddtree_bench.targets.commands import LocalStream
from ddtree_bench.targets.cpu_samples import Cpus, busy_and_all
from ddtree_bench.targets.gpu_samples import reasons
from ddtree_bench.targets.local import LocalLauncher

approx = pytest.approx

BASE_PYTHON = sys._base_executable  # type: ignore[attr-defined]
"""A Python without nvidia-ml-py."""

no_driver = pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvidia.build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(tmp_path / "leases", "test")


def watched(
    launcher: LocalLauncher, python: str = sys.executable, measured_s: float = 1.3
) -> tuple[Telemetry, float, float]:
    """Telemetry of a while that stands for a cell, and when the while began and ended."""
    with Telemetry(launcher.open_stream, program(python, launcher.tools())) as telemetry:
        begin = time.perf_counter()
        time.sleep(measured_s)
        end = time.perf_counter()
    return telemetry, begin, end


# The sampler


def test_samples_are_a_second_apart_and_do_not_drift(launcher: LocalLauncher) -> None:
    lines: list[tuple[float, dict[str, Any]]] = []
    stream = launcher.open_stream(
        program(sys.executable, launcher.tools()), lambda line: lines.append((time.monotonic(), json.loads(line)))
    )
    while len(lines) < 4:
        assert not stream.ended
        time.sleep(0.01)
    time.sleep(0.4)
    closed = time.monotonic()
    result = stream.close()
    assert (result.exit_code, result.stderr) == (0, "")
    assert time.monotonic() - closed < 1, "it ends with its input, not with its second"
    (_, header), *samples = lines
    assert header["every_s"] == 1.0
    moments = [told["monotonic"] for _, told in samples]
    assert [moment - moments[0] for moment in moments[:-1]] == approx([0, 1, 2], abs=0.2)
    assert 2.3 < moments[-1] - moments[0] < 2.9 and moments[-1] >= closed - 0.01, "the last is taken at the end"
    for came, told in samples:
        assert 0 <= came - told["monotonic"] < 0.5, "by the clock of this machine"
        assert told["time"] - told["monotonic"] == approx(time.time() - time.monotonic(), abs=0.05)


def test_reasons_are_said_once(launcher: LocalLauncher) -> None:
    lines: list[str] = []
    stream = launcher.open_stream(program(sys.executable, launcher.tools()), lines.append)
    assert eventually(lambda: len(lines) == 3, 15)
    stream.close()
    said = [name for line in lines[1:] for name in json.loads(line)["missing"]]
    assert len(lines) == 4 and said and len(said) == len(set(said))


def test_the_names_of_reasons() -> None:
    assert reasons(0) == []
    assert reasons(0x1) == ["gpu_idle"]
    assert reasons(0x84) == ["sw_power_cap", "hw_power_brake_slowdown"]
    assert reasons(0x420) == ["sw_thermal_slowdown", "0x400"]


def test_what_the_processors_did(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 800 50 5 5 10 90 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 2000.000\ncpu MHz\t\t: 3000.500\n")
    cpus = Cpus(proc=tmp_path, sys_root=tmp_path)
    first = cpus.sample()
    assert first.values["utilization_percent"] is None and first.values["clock_mhz"] == 2500.25
    # 60 of 100 ticks since were busy; 10 more waited for a disk.
    (tmp_path / "stat").write_text("cpu  140 20 40 830 60 10 10 10 130 9\n")
    second = cpus.sample()
    assert second.values["utilization_percent"] == 60.0 and "utilization_percent" not in second.missing
    assert second.missing["energy_j"] == f"there is no RAPL counter below {tmp_path}/class/powercap"
    assert busy_and_all("") is None


def rapl(root: Path, zone: str, name: str, energy: int | None) -> None:
    folder = root / "class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    (folder / "energy_uj").unlink(missing_ok=True)
    if energy is not None:
        (folder / "energy_uj").write_text(f"{energy}\n")


def test_energy_of_the_sockets_goes_on_where_a_counter_begins_again(tmp_path: Path) -> None:
    """Two sockets; parts of a socket and the whole platform are in no sum."""

    def counters(first: int | None, second: int) -> None:
        rapl(tmp_path, "intel-rapl:0", "package-0", first)
        rapl(tmp_path, "intel-rapl:1", "package-1", second)
        rapl(tmp_path, "intel-rapl:0:0", "dram", 5)
        rapl(tmp_path, "intel-rapl:2", "psys", 7)

    counters(900_000, 100_000)
    cpus = Cpus(proc=tmp_path, sys_root=tmp_path)
    assert cpus.sample().values["energy_j"] == 0
    counters(200_000, 150_000)
    assert cpus.sample().values["energy_j"] == approx(0.3 + 0.05)
    counters(300_000, 150_000)
    assert cpus.sample().values["energy_j"] == approx(0.4 + 0.05)
    counters(None, 150_000)
    missing = cpus.sample().missing
    assert missing["energy_j"] == f"{tmp_path}/class/powercap/intel-rapl:0/energy_uj cannot be read: only root may"


# With GPUs


def test_energy_is_the_difference_of_the_counters_over_just_the_measured_time(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    """The counters of fake_nvml.c grow by 500 + 10 i W; samples are a second apart, the measured time is not."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    telemetry, begin, end = watched(launcher)
    summary = telemetry.summary(begin, end)
    assert (summary["source"], summary["errors"]) == ("nvidia-ml-py", [])
    for index in range(GPUS):
        gpu = summary["gpus"][f"gpu{index}"]
        assert gpu["energy_j"] == approx((500 + 10 * index) * (end - begin), rel=0.02)
        assert gpu["power_w_mean"] == gpu["power_w_max"] == 500 + 10 * index
        assert gpu["clock_mhz_min"] == gpu["clock_mhz_median"] == 1900 + index
        assert (gpu["temperature_c_max"], gpu["memory_temperature_c_max"]) == (40 + index, None)
        assert gpu["throttled_share"] == (1.0 if index == 3 else 0.0)
        assert gpu["throttled_by"] == ({"sw_power_cap": 1.0} if index == 3 else {"gpu_idle": 1.0})
        assert summary["missing"][f"gpu{index}.memory_temperature_c"] == "the driver says: Not Supported"
    assert summary["all_gpus"] == {"energy_j": approx(4280 * (end - begin), rel=0.02), "power_w_mean": 4280}
    used = summary["used_gpus"]
    assert used["devices"] == [f"gpu{index}" for index in range(7)], "the driver's own memory is nobody's use"
    assert used["energy_j"] == approx(3710 * (end - begin), rel=0.02)
    assert (used["power_w_mean"], used["clock_mhz_min"], used["temperature_c_max"]) == (3710, 1900, 46)
    assert used["throttled_share"] == 1.0 and used["utilization_percent_mean"] == 30.0
    assert json.loads(json.dumps(summary)) == summary


def test_by_nvidia_smi_there_is_no_energy(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older release, which knows the reasons for low clocks by their older name."""
    use_smi(monkeypatch, write_smi(tmp_path / "bin", unknown=["clocks_event_reasons.active"]).parent)
    telemetry, begin, end = watched(launcher, BASE_PYTHON)
    summary = telemetry.summary(begin, end)
    assert (summary["source"], summary["errors"]) == ("nvidia-smi", [])
    assert summary["all_gpus"] == {"energy_j": None, "power_w_mean": 4280}
    assert summary["used_gpus"]["energy_j"] is None and summary["used_gpus"]["power_w_mean"] == 3710
    assert summary["gpus"]["gpu3"]["throttled_by"] == {"sw_power_cap": 1.0}
    why = "nvidia-smi does not tell it; nvidia-ml-py, where Python has it, does"
    assert summary["missing"]["gpu0.energy_j"] == why
    assert summary["missing"]["gpu0.memory_temperature_c"] == "nvidia-smi says N/A"


def test_a_driver_that_dies_meanwhile_is_said(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = write_smi(tmp_path / "bin")
    use_smi(monkeypatch, smi.parent)
    with Telemetry(launcher.open_stream, program(BASE_PYTHON, launcher.tools())) as telemetry:
        begin = time.perf_counter()
        smi.write_text("#!/bin/sh\necho Unable to determine the device handle for GPU0: Unknown Error; exit 15\n")
        end = time.perf_counter()
    frame = telemetry.frame()
    assert (frame["device"] == "gpu0").sum() == 1 and (frame["device"] == "cpu").sum() == 2
    assert telemetry.summary(begin, end)["missing"]["gpus"] == (
        "nvidia-smi failed: Unable to determine the device handle for GPU0: Unknown Error"
    )


@no_driver
def test_this_machine_has_no_gpus(launcher: LocalLauncher) -> None:
    telemetry, begin, end = watched(launcher, measured_s=1.2)
    summary = telemetry.summary(begin, end)
    assert (summary["source"], summary["gpus"], summary["errors"]) == (None, {}, [])
    assert summary["used_gpus"] is None and summary["all_gpus"] is None
    assert summary["missing"]["gpus"] == "no NVIDIA driver: NVML Shared Library Not Found"
    assert 0 < summary["cpu"]["utilization_percent_mean"] <= 100 and summary["samples"] == 1
    assert "cpu.utilization_percent" not in summary["missing"], "it is known from the second sample on"


# Collecting


def test_samples_are_by_the_clock_of_this_process(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Another machine's clock is brought to ours by its offset."""
    argv = program(sys.executable, launcher.tools())
    before = time.perf_counter()
    with Telemetry(launcher.open_stream, argv) as here, Telemetry(launcher.open_stream, argv, 5000.0) as there:
        pass
    after = time.perf_counter()
    frame = here.frame()
    assert list(frame.columns) == list(COLUMNS)
    assert before <= frame["time"].min() <= frame["time"].max() <= after
    assert before <= there.frame()["time"].min() + 5000 <= after
    assert there.summary(0, 1)["clock_offset_s"] == 5000
    frame.to_parquet(tmp_path / "telemetry.parquet", index=False)
    back = pd.read_parquet(tmp_path / "telemetry.parquet")
    pd.testing.assert_frame_equal(back, frame, check_dtype=False)


def broken(line: str) -> Callable[[Sequence[str], Callable[[str], None]], LocalStream]:
    return lambda _, on_line: LocalStream(["sh", "-c", line], on_line)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("echo oops >&2; exit 3", "the sampler ended early, exit status 3: oops"),
        ("kill -9 $$", "the sampler ended early, signal KILL"),
        ("echo 'not JSON'; cat", "the sampler printed 'not JSON'"),
        ("echo '{\"devices\": {}}'; cat", "the sampler printed '{\"devices\": {}}'"),
    ],
)
def test_a_broken_sampler_is_recorded_and_raises_nothing(
    line: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree_bench.load.telemetry.FIRST_SAMPLE_S", 0.3)
    with Telemetry(broken(line), []) as telemetry:
        time.sleep(0.2)
    assert telemetry.frame().empty and list(telemetry.frame().columns) == list(COLUMNS)
    summary = telemetry.summary(0.0, 1.0)
    assert summary["errors"] == [error] and summary["all_gpus"] is None and summary["cpu"] is None
    assert summary["missing"] == {"gpus": "no sample came from the machine of the server"}


def test_a_sampler_that_cannot_start_is_recorded() -> None:
    with Telemetry(LocalStream, ["/nonexistent/python"]) as telemetry:
        pass
    (error,) = telemetry.summary(0.0, 1.0)["errors"]
    assert error == "the sampler could not be started: cannot run /nonexistent/python: No such file or directory"


def test_a_sampler_that_is_killed_leaves_what_it_had(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    with Telemetry(launcher.open_stream, program(sys.executable, launcher.tools())) as telemetry:
        begin = time.perf_counter()
        (sampler,) = [child for child in psutil.Process().children() if PROGRAM in child.cmdline()]
        sampler.kill()
        time.sleep(0.2)
    summary = telemetry.summary(begin, time.perf_counter())
    assert summary["errors"] == ["the sampler ended early, signal KILL"]
    assert summary["gpus"]["gpu0"]["energy_j"] is None and (telemetry.frame()["device"] == "gpu0").any()
    assert summary["missing"]["gpu0.energy_j"].startswith("the samples of the counter do not cover the measured time")
    assert summary["missing"]["gpu0"] == "no sample was taken in the measured time"


# What is said of the measured time


def samples(**columns: Sequence[Any]) -> pd.DataFrame:
    """Samples of one GPU at the moments `time`."""
    n = len(columns["time"])
    return pd.DataFrame({name: columns.get(name, ["gpu0"] * n if name == "device" else [None] * n) for name in COLUMNS})


def test_energy_is_interpolated_at_both_ends() -> None:
    """100 W, then 300 W from 11 on: half a second of the first and a quarter of the last."""
    counter = samples(time=[10.0, 11.0, 12.0], energy_j=[5000.0, 5100.0, 5400.0])
    assert energy_j(counter, 10.5, 11.25) == approx(50 + 75)
    assert energy_j(counter, 10.0, 12.0) == 400


@pytest.mark.parametrize(
    ("begin", "end", "energy"),
    [
        (9.9, 11.0, [1.0, 2.0, 3.0]),
        (10.5, 12.1, [1.0, 2.0, 3.0]),
        (10.5, 11.5, [3.0, 2.0, 5.0]),
        (10.5, 11.5, [None, None, None]),
        (10.5, 11.5, [1.0, 2.0, None]),
    ],
)
def test_energy_that_is_not_known(begin: float, end: float, energy: list[float | None]) -> None:
    assert energy_j(samples(time=[10.0, 11.0, 12.0], energy_j=energy), begin, end) is None


def test_only_the_measured_time_counts() -> None:
    frame = samples(
        time=[9.0, 10.0, 11.0, 12.0, 13.0, 14.0],
        power_w=[80.0, 90.0, 300.0, 500.0, 400.0, 999.0],
        clock_mhz=[100.0, 100.0, 1900.0, 1500.0, 1800.0, 90.0],
        throttled_by=["gpu_idle", "hw_slowdown", "sw_power_cap gpu_idle", "", "sw_power_cap sw_thermal_slowdown", None],
    )
    summary = summarize(frame, {}, 10.5, 13.5)
    gpu = summary["gpus"]["gpu0"]
    assert summary["samples"] == 3 and summary["window_s"] == 3.0
    assert (gpu["power_w_mean"], gpu["power_w_max"]) == (400.0, 500.0)
    assert (gpu["clock_mhz_min"], gpu["clock_mhz_median"]) == (1500.0, 1800.0)
    assert gpu["throttled_by"] == {
        "sw_power_cap": approx(2 / 3),
        "gpu_idle": approx(1 / 3),
        "sw_thermal_slowdown": approx(1 / 3),
    }
    assert gpu["throttled_share"] == approx(2 / 3)


def test_all_gpus_are_throttled_when_one_is() -> None:
    first = samples(time=[1.0, 2.0, 3.0, 4.0], throttled_by=["hw_slowdown", "", "gpu_idle", ""])
    second = samples(time=[1.0, 2.0, 3.0, 4.0], throttled_by=["", "sw_power_cap", "gpu_idle", ""], device=["gpu1"] * 4)
    summary = summarize(pd.concat([first, second]), {}, 0.5, 4.5)
    assert [gpu["throttled_share"] for gpu in summary["gpus"].values()] == [0.25, 0.25]
    assert summary["used_gpus"]["devices"] == ["gpu0", "gpu1"], "their memory is not known"
    assert summary["used_gpus"]["throttled_share"] == 0.5
    assert summary["used_gpus"]["power_w_mean"] is None


def busy_and_idle(used_mib: Sequence[float]) -> dict[str, Any]:
    """The summary of a machine whose first GPU computes and whose second idles, with so much memory in use on each."""
    of: list[dict[str, Any]] = [
        {"power_w": 900.0, "energy_j": 900.0, "clock_mhz": 1900.0, "utilization_percent": 96.0, "temperature_c": 70.0},
        {"power_w": 80.0, "energy_j": 80.0, "clock_mhz": 210.0, "utilization_percent": 0.0, "temperature_c": 30.0},
    ]
    frames = []
    for index, values in enumerate(of):
        columns = {name: [value] * 3 for name, value in values.items()} | {"device": [f"gpu{index}"] * 3}
        columns |= {"energy_j": [i * values["energy_j"] for i in range(3)], "time": [0.0, 1.0, 2.0]}
        columns |= {"memory_used_mib": [used_mib[index]] * 3, "throttled_by": ["hw_slowdown" if index else ""] * 3}
        frames.append(samples(**columns))
    return summarize(pd.concat(frames), {}, 0.5, 1.5)


def test_gpus_that_a_server_does_not_use_are_in_the_machine_s_energy_only() -> None:
    summary = busy_and_idle([150_000.0, 4.0])
    assert summary["used_gpus"] == {
        "devices": ["gpu0"],
        "energy_j": 900.0,
        "power_w_mean": 900.0,
        "clock_mhz_min": 1900.0,
        "clock_mhz_median": 1900.0,
        "throttled_share": 0.0,
        "utilization_percent_mean": 96.0,
        "temperature_c_max": 70.0,
    }
    assert summary["all_gpus"] == {"energy_j": 980.0, "power_w_mean": 980.0}
    assert "used_gpus" not in summary["missing"]
    both = busy_and_idle([150_000.0, 1024.0])["used_gpus"]
    assert (both["devices"], both["clock_mhz_min"], both["throttled_share"]) == (["gpu0", "gpu1"], 210.0, 1.0)


def test_a_server_without_a_gpu_on_a_machine_that_has_some() -> None:
    summary = busy_and_idle([4.0, 4.0])
    assert summary["used_gpus"] is None and summary["all_gpus"]["energy_j"] == 980.0
    assert summary["missing"]["used_gpus"] == NOT_USED


def test_the_measured_time() -> None:
    requests = pd.DataFrame({"t_send": [12.0, 10.5], "t_end": [13.0, 14.25]})
    assert measured_window(requests) == (10.5, 14.25)
    assert measured_window(requests.iloc[:0]) is None


# Tables

SUMMARY: dict[str, Any] = {
    "source": "nvidia-ml-py",
    "all_gpus": {"energy_j": 1200.0, "power_w_mean": 600.5},
    "used_gpus": {
        "devices": ["gpu0", "gpu2"],
        "energy_j": 960.0,
        "power_w_mean": 480.5,
        "clock_mhz_min": 1700.0,
        "clock_mhz_median": 1965.0,
        "throttled_share": 0.25,
        "utilization_percent_mean": 88.0,
        "temperature_c_max": 71.0,
    },
    "cpu": {"energy_j": None, "utilization_percent_mean": 12.5},
    "missing": {
        "cpu.energy_j": "there is no RAPL counter",
        "gpu0.memory_temperature_c": "Not Supported",
        "gpu1.memory_temperature_c": "Not Supported",
    },
    "errors": ["the sampler ended early, signal KILL"],
}


def test_the_table_of_cells_has_it_and_is_empty_for_older_records(tmp_path: Path) -> None:
    with_it = replace(SMALL, repeats=2, records={("ar", 1): {"telemetry": SUMMARY}})
    cells = build(tmp_path, with_it)["cells"]
    old = cells[(cells["server"] == "ar") & (cells["repeat"] == 2)].iloc[0]
    assert old[list(definitions.MACHINE)].isna().all()
    row = cells[(cells["server"] == "ar") & (cells["repeat"] == 1)].iloc[0]
    assert row["energy_j"] == 960 and row["energy_j_per_token"] == approx(960 / row["output_tokens"])
    assert (row["gpus_used"], row["gpu_power_w_mean"], row["throttled_share"]) == (2, 480.5, 0.25)
    assert (row["machine_gpu_energy_j"], row["machine_gpu_power_w_mean"]) == (1200, 600.5)
    assert pd.isna(row["gpu_power_w_idle"]), "the record of the host names no GPU"
    assert (row["sm_clock_mhz_min"], row["sm_clock_mhz_median"], row["gpu_temperature_c_max"]) == (1700, 1965, 71)
    assert row["cpu_utilization_percent_mean"] == 12.5 and pd.isna(row["cpu_energy_j"])
    assert row["telemetry_missing"] == (
        "CPU energy_j: there is no RAPL counter; GPU memory_temperature_c: Not Supported; "
        "the sampler ended early, signal KILL"
    )


def test_idle_power_is_that_of_the_used_gpus_before_the_server_was_started() -> None:
    probed = [{"power_draw_w": watts} for watts in (70.0, 71.0, None, 75.0)]

    def idle(*devices: str) -> Any:
        summary = {**SUMMARY, "used_gpus": {"devices": list(devices)}}
        return machine(summary, {"output_tokens": 9}, probed)["gpu_power_w_idle"]

    assert idle("gpu0", "gpu3") == 145.0
    assert idle("gpu0", "gpu2") is None and idle("gpu4") is None
    assert machine({**SUMMARY, "used_gpus": None}, {"output_tokens": 9}, probed)["gpu_power_w_idle"] is None
