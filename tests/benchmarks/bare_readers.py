"""Clients that do nothing but send, read and stamp: what reading a stream costs at the least."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"
_PIECE = 65536
_SO_TIMESTAMPNS = 35
_ANCILLARY = socket.CMSG_SPACE(16)


def connect(url: str, users: int) -> list[socket.socket]:
    """Open a connection for each user."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    connections = [socket.create_connection((parts.hostname, parts.port)) for _ in range(users)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def read_with_epoll(url: str, requests: Sequence[Sequence[bytes]], stagger_s: float, record: bool = False) -> float:
    """One thread for all connections: send each user's requests one after another; return the CPU seconds it took.

    With `record` it asks for the kernel's stamp of every read and keeps this and the bytes, as a client has to that is
    to know what it read and how late.
    """
    connections = connect(url, len(requests))
    if record:
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    cpu = time.process_time()
    epoll, by_fd = select.epoll(), {connection.fileno(): connection for connection in connections}
    waiting = {
        connection.fileno(): list(reversed(texts)) for connection, texts in zip(connections, requests, strict=True)
    }
    stamps: list[float] = []
    kept: list[tuple[bytes, bytes]] = []
    starting, began, in_flight = list(reversed(connections)), time.perf_counter(), 0
    while starting or in_flight:
        due = began + (len(connections) - len(starting)) * stagger_s
        if starting and time.perf_counter() >= due:
            connection = starting.pop()
            connection.sendall(waiting[connection.fileno()].pop())
            epoll.register(connection.fileno(), select.EPOLLIN)
            in_flight += 1
            continue
        for fd, _ in epoll.poll(max(0.0, due - time.perf_counter()) if starting else None):
            if record:
                piece, ancillary, _, _ = by_fd[fd].recvmsg(_PIECE, _ANCILLARY)
                stamps.append(time.perf_counter())
                kept.append((piece, ancillary[0][2] if ancillary else b""))
            else:
                piece = by_fd[fd].recv(_PIECE)
                stamps.append(time.perf_counter())
            if piece.endswith(_END):
                if waiting[fd]:
                    by_fd[fd].sendall(waiting[fd].pop())
                else:
                    epoll.unregister(fd)
                    in_flight -= 1
    cpu = time.process_time() - cpu
    epoll.close()
    for connection in connections:
        connection.close()
    return cpu


def read_with_threads(url: str, requests: Sequence[Sequence[bytes]], stagger_s: float) -> float:
    """A thread for each connection, blocked in recv; return the CPU seconds of all."""
    connections = connect(url, len(requests))
    cpu = time.process_time()
    threads = [
        threading.Thread(target=_read_one, args=(connection, texts, number * stagger_s))
        for number, (connection, texts) in enumerate(zip(connections, requests, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu = time.process_time() - cpu
    for connection in connections:
        connection.close()
    return cpu


def _read_one(connection: socket.socket, requests: Sequence[bytes], delay_s: float) -> None:
    time.sleep(delay_s)
    stamps: list[float] = []
    for request in requests:
        connection.sendall(request)
        piece = b""
        while not piece.endswith(_END):
            piece = connection.recv(_PIECE)
            stamps.append(time.perf_counter())
