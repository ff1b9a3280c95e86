"""Finding processes and ports of this machine: by a mark in the environment, by session, by port."""

from __future__ import annotations

import os
import socket

import psutil

HOST = "127.0.0.1"


def marked(variable: str, value: str) -> list[psutil.Process]:
    """This user's living processes that were started with `variable` set to `value` in their environment."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ", "status", "uids"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and process.info["uids"] is not None
        and process.info["uids"].real == os.getuid()
        and (process.info["environ"] or {}).get(variable) == value
    ]


def in_session(session: int) -> list[psutil.Process]:
    """The living processes of a session (setsid), whose leader may be gone."""
    return [
        process
        for process in psutil.process_iter(["status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and _session(process.pid) == session
    ]


def terminate(processes: list[psutil.Process], timeout_s: float) -> None:
    """Send SIGTERM to processes and wait up to `timeout_s` seconds for their end."""
    for process in processes:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=timeout_s)


def kill(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kill processes and wait for their end; returns those that remain after `timeout_s` seconds."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    return left


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether a server could listen on the port; connections that linger from an ended one do not count."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """The process that listens on a port, in words; other users' processes cannot be seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.pid is None or not connection.laddr:
            continue
        if connection.laddr.port == port:
            process = psutil.Process(connection.pid)
            return f"process {process.pid} ({' '.join(process.cmdline()[:6])})"
    return "a process that this user cannot see"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1
