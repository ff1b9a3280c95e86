"""A host's own Python is used where it fits; where there is none, that of this machine runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from lab import Lab
from nspawn import Host

from ddtree_bench.environments import python_tag
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.interpreter import fitting_python

ROOT = "/srv/ours"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archives")


@pytest.fixture
def host(make_host: Callable[..., Host]) -> Host:
    """A host of Debian whose python3 lacks venv and ensurepip, as Debian delivers it."""
    return make_host("bare")


@pytest.fixture
def connection(host: Host, lab: Lab) -> Iterator[Connection]:
    with closing(Connection(resolve(host.name, lab.client_config), reconnect_s=10, report=print)) as connection:
        yield connection


def hide_python(host: Host) -> None:
    """Take every Python off the host's search path."""
    host.exec("sh", "-c", "mkdir /opt/hidden && mv /usr/bin/python3* /opt/hidden/")


@pytest.mark.slow
def test_one_is_sent_for_wheels_where_that_of_the_system_cannot_make_environments(
    host: Host, connection: Connection, cache: Path
) -> None:
    said: list[str] = []
    assert fitting_python(connection, ROOT, "py3", cache, said.append) == "/usr/bin/python3"
    assert connection.bytes_copied == 0 and not said

    python = fitting_python(connection, ROOT, python_tag(), cache, said.append)
    assert python.startswith(f"{ROOT}/pythons/{python_tag()}-") and "has no Python 3." in said[0]
    version = host.exec(python, "-c", "import sys; print(sys.version)")
    assert version.strip() == sys.version
    host.exec(python, "-m", "venv", "/srv/made", timeout_s=60)
    assert "pip" in host.exec("/srv/made/bin/python", "-m", "pip", "--version")
    # Its modules find the libraries that came with them, not those of a path of this machine.
    loaded = host.exec(python, "-c", "import ssl, ctypes, sqlite3, lzma; print(open('/proc/self/maps').read())")
    assert f"{Path(python).parents[1]}/lib/libssl.so" in loaded and sys.base_prefix not in loaded
    assert host.exec("ls", f"{ROOT}/pythons").split() == [Path(python).parts[-3]]

    sent = connection.bytes_copied
    assert fitting_python(connection, ROOT, python_tag(), cache, said.append) == python
    assert connection.bytes_copied == sent


@pytest.mark.slow
def test_a_host_without_any_python_gets_one(host: Host, connection: Connection, cache: Path) -> None:
    hide_python(host)
    python = fitting_python(connection, ROOT, "py3", cache, print)
    assert host.exec(python, "-c", "import ssl, ctypes, zlib, http.client; print('runs')") == "runs\n"
    # What was sent for programs fits wheels too.
    sent = connection.bytes_copied
    assert fitting_python(connection, ROOT, python_tag(), cache, print).startswith(f"{ROOT}/pythons/")
    assert connection.bytes_copied == sent


def test_where_ours_is_of_no_use_nothing_is_sent(host: Host, connection: Connection, cache: Path) -> None:
    host.write_file("/usr/local/bin/uname", "#!/bin/sh\necho Linux aarch64\n", mode=0o755)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lacking = rf"bare: has no Python {version} with .*ensurepip.*Linux x86_64.*python{version}-venv"
    with pytest.raises(TargetError, match=lacking):
        fitting_python(connection, ROOT, python_tag(), cache, print)
    with pytest.raises(TargetError, match=r"has no Python 3\.99 .*install python3\.99 there"):
        fitting_python(connection, ROOT, "cp399", cache, print)
    assert connection.bytes_copied == 0


@pytest.mark.slow
def test_one_that_does_not_run_there_is_refused_and_never_used(host: Host, connection: Connection, cache: Path) -> None:
    hide_python(host)
    host.exec("sh", "-c", f"mkdir -p {ROOT} && mount -t tmpfs -o noexec,size=200m none {ROOT}")
    with pytest.raises(TargetError, match=r"does not run there: .*Permission denied.*; install python3 there"):
        fitting_python(connection, ROOT, "py3", cache, print)
    assert [name for name in host.exec("ls", f"{ROOT}/pythons").split() if not name.endswith(".tar.gz")] == []
