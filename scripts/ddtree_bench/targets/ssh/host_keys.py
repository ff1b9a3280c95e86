"""Whether a host is who it claims to be: its key against the known_hosts files, which are never written here."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paramiko import PKey

from ddtree_bench.targets.ssh.destination import Destination, login_words
from ddtree_bench.targets.ssh.failures import ConnectionFailed, HostKeyChanged, HostKeyRevoked, HostKeyUnknown

SSH_PORT = 22
ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""How a key of a type may sign, where that is not called as the type."""

KRL = b"SSHKRL\n\0"
"""How a key revocation list begins, which `ssh-keygen -k` writes."""


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file. `marker` is None, @revoked or @cert-authority."""

    marker: str | None
    key_type: str
    blob: bytes
    file: Path
    line: int

    @property
    def fingerprint(self) -> str:
        """As OpenSSH prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.key_type} {self.fingerprint} ({self.file}:{self.line})"


def names(destination: Destination) -> tuple[str, ...]:
    """Return the names under which a host's key may be known, the one that it should be known under first."""
    if destination.host_key_alias is not None:
        return (destination.host_key_alias.lower(),)
    host = destination.host.lower()
    return (host,) if destination.port == SSH_PORT else (f"[{host}]:{destination.port}", host)


def known_keys(destination: Destination, name: str) -> list[KnownKey]:
    """Return the lines of all known_hosts files that hold for a host's name."""
    return [key for file in destination.known_hosts for key in _lines_for(file, name)]


def expected_algorithms(destination: Destination) -> list[str]:
    """Return how the keys that are known for a host sign: what the host is to be asked for first.

    Of several keys a host would else show one that happens not to be known.
    """
    types = [key.key_type for key in _accepted(known_keys(destination, name) for name in names(destination))]
    return list(dict.fromkeys(algorithm for kind in types for algorithm in ALGORITHMS.get(kind, (kind,))))


def require_known(destination: Destination, key: PKey) -> None:
    """See that the key which a host has shown is known for it.

    Raises HostKeyRevoked, HostKeyChanged or HostKeyUnknown, each with the key's fingerprint and the remedy, and
    ConnectionFailed when the file of revoked keys cannot be read.
    """
    by_name = {name: known_keys(destination, name) for name in names(destination)}
    blob = key.asbytes()
    revoked = [known for keys in by_name.values() for known in keys if known.marker == "@revoked"]
    if destination.revoked_host_keys is not None:
        revoked += _revoked_keys(destination, destination.revoked_host_keys)
    by = next((known for known in revoked if known.blob == blob), None)
    if by is not None:
        raise HostKeyRevoked(
            f"{destination.name}: the key of {destination.address} is revoked by {by}; the host must get a new key "
            "before anything is sent to it"
        )
    if any(known.blob == blob for known in _accepted(by_name.values())):
        return
    name = names(destination)[0]
    changed = [known for known in by_name[name] if known.marker is None and known.key_type == key.get_name()]
    if changed:
        raise _changed(destination, name, key, changed[0])
    raise _unknown(destination, key, by_name[name])


def _accepted(by_name: Iterable[list[KnownKey]]) -> list[KnownKey]:
    """The keys that hold: as with OpenSSH those of the plain name only where none is known for that with the port."""
    plain = ([known for known in keys if known.marker is None] for keys in by_name)
    return next(filter(None, plain), [])


def _revoked_keys(destination: Destination, file: Path) -> list[KnownKey]:
    """The keys of a text file of RevokedHostKeys; as with OpenSSH, no host is trusted when it cannot be read."""
    where = f"{destination.name}: RevokedHostKeys {file}"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConnectionFailed(f"{where}: cannot be read ({error.strerror}), so that no host key is accepted") from None
    if content.startswith(KRL):
        raise ConnectionFailed(
            f"{where}: is a key revocation list (KRL), which is not read here, so that no host key is accepted; give a "
            "text file with one public key a line"
        )
    found = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        blob = _blob(words[1]) if len(words) > 1 else None
        if blob is None:
            raise ConnectionFailed(f"{where}:{number}: is no public key, so that no host key is accepted; mend it")
        found.append(KnownKey("@revoked", words[0], blob, file, number))
    return found


def _changed(destination: Destination, name: str, key: PKey, known: KnownKey) -> HostKeyChanged:
    forget = shlex.join(["ssh-keygen", "-f", str(known.file), "-R", name])
    return HostKeyChanged(
        f"{destination.name}: {destination.address} shows the key {key.get_name()} {key.fingerprint}, but known is "
        f"{known}. Somebody may be in between. If the host was installed anew, and {key.fingerprint} is what "
        f"`ssh-keygen -lf` says of its key on its console, forget the old key with `{forget}` and accept the new one "
        f"with `{login_words(destination)}`"
    )


def _unknown(destination: Destination, key: PKey, others: list[KnownKey]) -> HostKeyUnknown:
    files = ", ".join(map(str, destination.known_hosts)) or "no file: UserKnownHostsFile is none"
    authorities = [str(other) for other in others if other.marker == "@cert-authority"]
    plain = [str(other) for other in others if other.marker is None]
    if authorities:
        more = f"; the certificate authority {authorities[0]} vouches for it, but only plain keys are checked here"
    elif plain:
        more = f"; known are keys of other types: {', '.join(plain)}"
    else:
        more = ""
    return HostKeyUnknown(
        f"{destination.name}: the key of {destination.address} is not known ({files}){more}. Run "
        f"`{login_words(destination)}` once, compare the fingerprint that it shows with {key.get_name()} "
        f"{key.fingerprint}, which this host has shown now, and with the host's own, and answer yes"
    )


def _lines_for(file: Path, name: str) -> Iterator[KnownKey]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if len(words) < 3 or words[0].startswith("#") or not _holds(words[0], name):
            continue
        blob = _blob(words[2])
        if blob is not None:
            yield KnownKey(marker, words[1], blob, file, number)


def _blob(text: str) -> bytes | None:
    """What base64 stands for; None for text that is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _holds(patterns: str, name: str) -> bool:
    """Whether a line with these patterns, or with a hashed name, is about a host."""
    if patterns.startswith("|1|"):
        salt, _, digest = patterns.removeprefix("|1|").partition("|")
        key = _blob(salt)
        return key is not None and hmac.new(key, name.encode(), hashlib.sha1).digest() == _blob(digest)
    found = False
    for pattern in patterns.lower().split(","):
        expression = re.escape(pattern.removeprefix("!")).replace(r"\*", ".*").replace(r"\?", ".")
        if re.fullmatch(expression, name):
            if pattern.startswith("!"):
                return False
            found = True
    return found
