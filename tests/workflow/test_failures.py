"""A cell that fails is a result: a row with its reason, every other cell measured, and measured again on request."""

from __future__ import annotations

import csv
import json

from clone import Clone

FAULT = "DDTREE_REFERENCE_FAULT"


def rows(clone: Clone) -> list[dict[str, str]]:
    with (clone.root / "results" / "tables" / "cells.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_crash_at_start(fresh: Clone) -> None:
    output = fresh.snakemake(env={FAULT: "DDTREE:4@start"})
    assert "warning: failed cell" in output
    assert "retry_failed=true" in output
    by_status = {row["server"]: row["status"] for row in rows(fresh)}
    assert by_status == {"toy-ar": "ok", "toy-dflash": "ok", "toy-ddtree-b4-k4": "failed"}
    failed = next(view for view in fresh.views().values() if view["status"] == "failed")
    assert "exit status 3" in failed["reason"]
    assert failed["log_tail"]
    report = (fresh.root / "results" / "report.html").read_text()
    assert "exit status 3" in report
    before = fresh.starts()
    assert "Nothing to be done" in fresh.snakemake()
    assert fresh.starts() == before
    assert "run-local-toy-ddtree-b4-k4-r1" in fresh.snakemake("-n", "--config", "retry_failed=true")
    assert any(view["status"] == "failed" for view in fresh.views().values())
    fresh.measure("--config", "retry_failed=true")
    assert [name.split("-r1")[0] for name in fresh.starts() - before] == ["toy-ddtree-b4-k4"]
    assert {row["status"] for row in rows(fresh)} == {"ok"}
    attempts = [r["attempt"] for r in fresh.records() if r["labels"]["server"] == "toy-ddtree-b4-k4"]
    assert attempts == [1, 2]
    again = fresh.starts()
    fresh.snakemake()
    assert fresh.starts() == again


def test_a_crash_in_the_middle_of_a_cell(fresh: Clone) -> None:
    prompts = (fresh.root / "config" / "prompts" / "heldout.jsonl").read_text().splitlines()
    in_first = next(p["prompt"] for p in map(json.loads, prompts) if p["block"] == 1)
    fresh.block["workload"] = ["first", "second"]
    fresh.measure(env={FAULT: f"DFLASH@prompt={in_first[:40]}"})
    by_cell = {(row["server"], row["workload"]): row["status"] for row in rows(fresh)}
    assert by_cell.pop(("toy-dflash", "first")) == "failed"
    assert set(by_cell.values()) == {"ok"}
    assert len(by_cell) == 5
    failed = next(record for record in fresh.records() if record["status"] == "failed")
    assert "exit status 3" in failed["reason"]


def test_a_changed_host_stops_the_run_and_says_how_to_accept_it(measured: Clone) -> None:
    targets = measured.root / "results" / "targets"
    for record in (targets / "local.json", targets / "local.accepted.json"):
        host = json.loads(record.read_text())
        host["cpu"]["model"] = "Another CPU"
        record.write_text(json.dumps(host))
    before = measured.starts()
    output = measured.measure(status=1)
    assert "Another CPU" in output and "snakemake probe" in output
    (targets / "local.json").unlink()
    assert "Another CPU" in measured.measure(status=1)
    assert measured.starts() == before
    measured.snakemake("probe")
    measured.block["budget"] = [4, 8]
    measured.measure()
    assert [name.split("-r1")[0] for name in measured.starts() - before] == ["toy-ddtree-b8-k8"]


def test_a_configuration_error_is_said_before_anything_starts(fresh: Clone) -> None:
    fresh.block["bugdet"] = [4]
    output = fresh.snakemake(status=1)
    assert "sweep[0].bugdet: unknown key; did you mean 'budget'?" in output
    assert not (fresh.root / "results").exists()
