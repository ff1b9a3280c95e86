"""An external endpoint: whether it answers, what it says of itself, and whether that is the server that was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_bench.plan import Server
from ddtree_bench.servers import api
from ddtree_bench.servers.identity import NAMES_OF_A_START, wanted_identity
from ddtree_bench.servers.observation import observe
from ddtree_bench.servers.own_words import hide, lasting
from ddtree_bench.servers.ready import WrongServer
from ddtree_bench.targets.launcher import TargetError

NONE_MEANS_NONE = ("speculative_algorithm",)
"""Fields whose null is an answer; any other null says that the server chose a value and does not tell it."""


@dataclass(frozen=True)
class Endpoint:
    """Where an external server is reached, the model's name there, and the headers that every request carries."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be recorded nowhere: the key in the headers."""
        return api.secrets_of(self.headers)


@dataclass(frozen=True)
class Answered:
    """An endpoint that answered a completion: its words about itself, and which parts of the plan these confirm.

    `server_info` is None when it offers none. `started` changes with the server's next start, if it tells such a thing.
    """

    server_info: dict[str, Any] | None
    confirmed: tuple[str, ...]
    not_confirmed: tuple[str, ...]
    started: str | None


def said(endpoint: Endpoint, target: str) -> dict[str, Any] | None:
    """What the server says of itself; None when it has no such page.

    Raises TargetError when nothing answers, or answers something else: what it says now would be taken for nothing.
    """
    try:
        return api.server_info(endpoint.base_url, endpoint.headers)
    except api.ApiError as error:
        if error.not_offered:
            return None
        how = "does not answer" if isinstance(error, api.Unreachable) else "does not say what it is"
        raise TargetError(
            f"targets.{target}.url: {endpoint.base_url} {how}: {error}; "
            "start the server there, or mend url or api_key_env; a server without such a page says 404"
        ) from error


def started(endpoint: Endpoint) -> str | None:
    """What changes with the server's next start, if it tells such a thing; None too when it does not answer."""
    return observe(endpoint.base_url, headers=endpoint.headers).started


def see_answer(
    endpoint: Endpoint,
    server: Server,
    *,
    path: str,
    body: dict[str, Any],
    timeout_s: float,
    progress: Callable[[str], None],
) -> Answered:
    """See that the endpoint serves the model, is the server that was planned as far as it tells, and answers `body`.

    Raises WrongServer when it says otherwise, naming both, and TargetError when it does not answer.
    """
    _see_model(endpoint, server)
    info = said(endpoint, server.target)
    confirmed, silent = check_plan(server, info or {}, endpoint.base_url)
    try:
        api.first_answer(endpoint.base_url, path, body, timeout_s, endpoint.headers)
    except api.ApiError as error:
        raise TargetError(
            f"targets.{server.target}.url: {endpoint.base_url} does not answer a completion of {endpoint.model}: "
            f"{error}; start the server there, or mend url, served_model or api_key_env"
        ) from error
    progress(f"{server.name}: {endpoint.base_url} answers; not confirmed by it: {', '.join(silent) or 'nothing'}")
    return Answered(info, tuple(confirmed), tuple(silent), started(endpoint))


def _see_model(endpoint: Endpoint, server: Server) -> None:
    try:
        served = api.models(endpoint.base_url, endpoint.headers)
    except api.ApiError:
        # It need not list them; whether it serves this one, the completion shows.
        return
    if endpoint.model not in served:
        raise WrongServer(
            f"targets.{server.target}: wanted the model {endpoint.model!r}, and {endpoint.base_url} serves "
            f"{', '.join(served) or 'none'}; name one of these in targets.{server.target}.served_model"
        )


def check_plan(server: Server, info: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Return which parts of the planned launch configuration the server confirms, and of which it says nothing.

    Raises WrongServer, naming what was planned and what it says, when they differ.
    """
    confirmed, silent, wrong = [], [], []
    for name, wanted in _planned(server):
        told = info.get(name)
        if name not in info or (_plain(told) is None and wanted is not None and name not in NONE_MEANS_NONE):
            silent.append(name)
        elif _same(wanted, told):
            confirmed.append(name)
        else:
            wrong.append(f"{name}: planned {wanted!r}, the endpoint says {told!r}")
    if wrong:
        raise WrongServer(
            f"targets.{server.target}: {where} is not server {server.name} as it was planned: {'; '.join(wrong)}; "
            "plan what it is, or give the address of another endpoint"
        )
    return confirmed, silent


def _planned(server: Server) -> Iterator[tuple[str, Any]]:
    """The fields of /server_info that the plan has a value for, under SGLang's names; flags by their own."""
    wanted = wanted_identity(server, "") | {"tp_size": server.tensor_parallel, "ep_size": server.expert_parallel}
    yield from ((name, value) for name, value in wanted.items() if name not in NAMES_OF_A_START)
    for flag, value in server.flags:
        yield flag.removeprefix("--").replace("-", "_"), value or True


def _same(wanted: Any, told: Any) -> bool:
    ours, theirs = _plain(wanted), _plain(told)
    return type(ours) is type(theirs) and ours == theirs


def _plain(value: Any) -> bool | float | str | None:
    """A value as it is meant, however it is written: a switch, a number, a name in capitals; None for nothing."""
    text = str(value).strip()
    if value is None or not text:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text.upper()


def record(endpoint: Endpoint, target: str) -> dict[str, Any]:
    """Return what is known of an endpoint: address, model, and the lasting part of what the server says of itself.

    Raises TargetError when it does not answer.
    """
    return {
        "url": endpoint.base_url,
        "served_model": endpoint.model,
        "server": hide(lasting(said(endpoint, target) or {}), endpoint.secrets),
    }
