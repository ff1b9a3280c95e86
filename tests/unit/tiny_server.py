"""A server for tests of launchers and readiness: the standard library, and the calls that readiness makes.

It can misbehave on demand: end at once, take its time, ignore SIGTERM, start a child in a session of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    info: ClassVar[dict[str, Any]] = {}
    tokens = 1

    def do_GET(self) -> None:
        self._answer(self.info if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer({"usage": {"completion_tokens": self.tokens}, "choices": [{"text": "x"}]})

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--info", type=json.loads, default={})
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child-pid-file", type=Path)
    parser.add_argument("--environment-file", type=Path)
    options = parser.parse_args()

    print("loading weights", flush=True)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child_pid_file:
        child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
        options.child_pid_file.write_text(str(child.pid))
    if options.environment_file:
        options.environment_file.write_text(json.dumps(dict(os.environ)))
    time.sleep(options.load_s)
    if options.exit is not None:
        print("out of memory while capturing graphs", file=sys.stderr, flush=True)
        sys.exit(options.exit)
    Handler.info = options.info
    Handler.tokens = options.tokens
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
