"""The connection to a host, against a real SSH server on loopback: keys, ways, commands, lost links."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import call
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import eventually
from ssh_client import Alias, make_key, write_client_config
from sshd import SshServer

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh import command, command_line, connection, link
from ddtree_bench.targets.ssh.command import read_blocks
from ddtree_bench.targets.ssh.command_line import MARK, render
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.failures import (
    ConnectionFailed,
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnknown,
    HostUnreachable,
    LinkLost,
    LoginRefused,
)

TIMEOUT_S = 20.0
PRINT_ARGUMENTS = "import json, sys; json.dump(sys.argv[1:], sys.stdout)"


@pytest.fixture(scope="module")
def shared(shared_sshd: SshServer) -> Iterator[Connection]:
    with connected(shared_sshd) as connection:
        yield connection


@contextmanager
def connected(
    server: SshServer, *aliases: Alias, reconnect_s: float = 30.0, report: Callable[[str], None] = print
) -> Iterator[Connection]:
    """A connection to the first of the aliases, or to the server."""
    path = server.client_config(*aliases)
    name = aliases[0].name if aliases else "lab"
    connection = Connection(resolve(name, path), reconnect_s=reconnect_s, report=report)
    try:
        yield connection
    finally:
        connection.close()


def true(connection: Connection) -> None:
    assert connection.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0


def fingerprint(key: Path) -> str:
    return call("ssh-keygen", "-lf", str(key)).split()[1]


def configured(server: SshServer, more: str) -> None:
    """Restart the server with lines that come before its own, which hold if given first."""
    path = server.folder / "sshd_config"
    path.write_text(more + path.read_text())
    server.restart()


# What a command gets, and what becomes of it

NASTY = ["", "it's", '"', "$HOME `id` $(id)", "a\\0b\\\\", "%h %% %n", "two\nlines\n", "\t ", "ümläut 漢字 🚀", "!x"]
NASTY += ["-n", "*?[a]", "~", "#", ";", "&", "|", "{a,b}", "\x01\x7f"]


@settings(max_examples=10, deadline=None)
@example(NASTY)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30), max_size=6))
def test_every_argument_arrives_exactly(shared: Connection, arguments: list[str]) -> None:
    env = {"NASTY": "".join(arguments)}
    script = 'printf \'%s\\0\' "$NASTY" "$@"'
    result = shared.run(["sh", "-c", script, "sh", *arguments], timeout_s=TIMEOUT_S, env=env)
    assert result.exit_code == 0 and result.stdout.split("\0") == ["".join(arguments), *arguments, ""]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh"])
def test_every_shell_of_a_login_gives_the_same(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = render([sys.executable, "-c", PRINT_ARGUMENTS, *NASTY], {"A": "'\\\n$x!"})
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == NASTY


def test_an_argument_that_no_process_can_have_is_refused(shared: Connection) -> None:
    with pytest.raises(TargetError, match="NUL"):
        shared.run(["echo", "a\0b"], timeout_s=TIMEOUT_S)


def test_exit_status_and_signal_are_told_apart(shared: Connection) -> None:
    assert shared.run(["sh", "-c", "exit 137"], timeout_s=TIMEOUT_S).exit_code == 137
    for name in ("KILL", "TERM", "SEGV"):
        result = shared.run(["sh", "-c", f"echo out; kill -{name} $$"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.signal, result.stdout) == (-1, name, "out\n")
    missing = shared.run(["no-such-program"], timeout_s=TIMEOUT_S)
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr and missing.signal is None


def test_output_is_reported_line_by_line_while_the_command_runs(shared: Connection) -> None:
    lines: list[tuple[str, float]] = []
    began = time.monotonic()
    script = "echo one; printf 'tw' >&2; sleep 1; echo 'o' >&2; printf end"
    result = shared.run(["sh", "-c", script], timeout_s=TIMEOUT_S, report=lambda x: lines.append((x, time.monotonic())))
    assert (result.stdout, result.stderr) == ("one\nend", "two\n")
    assert lines[0][0] == "one" and sorted(line for line, _ in lines) == ["end", "one", "two"]
    assert lines[0][1] - began < 0.9 < lines[-1][1] - began


def test_much_output_on_both_streams_at_once(shared: Connection) -> None:
    lines: list[str] = []
    script = "yes 123456789 | head -c 25000000; head -c 25000000 /dev/zero >&2; yes abcdefghi | head -c 25000000"
    result = shared.run(["sh", "-c", script], timeout_s=60, report=lines.append)
    assert result.stdout == "123456789\n" * 2_500_000 + "abcdefghi\n" * 2_500_000
    assert result.stderr == "\0" * 25_000_000
    assert len(lines) == 5_000_001


def test_input_is_sent_and_closed(shared: Connection) -> None:
    text = "é\n" * 3_000_000
    assert shared.run(["wc", "-c"], stdin=text, timeout_s=TIMEOUT_S).stdout.strip() == str(len(text.encode()))
    assert shared.run(["head", "-c", "2"], stdin=text, timeout_s=TIMEOUT_S).stdout == "é"


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(shared: Connection) -> None:
    script = "echo begun; (setsid sleep 300 &) ; sleep 300"
    seen: list[str] = []
    with pytest.raises(TargetError, match=r"sh -c .* did not end within 1 s and was killed"):
        shared.run(["sh", "-c", script], timeout_s=1, env={"WHICH": "too-long"}, report=seen.append)
    assert seen == ["begun"] and eventually(lambda: not marked("WHICH", "too-long"), 5)
    # Nor does one that reads nothing hold us up.
    with pytest.raises(TargetError, match="did not end within 1 s"):
        shared.run(["sleep", "300"], stdin="x" * 10_000_000, timeout_s=1, env={"WHICH": "deaf"})
    assert eventually(lambda: not marked("WHICH", "deaf"), 5)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, although a shell that starts tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_command_is_killed(shared_sshd: SshServer, interruptible: None) -> None:
    with connected(shared_sshd) as connection:
        main = threading.main_thread().ident
        assert main is not None

        def interrupt(line: str) -> None:
            signal.pthread_kill(main, signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            connection.run(["sh", "-c", "echo x; sleep 300"], timeout_s=20, env={"WHICH": "cut"}, report=interrupt)
        assert eventually(lambda: not marked("WHICH", "cut"), 5)


def marked(name: str, value: str) -> list[int]:
    """Processes with a variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_stream_gives_lines_as_they_come_and_ends_when_it_is_closed(shared: Connection) -> None:
    lines: list[str] = []
    stream = shared.stream(["sh", "-c", 'while read x; do echo "got $x"; done; echo bye >&2; exit 3'], lines.append)
    stream.send("one")
    assert eventually(lambda: lines == ["got one"], 5) and not stream.ended
    stream.send("two ü")
    result = stream.close()
    assert lines == ["got one", "got two ü"] and stream.ended
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "bye\n")
    with pytest.raises(TargetError, match="gone"):
        stream.send("three")


def test_a_stream_whose_command_ends_says_so(shared: Connection) -> None:
    stream = shared.stream(["sh", "-c", "exit 4"], print)
    assert eventually(lambda: stream.ended, 5) and stream.close().exit_code == 4


def test_of_a_stream_the_end_of_stderr_alone_is_kept(shared: Connection) -> None:
    count = 0

    def take(_: str) -> None:
        nonlocal count
        count += 1

    stream = shared.stream(["sh", "-c", "seq 1 300000; seq 1 300000 >&2"], take)
    assert eventually(lambda: stream.ended, 20)
    result = stream.close()
    assert count == 300_000 and result.stdout == ""
    assert result.stderr.endswith("\n299999\n300000\n") and len(result.stderr) == command.TAIL_BYTES


def test_what_cannot_be_killed_is_said(shared_sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "END_MARKED", "sleep 3")
    monkeypatch.setattr(connection, "KILL_TIMEOUT_S", 0.2)
    said: list[str] = []
    with (
        connected(shared_sshd, report=said.append) as there,
        pytest.raises(TargetError, match="did not end within 0 s"),
    ):
        there.run(["sleep", "4"], timeout_s=0.3)
    assert said == ["`sleep 4 …` may still run on the host; it could not be killed: that took longer than 0 s"]


def test_a_file_of_which_nothing_comes_is_an_error(shared: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SILENT_S", 0.5)
    with pytest.raises(TargetError, match="nothing came of it"):
        shared.repeated(lambda link: list(read_blocks(link, "printf begun; sleep 3")))
    assert shared.repeated(lambda link: list(read_blocks(link, "printf all"))) == [b"all"]


# Who the host is


def test_one_connection_serves_everything(shared_sshd: SshServer) -> None:
    server = shared_sshd
    before = server.log.count("Accepted publickey")
    with connected(server) as connection:
        for _ in range(3):
            true(connection)
        with connection.sftp() as sftp:
            assert "sshd_config" in sftp.listdir(str(server.folder))
    assert server.log.count("Accepted publickey") == before + 1
    with pytest.raises(TargetError, match="closed"):
        true(connection)


def test_an_unknown_host_key_is_refused_and_not_added(lab_sshd: SshServer) -> None:
    lab_sshd.known_hosts.write_text("")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyUnknown) as raised:
        true(connection)
    words = str(raised.value)
    assert fingerprint(lab_sshd.host_key) in words and f"[127.0.0.1]:{lab_sshd.port}" in words
    assert f"ssh -F {lab_sshd.folder / 'ssh_config'} lab" in words and str(lab_sshd.known_hosts) in words
    assert lab_sshd.known_hosts.read_text() == "" and "Accepted" not in lab_sshd.log


def test_a_changed_host_key_is_refused_with_both_fingerprints(lab_sshd: SshServer) -> None:
    known = fingerprint(lab_sshd.host_key)
    before = lab_sshd.known_hosts.read_text()
    lab_sshd.rekey()
    with connected(lab_sshd) as connection, pytest.raises(HostKeyChanged) as raised:
        true(connection)
    words = str(raised.value)
    assert known in words and fingerprint(lab_sshd.host_key) in words and f"{lab_sshd.known_hosts}:1" in words
    assert f"ssh-keygen -f {lab_sshd.known_hosts} -R '[127.0.0.1]:{lab_sshd.port}'" in words
    assert lab_sshd.known_hosts.read_text() == before and "Accepted" not in lab_sshd.log
    # The remedy it names does what it says.
    call("ssh-keygen", "-f", str(lab_sshd.known_hosts), "-R", f"[127.0.0.1]:{lab_sshd.port}")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyUnknown):
        true(connection)


def test_a_revoked_host_key_is_refused_although_it_is_known(lab_sshd: SshServer) -> None:
    line = lab_sshd.known_hosts.read_text()
    lab_sshd.known_hosts.write_text(f"{line}@revoked * {' '.join(line.split()[1:])}\n")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyRevoked, match="known_hosts:2"):
        true(connection)


@pytest.mark.parametrize("how", ["listed", "not listed", "a list of another kind", "no key", "missing"])
def test_the_file_of_revoked_keys_holds(lab_sshd: SshServer, how: str) -> None:
    file, other = lab_sshd.folder / "revoked", lab_sshd.folder / "other"
    make_key(other)
    key = lab_sshd.host_key.with_suffix(".pub")
    if how == "listed":
        file.write_text(f"# stolen\n\n{other.with_suffix('.pub').read_text()}{key.read_text()}")
    elif how == "not listed":
        file.write_text(other.with_suffix(".pub").read_text())
    elif how == "a list of another kind":
        call("ssh-keygen", "-q", "-k", "-f", str(file), str(key))
    elif how == "no key":
        file.write_text("ssh-ed25519 !\n")
    config = lab_sshd.client_config()
    config.write_text(f"Host *\n  RevokedHostKeys {file}\n{config.read_text()}")
    there = Connection(resolve("lab", config), reconnect_s=0, report=print)
    argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "lab", "true"]
    by_openssh = subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode
    assert (by_openssh == 0) == (how == "not listed")
    if how == "not listed":
        true(there)
        there.close()
        return
    error = HostKeyRevoked if how == "listed" else ConnectionFailed
    words = {"listed": f"{file}:4", "a list of another kind": "KRL", "no key": f"{file}:1", "missing": "cannot be read"}
    with pytest.raises(error, match=words[how]):
        true(there)
    assert "Accepted" not in lab_sshd.log


def test_a_key_under_the_plain_name_does_not_stand_in_for_another_one_of_the_port(lab_sshd: SshServer) -> None:
    where, kind, key = lab_sshd.known_hosts.read_text().split()
    other = lab_sshd.folder / "other"
    make_key(other)
    lab_sshd.known_hosts.write_text(
        f"127.0.0.1 {kind} {key}\n{where} {' '.join(other.with_suffix('.pub').read_text().split()[:2])}\n"
    )
    with connected(lab_sshd) as connection, pytest.raises(HostKeyChanged, match=f"{lab_sshd.known_hosts}:2"):
        true(connection)


def test_a_key_that_only_an_authority_vouches_for_is_refused_in_words(lab_sshd: SshServer) -> None:
    line = lab_sshd.known_hosts.read_text()
    lab_sshd.known_hosts.write_text(f"@cert-authority * {' '.join(line.split()[1:])}\n")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyUnknown, match=r"authority .* only plain keys"):
        true(connection)


@pytest.mark.parametrize("known", ["hashed", "pattern", "several names", "without the port", "global file", "alias"])
def test_every_way_in_which_a_host_key_is_known(lab_sshd: SshServer, known: str) -> None:
    file = lab_sshd.known_hosts
    key = " ".join(file.read_text().split()[1:])
    more = ""
    if known == "hashed":
        call("ssh-keygen", "-H", "-f", str(file))
        assert "127.0.0.1" not in file.read_text()
    elif known == "pattern":
        file.write_text(f"!other,[127.0.0.?]:* {key}\n")
    elif known == "several names":
        broken = f"broken line\n|1|x {key}\n|1|x|y {key}\n|1|é|é {key}\nx ssh-ed25519 é\n"
        file.write_text(f"# a comment\n\n{broken}other,[127.0.0.1]:{lab_sshd.port} {key} comment\n")
    elif known == "without the port":
        file.write_text(f"127.0.0.1 {key}\n")
    elif known == "global file":
        other = file.with_name("global")
        file.rename(other)
        more = f"Host lab\n  GlobalKnownHostsFile {other}\n"
    else:
        file.write_text(f"rack-7 {key}\n")
        more = "Host lab\n  HostKeyAlias rack-7\n"
    path = lab_sshd.client_config()
    path.write_text(more + path.read_text())
    connection = Connection(resolve("lab", path), reconnect_s=0, report=print)
    true(connection)
    connection.close()
    # OpenSSH itself holds it for known too.
    call("ssh", "-F", str(path), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "lab", "true")


def test_a_negated_pattern_does_not_hold(lab_sshd: SshServer) -> None:
    key = " ".join(lab_sshd.known_hosts.read_text().split()[1:])
    lab_sshd.known_hosts.write_text(f"[*]:*,![127.0.0.1]:{lab_sshd.port} {key}\n")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyUnknown):
        true(connection)


def test_a_host_with_several_keys_is_asked_for_the_one_that_is_known(lab_sshd: SshServer) -> None:
    rsa = lab_sshd.folder / "rsa"
    call("ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(rsa))
    configured(lab_sshd, f'HostKey "{rsa}"\n')
    where = lab_sshd.known_hosts.read_text().split()[0]
    lab_sshd.known_hosts.write_text(f"{where} {' '.join(rsa.with_suffix('.pub').read_text().split()[:2])}\n")
    with connected(lab_sshd) as connection:
        true(connection)


def test_a_host_that_shows_another_type_of_key_is_unknown(lab_sshd: SshServer) -> None:
    ecdsa = lab_sshd.folder / "ecdsa"
    call("ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(ecdsa))
    where = lab_sshd.known_hosts.read_text().split()[0]
    lab_sshd.known_hosts.write_text(f"{where} {' '.join(ecdsa.with_suffix('.pub').read_text().split()[:2])}\n")
    with connected(lab_sshd) as connection, pytest.raises(HostKeyUnknown, match="keys of other types: ecdsa"):
        true(connection)


# Who we are


def test_a_wrong_key_is_refused_with_user_host_and_key(lab_sshd: SshServer) -> None:
    wrong = lab_sshd.folder / "wrong"
    make_key(wrong)
    alias = replace(lab_sshd.alias(), identity_file=wrong)
    with connected(lab_sshd, alias) as connection, pytest.raises(LoginRefused) as raised:
        true(connection)
    words = str(raised.value)
    assert fingerprint(wrong) in words and str(wrong) in words and f"[127.0.0.1]:{lab_sshd.port}" in words
    assert alias.user in words and "authorized_keys" in words


def test_no_key_at_all_is_said(lab_sshd: SshServer) -> None:
    alias = replace(lab_sshd.alias(), identity_file=Path("/nowhere/key"))
    with connected(lab_sshd, alias) as connection, pytest.raises(LoginRefused, match=r"none .*/nowhere/key"):
        true(connection)


def test_a_host_that_wants_a_password_too_is_refused_without_one(lab_sshd: SshServer) -> None:
    configured(lab_sshd, "PasswordAuthentication yes\nAuthenticationMethods publickey,password\n")
    with connected(lab_sshd) as connection, pytest.raises(LoginRefused, match="the host wants password"):
        true(connection)


@contextmanager
def agent(folder: Path, *keys: Path) -> Iterator[str]:
    """An ssh-agent that holds keys; the path of its socket."""
    path = folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        assert eventually(path.exists, 5)
        for key in keys:
            askpass = folder / "askpass"
            askpass.write_text("#!/bin/sh\necho secret\n")
            askpass.chmod(0o700)
            env = {"SSH_AUTH_SOCK": str(path), "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
            subprocess.run(["ssh-add", "-q", str(key)], env={**os.environ, **env}, check=True)
        yield str(path)
    finally:
        process.terminate()
        process.wait()


def test_an_encrypted_key_works_through_an_agent_and_else_says_so(
    lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    call("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(lab_sshd.user_key))
    with connected(lab_sshd) as connection, pytest.raises(LoginRefused, match=f"ssh-add {lab_sshd.user_key}"):
        true(connection)
    other = lab_sshd.folder / "other"
    make_key(other)
    with agent(lab_sshd.folder, other, lab_sshd.user_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        with connected(lab_sshd) as connection:
            true(connection)
        # IdentitiesOnly: the other key was not even offered.
        assert fingerprint(other) not in lab_sshd.log
    with connected(lab_sshd) as connection, pytest.raises(LoginRefused, match="ssh-add"):
        true(connection)


def test_any_key_of_the_agent_that_is_configured_will_do(lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    other = lab_sshd.folder / "other"
    make_key(other)
    with agent(lab_sshd.folder, other, lab_sshd.user_key) as path:
        config = lab_sshd.client_config(replace(lab_sshd.alias(), identity_file=Path("/nowhere/key")))
        config.write_text(f"Host *\n  IdentitiesOnly no\n  IdentityAgent {path}\n{config.read_text()}")
        connection = Connection(resolve("lab", config), reconnect_s=0, report=print)
        true(connection)
        connection.close()


def test_a_certificate_beside_the_key_is_used(lab_sshd: SshServer) -> None:
    authority, key = lab_sshd.folder / "authority", lab_sshd.folder / "certified"
    make_key(authority)
    make_key(key)
    user = lab_sshd.alias().user
    call("ssh-keygen", "-q", "-s", str(authority), "-I", "test", "-n", user, f"{key}.pub")
    alias = replace(lab_sshd.alias(), identity_file=key)
    with connected(lab_sshd, alias) as connection, pytest.raises(LoginRefused):
        true(connection)
    configured(lab_sshd, f'TrustedUserCAKeys "{authority}.pub"\n')
    with connected(lab_sshd, alias) as connection:
        true(connection)


# The way to the host


def test_a_closed_port_and_an_unknown_name_are_told_at_once(lab_sshd: SshServer) -> None:
    lab_sshd.stop()
    began = time.monotonic()
    with connected(lab_sshd) as connection, pytest.raises(HostUnreachable, match="Connection refused"):
        true(connection)
    with (
        connected(lab_sshd, replace(lab_sshd.alias(), hostname="a..b")) as connection,
        pytest.raises(HostUnreachable, match=r"no address is known for the host a\.\.b"),
    ):
        true(connection)
    assert time.monotonic() - began < 3


def test_a_name_that_is_looked_up_for_ever_is_told_in_time(
    lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: looked_up.wait(30))
    config = lab_sshd.client_config(replace(lab_sshd.alias(), hostname="gpu.example"))
    config.write_text(f"Host *\n  ConnectTimeout 1\n{config.read_text()}")
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"gpu\.example was not told within 1 s; see that"):
        true(Connection(resolve("lab", config), reconnect_s=60, report=print))
    looked_up.set()
    assert time.monotonic() - began < 4


def test_a_port_that_does_not_speak_ssh_is_told_within_the_configured_time(lab_sshd: SshServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = lab_sshd.client_config(replace(lab_sshd.alias(), port=silent.getsockname()[1]))
        config.write_text(f"Host *\n  ConnectTimeout 1\n{config.read_text()}")
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="does not answer as SSH"):
            true(Connection(resolve("lab", config), reconnect_s=60, report=print))
        assert time.monotonic() - began < 4


@pytest.fixture
def gates(lab_sshd: SshServer, tmp_path: Path) -> Iterator[tuple[SshServer, SshServer]]:
    """Two further servers, to jump through."""
    with SshServer(tmp_path / "gate1") as first, SshServer(tmp_path / "gate2") as second:
        yield first, second


def test_a_host_behind_others_is_reached_through_them(lab_sshd: SshServer, gates: tuple[SshServer, SshServer]) -> None:
    first, second = (replace(gate.alias(f"gate{n}"), name=f"gate{n}") for n, gate in enumerate(gates, 1))
    far = replace(lab_sshd.alias("far"), proxy_jump="gate1,gate2")
    with connected(lab_sshd, far, first, second) as connection:
        true(connection)
        assert all(gate.log.count("Accepted publickey") == 1 for gate in gates)
        # From one to the next: only the first was connected to from here.
        ways = [child for child in psutil.Process().children(True) if child.name() == "ssh"]
        assert len(ways) == 2
    assert eventually(lambda: not any(way.is_running() for way in ways), 5)


def test_the_hosts_on_the_way_are_checked_as_strictly(lab_sshd: SshServer, gates: tuple[SshServer, SshServer]) -> None:
    first, second = (gate.alias(f"gate{n}") for n, gate in enumerate(gates, 1))
    far = replace(lab_sshd.alias("far"), proxy_jump="gate1,gate2")
    gates[0].known_hosts.write_text("")
    config = lab_sshd.client_config(far, first, second)
    config.write_text(f"Host *\n  StrictHostKeyChecking no\n{config.read_text()}")
    with pytest.raises(HostKeyUnknown, match=r"through ProxyJump gate1,gate2: .*host key is known for"):
        true(Connection(resolve("far", config), reconnect_s=60, report=print))
    assert gates[0].known_hosts.read_text() == ""
    gates[0].trust()
    gates[1].rekey()
    with pytest.raises(HostKeyChanged, match="REMOTE HOST IDENTIFICATION HAS CHANGED"):
        true(Connection(resolve("far", config), reconnect_s=60, report=print))
    gates[1].stop()
    with pytest.raises(HostUnreachable, match="Connection refused"):
        true(Connection(resolve("far", config), reconnect_s=60, report=print))


def test_a_proxy_command_is_the_way(lab_sshd: SshServer, gates: tuple[SshServer, SshServer]) -> None:
    config = lab_sshd.client_config(lab_sshd.alias(), gates[0].alias("gate1"))
    log = lab_sshd.folder / "what it was given"
    command = f"echo '%n %% %r' > '{log}'; ssh -F {config} -W [%h]:%p gate1"
    config.write_text(f'Host lab\n  ProxyCommand sh -c "{command}"\n{config.read_text()}')
    connection = Connection(resolve("lab", config), reconnect_s=0, report=print)
    true(connection)
    connection.close()
    assert log.read_text() == f"lab % {lab_sshd.alias().user}\n" and "Accepted" in gates[0].log
    failing = write_client_config(lab_sshd.folder / "failing", [lab_sshd.alias()])
    failing.write_text(f"Host lab\n  ProxyCommand echo no way >&2; exit 1\n{failing.read_text()}")
    with pytest.raises(HostUnreachable, match="no way"):
        true(Connection(resolve("lab", failing), reconnect_s=60, report=print))


def test_a_lost_way_is_noticed_and_found_again(lab_sshd: SshServer, gates: tuple[SshServer, SshServer]) -> None:
    far = replace(lab_sshd.alias("far"), proxy_jump="gate1")
    with connected(lab_sshd, far, gates[0].alias("gate1")) as connection:
        true(connection)
        gates[0].end_sessions()
        true(connection)
    assert lab_sshd.log.count("Accepted publickey") == 2


def test_nothing_is_left_open_of_a_way(lab_sshd: SshServer, gates: tuple[SshServer, SshServer]) -> None:
    far = replace(lab_sshd.alias("far"), proxy_jump="gate1")
    before = psutil.Process().num_fds()
    with connected(lab_sshd, far, gates[0].alias("gate1")) as connection:
        true(connection)
    assert eventually(lambda: psutil.Process().num_fds() <= before, 5)


# The link is lost


def test_a_command_is_run_again_when_the_server_restarts_under_it(lab_sshd: SshServer, tmp_path: Path) -> None:
    said: list[str] = []
    runs = tmp_path / "runs"
    script = f"echo x >> '{runs}'; sleep 1; echo done"
    with connected(lab_sshd, report=said.append) as connection:
        true(connection)
        restart = threading.Timer(0.5, lab_sshd.restart)
        restart.start()
        result = connection.run(["sh", "-c", script], timeout_s=TIMEOUT_S, env={"WHICH": "again"})
        restart.join()
        # What the cut had left of the first was killed before the second began.
        assert result.stdout == "done\n" and runs.read_text() == "x\nx\n" and not marked("WHICH", "again")
    assert any("link lost; trying again for 30 s more" in line for line in said)
    assert any("link found again" in line for line in said)


def test_a_link_that_stays_away_is_given_up_in_time(lab_sshd: SshServer) -> None:
    said: list[str] = []
    with connected(lab_sshd, reconnect_s=1, report=said.append) as connection:
        true(connection)
        lab_sshd.end_sessions(server_too=True)
        began = time.monotonic()
        with pytest.raises(LinkLost, match=r"not found again within 1 s: .*Connection refused"):
            true(connection)
        assert 0.9 < time.monotonic() - began < 5 and 2 <= len(said) <= 5
        # Later calls try once, and find it when it is there.
        with pytest.raises(LinkLost):
            true(connection)
        assert time.monotonic() - began < 6
        lab_sshd.start()
        true(connection)


def test_patience_bounds_the_search_of_every_thread(lab_sshd: SshServer) -> None:
    with connected(lab_sshd, reconnect_s=300) as connection:
        true(connection)
        lab_sshd.end_sessions(server_too=True)
        searching = threading.Thread(target=works, args=(connection,))
        searching.start()
        time.sleep(0.2)
        began = time.monotonic()
        with connection.patience(0.5), pytest.raises(LinkLost):
            true(connection)
        assert time.monotonic() - began < 3
        # Afterwards it is looked for as long as ever.
        starting = threading.Timer(0.2, lab_sshd.start)
        starting.start()
        true(connection)
        searching.join()
        starting.join()


def test_a_link_on_which_nothing_can_be_sent_is_given_up(lab_sshd: SshServer) -> None:
    with connected(lab_sshd) as connection:
        stream = connection.stream(["cat"], print)
        link = connection.repeated(lambda link: link)
        # As while new keys are agreed upon with a host that does not do its part.
        link.clear_to_send_timeout = 0.3
        link.clear_to_send.clear()
        with pytest.raises(LinkLost, match="Key-exchange timed out"):
            stream.send("x")
        assert not link.is_active()
        true(connection)


def test_a_host_key_that_changes_meanwhile_ends_the_waiting(lab_sshd: SshServer) -> None:
    with connected(lab_sshd) as connection:
        true(connection)
        lab_sshd.rekey()
        with pytest.raises(HostKeyChanged):
            true(connection)


def test_a_host_that_falls_silent_is_noticed(lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(link, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(link, "LOOK_EVERY_S", 0.1)
    with connected(lab_sshd) as connection:
        true(connection)
        # A link on which nothing is sent stays.
        time.sleep(1.5)
        true(connection)
        assert lab_sshd.log.count("Accepted publickey") == 1
        for process in lab_sshd.sessions:
            process.suspend()
        began = time.monotonic()
        true(connection)
        assert 0.5 < time.monotonic() - began < 6


def test_a_silent_host_is_noticed_while_much_is_sent(lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(link, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(link, "LOOK_EVERY_S", 0.1)
    with connected(lab_sshd, reconnect_s=0) as connection:
        true(connection)
        for process in lab_sshd.sessions:
            process.suspend()
        began = time.monotonic()
        with pytest.raises(TargetError):
            connection.run(["cat"], stdin="x" * 50_000_000, timeout_s=30)
        assert time.monotonic() - began < 6


def test_two_threads_find_one_link_again(lab_sshd: SshServer) -> None:
    with connected(lab_sshd) as connection:
        true(connection)
        restart = threading.Timer(0.3, lab_sshd.restart)
        restart.start()
        results: list[str] = []

        def work(name: str) -> None:
            for _ in range(3):
                results.append(connection.run(["sh", "-c", f"sleep 0.2; echo {name}"], timeout_s=TIMEOUT_S).stdout)

        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        restart.join()
    assert sorted(results) == sorted(["a\n", "b\n", "c\n"] * 3)
    assert lab_sshd.log.count("Accepted publickey") == 2


def test_a_stream_ends_with_the_link(lab_sshd: SshServer) -> None:
    with connected(lab_sshd) as connection:
        lines: list[str] = []
        stream = connection.stream(["sh", "-c", "echo begun; cat"], lines.append)
        assert eventually(lambda: lines == ["begun"], 5)
        lab_sshd.end_sessions()
        assert eventually(lambda: stream.ended, 5)
        with pytest.raises(LinkLost):
            stream.send("x")
        result = stream.close()
        assert (result.exit_code, result.signal) == (-1, None)
        true(connection)


def test_closing_ends_the_search_for_a_lost_link(lab_sshd: SshServer) -> None:
    with connected(lab_sshd, reconnect_s=300) as connection:
        true(connection)
        lab_sshd.end_sessions(server_too=True)
        threading.Timer(1.0, connection.close).start()
        began = time.monotonic()
        with pytest.raises(LinkLost):
            true(connection)
        assert time.monotonic() - began < 5


def test_a_connection_that_is_closed_while_it_connects_has_no_link(
    lab_sshd: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[link.Link] = []

    def open_and_close(*arguments: Any) -> link.Link:
        opened.append(link.open_link(*arguments))
        there.close()
        return opened[-1]

    monkeypatch.setattr(connection, "open_link", open_and_close)
    with connected(lab_sshd) as there:
        with pytest.raises(TargetError, match="the connection was closed"):
            true(there)
        assert not opened[0].is_active()


# A host that grants little


def test_a_host_that_runs_nothing_else_says_so(lab_sshd: SshServer) -> None:
    configured(lab_sshd, "MaxSessions 1\n")
    with connected(lab_sshd) as connection:
        stream = connection.stream(["cat"], print)
        with pytest.raises(TargetError, match="MaxSessions"):
            true(connection)
        with pytest.raises(TargetError, match="MaxSessions"), connection.sftp():
            pass
        stream.close()
        assert eventually(lambda: works(connection), 5)


def works(connection: Connection) -> bool:
    try:
        true(connection)
    except TargetError:
        return False
    return True


def test_a_host_without_sftp_says_so(lab_sshd: SshServer) -> None:
    path = lab_sshd.folder / "sshd_config"
    path.write_text(path.read_text().replace("Subsystem sftp internal-sftp\n", ""))
    lab_sshd.restart()
    with connected(lab_sshd) as connection, pytest.raises(TargetError, match="offers no SFTP"), connection.sftp():
        pass


USER = """
import sys
from pathlib import Path
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.destination import resolve
connection = Connection(resolve("lab", Path(sys.argv[1])), reconnect_s=0, report=print)
connection.run(["true"], timeout_s=20)
print("connected", flush=True)
sys.stdin.readline()
try:
    connection.run(["true"], timeout_s=20)
except TargetError:
    print("lost")
"""


def hang_up(listener: socket.socket) -> None:
    """Close the first connection."""
    listener.accept()[0].close()


def test_nothing_is_printed_by_the_library(lab_sshd: SshServer) -> None:
    argv = [sys.executable, "-c", USER, str(lab_sshd.client_config())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **pipes) as user:
        assert user.stdout is not None and user.stdout.readline() == "connected\n"
        lab_sshd.end_sessions(server_too=True)
        with socket.create_server(("127.0.0.1", lab_sshd.port)) as hangs_up:
            threading.Thread(target=hang_up, args=(hangs_up,), daemon=True).start()
            assert user.communicate("\n", timeout=30) == ("lost\n", "")


def test_the_mark_of_a_command_is_the_only_thing_added_to_its_environment(shared: Connection) -> None:
    names = [line.partition("=")[0] for line in shared.run(["env"], timeout_s=TIMEOUT_S).stdout.splitlines()]
    assert MARK in names and "SSH_CONNECTION" in names and "PYTHONPATH" not in names
