"""Semantic checks of targets that are reached over SSH: sentences that name the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from ddtree_bench.config.models import Config, Target
from ddtree_bench.config.sweep import Coordinates

SSH_KEYS = ("ssh_host", "ssh_config", "scope", "client", "reconnect_s", "memory_max_gib", "keep_environments")
"""Keys of a target that have a meaning for `launcher: ssh` alone."""

LEAST_TTL_S = 10.0
"""A round trip may take 6 s until it is taken for lost."""

WILDCARDS = ("0.0.0.0", "::", "*")


def check_ssh_targets(config: Config) -> list[str]:
    """A host that is reached over SSH is named, and so is whose systemd runs servers; no other target has its keys."""
    problems: list[str] = []
    for name, target in config.targets.items():
        if target.launcher == "ssh":
            problems += _problems(f"targets.{name}", target)
            continue
        problems += [
            f"targets.{name}.{key}: is for `launcher: ssh` alone, and this one is {target.launcher}; take it out"
            for key in SSH_KEYS
            if key in target.model_fields_set
        ]
    return problems


def _problems(where: str, target: Target) -> Iterator[str]:
    if target.ssh_host is None:
        yield f"{where}.ssh_host: is missing; give the host as you would give it to ssh"
    elif not target.ssh_host.strip() or target.ssh_host.startswith("-") or any(c.isspace() for c in target.ssh_host):
        yield f"{where}.ssh_host: {target.ssh_host!r} is no host; give it as you would give it to ssh, without options"
    if target.scope is None:
        yield (
            f"{where}.scope: is missing; `system` runs servers under the host's own systemd (root, or sudo without a "
            "password), `user` under that of the login (with lingering)"
        )
    if target.host in WILDCARDS:
        yield f"{where}.host: {target.host!r} would open the servers to the network; leave it out, or give one address"
    if target.lease_ttl_s is not None and target.lease_ttl_s < LEAST_TTL_S:
        yield (
            f"{where}.lease_ttl_s: {target.lease_ttl_s:g} is shorter than a link may take to be found again; give at "
            f"least {LEAST_TTL_S:g}"
        )
    if ":" in target.host:
        yield f"{where}.host: {target.host!r} is an IPv6 address, which is not supported; give an IPv4 address"
    if target.root is not None and ":" in target.root:
        yield f"{where}.root: {target.root!r} has a colon, which ends a path in a search path; choose another folder"
    for key in ("root", "lease_dir"):
        path = getattr(target, key)
        if path is not None and not _is_absolute(path, home=key == "root"):
            yield f"{where}.{key}: {path!r} is not absolute; give a path of the host that begins with /"


def _is_absolute(path: str, home: bool) -> bool:
    return PurePosixPath(path).is_absolute() or (home and (path == "~" or path.startswith("~/")))


def check_ssh_models(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """The path of a model on a host is one of that host, and does not depend on where somebody stands there."""
    problems: dict[str, None] = {}
    for point in points:
        if config.targets[point.target].launcher != "ssh":
            continue
        for key, paths in _paths(point.model, config):
            path = paths.get(point.target)
            if path is not None and not PurePosixPath(path).is_absolute():
                problems[f"{key}.{point.target}: {path!r} is not absolute; give the path on the host from / on"] = None
    return list(problems)


def _paths(name: str, config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    model = config.models[name]
    yield f"models.{name}.paths", model.paths
    if model.drafter is not None:
        yield f"models.{name}.drafter.paths", model.drafter.paths
