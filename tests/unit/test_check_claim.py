"""The check of the claim: every named comparison must clear its bar, and none may be missing."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from check_claim import verdicts


def ratio(baseline: str, low: float, **changes: Any) -> dict[str, Any]:
    fixed = {"named": True, "method": "DDTREE", "budget": 4, "server": "b4", "baseline": baseline, "n": 10}
    rest = {"pairing": "paired", "speedup": low + 0.1, "speedup_low": low, "speedup_high": low + 0.2}
    return fixed | rest | {"identical_share": 1.0 if baseline == "AR" else float("nan")} | changes


def cleared(*rows: dict[str, Any]) -> bool:
    return all(ok for ok, _ in verdicts(pd.DataFrame(rows)))


def test_both_bars_cleared() -> None:
    assert cleared(ratio("AR", 1.31), ratio("DFLASH", 1.01))


@pytest.mark.parametrize(
    "rows",
    [
        [ratio("AR", 1.30), ratio("DFLASH", 1.01)],
        [ratio("AR", 1.4), ratio("DFLASH", 1.0)],
        [ratio("AR", 1.4), ratio("AR", 1.5), ratio("DFLASH", 0.8)],
        [ratio("AR", 1.4)],
        [ratio("AR", 1.4, n=9), ratio("DFLASH", 1.1)],
        [ratio("AR", 1.4), ratio("DFLASH", 1.1, pairing="unpaired")],
        [ratio("AR", 1.4, named=False), ratio("DFLASH", 1.1)],
        [ratio("AR", 1.4, identical_share=0.99), ratio("DFLASH", 1.1)],
    ],
)
def test_anything_less_is_not_cleared(rows: list[dict[str, Any]]) -> None:
    assert not cleared(*rows)
