"""What engine tests share: the models, opened once, and toy servers of each method."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_server import Launch, Server, end, launch

from ddtree_reference import startup
from ddtree_reference.method import Method
from ddtree_reference.startup import Opened

WIDEST = Method("DDTREE", budget=64)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Opened:
    return startup.open_engine("smollm2", "auto", [WIDEST], sequences=8)


@pytest.fixture(scope="session")
def toy() -> Opened:
    return startup.open_engine("toy", "auto", [WIDEST], sequences=8)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    servers: list[Server] = []

    def start(*arguments: str, fault: str | None = None) -> Server:
        server = launch(tmp_path_factory.mktemp("server") / "log", *arguments, fault=fault)
        servers.append(server)
        return server

    yield start
    for server in servers:
        end(server)


@pytest.fixture(scope="module")
def toy_ar(serve: Launch) -> Server:
    return serve("--model", "toy")


@pytest.fixture(scope="module")
def toy_ddtree(serve: Launch) -> Server:
    budget = ("--speculative-ddtree-budget", "16", "--speculative-ddtree-topk-cap", "4")
    return serve("--model", "toy", "--speculative-algorithm", "DDTREE", *budget, "--start-id", "start-7")


@pytest.fixture(scope="module")
def toy_dflash(serve: Launch) -> Server:
    return serve("--model", "toy", "--speculative-algorithm", "DFLASH")
