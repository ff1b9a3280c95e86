"""The report: one self-contained HTML page."""

from __future__ import annotations

from ddtree_bench.report.page import ReportContext, write_report

__all__ = ["ReportContext", "write_report"]
