"""Whether a cell had the load that was asked for: at the client, on the server, and for long enough."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ddtree_bench.metrics.checked import Checked, Verdict
from ddtree_bench.metrics.throughput import STEADY_LEAST_SHARE, in_flight_at

LOAD_TOLERANCE = 0.05
"""Most that the requests on the server may differ from those in flight at the client, as a share of these."""

LEAST_SAMPLES = 3
"""Samples of the server's load from which it can be judged."""

LEAST_SAMPLES_AGAINST = 10
"""Samples from which it can be said that the server had another load: a few may all have met the same moment."""

LEAST_SPREAD = 0.5
"""Least standard deviation of a sample, requests: counts are whole, however alike a few of them look."""

CAPPED_SHARE = 0.01
"""Share of an open loop's requests that may have waited for a free place: more of them move a 99th percentile."""

CAPPED_LATE_S = 0.01
"""A request that was sent so much after its intended start, with all places taken, had waited for one of them."""

GROWTH = 0.5
"""Seconds that requests take longer with each second of arrivals, from which on the server is taken as overloaded: they
are (arrivals a second) / (ends a second) - 1."""


def delivered_load(of: Checked) -> Verdict:
    """The requests on the server (running and queued) against those in flight at the client, at the same moments.

    False when they are further apart than LOAD_TOLERANCE and than twice the standard error of the samples' mean, and
    when an open loop was none: when its requests waited for others to end.
    """
    if of.load.kind == "open" and (capped := _capped(of)):
        return False, capped
    found = _samples(of)
    if len(found) < LEAST_SAMPLES:
        return None, f"{len(found)} samples of the server's load; {LEAST_SAMPLES} are needed"
    server = (found["running"] + found["queued"]).to_numpy(dtype=float)
    client = in_flight_at(of.rows, found["time"].to_numpy(dtype=float))
    apart = server - client
    off, allowed = abs(float(apart.mean())), LOAD_TOLERANCE * float(client.mean())
    noise = 2 * max(float(apart.std(ddof=1)), LEAST_SPREAD) / len(apart) ** 0.5
    detail = f"in flight {client.mean():.2f}, on the server {server.mean():.2f}, mean of {len(found)} samples"
    if off <= allowed:
        return True, detail
    certain = off - noise > allowed and len(found) >= LEAST_SAMPLES_AGAINST
    return (False, detail) if certain else (None, f"{detail}: too uncertain to tell (± {noise:.2f}); measure longer")


def _capped(of: Checked) -> str | None:
    """What to know of an open loop whose most in flight kept requests from their start; None when it kept none."""
    known = [(row["intended_start"], row["t_send"]) for row in of.rows if not pd.isna(row["intended_start"])]
    intended, sent = np.array(known, dtype=float).reshape(-1, 2).T
    places = np.maximum(in_flight_at(of.rows, intended), in_flight_at(of.rows, sent))
    waits = (sent - intended)[(sent - intended > CAPPED_LATE_S) & (places >= of.load.concurrency)]
    if len(waits) <= CAPPED_SHARE * len(of.rows):
        return None
    return (
        f"{len(waits)} of {len(of.rows)} requests waited, up to {waits.max():.2f} s, until fewer than "
        f"{of.load.concurrency} were in flight: the load was no open loop; raise --concurrency or lower the rate"
    )


def admitted(of: Checked) -> Verdict:
    """As many requests as the load asks for ran at once on the server, and did not only wait in its queue."""
    if of.load.kind == "open":
        return None, "in an open loop requests may wait on the server"
    found = _samples(of)
    if len(found) < LEAST_SAMPLES:
        return None, f"{len(found)} samples of the server's load; {LEAST_SAMPLES} are needed"
    wanted = min(of.load.concurrency, int(of.cell["most_in_flight"] or 0))
    least = (1 - LOAD_TOLERANCE) * wanted
    full = found[found["running"] + found["queued"] >= least]
    if not len(full):
        return None, f"in none of {len(found)} samples were {wanted} requests on the server"
    running, queued = int(full["running"].max()), float(full["queued"].mean())
    detail = f"at most {running} of {wanted} ran at once, {queued:.1f} waited, mean of {len(full)} samples with all"
    if running < least and len(full) < LEAST_SAMPLES_AGAINST:
        # Requests that are prefilled in turn wait for a moment without the server being full.
        return None, f"{detail}; {LEAST_SAMPLES_AGAINST} are needed to say that it does not admit more"
    return running >= least, detail


def _samples(of: Checked) -> pd.DataFrame:
    """The samples with both counts that were taken while requests were in flight."""
    if not of.rows:
        return of.samples.iloc[:0]
    begun, ended = min(row["t_send"] for row in of.rows), max(row["t_end"] for row in of.rows)
    known = of.samples.dropna(subset=["running", "queued"])
    return known[known["time"].between(begun, ended)]


def steady_window(of: Checked) -> Verdict:
    """The steady window is there and holds half of the tokens, so that figures use it."""
    if of.cell["throughput_window"] is None:
        return None, "there is no throughput"
    share = of.cell["steady_token_share"]
    if share is not None:
        detail = f"it holds {float(share):.0%} of the tokens"
        enough = float(share) >= STEADY_LEAST_SHARE
        return enough, detail if enough else f"{detail}, {STEADY_LEAST_SHARE:.0%} are needed; {_remedy(of)}"
    if of.load.kind == "open":
        return False, f"the last request arrived before nine of ten would have ended; {_remedy(of)}"
    most = of.cell["most_in_flight"]
    return False, f"at most {most} of {of.load.concurrency} requests were in flight; {_remedy(of)}"


def _remedy(of: Checked) -> str:
    """What to do about a window that is too short."""
    growth = _growth(of)
    if growth is None or growth < GROWTH:
        return "send more requests"
    return (
        f"with each second of arrivals requests took {growth:.1f} s longer: the rate is above what the server "
        "completes, so there is no steady state; lower it"
    )


def _growth(of: Checked) -> float | None:
    """By how much the time from the intended start to the end grows with the intended start, s/s; None if unknown."""
    spans = [
        (float(row["intended_start"]), float(row["t_end"] - row["intended_start"]))
        for row in of.rows
        if row["status"] == "ok" and not pd.isna(row["intended_start"])
    ]
    if len({start for start, _ in spans}) < 3:
        return None
    starts, took = np.array(spans).T
    starts = starts - starts.mean()
    return float(starts @ took / (starts @ starts))
