"""The command line: serve, files, check-lossless, speed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

SERVED_NAMES = {"smollm2": "SmolLM2-135M-Instruct", "toy": "toy"}

log = logging.getLogger("ddtree_reference")


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options; option names are SGLang's where it has them."""
    parser = argparse.ArgumentParser(prog="ddtree_reference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="serve the model over HTTP")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=_port, default=30000)
    _add_model(serve)
    serve.add_argument("--served-model-name", help="the name requests use (default: the model's own)")
    serve.add_argument(
        "--speculative-algorithm", choices=["DFLASH", "DDTREE"], help="how tokens are drafted (default: not at all, AR)"
    )
    serve.add_argument(
        "--speculative-dflash-block-size", type=_positive, default=8, help="tokens of a block, the anchor included"
    )
    serve.add_argument(
        "--speculative-ddtree-budget", type=_positive, default=8, help="nodes of DDTREE's tree, root not counted"
    )
    serve.add_argument(
        "--speculative-ddtree-topk-cap", type=_positive, help="tokens DDTREE keeps for each depth (default: the budget)"
    )
    serve.add_argument(
        "--max-running-requests", type=_positive, default=8, help="requests decoded at a time; the others wait"
    )
    serve.add_argument(
        "--max-queued-requests", type=_positive, help="requests that may wait; more are refused (default: no limit)"
    )
    serve.add_argument(
        "--enable-prefix-cache", action="store_true", help="reuse the beginnings of earlier prompts (default: never)"
    )
    serve.add_argument("--round-log", type=Path, help="append a line of JSON for each round to this file")
    serve.add_argument(
        "--shutdown-grace", type=_seconds, default=1.0, help="seconds that running requests get to end on SIGTERM"
    )
    serve.add_argument("--start-id", default="", help="told back by /server_info (default: a random one)")
    serve.set_defaults(run=_serve)

    files = commands.add_parser("files", help="print the files of the model and the drafter as JSON")
    files.add_argument("--model", choices=sorted(SERVED_NAMES), default="smollm2")
    files.set_defaults(run=_files)

    check = commands.add_parser("check-lossless", help="compare DFLASH and DDTREE with AR, token by token")
    _add_model(check)
    check.add_argument("--prompts", type=Path, required=True, help='JSON lines {"id", "prompt"}')
    check.add_argument("--limit", type=_positive, help="use the first prompts only")
    check.add_argument("--tokens", type=_positive, default=64, help="tokens of an answer at most")
    check.add_argument(
        "--configs",
        nargs="+",
        metavar="CONFIG",
        help="DFLASH, DFLASH:BLOCK, DDTREE:BUDGET or DDTREE:BUDGET:CAP (default: all of the bar)",
    )
    check.add_argument(
        "--batch", type=_positive, default=1, help="prompts answered at a time; AR alone is what they are compared with"
    )
    check.add_argument("--output", type=Path, help="write the result as JSON")
    check.set_defaults(run=_check_lossless)

    speed = commands.add_parser("speed", help="measure decoding beside the memory's bandwidth")
    _add_model(speed)
    speed.add_argument("--prompts", type=Path, required=True, help='JSON lines {"id", "prompt"}')
    speed.add_argument("--limit", type=_positive, default=8, help="prompts of a configuration (at least C)")
    speed.add_argument("--tokens", type=_positive, default=64, help="tokens of an answer")
    speed.add_argument("--configs", nargs="+", default=["AR", "DFLASH", "DDTREE:4", "DDTREE:8", "DDTREE:16"])
    speed.add_argument("--concurrency", nargs="+", type=_positive, default=[1, 8])
    speed.add_argument("--repeats", type=_positive, default=5)
    speed.add_argument("--output", type=Path, help="write all repeats as JSON")
    speed.set_defaults(run=_speed)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    # pages of 2 MiB for weights and caches: with small ones a tenth of a round goes into looking up addresses.
    # torch reads the variable once, when it first takes memory
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    return status


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(SERVED_NAMES), default="smollm2")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of one tensor operation")
    parser.add_argument(
        "--numerics", choices=["auto", "mixed", "fp32"], default="auto", help="auto: fp32 if the self-test fails"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: 1 to 65535")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds from 0 on")
    return value


# The commands import what they need themselves: --help and files answer without loading torch.


def _serve(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    import torch

    from ddtree_reference import fault, server, startup
    from ddtree_reference.method import Method
    from ddtree_reference.round_log import RoundLog
    from ddtree_reference.service import Service
    from ddtree_reference.worker import Worker

    method = Method(
        algorithm=options.speculative_algorithm or "AR",
        block_size=options.speculative_dflash_block_size,
        budget=options.speculative_ddtree_budget,
        topk_cap=options.speculative_ddtree_topk_cap or options.speculative_ddtree_budget,
    )
    injected = fault.parse(os.environ.get(fault.VARIABLE), method)
    if injected is not None and injected.kind == "start":
        log.error("%s: refusing to start", fault.VARIABLE)
        return 3
    server.check_port(options.host, options.port)
    torch.set_num_threads(options.threads)
    opened = startup.open_engine(
        options.model, options.numerics, [method], options.max_running_requests, options.enable_prefix_cache
    )
    round_log = RoundLog(options.round_log) if options.round_log else None
    worker = Worker(
        opened.engine,
        opened.tokenizer,
        method,
        options.threads,
        max_queued_requests=options.max_queued_requests,
        fault=injected,
        round_log=round_log,
    )
    service = Service(
        opened=opened,
        worker=worker,
        served_model_name=options.served_model_name or SERVED_NAMES[options.model],
        max_running_requests=options.max_running_requests,
        threads=options.threads,
        start_id=options.start_id or uuid.uuid4().hex,
        load_seconds=round(time.perf_counter() - began, 3),
    )
    log.info(
        "%s with %s, %s numerics, self-test of %d rows %s, ready in %.1f s",
        service.served_model_name,
        method.algorithm,
        opened.engine.target.numerics,
        opened.self_test.rows,
        "passed" if opened.self_test.passed else f"with {opened.self_test.differing} differing",
        service.load_seconds,
    )
    server.run(service, options.host, options.port, options.shutdown_grace)
    return 0


def _files(options: argparse.Namespace) -> int:
    from ddtree_reference import assets

    print(json.dumps({name: str(path) for name, path in assets.weight_files(options.model).items()}))
    return 0


def _speed(options: argparse.Namespace) -> int:
    from ddtree_reference import speed

    return speed.main(options)


def _check_lossless(options: argparse.Namespace) -> int:
    from ddtree_reference import lossless

    return lossless.main(options)


if __name__ == "__main__":
    sys.exit(main())
