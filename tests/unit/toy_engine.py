"""A server with the embedded engine's command line, for tests: it streams words, and ends when it is told to."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from scripted_server import Script, ScriptedServer, prompt_of, words

WHOLE = {"usage": {"completion_tokens": 4}, "choices": [{"text": "x"}]}
DECODE = "[2026-11-30 10:00:21] Decode batch, #running-req: 1, #token: 5, cuda graph: True, gen throughput (token/s): 1"


def python(folder: Path, *options: str) -> str:
    """Write what stands for the interpreter of an environment and starts this server; returns its path."""
    path = folder / "toy-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {" ".join(options)} "$@"\n')
    path.chmod(0o755)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crash-at", type=int, default=0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--start-id", required=True)
    options, _ = parser.parse_known_args()
    measured: list[str] = []

    def answer(body: dict[str, Any]) -> Script:
        if not body.get("stream"):
            return Script([(0, json.dumps(WHOLE).encode())], content_type="application/json")
        if "measured" in prompt_of(body):
            measured.append(prompt_of(body))
            print(DECODE, flush=True)
        if len(measured) == options.crash_at and measured:
            print("CUDA out of memory", flush=True)
            os._exit(3)
        return words(2)

    print("loading weights", flush=True)
    time.sleep(options.load_s)
    told = {name: getattr(options, name) for name in ("served_model_name", "max_running_requests", "start_id")}
    with ScriptedServer(answer, info=told, port=options.port):
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
