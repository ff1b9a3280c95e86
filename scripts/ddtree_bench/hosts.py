"""The record of each target in results/targets/: made once, held against the machine by every run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.external_endpoint import endpoint_now
from ddtree_bench.launchers import target_launcher
from ddtree_bench.plan import Server
from ddtree_bench.project import Project, Report
from ddtree_bench.records.files import read_json, write_json, write_json_keeping_time
from ddtree_bench.targets import host_facts
from ddtree_bench.targets.launcher import Launcher
from ddtree_bench.targets.probe import (
    ModelFiles,
    check_unchanged,
    differences,
    endpoint_record,
    host_key,
    knows_model,
    probe,
    recorded_name,
    with_full_digests,
)


def record_host(project: Project, target: str, report: Report, accept: bool = False) -> dict[str, Any]:
    """Probe a target with the models of all its servers and write its record.

    Raises HostChanged when it is not what was accepted before, unless `accept` says that it may have changed. The
    accepted record is kept beside the declared one, which Snakemake removes before it is made anew.
    """
    record: dict[str, Any] = {"models": {}}
    with closing(target_launcher(project, target, report)) as launcher:
        for engine, receipt in _receipts(project, launcher, target, report).items():
            probed = probe_now(project, launcher, target, engine, receipt, full=project.config.hash_models)
            record = {**record, **probed, "models": {**record["models"], **probed["models"]}}
    accepted = project.host_record(target).with_suffix(".accepted.json")
    if accepted.exists() and not accept:
        check_unchanged(read_json(accepted), record)
    write_json(accepted, record)
    _write_record(project.host_record(target), record)
    report(f"{target}: {_described(record)}")
    return record


def _receipts(project: Project, launcher: Launcher, target: str, report: Report) -> dict[str, dict[str, Any]]:
    """The receipt of each engine that the plan uses on a target; of an adopted one, that of what is there now."""
    engines = dict.fromkeys(server.engine for server in project.plan.servers if server.target == target)
    external = project.config.targets[target].launcher == "external"
    return {
        engine: confirm_deployment(project, launcher, target, engine, report)
        if external or project.adopted(target, engine) is not None
        else read_json(project.receipt(target, engine))
        for engine in engines
    }


def _described(record: Mapping[str, Any]) -> str:
    if "endpoint" in record:
        return f"{record['endpoint']['url']}, an external endpoint: nothing is known of its machine"
    return f"{record['cpu']['model']}, {record['cpu']['cores']} cores, {len(record['gpus'])} GPUs"


def probe_now(
    project: Project, launcher: Launcher, target: str, engine: str, receipt: Mapping[str, Any], full: bool = False
) -> dict[str, Any]:
    """Probe a target now with the models that an engine serves there; `full` digests all of their files."""
    servers = [s for s in project.plan.servers if (s.target, s.engine) == (target, engine)]
    if servers[0].external:
        known = endpoint_now(project, servers[0])
        names = {name for s in servers for name in (s.model.name, s.drafter.name if s.drafter else None) if name}
        return endpoint_record(engine, known, sorted(names), host_facts.facts({}))
    models = {
        (server.model, server.drafter): ModelFiles(
            server.model.name,
            server.drafter.name if server.drafter else None,
            **project.model_paths(server),
            model_revision=server.model.revision,
            drafter_revision=server.drafter.revision if server.drafter else None,
        )
        for server in servers
    }
    record = probe(launcher, receipt["python"], engine, list(models.values()), full)
    adopted = receipt.get("adopted")
    return {**record, "adopted": {engine: adopted["installation"]}} if adopted else record


def read_host(project: Project, target: str) -> dict[str, Any]:
    """Read the record of a target."""
    return read_json(project.host_record(target))


def knows_models(record: Mapping[str, Any], server: Server) -> bool:
    """Whether a record has the model files of a server."""
    return all(knows_model(record, name) for name in _recorded_names(server) if name is not None)


def _recorded_names(server: Server) -> tuple[str, str | None]:
    """How a host record names a server's model and its drafter."""
    drafter = server.drafter
    return (
        recorded_name(server.model.name, server.model.revision),
        None if drafter is None else recorded_name(drafter.name, drafter.revision),
    )


def server_host_key(record: Mapping[str, Any], server: Server) -> str:
    """Return the host key of a server on a recorded target, 64 hex digits."""
    installation = record.get("adopted", {}).get(server.engine)
    return host_key(record, *_recorded_names(server), installation)


def confirm_host(project: Project, launcher: Launcher, server: Server, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Probe the target of a server and hold it against its record, which gains the models that are new.

    Raises HostChanged when the machine or a model's content is not what was recorded.
    """
    saved = read_host(project, server.target)
    now = probe_now(project, launcher, server.target, server.engine, receipt)
    check_unchanged(saved, now)
    now = {**now, "models": with_full_digests(now["models"], saved["models"])}
    if not now["models"].keys() <= saved["models"].keys():
        record = {**saved, "models": {**saved["models"], **now["models"]}}
        _write_record(project.host_record(server.target), record)
    return now


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a target's record; the file keeps its time unless a host key made from it has changed.

    Snakemake looks at every run on the target again when the time moves, which is free, but not nothing.
    """
    if path.exists() and not differences(read_json(path), record):
        write_json_keeping_time(path, record)
    else:
        write_json(path, record)
