"""Environments on a host over SSH: complete or not there, sent once, and never to a host that cannot take them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from lab import Lab
from nspawn import Host
from processes import eventually
from ssh_client import write_client_config
from tiny_wheelhouse import write_wheelhouse

from ddtree_bench.environments import EnvironmentFailed
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.prune import prune_environments
from ddtree_bench.targets.ssh.launcher import SshLauncher
from ddtree_bench.targets.ssh.place import HostPlace

ROOT = "/srv/ours"
KEY = "0123456789abcdef" * 4
SLOW_IMPORT_S = 6

DEPLOY = """\
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_deploy import launcher_for
from ddtree_bench.environments.deploy import deploy
launcher = launcher_for(Path({config!r}), Path({cache!r}))
deploy(launcher, Path({wheelhouse!r}), {root!r}, report=lambda line: print(line, flush=True))
"""


def launcher_for(config: Path, cache: Path, host: str = "box", root: str = ROOT) -> SshLauncher:
    place = HostPlace(
        name=host,
        ssh_host=host,
        ssh_config=config,
        scope="system",
        root=root,
        cache=cache,
        lease_directory="/var/tmp/leases",
        lease_ttl_s=60,
        reconnect_s=60,
    )
    return SshLauncher(place, "machine", print)


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    host = lab.start("box")
    yield host
    lab.remove(host)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archives")


@pytest.fixture
def launcher(host: Host, lab: Lab, cache: Path) -> Iterator[SshLauncher]:
    with closing(launcher_for(lab.client_config, cache)) as launcher:
        yield launcher


def sent(launcher: SshLauncher) -> int:
    return launcher.host.connection.bytes_copied


def refusal(launcher: SshLauncher, wheelhouse: Path, root: str = ROOT) -> str:
    """Why a deployment is refused, in less than 15 s and before anything is sent."""
    began = time.monotonic()
    with pytest.raises(EnvironmentFailed) as caught:
        deploy(launcher, wheelhouse, root)
    assert sent(launcher) == 0 and time.monotonic() - began < 15
    return str(caught.value)


@pytest.mark.slow
def test_it_is_deployed_once_with_nothing_left_over(launcher: SshLauncher, host: Host, tmp_path: Path) -> None:
    wheelhouse, said = write_wheelhouse(tmp_path / "wheelhouse", KEY), list[str]()
    receipt = deploy(launcher, wheelhouse, ROOT, report=said.append)
    folder = f"{ROOT}/reference-{KEY[:12]}-"
    assert receipt["folder"].startswith(folder) and receipt["versions"]["ddtree-reference"] == "1"
    assert "DDTREE" in host.exec(receipt["python"], "-m", "ddtree_reference")
    assert any("installing the wheels" in line for line in said) and "deployed in" in said[-1]
    assert not [name for name in host.exec("ls", ROOT).split() if name.endswith((".wheels", ".partial"))]

    before, began = sent(launcher), time.monotonic()
    assert deploy(launcher, wheelhouse, ROOT, report=said.append) == receipt
    assert time.monotonic() - began < 5 and sent(launcher) == before
    assert said[-1] == f"{receipt['folder']}: already deployed"

    # Half an environment is made anew.
    host.exec("rm", f"{receipt['folder']}/receipt.json")
    host.exec("mkdir", f"{receipt['folder']}.partial")
    assert deploy(launcher, wheelhouse, ROOT, report=said.append)["versions"] == receipt["versions"]
    assert any("half made" in line for line in said)
    assert not [name for name in host.exec("ls", ROOT).split() if name.endswith((".partial", ".replaced"))]


@pytest.mark.slow
def test_a_link_that_is_cut_while_wheels_are_sent_goes_on_where_it_was(
    launcher: SshLauncher, host: Host, tmp_path: Path
) -> None:
    size = 120 * 2**20
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "1" * 64, files={"torch/weights.bin": os.urandom(size)})
    cut = threading.Thread(target=cut_while_sent, args=(host, f"reference-{'1' * 12}-*.wheels/torch-*.part"))
    cut.start()
    receipt = deploy(launcher, wheelhouse, ROOT)
    cut.join()
    assert size < sent(launcher) < 1.9 * size
    installed = f"{receipt['folder']}/lib/python*/site-packages/torch/weights.bin"
    assert host.exec("sh", "-c", f"stat -c %s {installed}") == f"{size}\n"


def cut_while_sent(host: Host, pattern: str) -> None:
    """End the host's SSH sessions when half of a file has arrived."""
    folder = host.root / ROOT.lstrip("/")
    eventually(lambda: any(path.stat().st_size > 50 * 2**20 for path in folder.glob(pattern)))
    host.exec("sh", "-c", "kill -9 $(pgrep -f 'sshd: root@[n]otty')")


@pytest.mark.slow
def test_an_installation_whose_deployment_is_gone_goes_on_and_is_waited_for(
    launcher: SshLauncher, host: Host, lab: Lab, cache: Path, tmp_path: Path
) -> None:
    slow = {"torch/slow.py": f"import time\ntime.sleep({SLOW_IMPORT_S})\n", "torch/__init__.py": "from . import slow\n"}
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "2" * 64, files=slow)
    program = DEPLOY.format(
        paths=sys.path, config=str(lab.client_config), cache=str(cache), wheelhouse=str(wheelhouse), root=ROOT
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as gone:
        assert gone.stdout is not None
        assert any(line.startswith("importing") for line in gone.stdout)
        gone.send_signal(signal.SIGKILL)
    said: list[str] = []
    receipt = deploy(launcher, wheelhouse, ROOT, report=said.append)
    assert any("another installation is going on, process" in line for line in said)
    # It is the first one's: nothing was sent again, let alone installed.
    assert sent(launcher) == 0 and not any("installing" in line for line in said)
    assert receipt["seconds"] >= SLOW_IMPORT_S
    assert not [name for name in host.exec("ls", ROOT).split() if name.endswith((".wheels", ".partial"))]


@pytest.mark.slow
def test_a_failed_installation_keeps_its_wheels_for_the_next_try(
    launcher: SshLauncher, host: Host, tmp_path: Path
) -> None:
    broken = write_wheelhouse(tmp_path / "wheelhouse", "3" * 64, files={"torch/__init__.py": "import no_such_module\n"})
    for _ in range(2):
        before = sent(launcher)
        with pytest.raises(EnvironmentFailed, match=r": install failed: importing torch(.|\n)*no_such_module"):
            deploy(launcher, broken, ROOT)
    assert before > 0 and sent(launcher) == before
    names = [name for name in host.exec("ls", ROOT).split() if "3" * 12 in name]
    assert {Path(name).suffix for name in names} == {".lock", ".partial", ".wheels"}


def test_a_disk_that_is_too_small_is_refused(launcher: SshLauncher, host: Host, tmp_path: Path) -> None:
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "4" * 64)
    with host.small_disk("/srv/small", 100):
        said = refusal(launcher, wheelhouse, "/srv/small")
    assert said.startswith("/srv/small: needs 0.13 GiB, but 0.10 GiB are free; make room, `snakemake prune`")


def test_a_disk_without_inodes_is_refused(launcher: SshLauncher, host: Host, tmp_path: Path) -> None:
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "4" * 64)
    host.exec("sh", "-c", "mkdir -p /srv/few && mount -t tmpfs -o size=1g,nr_inodes=10 none /srv/few")
    assert "/srv/few: needs 32 files (inodes), but 9 are free" in refusal(launcher, wheelhouse, "/srv/few")


def test_a_root_that_is_not_ours_is_refused(host: Host, lab: Lab, cache: Path, tmp_path: Path) -> None:
    host.add_user("plain")
    config = tmp_path / "config"
    write_client_config(config, [replace(host.alias, user="plain")])
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "4" * 64)
    with closing(launcher_for(config, cache)) as launcher:
        assert "/srv/theirs: nothing can be written there: mkdir: " in refusal(launcher, wheelhouse, "/srv/theirs")
        said = refusal(launcher, wheelhouse, "/srv")
        assert "/srv: nothing can be written there" in said and "set `root` of the target" in said


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ("py3-none-manylinux_2_99_x86_64", "needs glibc 2.99 or newer, but the target has glibc 2.36; choose a target"),
        ("py3-none-manylinux_2_17_aarch64", "is for Linux aarch64, but the target is Linux x86_64; deploy from"),
    ],
)
def test_wheels_for_another_system_are_refused(launcher: SshLauncher, tmp_path: Path, tags: str, said: str) -> None:
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "4" * 64, tags=tags)
    assert f"torch-1-{tags}.whl: {said}" in refusal(launcher, wheelhouse)


def test_a_driver_that_is_too_old_or_missing_is_refused(launcher: SshLauncher, host: Host, tmp_path: Path) -> None:
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "5" * 64, engine="sglang", build="cuda13")
    needed = "driver: the environment's CUDA needs NVIDIA's driver 580 or newer, but the target has"
    assert f"{needed} none; install it there" in refusal(launcher, wheelhouse)
    # What nvidia-smi prints on a machine with two GPUs; there is none here.
    host.write_file("/usr/local/bin/nvidia-smi", "#!/bin/sh\necho 570.86.15\necho 570.86.15\n", mode=0o755)
    assert f"{needed} 570.86.15; install it there" in refusal(launcher, wheelhouse)


@pytest.mark.slow
def test_what_is_old_is_removed_and_what_runs_is_not(launcher: SshLauncher, host: Host, tmp_path: Path) -> None:
    root = "/srv/pruned"
    launcher.host.place = replace(launcher.host.place, root=root)
    first = deploy(launcher, write_wheelhouse(tmp_path / "wheelhouse", "a" * 64), root)["folder"]
    names = [Path(first).name.replace("a" * 12, key * 12) for key in "abcd"]
    folders = [f"{root}/{name}" for name in names]
    for day, folder in zip(("09", "08", "07", "06"), folders, strict=True):
        copied = f"[ -d {folder} ] || cp -a {first} {folder}"
        host.exec("sh", "-c", f"{copied}; touch -d 2026-01-{day} {folder}/receipt.json")
    host.exec("sh", "-c", f"mkdir -p {root}/theirs {folders[3]}.partial && touch {root}/notes.txt")
    (python,) = [line for line in host.exec("ls", f"{root}/pythons").split() if line.startswith("cp")]
    program = "import time; time.sleep(600)"
    host.exec("systemd-run", "--unit=runs-from-it", f"{folders[2]}/bin/python", "-c", program)
    said: list[str] = []
    removed = prune_environments(launcher, root, names[:1], 1, said.append)
    # The first is wanted, the second was used last of the others, and the third runs.
    assert [entry.path for entry in removed] == [folders[3], f"{folders[3]}.partial"]
    assert removed[0].n_bytes > 2**20 and any(f"{folders[2]}: kept, for process" in line for line in said)
    assert sorted(host.exec("ls", root).split()) == sorted(
        [*names[:3], f"{names[0]}.lock", "deploying.lock", "notes.txt", "pythons", "theirs"]
    )
    host.exec("systemctl", "stop", "runs-from-it")
    assert [entry.path for entry in prune_environments(launcher, root, [], 1, said.append)] == folders[1:3]
    # The interpreter goes with the last environment that was made from it.
    assert [entry.path for entry in prune_environments(launcher, root, [], 0, said.append)] == [
        folders[0],
        f"{root}/pythons/{python}",
    ]
    assert prune_environments(launcher, "/srv/nowhere", [], 0, said.append) == []
