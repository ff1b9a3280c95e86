"""Answer a measuring process elsewhere: one JSON object a line on stdin, one a line on stdout, in order.

    {"op": "ping"}                                  {"monotonic": S, "time": S}
    {"op": "renew", "lease": PATH, "token": T}      {"renewed": BOOL, "why": WORDS or null}
    {"op": "holder", "lease": PATH}                 {"held": BOOL, "owner": {…} or null, "words": WORDS}
    {"op": "state", "unit": NAME, "scope": S}       {"show": what unit_state.parse_show reads, "took_s": S}
    {"op": "port", "port": N, "host": ADDRESS}      {"free": BOOL, "holder": WORDS}
    {"op": "free_port", "host": ADDRESS}            {"port": N}
    {"op": "gpu_memory"}                            {"used_mib": [MIB of each GPU] or null without nvidia-smi}

A request that cannot be understood or answered is answered with {"error": WORDS}. No answer takes more than a few
seconds. The agent ends with its input; nothing on the host needs it. Standard library only.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree_bench.targets import lease, lease_keeper
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.proc import port_holder
from ddtree_bench.targets.service_manager import systemctl
from ddtree_bench.targets.unit_state import SHOW

LOOPBACK = "127.0.0.1"
SMI_TIMEOUT_S = 6.0

SILENT_S = 600
"""An agent that is asked nothing for so long is at the end of a cut link, of which the host was not told."""

Request = Mapping[str, Any]
Answer = dict[str, Any]


def ping(_: Request) -> Answer:
    """Say what time it is here: CLOCK_MONOTONIC, and seconds since 1970."""
    return {"monotonic": time.monotonic(), "time": time.time()}


def renew(request: Request) -> Answer:
    """Renew a lease at its keeper."""
    if lease_keeper.renew(request["token"]):
        return {"renewed": True, "why": None}
    return {"renewed": False, "why": f"its keeper does not answer; the lease is held by {holder(request)['words']}"}


def holder(request: Request) -> Answer:
    """Say who holds a lease."""
    path = Path(request["lease"])
    if not lease.is_held(path):
        return {"held": False, "owner": None, "words": "nobody"}
    content = lease.read(path)
    owner = None if content is None else asdict(lease.Owner.read(content))
    return {"held": True, "owner": owner, "words": lease.describe_holder(path)}


def state(request: Request) -> Answer:
    """Show what systemd knows of a unit, and say how long that took here, s: a busy host is no slow link."""
    begun = time.monotonic()
    show = systemctl(request["scope"], *SHOW, request["unit"])
    return {"show": show, "took_s": time.monotonic() - begun}


def port(request: Request) -> Answer:
    """Say whether a server could listen on a port, and who does."""
    number, host = int(request["port"]), request.get("host", LOOPBACK)
    with socket.socket() as listener:
        # Connections that linger from an ended server do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _bind(listener, host, number)
        except OSError:
            return {"free": False, "holder": port_holder(number)}
    return {"free": True, "holder": "nobody"}


def free_port(request: Request) -> Answer:
    """Choose a port that nothing listens on now."""
    with socket.socket() as listener:
        _bind(listener, request.get("host", LOOPBACK), 0)
        return {"port": listener.getsockname()[1]}


def gpu_memory(_: Request) -> Answer:
    """Say how much memory of each GPU is in use."""
    if shutil.which("nvidia-smi") is None:
        return {"used_mib": None}
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    return {"used_mib": [int(used) for used in re.findall(r"^\d+$", result.stdout, re.MULTILINE)]}


OPERATIONS: Mapping[str, Callable[[Request], Answer]] = {
    operation.__name__: operation for operation in (ping, renew, holder, state, port, free_port, gpu_memory)
}


def answer(line: bytes) -> Answer:
    """The answer to one line."""
    try:
        request = json.loads(line)
        operation = OPERATIONS[request["op"]]
    except Exception:
        return {"error": f"{line[:200]!r} is no request; operations: {', '.join(OPERATIONS)}"}
    try:
        return operation(request)
    except TargetError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{operation.__name__}: {type(error).__name__}: {error}"}


def _bind(listener: socket.socket, host: str, number: int) -> None:
    """Bind a socket. Raises OSError when the port is in use, TargetError when that is not what is wrong."""
    try:
        listener.bind((host, number))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise TargetError(
            f"the target's host {host} cannot be listened on, port {number}: {error.strerror}; set the target's host "
            "to an address of its own and its port to one that this login may use"
        ) from error


def main() -> None:
    """Answer until the input ends."""
    signal.alarm(SILENT_S)
    with suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            signal.alarm(SILENT_S)
            print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
