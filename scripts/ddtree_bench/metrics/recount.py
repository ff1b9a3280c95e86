"""Tokens of answers counted again from their stored texts, where the server did not say how many there were."""

from __future__ import annotations

import pandas as pd

from ddtree_bench.load.tokenizer import Tokenizer


def recounted(requests: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
    """Return raw rows with the tokens of each event by a tokenizer; whatever was counted before is replaced.

    `requests` has the columns of requests_table.SCHEMA. Usage that the server sent still comes first (metrics.tokens).
    """
    return requests.assign(event_tokenized=[tokenizer.counts(list(texts)) for texts in requests["event_texts"]])
