"""What was measured, computed from the raw rows of a cell: by request, by cell, and of the speculation.

Every function is pure. A value that cannot be known is None (or NaN in a frame), never a stand-in.
"""

from ddtree_bench.metrics.cells import acceptance_by_depth, cell_metrics
from ddtree_bench.metrics.document import document
from ddtree_bench.metrics.machine import machine
from ddtree_bench.metrics.parsed import parse
from ddtree_bench.metrics.requests import request_metrics
from ddtree_bench.metrics.server_load import server_load
from ddtree_bench.metrics.slos import Slos

__all__ = [
    "Slos",
    "acceptance_by_depth",
    "cell_metrics",
    "document",
    "machine",
    "parse",
    "request_metrics",
    "server_load",
]
