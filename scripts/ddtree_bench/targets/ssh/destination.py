"""Where an SSH name leads: what OpenSSH's own client makes of it and of the user's configuration."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree_bench.targets.ssh.failures import ConnectionFailed

CONNECT_TIMEOUT_S = 10.0
"""As long as a host may take to answer, unless less is configured: a lost link is to be found again in time."""

ASK_TIMEOUT_S = 10.0
ALIVE_EVERY_S = 5
ALIVE_COUNT = 3

TOKEN = re.compile(r"%(.)")
VARIABLE = re.compile(r"\$\{(\w+)\}")
NEXT_PATH = re.compile(r"\s+(?=[/~])")
"""Between two paths of one line; a path may hold spaces."""


@dataclass(frozen=True)
class Destination:
    """A host, and how to log in to it. All paths are absolute; `name` is what the user calls it."""

    name: str
    config_file: Path | None
    host: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    known_hosts: tuple[Path, ...]
    host_key_alias: str | None = None
    proxy_jump: str | None = None
    proxy_command: str | None = None
    revoked_host_keys: Path | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S

    @property
    def address(self) -> str:
        """[HOST]:PORT, as OpenSSH writes it."""
        return f"[{self.host}]:{self.port}"


def resolve(name: str, config_file: Path | None = None) -> Destination:
    """Return what OpenSSH makes of a name: an alias of its configuration, or [USER@]HOST.

    `config_file` is read instead of the user's own configuration. Raises ConnectionFailed where there is no OpenSSH
    client, or it does not understand the name or the file.
    """
    argv = ["ssh", "-G", *_config(config_file), "--", name]
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise ConnectionFailed(
            f"{name}: there is no OpenSSH client on this machine, and targets with the launcher ssh need one; "
            "install it (Debian, Ubuntu: openssh-client)"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConnectionFailed(
            f"{name}: `{shlex.join(argv)}` did not end within {ASK_TIMEOUT_S:.0f} s; look at `Match exec` in its "
            "configuration"
        ) from None
    if answer.returncode != 0:
        raise ConnectionFailed(
            f"{name}: OpenSSH does not understand it: {answer.stderr.strip()}; try `{shlex.join(argv)}`"
        )
    return _destination(name, config_file, answer.stdout)


def ssh_argv(destination: Destination, *options: str) -> list[str]:
    """Return the command line of OpenSSH's client for a process without a terminal; the host's name is to follow.

    `options` are written as in its configuration, such as "LogLevel=ERROR". The process asks nothing, adds no host
    key, shares no connection, and ends within 15 s when the link is dead.
    """
    own = (
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "UpdateHostKeys=no",
        "ControlMaster=no",
        "ControlPath=none",
        f"ConnectTimeout={destination.connect_timeout_s:.0f}",
        f"ServerAliveInterval={ALIVE_EVERY_S}",
        f"ServerAliveCountMax={ALIVE_COUNT}",
    )
    given = [word for option in (*own, *options) for word in ("-o", option)]
    return ["ssh", *_config(destination.config_file), *given]


def login_words(destination: Destination) -> str:
    """Return the command by which a user logs in to the destination."""
    return shlex.join(["ssh", *_config(destination.config_file), destination.name])


def expand_tokens(text: str, tokens: Mapping[str, str]) -> str:
    """Replace %x by `tokens["x"]`, as OpenSSH does; tokens that are not given stay."""
    return TOKEN.sub(lambda found: tokens.get(found[1], found[0]), text)


def tokens_of(destination: Destination) -> dict[str, str]:
    """Return the tokens of OpenSSH's configuration that are known for a destination."""
    here = socket.gethostname()
    return {
        "%": "%",
        "h": destination.host,
        "n": destination.name.rpartition("@")[2],
        "p": str(destination.port),
        "r": destination.user,
        "k": destination.host_key_alias or destination.host,
        "u": getpass.getuser(),
        "i": str(os.getuid()),
        "d": str(Path.home()),
        "l": here,
        "L": here.partition(".")[0],
    }


def _config(config_file: Path | None) -> list[str]:
    return [] if config_file is None else ["-F", str(config_file)]


def _destination(name: str, config_file: Path | None, answer: str) -> Destination:
    said: dict[str, list[str]] = {}
    for line in answer.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    bare = Destination(
        name=name,
        config_file=config_file,
        host=said["hostname"][0].strip("[]"),
        port=int(said["port"][0]),
        user=said["user"][0],
        identity_files=(),
        identities_only=_option(said, "identitiesonly") == "yes",
        identity_agent=None,
        known_hosts=(),
        host_key_alias=_option(said, "hostkeyalias"),
        proxy_jump=_option(said, "proxyjump"),
        proxy_command=_option(said, "proxycommand"),
        connect_timeout_s=min(float(_option(said, "connecttimeout") or 0) or CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S),
    )
    tokens = tokens_of(bare)
    revoked = _option(said, "revokedhostkeys")
    known = " ".join(filter(None, (_option(said, key) for key in ("userknownhostsfile", "globalknownhostsfile"))))
    return replace(
        bare,
        identity_files=tuple(_path(text, tokens) for text in said.get("identityfile", []) if text != "none"),
        identity_agent=_agent(said.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        known_hosts=tuple(_path(text, tokens) for text in NEXT_PATH.split(known) if text),
        revoked_host_keys=None if revoked is None else _path(revoked, tokens),
    )


def _option(said: Mapping[str, list[str]], key: str) -> str | None:
    value = said.get(key, ["none"])[0]
    return None if value == "none" else value


def _agent(given: str, tokens: Mapping[str, str]) -> str | None:
    """The socket of the agent to ask: the one that IdentityAgent gives, or names the variable of, if any."""
    if given == "none":
        return None
    if given == "SSH_AUTH_SOCK" or re.fullmatch(r"\$\w+", given):
        return os.environ.get(given.removeprefix("$"))
    return str(_path(given, tokens))


def _path(text: str, tokens: Mapping[str, str]) -> Path:
    text = VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), text)
    return Path(expand_tokens(text, tokens)).expanduser().absolute()
