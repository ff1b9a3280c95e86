"""What can be wrong with the way to a host: each error says what to do."""

from __future__ import annotations

from ddtree_bench.targets.launcher import TargetError, TargetLost


class ConnectionFailed(TargetError):
    """A host cannot be connected to."""


class HostUnreachable(ConnectionFailed):
    """Nothing answers as SSH there, or the way there is closed."""


class HostKeyUnknown(ConnectionFailed):
    """The host's key is in no known_hosts file."""


class HostKeyChanged(ConnectionFailed):
    """The host shows another key than known_hosts holds for it."""


class HostKeyRevoked(ConnectionFailed):
    """The host shows a key that known_hosts marks as revoked."""


class LoginRefused(ConnectionFailed):
    """The host accepts none of the keys."""


class LinkLost(TargetLost):
    """A connection that was up is gone."""
