"""What keeps the targets of a plan from being measured, found in seconds before anything long starts."""

from __future__ import annotations

from ddtree_bench.target_checks.checks import check_target, check_targets
from ddtree_bench.target_checks.findings import Finding, NotReady, findings_table, refuse_problems

__all__ = ["Finding", "NotReady", "check_target", "check_targets", "findings_table", "refuse_problems"]
