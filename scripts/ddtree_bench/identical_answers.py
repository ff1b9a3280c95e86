"""Whether a configuration's answers are those of AR, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

JOINED = ("repeat", "index", "prompt_sha256")


@dataclass(frozen=True)
class Answers:
    """The requests table, and a function from a cell's plan key to its texts by the index of the request.

    Texts are large and are asked for only where digests differ.
    """

    requests: pd.DataFrame
    texts: Callable[[str], Mapping[int, str]]


def against_ar(answers: Answers, ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, Any]:
    """Return `prompts_compared`, `identical_share` and `first_divergence` of a configuration's cells and AR's.

    Requests are joined on repeat and prompt, and both must have succeeded. {} when there is no such pair, or when
    decoding was sampled: then equal texts are not to be expected.
    """
    if (ours["temperature"] > 0).any():
        return {}
    ok = answers.requests[answers.requests["status"] == "ok"]
    wanted = ["plan_key", *JOINED, "text_sha256"]
    left, right = (ok.loc[ok["plan_key"].isin(side["plan_key"]), wanted] for side in (ours, theirs))
    joined = left.merge(right, on=list(JOINED), suffixes=("", "_ar"))
    if joined.empty:
        return {}
    same = joined["text_sha256"] == joined["text_sha256_ar"]
    by_prompt = same.groupby(joined["prompt_sha256"]).all()
    places = [
        divergence(answers.texts(row["plan_key"])[row["index"]], answers.texts(row["plan_key_ar"])[row["index"]])
        for row in joined[~same].to_dict("records")
    ]
    return {
        "prompts_compared": len(by_prompt),
        "identical_share": float(by_prompt.mean()),
        "first_divergence": min(places, default=None),
    }


def divergence(text: str, other: str) -> int:
    """Index of the first character in which two different texts differ; the shorter's length when it begins the other.

    >>> divergence("to be", "to do"), divergence("to", "to be")
    (3, 2)
    """
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(text), len(other)))
