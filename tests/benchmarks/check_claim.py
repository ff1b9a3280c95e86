"""Hold what config/claim.yaml measured against the bars: DDTREE at budget 4 over AR and over DFLASH.

    DDTREE_BENCH_STORE=results/claim snakemake --configfile config/claim.yaml
    python tests/benchmarks/check_claim.py

Ends with status 1 unless the lower bound of the 95 % interval over paired server starts clears both and every answer is
AR's. The store is empty at first, so that all starts belong to one pass and their number was fixed beforehand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from ddtree_bench.tables import read_tables

BARS = {"AR": 1.30, "DFLASH": 1.00}
"""Baseline: what the lower bound of the speed-up must exceed."""

PAIRS = 10
BUDGET = 4


def verdicts(ratios: pd.DataFrame) -> list[tuple[bool, str]]:
    """Return for each comparison that was named whether it clears its bar, and a line that says so."""
    named = ratios[ratios["named"].fillna(False) & (ratios["method"] == "DDTREE") & (ratios["budget"] == BUDGET)]
    found = []
    for baseline, bar in BARS.items():
        rows = named[named["baseline"] == baseline]
        if rows.empty:
            found.append((False, f"DDTREE at budget {BUDGET} over {baseline}: no comparison was named and measured"))
        for row in rows.itertuples():
            same = baseline != "AR" or row.identical_share == 1
            cleared = bool(row.n >= PAIRS and row.pairing == "paired" and row.speedup_low > bar and same)
            found.append(
                (
                    cleared,
                    f"{row.server} over {baseline}: {row.speedup:.3f} [{row.speedup_low:.3f}, {row.speedup_high:.3f}], "
                    f"n = {row.n} {row.pairing} starts, bar {bar:.2f}, outputs {'' if same else 'NOT '}those of AR: "
                    f"{'cleared' if cleared else 'NOT cleared'}",
                )
            )
    return found


def main() -> int:
    """Print each comparison and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("results/tables"), help="folder of the tables")
    found = verdicts(read_tables(parser.parse_args().tables)["speedup"])
    print("\n".join(line for _, line in found))
    return 0 if all(cleared for cleared, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
