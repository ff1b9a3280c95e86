"""What the server itself said of its load during a cell."""

from __future__ import annotations

import pandas as pd


def server_load(samples: pd.DataFrame) -> dict[str, float | int | None]:
    """Return the means of the requests that ran and that waited, and the most that ran; `definitions.SERVER_LOAD`.

    `samples` has the columns of server_samples.COLUMNS, one row a second. The client's own stamps cannot show what
    these do: with 64 requests in flight on a server that admits 48, 16 only wait. A value is None without samples, or
    when the server does not tell.
    """
    running, queued = samples["running"].dropna(), samples["queued"].dropna()
    return {
        "server_running_mean": float(running.mean()) if len(running) else None,
        "server_running_max": int(running.max()) if len(running) else None,
        "server_queued_mean": float(queued.mean()) if len(queued) else None,
    }
