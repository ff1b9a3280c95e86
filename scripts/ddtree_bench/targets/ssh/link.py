"""One SSH connection: opened strictly, closed when the host is silent, aware of the signals that end commands."""

from __future__ import annotations

import logging
import threading
import time
from typing import cast

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_GLOBAL_REQUEST
from paramiko.packet import Packetizer

from ddtree_bench.targets.ssh.destination import Destination
from ddtree_bench.targets.ssh.host_keys import expected_algorithms, require_known
from ddtree_bench.targets.ssh.login import log_in
from ddtree_bench.targets.ssh.proxy import Way, open_way

PING_EVERY_S = 4.0
DEAD_AFTER_S = 12.0
LOOK_EVERY_S = 0.5

FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""Ciphers that check integrity on the way: several times as fast as a cipher and a digest, in paramiko."""

# Each lost link would be an error with a traceback on the terminal; what matters of it is in our own errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _Packets(Packetizer):
    """Packets, with the moment of time.monotonic() when the last one came."""

    heard = 0.0

    def read_message(self) -> tuple[int, paramiko.Message]:
        """Read a packet; the thread of the transport does."""
        message = super().read_message()
        self.heard = time.monotonic()
        return message


def _channel_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Take note of the signal that ended a channel's command; paramiko handles all else that a host may say of it."""
    begin = message.packet.tell()
    kind, _ = message.get_text(), message.get_boolean()
    if kind == "exit-signal":
        cast(Link, channel.get_transport()).signals[channel.chanid] = message.get_text()
        channel.status_event.set()
        return
    message.packet.seek(begin)
    channel._handle_request(message)  # type: ignore[attr-defined]


class Link(paramiko.Transport):
    """A connection that is closed when the host has been silent for DEAD_AFTER_S seconds, asked every few seconds.

    `signals` has, by channel, the name of the signal that ended its command, which paramiko itself lets pass.
    """

    _channel_handler_table = {  # noqa: RUF012  # as in paramiko
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _channel_request,
    }

    def __init__(self, way: Way) -> None:
        super().__init__(way.socket, packetizer_class=_Packets)
        self.signals: dict[int, str] = {}
        self._way = way

    def watch(self) -> None:
        """Begin to ask whether the host is there, and to close the connection when it is not."""
        self.packetizer.set_keepalive(PING_EVERY_S, self._ping)
        threading.Thread(target=self._watch, name="ssh link", daemon=True).start()

    def close(self) -> None:
        """Close the connection and the way to the host."""
        super().close()
        self._way.close()

    def _watch(self) -> None:
        # A thread of its own: the one that reads may be held up by a socket that takes no more.
        packets = cast(_Packets, self.packetizer)
        while self.is_active() and time.monotonic() - packets.heard < DEAD_AFTER_S:
            time.sleep(LOOK_EVERY_S)
        self.close()

    def _ping(self) -> None:
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(True)
        self._send_user_message(message)  # type: ignore[attr-defined]  # public requests wait for ever, or ask nothing


def open_link(destination: Destination, timeout_s: float) -> Link:
    """Connect to a host whose key is known, and log in.

    Raises HostUnreachable within about `timeout_s` seconds, HostKeyUnknown, HostKeyChanged, HostKeyRevoked or
    LoginRefused.
    """
    deadline = time.monotonic() + timeout_s
    way = open_way(destination, timeout_s)
    link = Link(way)
    try:
        _shake_hands(link, destination, max(1.0, deadline - time.monotonic()), way)
        require_known(destination, link.get_remote_server_key())
        log_in(link, destination)
    except BaseException:
        link.close()
        raise
    link.watch()
    return link


def _shake_hands(link: Link, destination: Destination, timeout_s: float, way: Way) -> None:
    link.banner_timeout = link.handshake_timeout = link.auth_timeout = timeout_s
    options = link.get_security_options()
    expected = expected_algorithms(destination)
    options.key_types = [name for name in expected if name in options.key_types] + [
        name for name in options.key_types if name not in expected
    ]
    options.ciphers = [*FAST_CIPHERS, *(name for name in options.ciphers if name not in FAST_CIPHERS)]
    try:
        link.start_client(timeout=timeout_s)
        if link.host_key is None:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise way.failure(destination, error) from None
