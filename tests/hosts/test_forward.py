"""Port forwards, by OpenSSH's own client against a real SSH server on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from processes import alive, children, end, eventually
from ssh_client import free_port
from sshd import SshServer

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh import forward
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.forward import PortForward

TIMEOUT_S = 15.0


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"answered")

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def web() -> Iterator[int]:
    """The port of an HTTP server on the host, which is this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def answer(port: int) -> bytes:
    """The last line that an HTTP server behind a port answers; nothing when it hangs up."""
    with closing(socket.create_connection(("127.0.0.1", port), 5)) as connection:
        said = b""
        with suppress(ConnectionResetError):
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while chunk := connection.recv(1000):
                said += chunk
        return said.rpartition(b"\n")[2]


def processes() -> set[int]:
    return children("ssh")


def test_a_port_of_the_host_is_reached_and_nothing_is_left(lab_sshd: SshServer, web: int) -> None:
    before = processes()
    there = PortForward(resolve("lab", lab_sshd.client_config()), web)
    assert not there.alive
    there.start(TIMEOUT_S)
    assert there.alive and there.port != web and there.base_url == f"http://127.0.0.1:{there.port}"
    assert [answer(there.port) for _ in range(3)] == [b"answered"] * 3 and there.said == ""
    (process,) = processes() - before
    listening = {c.laddr.ip for c in psutil.Process(process).net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    there.stop()
    there.stop()
    assert not there.alive and processes() == before
    with pytest.raises(ConnectionRefusedError):
        answer(there.port)


def test_a_port_on_which_nobody_listens_there_is_told(lab_sshd: SshServer) -> None:
    there = PortForward(resolve("lab", lab_sshd.client_config()), free_port())
    there.start(TIMEOUT_S)
    try:
        assert answer(there.port) == b""
        assert eventually(lambda: "Connection refused" in there.said, 5) and there.alive
    finally:
        there.stop()


def test_what_the_process_writes_while_it_is_asked_is_not_lost(lab_sshd: SshServer) -> None:
    there = PortForward(resolve("lab", lab_sshd.client_config()), free_port())
    there.start(TIMEOUT_S)
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            assert there.said is not None

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(40):
            answer(there.port)
        assert eventually(lambda: there.said.count("Connection refused") == 40, 5)
    finally:
        ended.set()
        asking.join()
        there.stop()


def test_a_client_that_cannot_be_started_is_told(lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    there = PortForward(resolve("lab", lab_sshd.client_config()), 1)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TargetError, match="OpenSSH's client cannot be started here"):
        there.start(TIMEOUT_S)
    assert not there.alive


def test_a_host_behind_another_is_reached(lab_sshd: SshServer, web: int, tmp_path: Path) -> None:
    before = processes()
    with SshServer(tmp_path / "gate") as gate:
        config = lab_sshd.client_config(replace(lab_sshd.alias("far"), proxy_jump="gate"), gate.alias("gate"))
        there = PortForward(resolve("far", config), web)
        there.start(TIMEOUT_S)
        assert answer(there.port) == b"answered" and len(processes() - before) == 2
        there.stop()
        assert eventually(lambda: processes() == before, 5)
        # No way through, and nothing is asked on a terminal.
        gate.known_hosts.write_text("")
        with pytest.raises(TargetError, match="host key is known for"):
            there.start(TIMEOUT_S)
        assert eventually(lambda: processes() == before, 5)


@pytest.mark.parametrize("wrong", ["host key", "user key", "port"])
def test_why_there_is_no_forward_is_said_at_once(lab_sshd: SshServer, wrong: str) -> None:
    config = lab_sshd.client_config()
    if wrong == "host key":
        lab_sshd.rekey()
        words = "REMOTE HOST IDENTIFICATION HAS CHANGED"
    elif wrong == "user key":
        (lab_sshd.folder / "authorized_keys").write_text("")
        words = r"Permission denied \(publickey\)"
    else:
        lab_sshd.stop()
        words = "Connection refused"
    began = time.monotonic()
    with pytest.raises(TargetError, match=f"(?s)lab: port 127.0.0.1:8000 there cannot be forwarded.*{words}"):
        PortForward(resolve("lab", config), 8000).start(TIMEOUT_S)
    assert time.monotonic() - began < 5


def test_a_cut_link_ends_it(lab_sshd: SshServer, web: int) -> None:
    there = PortForward(resolve("lab", lab_sshd.client_config()), web)
    there.start(TIMEOUT_S)
    lab_sshd.end_sessions()
    assert eventually(lambda: not there.alive, 5)
    there.start(TIMEOUT_S)
    assert there.alive and answer(there.port) == b"answered"
    there.stop()


def test_a_port_that_somebody_else_takes_first_is_passed_over(
    lab_sshd: SshServer, web: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken, free = stranger.getsockname()[1], free_port()
        ports = iter([taken, taken, free])
        monkeypatch.setattr(forward, "free_port", lambda: next(ports))
        there = PortForward(resolve("lab", lab_sshd.client_config()), web)
        there.start(TIMEOUT_S)
        assert there.port == free and answer(free) == b"answered"
        there.stop()


def test_what_the_user_configures_for_sessions_is_not_in_the_way(lab_sshd: SshServer, web: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = lab_sshd.client_config()
        more = f"  LocalForward {taken.getsockname()[1]} localhost:1\n  RemoteCommand top\n  RequestTTY force\n"
        more += "  ExitOnForwardFailure yes\n  LogLevel QUIET\n"
        config.write_text(f"Host lab\n{more}{config.read_text()}")
        there = PortForward(resolve("lab", config), web)
        there.start(TIMEOUT_S)
        assert answer(there.port) == b"answered"
        there.stop()


OWNER = """
import sys, time
from pathlib import Path
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.forward import PortForward
there = PortForward(resolve("lab", Path(sys.argv[1])), 1)
there.start(15)
print(there._process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_a_process_that_is_killed(lab_sshd: SshServer) -> None:
    argv = [sys.executable, "-c", OWNER, str(lab_sshd.client_config())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        process = int(owner.stdout.readline())
        assert alive(process)
        end(owner.pid)
    assert eventually(lambda: not alive(process), 5)
