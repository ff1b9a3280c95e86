"""The load client: what is sent (prompts, bodies), when (arrivals, cell), and what is recorded.

The record of one request is an `exchange`: raw bytes and stamps, taken by `reader` and `connection`. What they say is
worked out after the measurement by `wire` (HTTP), `sse` (events) and `requests_table` (rows).
"""
