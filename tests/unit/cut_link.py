"""A launcher whose servers are reached over a link that can be cut, as those behind a port forward are."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddtree_bench.targets.launcher import LINK_LOST, Launch, LinkRecord, ServerState
from ddtree_bench.targets.local import LocalLauncher

ROUND_TRIPS_S = (0.003, 0.001, 0.002)


class CutLink:
    """Forwards connections to a port; cut, it ends for good, and `open` makes another way some seconds later.

    `passes` sees what clients send: for how many seconds the link is cut then, or 0.
    """

    def __init__(self, port_there: int, passes: Callable[[bytes], float]) -> None:
        self._port_there = port_there
        self._passes = passes
        self._open: list[socket.socket] = []
        self._back = 0.0
        self.cuts: list[float] = []
        self.open()

    def open(self) -> None:
        """Make a way to the port, at an address of its own."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether it is cut now."""
        return time.monotonic() < self._back

    def close(self) -> None:
        """End the way, and all that goes over it."""
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.clear()

    def _cut(self, seconds: float) -> None:
        self.cuts.append(time.monotonic())
        self._back = time.monotonic() + seconds
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._port_there))
            except OSError:
                here.close()
                continue
            self._open += [here, there]
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._forward, args=(source, sink, source is here), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, asked: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if asked and (seconds := self._passes(data)):
                    self._cut(seconds)
                    return
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class LinkedLauncher(LocalLauncher):
    """Servers of this machine behind a link, which is cut as `passes` says.

    `log` is where the servers' log is kept here, instead of where they write it. `ended` is what becomes of a server
    whose link was cut, where it is not left alone. `untold` sees what clients send, too: for how many seconds nothing
    is told of the server then, while the link holds.
    """

    def __init__(
        self,
        root: Path,
        passes: Callable[[bytes], float] = lambda _: 0.0,
        log: Path | None = None,
        ended: ServerState | None = None,
        untold: Callable[[bytes], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(root / "leases", "test")
        self._passes = passes
        self._untold = untold
        self._told_again = 0.0
        self._log = log
        self._ended = ended
        self.link: CutLink | None = None

    def start(self, launch: Launch) -> None:
        self.link = CutLink(launch.port, self._seen)
        super().start(launch)

    def stop(self) -> ServerState:
        if self.link is not None:
            self.link.close()
        return super().stop()

    def base_url(self) -> str:
        assert self.link is not None
        return self.link.base_url

    def state(self) -> ServerState:
        if time.monotonic() < self._told_again or (self.link is not None and self.link.lost):
            return ServerState(alive=True, reason=LINK_LOST)
        if self._ended is not None and self.link is not None and self.link.cuts:
            return self._ended
        return super().state()

    def fetch_log(self) -> Path | None:
        return super().fetch_log() if self._log is None else self._log

    def _seen(self, data: bytes) -> float:
        if seconds := self._untold(data):
            self._told_again = time.monotonic() + seconds
        return self._passes(data)

    @contextmanager
    def watched_link(self) -> Iterator[Callable[[], LinkRecord]]:
        since = time.monotonic()

        def record() -> LinkRecord:
            link = self.link
            if link is None or not any(at >= since for at in link.cuts):
                return LinkRecord(ROUND_TRIPS_S)
            while link.lost:
                time.sleep(0.05)
            link.open()
            return LinkRecord(ROUND_TRIPS_S, "the link was cut")

        yield record
