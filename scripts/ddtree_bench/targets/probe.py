"""The record of a target's machine and model files, and the host key made of the part that numbers depend on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench import keys
from ddtree_bench.servers.command_line import REFERENCE_PACKAGE, reference_model
from ddtree_bench.targets import host_tools
from ddtree_bench.targets.launcher import CommandResult, Launcher, TargetError

SCHEMA = 1
TIMEOUT_S = 300.0

FULL_TIMEOUT_S = 4 * 3600.0
"""For reading every byte of the largest models: 1 TB from a disk that gives 100 MB/s takes 2.8 h."""

PROGRAM = "ddtree_bench.targets.host_facts"
REMEDY = "`snakemake probe` accepts it, and what was measured before is then measured again"


NOT_KNOWN = "not known"


class HostChanged(TargetError):
    """The machine or the model files are no longer those that were probed."""


def recorded_name(name: str, revision: str | None) -> str:
    """The key of a model in a host record: another revision is another model, whose content may well differ.

    Without a revision the name alone, as in records of earlier versions.
    """
    return f"{name}@{revision}" if revision else name


@dataclass(frozen=True)
class ModelFiles:
    """A model pair by name and revision, and where the target keeps it; an engine that brings them needs no paths."""

    model: str
    drafter: str | None = None
    model_path: str | None = None
    drafter_path: str | None = None
    model_revision: str | None = None
    drafter_revision: str | None = None


def probe(
    launcher: Launcher, python: str, engine: str, models: Sequence[ModelFiles], full: bool = False
) -> dict[str, Any]:
    """Return the record of the target: platform, CPUs, memory, NUMA, GPUs, links, clocks, and the files of `models`.

    `python` is the environment's on the target. `full` has the whole content of every model file digested. What is not
    known there is null, and `missing` beside it says why. Raises TargetError, which names a model file that is missing.
    """
    request = {"files": _model_paths(launcher, python, engine, models), "full": full}
    argv = host_tools.command_line(python, launcher.tools(), PROGRAM, json.dumps(request))
    output = _checked(launcher.run_command(argv, timeout_s=FULL_TIMEOUT_S if full else TIMEOUT_S))
    record: dict[str, Any] = json.loads(output)
    return {"schema": SCHEMA, "engine": engine, **record}


def endpoint_record(
    engine: str, endpoint: Mapping[str, Any], models: Sequence[str], client: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of an external endpoint: what it says of itself, and the facts of this machine, the client.

    Of the endpoint's own machine nothing is known: no CPU, no GPUs, no model files.
    """
    return {
        "schema": SCHEMA,
        "engine": engine,
        "endpoint": endpoint,
        "client": client,
        "cpu": {"model": None, "cores": None},
        "gpus": None,
        "driver": None,
        "models": {name: {"fingerprint": NOT_KNOWN, "path": endpoint["url"]} for name in models},
    }


def host_key(record: Mapping[str, Any], model: str, drafter: str | None, installation: str | None = None) -> str:
    """The digest of what measured numbers depend on in a host record, 64 hex digits, for one model pair.

    `model` and `drafter` are recorded names; a record without them is asked for the names without revisions.
    Keyed: GPU models and their count, driver, power limits, CPU model, cores, content of model and drafter. Not
    keyed: UUIDs, kernel, clocks, times, host name. Of an external endpoint: its address, the model's name there, what
    it says of itself that lasts, and whether its prefix cache is emptied before each cell. `installation` says what an
    adopted engine is, whose packages the plan key knows nothing of. Raises TargetError for a model that was not
    probed.
    """
    adopted = {} if installation is None else {"adopted installation": installation}
    return keys.digest({**_keyed(record, model, drafter), **adopted})


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs in the keyed part of two records of a target, in words; models that only one of them has do not."""
    before, after = _machine(old), _machine(new)
    found = [
        f"{name}: was {_shown(before.get(name))}, is {_shown(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    for name in sorted(set(old["models"]) & set(new["models"])):
        if old["models"][name]["fingerprint"] != new["models"][name]["fingerprint"]:
            found.append(f"content of model {name} ({new['models'][name]['path']})")
    was, now = old.get("adopted", {}), new.get("adopted", {})
    found += [
        f"adopted installation of {engine}: was {was[engine]}, is {now[engine]}"
        for engine in sorted(set(was) & set(now))
        if was[engine] != now[engine]
    ]
    return found


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise HostChanged, which says what changed and the remedy, when the keyed part of two records differs."""
    changed = differences(old, new)
    if changed:
        raise HostChanged(f"host has changed: {'; '.join(changed)}; {REMEDY}")


def with_full_digests(models: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of models, with the digests of whole files that were taken when they were as they are now."""
    return {
        name: {**entry, "full_sha256": before["full_sha256"]}
        if "full_sha256" in (before := saved.get(name, {})) and before["files"] == entry["files"]
        else entry
        for name, entry in models.items()
    }


def _model_paths(launcher: Launcher, python: str, engine: str, models: Sequence[ModelFiles]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for pair in models:
        model_path, drafter_path = pair.model_path, pair.drafter_path
        if engine == "reference":
            argv = [python, "-m", REFERENCE_PACKAGE, "files", "--model", reference_model(pair.model)]
            brought = json.loads(_checked(launcher.run_command(argv, timeout_s=TIMEOUT_S)))
            model_path, drafter_path = brought["model"], brought["drafter"]
        for name, revision, path in (
            (pair.model, pair.model_revision, model_path),
            (pair.drafter, pair.drafter_revision, drafter_path),
        ):
            if name is None:
                continue
            if path is None:
                raise TargetError(f"model {name}: has no path on this target; give one in its paths")
            paths[recorded_name(name, revision)] = path
    return paths


def _keyed(record: Mapping[str, Any], model: str, drafter: str | None) -> dict[str, Any]:
    return {
        **_machine(record),
        "model": _fingerprint(record, model),
        "drafter": None if drafter is None else _fingerprint(record, drafter),
    }


def _machine(record: Mapping[str, Any]) -> dict[str, Any]:
    if "endpoint" in record:
        known = record["endpoint"]
        emptied = {"prefix cache emptied": known["flush_cache"]} if "flush_cache" in known else {}
        return {"endpoint": known["url"], "served model": known["served_model"], **emptied, **known["server"]}
    gpus = record["gpus"]
    return {
        "GPUs": dict(sorted(Counter(gpu["name"] for gpu in gpus).items())),
        "GPU driver": record["driver"],
        "GPU power limits (W)": sorted({gpu["power_limit_w"] or 0 for gpu in gpus}),
        "CPU": record["cpu"]["model"],
        "cores": record["cpu"]["cores"],
    }


def knows_model(record: Mapping[str, Any], name: str) -> bool:
    """Whether a host record has a model of this recorded name, or of the name without its revision."""
    return _model(record, name) is not None


def _model(record: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    models: Mapping[str, Mapping[str, Any]] = record["models"]
    return models.get(name) or models.get(name.rpartition("@")[0])


def _fingerprint(record: Mapping[str, Any], name: str) -> str:
    found = _model(record, name)
    if found is None:
        known = ", ".join(sorted(record["models"])) or "none"
        raise TargetError(f"model {name}: is not in the target's record, which has {known}; `snakemake probe` adds it")
    fingerprint: str = found["fingerprint"]
    return fingerprint


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} x {name}" for name, count in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _checked(result: CommandResult) -> str:
    if result.exit_code != 0:
        raise TargetError(
            f"the target could not be probed: {result.stderr.strip()[-1000:]}; mend what it "
            "names; a model's folder is given in models.<name>.paths"
        )
    return result.stdout.splitlines()[-1]
