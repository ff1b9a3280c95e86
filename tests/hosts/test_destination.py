"""What OpenSSH makes of names and of its users' configurations."""

from __future__ import annotations

import getpass
import os
import subprocess
from pathlib import Path

import pytest

from ddtree_bench.targets.ssh.destination import resolve, ssh_argv
from ddtree_bench.targets.ssh.failures import ConnectionFailed


def config(folder: Path, text: str) -> Path:
    path = folder / "ssh config"
    path.write_text(text)
    return path


def test_a_host_without_configuration(tmp_path: Path) -> None:
    there = resolve("bob@gpu.example", config(tmp_path, ""))
    assert (there.host, there.port, there.user) == ("gpu.example", 22, "bob")
    assert Path.home() / ".ssh/id_ed25519" in there.identity_files
    assert there.known_hosts[0] == Path.home() / ".ssh/known_hosts"
    assert not there.identities_only and there.proxy_jump is None and there.connect_timeout_s == 10
    assert resolve("gpu.example", config(tmp_path, "")).user == getpass.getuser()


def test_everything_that_a_user_configures(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host ct200\n  Port 2222\n  HostKeyAlias rack-7\n")
    path = config(
        tmp_path,
        f"""\
Include {tmp_path}/more
Match originalhost ct200
  HostName 10.0.0.5
Host ct200
  User bench
  IdentityFile "~/keys/of %h"
  IdentityFile ~/.ssh/%r_%n
  IdentitiesOnly yes
  IdentityAgent "${{HOME}}/agent %p"
  UserKnownHostsFile "/etc/known hosts" ~/hosts.%h
  GlobalKnownHostsFile none
  RevokedHostKeys ~/revoked.%h
  ProxyJump a@gate:2201,inner
  ConnectTimeout 3
""",
    )
    there = resolve("ct200", path)
    assert (there.name, there.host, there.port, there.user) == ("ct200", "10.0.0.5", 2222, "bench")
    assert there.identity_files == (Path.home() / "keys/of 10.0.0.5", Path.home() / ".ssh/bench_ct200")
    assert there.identities_only and there.identity_agent == f"{Path.home()}/agent 2222"
    assert there.known_hosts == (Path("/etc/known hosts"), Path.home() / "hosts.10.0.0.5")
    assert there.host_key_alias == "rack-7" and there.proxy_jump == "a@gate:2201,inner"
    assert there.revoked_host_keys == Path.home() / "revoked.10.0.0.5"
    assert there.connect_timeout_s == 3 and there.config_file == path


@pytest.mark.parametrize("configured", ["60", "none", "0"])
def test_a_host_is_not_waited_for_longer_than_a_lost_link_may_be(tmp_path: Path, configured: str) -> None:
    assert resolve("x", config(tmp_path, f"ConnectTimeout {configured}\n")).connect_timeout_s == 10


def test_a_proxy_command_keeps_its_tokens(tmp_path: Path) -> None:
    there = resolve("x", config(tmp_path, 'Host x\n  ProxyCommand nc -X "5 %%" %h %p\n'))
    assert there.proxy_command == 'nc -X "5 %%" %h %p' and there.proxy_jump is None


def test_the_agent_is_the_environments_unless_another_or_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("MY_AGENT", "/run/mine")
    path = config(tmp_path, "Host none\n  IdentityAgent none\nHost mine\n  IdentityAgent $MY_AGENT\n")
    assert resolve("any", path).identity_agent == "/run/agent"
    assert resolve("none", path).identity_agent is None
    assert resolve("mine", path).identity_agent == "/run/mine"
    monkeypatch.delenv("SSH_AUTH_SOCK")
    assert resolve("any", path).identity_agent is None


def test_addresses_of_ipv6(tmp_path: Path) -> None:
    there = resolve("[::1]", config(tmp_path, ""))
    assert there.host == "::1" and there.address == "[::1]:22"


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("Prot 22\n", "x", "Bad configuration option: prot"),
        ("", "-oProxyCommand=touch x", "hostname contains invalid characters"),
        ("", "a;touch x", "hostname contains invalid characters"),
    ],
)
def test_what_openssh_refuses_is_refused_with_its_words(tmp_path: Path, text: str, name: str, words: str) -> None:
    with pytest.raises(ConnectionFailed, match=words):
        resolve(name, config(tmp_path, text))
    assert not Path("x").exists()


def test_without_an_openssh_client_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectionFailed, match=r"install it \(Debian, Ubuntu: openssh-client\)"):
        resolve("x")


def test_clients_of_ours_ask_nothing_and_accept_no_key_whatever_the_configuration_says(tmp_path: Path) -> None:
    lax = config(
        tmp_path,
        "Host *\n  StrictHostKeyChecking no\n  BatchMode no\n  UpdateHostKeys yes\n  ControlMaster auto\n"
        f"  ControlPath {tmp_path}/%C\n  ServerAliveInterval 0\n",
    )
    argv = [*ssh_argv(resolve("x", lax), "LogLevel=INFO"), "-G", "x"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, env=os.environ).stdout.splitlines()
    expected = {"stricthostkeychecking true", "batchmode yes", "updatehostkeys false", "controlmaster false"}
    assert expected <= set(said) and {"serveraliveinterval 5", "serveralivecountmax 3", "loglevel INFO"} <= set(said)
    assert not any(line.startswith("controlpath") for line in said)
