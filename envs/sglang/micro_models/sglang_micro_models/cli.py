"""The command line: train one micro model, or find it in the cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_micro_models import identity


def main(argv: list[str] | None = None) -> int:
    """Train (or find) a model and print its folder; 2 for a wrong option."""
    args = _parser().parse_args(argv)
    wanted = identity.Identity(args.kind, args.block_size, args.seed)
    try:
        identity.check(wanted.kind, wanted.block_size)
        if args.digest:
            print(identity.digest(*wanted))
            return 0
        # Here, because torch and transformers take seconds to load and a digest needs neither.
        from sglang_micro_models import cache

        print(cache.ensure(args.out, wanted))
    except (ValueError, FileExistsError) as error:
        print(f"sglang_micro_models: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_micro_models",
        description="Train a tiny target and its DFlash drafter, or find them in the cache, and print their folder.",
    )
    parser.add_argument("--kind", required=True, help=f"one of {', '.join(identity.KINDS)}")
    parser.add_argument("--out", type=Path, default=Path("micro-models"), help="the cache (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=identity.DEFAULT_BLOCK_SIZE, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=identity.DEFAULT_SEED, help="default: %(default)s")
    parser.add_argument("--digest", action="store_true", help="only print the digest that names the model")
    return parser
