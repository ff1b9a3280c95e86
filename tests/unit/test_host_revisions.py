"""A micro model's new revision is another model in the target's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import hosts
from ddtree_bench.project import open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.targets.probe import HostChanged

MACHINE: dict[str, Any] = {"cpu": {"model": "c", "cores": 1}, "gpus": [], "driver": None}


@pytest.mark.parametrize(("revision", "changed"), [("2", False), ("1", True)])
def test_content_is_compared_within_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str, changed: bool
) -> None:
    root = write_project(tmp_path)

    def opened(model_revision: str) -> Any:
        config = tree()
        config["models"]["toy"]["revision"] = model_revision
        return open_project(config, root, root / "results")

    def probed(content: str) -> Any:
        def probe(_launcher: Any, _python: str, _engine: str, models: Any, _full: bool) -> dict[str, Any]:
            names = {f"{m.model}@{m.model_revision}" for m in models}
            names |= {f"{m.drafter}@{m.drafter_revision}" for m in models if m.drafter}
            return {**MACHINE, "models": {name: {"fingerprint": content * 64, "path": "/m"} for name in names}}

        return probe

    old, new = opened("1"), opened(revision)
    receipt = {"python": "python"}
    monkeypatch.setattr(hosts, "probe", probed("a"))
    first = hosts.probe_now(old, None, "local", "reference", receipt)  # type: ignore[arg-type]
    first["models"] = {name: facts for name, facts in first["models"].items() if name.startswith("toy@")}
    write_json(old.host_record("local"), first)
    monkeypatch.setattr(hosts, "probe", probed("b"))
    server = new.plan.servers[0]
    if changed:
        with pytest.raises(HostChanged):
            hosts.confirm_host(new, None, server, receipt)  # type: ignore[arg-type]
        return
    now = hosts.confirm_host(new, None, server, receipt)  # type: ignore[arg-type]
    saved = hosts.read_host(new, "local")
    assert hosts.knows_models(saved, server)
    assert hosts.server_host_key(saved, server) == hosts.server_host_key(now, server)
    assert hosts.server_host_key(saved, old.plan.servers[0]) != hosts.server_host_key(saved, server)
