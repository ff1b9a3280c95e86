"""The lab does what tests on its hosts rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cgroups
import needs
import psutil
import pytest
import slots
from commands import LabFailed, call
from lab import ENVIRONMENTS, Lab
from networks import NAMESPACES
from nspawn import Host
from processes import eventually
from ssh_client import write_client_config
from sshd import SshServer
from vm import VirtualMachine

MakeHost = Callable[..., Host]
PYTHONPATH = ":".join(str(Path(__file__).parents[1] / folder) for folder in ("lab", "unit"))
ABANDONS_A_HOST = """
import os, signal, sys
from pathlib import Path
from lab import ENVIRONMENTS, Lab

lab = Lab(Path(sys.argv[1]), Path(sys.argv[2]))
with lab:
    host = lab.start("abandoned")
    print(host.slot.number, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def ssh(configuration: Path, destination: str, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["-F", str(configuration), "-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]
    argv = ["ssh", *options, destination, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def left(number: int) -> list[str]:
    """What is on this machine of the host in a slot: processes by their cgroup, mounts, network, folders."""
    name = f"ddtree-lab-{number}"
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if line.startswith(f"{name} ")]
    networks = [line for line in call("ip", "-o", "link").splitlines() if f" lab-{number}@" in line]
    files = [path for path in (NAMESPACES / name, slots.SLOTS / f"{number}.slot") if path.exists()]
    return [*map(str, cgroups.find(name)), *mounted, *networks, *map(str, files)]


def test_server_refuses_other_keys_and_is_trusted_anew(lab_sshd: SshServer, tmp_path: Path) -> None:
    configuration = lab_sshd.client_config()
    assert ssh(configuration, "lab", "echo", "hello").stdout == "hello\n"
    wrong = replace(lab_sshd.alias(), identity_file=lab_sshd.host_key)
    refused = ssh(write_client_config(tmp_path / "wrong", [wrong]), "lab", "true")
    assert (refused.returncode, "Permission denied" in refused.stderr) == (255, True)
    lab_sshd.rekey()
    assert "IDENTIFICATION HAS CHANGED" in ssh(configuration, "lab", "true").stderr
    lab_sshd.trust()
    assert ssh(configuration, "lab", "true").returncode == 0


def test_restart_cuts_connections_and_leaves_commands(lab_sshd: SshServer) -> None:
    argv = ["ssh", "-F", str(lab_sshd.client_config()), "lab", "echo $$; exec sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout is not None
        command = psutil.Process(int(client.stdout.readline()))
        lab_sshd.restart()
        assert client.wait(10) == 255
    assert command.is_running()
    assert ssh(lab_sshd.client_config(), "lab", "true").returncode == 0
    command.kill()


def test_host_boots_and_keeps_its_journal_through_a_power_cut(make_host: MakeHost, lab: Lab) -> None:
    host = make_host("host")
    assert ssh(lab.client_config, "host", "hostname && systemctl is-system-running").stdout == "host\nrunning\n"
    first = host.boot_id
    host.exec("systemd-run", "--unit=before", "--collect", "echo", "written before the cut")
    assert eventually(lambda: "written before" in host.exec("journalctl", "--unit=before"), 5)
    host.exec("journalctl", "--sync")
    host.crash()
    assert not host.alive
    with pytest.raises(LabFailed, match="not powered"):
        host.exec("true")
    host.boot()
    assert host.boot_id != first
    assert "written before the cut" in host.exec("journalctl", "--boot=-1", "--unit=before")
    second = host.boot_id
    host.reboot()
    assert host.boot_id not in (first, second)
    assert ssh(lab.client_config, "host", "true").returncode == 0


def test_cut_link_is_silent_and_connections_outlive_it(make_host: MakeHost, lab: Lab) -> None:
    host = make_host("host")
    argv = ["ssh", "-F", str(lab.client_config), "host", "while read line; do echo $line; done"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        client.stdin.write("before\n")
        client.stdin.flush()
        assert client.stdout.readline() == "before\n"
        with host.link_cut():
            assert "timed out" in ssh(lab.client_config, "host", "true").stderr
            client.stdin.write("during\n")
            client.stdin.flush()
        assert client.stdout.readline() == "during\n"
        client.stdin.close()
        assert client.wait(10) == 0


def test_host_behind_a_jump_host_is_reached_through_it_alone(make_host: MakeHost, lab: Lab) -> None:
    inner = make_host("behind", via=make_host("jump"))
    assert ssh(lab.client_config, "behind", "hostname").stdout == "behind\n"
    direct = replace(inner.alias, proxy_jump=None)
    refused = ssh(write_client_config(lab.folder / "direct", [direct]), "behind", "true")
    assert "No route to host" in refused.stderr


def test_users(make_host: MakeHost, lab: Lab) -> None:
    host = make_host("host")
    host.add_user("plain")
    host.add_user("lingering", lingering=True)
    host.add_user("admin", sudo=True)
    managers = host.exec("systemctl", "list-units", "--plain", "--no-legend", "user@*.service")
    assert managers.split()[0] == f"user@{host.exec('id', '-u', 'lingering').strip()}.service"
    assert len(managers.splitlines()) == 1
    assert ssh(lab.client_config, "lingering@host", "systemctl --user is-system-running").stdout == "running\n"
    assert "password is required" in ssh(lab.client_config, "plain@host", "sudo -n id -u").stderr
    assert ssh(lab.client_config, "admin@host", "sudo -n id -u").stdout == "0\n"


def test_files_folders_and_disks_of_a_host(make_host: MakeHost, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "read.txt").write_text("from here\n")
    bind = {"/opt/shared": tmp_path / "shared"}
    host = make_host("host", bind=bind, bind_ro={"/opt/read.txt": tmp_path / "read.txt"})
    host.write_file("/opt/shared/from_host", "ü\n", mode=0o600)
    assert (tmp_path / "shared/from_host").read_text() == "ü\n"
    assert (tmp_path / "shared/from_host").stat().st_mode & 0o777 == 0o600
    with pytest.raises(LabFailed, match="Read-only"):
        host.exec("sh", "-c", "echo >> /opt/read.txt")
    with host.small_disk("/srv/small", 2):
        with pytest.raises(LabFailed, match="No space left"):
            host.exec("dd", "if=/dev/zero", "of=/srv/small/big", "bs=1M", "count=3")
        host.exec("dd", "if=/dev/zero", "of=/srv/small/big", "bs=1M", "count=1")
    assert host.exec("ls", "/srv/small") == ""


def test_two_hosts_share_a_folder(two_hosts: tuple[Host, Host]) -> None:
    first, second = two_hosts
    first.write_file(f"{ENVIRONMENTS}/written", first.boot_id)
    assert second.exec("cat", f"{ENVIRONMENTS}/written") == first.boot_id
    assert second.exec("rm", f"{ENVIRONMENTS}/written") == ""
    assert first.boot_id != second.boot_id


def test_a_name_is_given_once(two_hosts: tuple[Host, Host], lab: Lab) -> None:
    with pytest.raises(LabFailed, match="has a machine gpu1 already"):
        lab.start("gpu1")


def test_missing_packages_are_named() -> None:
    commands = {"sh": "dash", "no-such-command": "b", "nor-this": "a"}
    assert needs.missing_commands(commands) == "needs Debian's packages: a b"


def test_virtual_machine_has_the_controllers_of_cgroup_v2(vm: VirtualMachine, lab: Lab) -> None:
    asked = ssh(lab.client_config, "vm", "cat /sys/fs/cgroup/cgroup.controllers && systemctl is-system-running --wait")
    controllers, state = asked.stdout.splitlines()
    assert {"cpu", "memory", "pids"} <= set(controllers.split())
    assert state == "running"


def test_nothing_is_left_of_a_removed_host(lab: Lab) -> None:
    host = lab.start("host")
    number, folder = host.slot.number, host.slot.folder
    pids = [pid for path in cgroups.find(host.slot.name) for pid in _pids(path)]
    assert len(left(number)) >= len(cgroups.HIERARCHIES) + 4
    assert len(pids) > 5
    lab.remove(host)
    assert left(number) == []
    assert not folder.exists()
    assert not any(map(psutil.pid_exists, pids))


def test_what_a_killed_session_left_is_removed_by_the_next(lab: Lab, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ABANDONS_A_HOST, str(tmp_path), str(lab.cache)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    number = int(ended.stdout)
    assert left(number)
    with Lab(tmp_path, lab.cache):
        assert left(number) == []


def _pids(cgroup: Path) -> list[int]:
    return [int(pid) for path in cgroup.glob("**/cgroup.procs") for pid in path.read_text().split()]
