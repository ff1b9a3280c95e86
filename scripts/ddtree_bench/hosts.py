"""The record of each target in results/targets/: made once, held against the machine by every run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.config.checks import SECRET_KEY
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.plan import EXTERNAL, Server
from ddtree_bench.project import Project, Report
from ddtree_bench.records.files import write_json
from ddtree_bench.servers import endpoint
from ddtree_bench.servers.endpoint import Endpoint
from ddtree_bench.targets import host_facts
from ddtree_bench.targets.external import plain_url
from ddtree_bench.targets.launcher import Launcher, TargetError, create_launcher
from ddtree_bench.targets.probe import (
    ModelFiles,
    check_unchanged,
    differences,
    endpoint_record,
    host_key,
    knows_model,
    probe,
    recorded_name,
)


def target_launcher(project: Project, target: str) -> Launcher:
    """Return the launcher of a target. Raises TargetError for a kind that is not there."""
    spec = project.config.targets[target]
    directory = Path(spec.lease_dir) if spec.lease_dir else None
    return create_launcher(spec.launcher, lease_directory=directory, url=spec.url)


def external_endpoint(project: Project, server: Server) -> Endpoint:
    """Return where an external server is reached and as what. Raises TargetError when its key is not at hand."""
    spec = project.config.targets[server.target]
    headers = {}
    if spec.api_key_env is not None:
        if not os.environ.get(spec.api_key_env):
            raise TargetError(
                f"targets.{server.target}.api_key_env: the variable {spec.api_key_env} is not set; "
                "set it to the key of the endpoint, or take api_key_env out"
            )
        headers["Authorization"] = f"Bearer {os.environ[spec.api_key_env]}"
    return Endpoint(plain_url(spec.url or ""), spec.served_model or server.model.name, headers)


def record_host(project: Project, target: str, report: Report, accept: bool = False) -> dict[str, Any]:
    """Probe a target with the models of all its servers and write its record.

    Raises HostChanged when it is not what was accepted before, unless `accept` says that it may have changed. The
    accepted record is kept beside the declared one, which Snakemake removes before it is made anew.
    """
    launcher = target_launcher(project, target)
    record: dict[str, Any] = {"models": {}}
    for engine, receipt in _receipts(project, launcher, target, report).items():
        probed = probe_now(project, launcher, target, engine, receipt)
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


def external_receipt(engine: str) -> dict[str, Any]:
    """Return what stands for the receipt of a deployment where nothing is built or deployed."""
    return {"engine": engine, "key": EXTERNAL, "folder": None, "python": None, "versions": {}}


def _described(record: Mapping[str, Any]) -> str:
    if "endpoint" in record:
        return f"{record['endpoint']['url']}, an external endpoint: nothing is known of its machine"
    return f"{record['cpu']['model']}, {record['cpu']['cores']} cores, {len(record['gpus'])} GPUs"


def probe_now(
    project: Project, launcher: Launcher, target: str, engine: str, receipt: Mapping[str, Any]
) -> dict[str, Any]:
    """Probe a target now with the models that an engine serves there."""
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
    record = probe(launcher, receipt["python"], engine, list(models.values()))
    adopted = receipt.get("adopted")
    return {**record, "adopted": {engine: adopted["installation"]}} if adopted else record


def endpoint_now(project: Project, server: Server) -> dict[str, Any]:
    """Return what is known of an external endpoint now, and what this project does to it. Raises TargetError."""
    known = endpoint.record(external_endpoint(project, server), server.target)
    return {**known, "flush_cache": project.config.targets[server.target].flush_cache}


def secret_values(project: Project, target: str) -> tuple[str, ...]:
    """Return the values of the variables with secrets that a target's servers get: nothing of them is recorded."""
    names = (name for name in project.config.targets[target].pass_env if SECRET_KEY.search(name))
    return tuple(os.environ[name] for name in names if name in os.environ)


def confirm_deployment(
    project: Project, launcher: Launcher, target: str, engine: str, report: Report
) -> dict[str, Any]:
    """See that the environment on a target is the one of the repository, and make it so if not; returns the receipt.

    The receipt in the results folder becomes that one, if there is any, and keeps its time: what follows from a change
    shows in the host's record. Of an external endpoint there is nothing to see. Raises EnvironmentFailed.
    """
    if project.config.targets[target].launcher == "external":
        return external_receipt(engine)
    wheelhouse = project.manifest(target, engine).parent
    build(project.environment(target, engine), project.root / "envs", wheelhouse, report=report)
    root, adopt = project.deploy_root(target), project.adopted(target, engine)
    receipt, path = deploy(launcher, wheelhouse, root, adopt=adopt, report=report), project.receipt(target, engine)
    if path.exists() and read_json(path) != receipt:
        _write_keeping_time(path, receipt)
    return receipt


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
    if not now["models"].keys() <= saved["models"].keys():
        record = {**saved, "models": {**saved["models"], **now["models"]}}
        _write_record(project.host_record(server.target), record)
    return now


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a target's record; the file keeps its time unless a host key made from it has changed.

    Snakemake looks at every run on the target again when the time moves, which is free, but not nothing.
    """
    if path.exists() and not differences(read_json(path), record):
        _write_keeping_time(path, record)
    else:
        write_json(path, record)


def _write_keeping_time(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is there anew, so that Snakemake does not see it."""
    before = path.stat()
    write_json(path, content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    return dict(json.loads(path.read_text(encoding="utf-8")))
