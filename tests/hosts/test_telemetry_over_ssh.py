"""Telemetry of a host with GPUs: its energy counter is read from here, and by a load client beside the server.

The GPUs are those of fake_nvml.c; all else is as on a real host, the Python with nvidia-ml-py included.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import fake_nvidia
import pytest
from clone import REPOSITORY
from lab import Lab
from launching import BIND, TOY, TOY_ENGINE, Ground, write_toy_engine
from load_cases import SHORT, WORK, prompts
from nspawn import Host
from processes import eventually
from remote import one_host

from ddtree_bench.load.cell_work import CellWork
from ddtree_bench.load.on_target import ClientRequest, write_request
from ddtree_bench.load.outcome import OUTCOME
from ddtree_bench.plan import Load
from ddtree_bench.project import open_project
from ddtree_bench.running_server import RunningServer
from ddtree_bench.server_start import Start
from ddtree_bench.servers import api
from ddtree_bench.targets import host_tools

DRIVER = "/opt/driver"
ENVIRONMENT = "/opt/environment"
"""A virtual environment of the host: its own Python, with the packages of the one that runs the tests."""

MODULE = "ddtree_bench.load.on_target"
PYTHON = f"{ENVIRONMENT}/bin/python"
USED_W, ALL_W = 3710, 4280
"""What the GPUs of fake_nvml.c draw: the seven whose memory is in use, and all eight."""

OVER_A_SECOND = Load(4, "open", 3.0, "constant")


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    driver = fake_nvidia.build_library(tmp_path_factory.mktemp("driver")).parent
    packages = Path(sysconfig.get_path("purelib"))
    bind = {**BIND, DRIVER: driver, f"{ENVIRONMENT}/lib/python3.11/site-packages": packages}
    host = lab.start("telemetry", bind_ro=bind)
    host.write_file(f"{ENVIRONMENT}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    host.exec("sh", "-c", f"mkdir -p {ENVIRONMENT}/bin && ln -s /usr/bin/python3.11 {PYTHON}")
    host.write_file("/etc/ld.so.conf.d/driver.conf", f"{DRIVER}\n")
    host.exec("ldconfig")
    yield host
    lab.remove(host)


def test_energy_is_measured_from_here(ground: Ground, lab: Lab) -> None:
    """By the Python of the server's environment: that of the host itself has no nvidia-ml-py."""
    project = open_project(one_host(lab, ground.host.name), REPOSITORY, ground.folder)
    start = Start("s1", ground.folder / "log")
    with ground.leased() as launcher:
        # By then a server would have been started, and many pings have told of the host's clock.
        time.sleep(2.5)
        server = RunningServer(project, TOY, launcher, {}, {"python": PYTHON}, start, ground.said.append)
        with server.telemetry() as watched:
            assert watched is not None
            time.sleep(0.1)
            begin = time.perf_counter()
            time.sleep(1.2)
            end = time.perf_counter()
            time.sleep(0.1)
    summary = watched.summary(begin, end)
    assert (summary["source"], summary["errors"]) == ("nvidia-ml-py", [])
    assert summary["used_gpus"]["energy_j"] == pytest.approx(USED_W * (end - begin), rel=0.05)
    assert summary["all_gpus"]["energy_j"] == pytest.approx(ALL_W * (end - begin), rel=0.05)
    assert summary["used_gpus"]["devices"] == [f"gpu{index}" for index in range(7)]


def test_energy_is_measured_by_a_client_beside_the_server(ground: Ground) -> None:
    write_toy_engine(ground.host)
    asked_for = ["--served-model-name", "toy", "--max-running-requests", "8", "--start-id", "s1"]
    with ground.leased() as launcher:
        port = launcher.free_port()
        launcher.start(ground.launch(port, TOY_ENGINE, "--port", str(port), *asked_for))
        assert eventually(lambda: api.health(launcher.base_url()), 10)
        work = CellWork(launcher.target_url(), "toy", WORK, OVER_A_SECOND, prompts(4), SHORT, seed=5)
        request = ClientRequest("one", work, server_pid=None, log_argv=(), draft={}, owner={})
        (ground.folder / "cell").mkdir()
        write_request(request, ground.folder / "cell")
        launcher.copy_in(ground.folder / "cell", "/root/cell")
        launcher.start_client("one", *host_tools.command(PYTHON, launcher.tools(), MODULE, "/root/cell"))
        assert eventually(lambda: not launcher.client_state("one").alive, 20), launcher.client_log("one")
        said = launcher.client_log("one")
        launcher.stop_client("one")
        launcher.copy_out("/root/cell", ground.folder / "measured")
    told = json.loads((ground.folder / "measured" / OUTCOME).read_text())["telemetry"]
    assert (told["source"], told["errors"]) == ("nvidia-ml-py", []), said
    assert told["window_s"] > 0.9
    assert told["used_gpus"]["energy_j"] == pytest.approx(USED_W * told["window_s"], rel=0.05)
