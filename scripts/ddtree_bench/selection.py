"""The best of several candidates, chosen without the runs it is scored on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Selection:
    """The best candidate, chosen without the repeat it is scored on.

    Attributes
    ----------
    chosen : tuple of int
        Column chosen for each repeat from the other repeats.
    scores : tuple of float
        Value of that column in the repeat left out, in the unit of the values; NaN where that run failed.
    """

    chosen: tuple[int, ...]
    scores: tuple[float, ...]


def leave_one_repeat_out(values: ArrayLike) -> Selection:
    """Choose the best candidate on all repeats but one and score it on that one, for each repeat in turn.

    Choosing and scoring on the same runs shows a gain where there is none: 2.3 % for the best of seven equal
    budgets at three repeats.

    Parameters
    ----------
    values : array_like, shape (repeats, candidates)
        Positive, larger is better; NaN for a failed run. Candidates are ranked by their geometric mean over the
        repeats that all of them have.

    Returns
    -------
    Selection

    Raises
    ------
    ValueError
        Fewer than two repeats, or a repeat without which no candidate has a value.

    Examples
    --------
    >>> leave_one_repeat_out([[10.0, 11.0], [10.0, 12.0], [10.0, 8.0]])
    Selection(chosen=(0, 0, 1), scores=(10.0, 10.0, 8.0))
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or array.shape[0] < 2 or array.shape[1] < 1:
        raise ValueError(f"needs at least 2 repeats and 1 candidate, the shape is {array.shape}")
    logs = np.log(array)
    chosen, scores = [], []
    for repeat in range(array.shape[0]):
        others = np.delete(logs, repeat, axis=0)
        if not np.isfinite(others).any():
            raise ValueError(f"without repeat {repeat + 1} no candidate has a value")
        best = _best_on_common_rows(others)
        chosen.append(best)
        scores.append(float(array[repeat, best]))
    return Selection(tuple(chosen), tuple(scores))


def _best_on_common_rows(logs: NDArray[np.float64]) -> int:
    """Column with the highest mean over the rows that all candidates have.

    Means over different rows would compare the rows. While no row is common, the column with the fewest values goes.
    """
    present = np.isfinite(logs)
    eligible = np.flatnonzero(present.any(axis=0))
    while not (common := present[:, eligible].all(axis=1)).any():
        counts = present[:, eligible].sum(axis=0)
        eligible = np.delete(eligible, int(np.flatnonzero(counts == counts.min())[-1]))
    means = logs[np.ix_(common, eligible)].mean(axis=0)
    return int(eligible[int(np.argmax(means))])
