"""Hold what config/claim.yaml measured against the bars: DDTREE at budget 8 over AR and over DFLASH.

    snakemake --configfile config/claim.yaml
    python tests/benchmarks/check_claim.py

Ends with status 1 unless the lower bound of the 95 % interval over paired server starts clears both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddtree_bench.tables import read_tables

BARS = {"AR": 1.10, "DFLASH": 1.00}
"""Baseline: what the lower bound of the speed-up must exceed."""

PAIRS = 10


def main() -> int:
    """Print each comparison and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("results/tables"), help="folder of the tables")
    ratios = read_tables(parser.parse_args().tables)["speedup"]
    named = ratios[ratios["named"].fillna(False) & (ratios["method"] == "DDTREE") & (ratios["budget"] == 8)]
    cleared = 0
    for baseline, bar in BARS.items():
        for row in named[named["baseline"] == baseline].itertuples():
            enough = row.n >= PAIRS and row.pairing == "paired" and row.speedup_low > bar
            cleared += enough
            print(
                f"{row.server} over {baseline}: {row.speedup:.3f} [{row.speedup_low:.3f}, {row.speedup_high:.3f}], "
                f"n = {row.n} {row.pairing} starts, bar {bar:.2f}: {'cleared' if enough else 'NOT cleared'}"
            )
    return 0 if cleared == len(BARS) else 1


if __name__ == "__main__":
    sys.exit(main())
