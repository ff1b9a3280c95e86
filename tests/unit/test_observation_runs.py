"""What the record of a cell says of the server's log lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages_server import sample
from scripted_server import Script, words
from test_external_runs import Endpoint, measured, project

from ddtree_bench.servers.log_lines import WHY_NOT_LOGGED
from ddtree_bench.targets.external import ExternalLauncher

LINES = sample("0.5.22", "decode_log.txt")


def test_the_record_of_a_cell_has_what_the_log_said_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(LINES)

    def answer(number: int) -> Script:
        if number == 1:
            log.write_bytes(LINES + LINES)
        return words(3)

    monkeypatch.setattr(ExternalLauncher, "fetch_log", lambda _: log)
    with Endpoint(answer) as endpoint:
        (attempt,) = measured(project(tmp_path / "p", endpoint.server.base_url))
    found = attempt.record["server_log"]
    assert found["missing"] == {}
    assert (found["values"]["decode_lines"], found["values"]["verify_width"]) == (2, 16)


def test_the_log_of_an_external_endpoint_is_not_to_be_had(tmp_path: Path) -> None:
    with Endpoint() as endpoint:
        (attempt,) = measured(project(tmp_path, endpoint.server.base_url))
    reason = "the server was not started here, so its log is not to be had"
    assert attempt.record["server_log"] == {"values": {}, "missing": dict.fromkeys(WHY_NOT_LOGGED, reason)}
