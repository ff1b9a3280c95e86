"""A server of fixed pages, for tests of what is read from a server's own words."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SAMPLES = Path(__file__).parent / "sglang"


@dataclass
class Site:
    """Pages by path and what was asked; a page that is not there is a 404. `silent` paths get no answer."""

    pages: dict[str, bytes]
    silent: frozenset[str] = frozenset()
    base_url: str = ""
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    connections: int = 0


@contextmanager
def serving(pages: Mapping[str, bytes], silent: frozenset[str] = frozenset()) -> Iterator[Site]:
    site, closing = Site(dict(pages), silent), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            site.connections += 1
            super().setup()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            site.asked.append((self.path, dict(self.headers)))
            if path in site.silent:
                closing.wait(30)
                self.close_connection = True
                return
            body = site.pages.get(path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.base_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def sample(release: str, name: str) -> bytes:
    return (SAMPLES / release / name).read_bytes()
