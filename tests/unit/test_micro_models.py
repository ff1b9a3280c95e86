"""Micro models in a configuration: their names, places and checks, and the training that a server waits for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import micro_prompts
import pytest
from configurations import tree, write_project

from ddtree_bench import serve_command
from ddtree_bench.client_machine import client_lease
from ddtree_bench.config import ConfigError
from ddtree_bench.config.model_checks import MICRO_BLOCK_SIZES
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.micro_models import THREADS, MicroModel, train
from ddtree_bench.micro_training import train_for
from ddtree_bench.project import Project, open_project
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lease import TargetBusy
from ddtree_bench.targets.local import LocalLauncher

ROOT = Path(__file__).resolve().parents[2]
MICRO = {"name": "tiny", "micro": "plain", "drafter": {"name": "tiny-dflash", "block_size": 8}}


def sglang_tree(**model: Any) -> dict[str, Any]:
    """The small configuration, served by SGLang with a micro model of which `model` may say otherwise."""
    changed = tree()
    changed["targets"]["local"] = {"launcher": "local", "engine": "sglang", "sglang_build": "cpu"}
    changed["models"]["toy"] = {**MICRO, **model}
    return changed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with prompts and the engines' sources."""
    shutil.copytree(ROOT / "envs" / "sglang", tmp_path / "envs" / "sglang")
    return write_project(tmp_path)


def opened(root: Path, **model: Any) -> Project:
    return open_project(sglang_tree(**model), root, root / "results")


def problems(root: Path, changed: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        open_project(changed, root, root / "results")
    return refused.value.problems


def micro_of(project: Project) -> MicroModel:
    found = project.micro_model(project.plan.servers[0])
    assert found is not None
    return found


def test_its_digest_is_its_revision_and_its_folder_the_path(root: Path) -> None:
    project = opened(root)
    micro = micro_of(project)
    assert {server.model.revision for server in project.plan.servers} == {micro.digest}
    assert {server.drafter.revision for server in project.plan.servers if server.drafter} == {micro.digest}
    folder = root / "results" / "micro_models" / f"plain-b8-s0-{micro.digest}"
    paths = project.model_paths(project.plan.servers[1])
    assert paths == {"model_path": str(folder / "target"), "drafter_path": str(folder / "drafter")}
    assert micro.finished == folder / "micro_model.json"


def test_another_recipe_is_another_server(root: Path, tmp_path: Path) -> None:
    first = opened(root)
    drafter = {"name": "tiny-dflash", "block_size": 4}
    assert micro_of(opened(root, drafter=drafter)).digest != micro_of(first).digest
    other = shutil.copytree(root, tmp_path / "other")
    source = other / "envs" / "sglang" / "micro_models" / "sglang_micro_models" / "language.py"
    source.write_text(source.read_text() + "\nMORE = 1\n")
    changed = open_project(sglang_tree(), other, other / "results")
    assert micro_of(changed).digest != micro_of(first).digest
    assert {s.key for s in changed.plan.servers}.isdisjoint(s.key for s in first.plan.servers)


def test_the_tokenizer_comes_with_the_training_and_changes_no_name(root: Path) -> None:
    project = opened(root)
    server, before = project.plan.servers[0], project.tables_plan
    assert project.tokenizer_path(server) is None
    micro_of(project).target.mkdir(parents=True)
    assert project.tokenizer_path(server) == micro_of(project).target
    assert opened(root).tables_plan == before


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"revision": "1"}, "models.toy.revision: a micro model is trained by the workflow"),
        ({"paths": {"local": "/m"}}, "models.toy.paths: a micro model is trained"),
        ({"tokenizer": "/m"}, "models.toy.tokenizer: a micro model is trained"),
        (
            {"drafter": {"name": "d", "block_size": 8, "paths": {"local": "/d"}}},
            "models.toy.drafter.paths: a micro model is trained",
        ),
        ({"hybrid": True}, "models.toy.hybrid: is true, but a micro model of kind plain is not so; set it to false"),
        (
            {"micro": "hybrid_gdn"},
            "models.toy.hybrid: is false, but a micro model of kind hybrid_gdn is not so; set it to true",
        ),
        ({"drafter": None}, "models.toy.drafter: is missing; a micro model is trained with one"),
        (
            {"drafter": {"name": "d", "block_size": 40}},
            "models.toy.drafter.block_size: is 40, but a micro model is trained with 2 to 32; lower it",
        ),
        ({"micro": "moe"}, "models.toy.micro: 'moe' is not allowed"),
    ],
)
def test_what_a_micro_model_cannot_have(root: Path, model: dict[str, Any], problem: str) -> None:
    assert any(one.startswith(problem) for one in problems(root, sglang_tree(**model)))


def test_other_models_have_a_revision_and_paths_where_sglang_serves_them(root: Path) -> None:
    changed = sglang_tree()
    changed["models"]["toy"] = {"name": "toy", "drafter": {"name": "d", "block_size": 8}}
    assert problems(root, changed) == [
        "models.toy.revision: is missing; add the commit, tag or version",
        "models.toy.drafter.revision: is missing; add the commit, tag or version",
        "models.toy.paths.local: is missing, but sweep[0] serves it there; give its folder",
        "models.toy.drafter.paths.local: is missing, but sweep[0] drafts with it there; give its folder",
    ]
    changed["targets"]["local"]["engine"] = "reference"
    assert not any("paths" in one for one in problems(root, changed))


def test_a_micro_model_is_for_local_targets(root: Path) -> None:
    changed = sglang_tree()
    external = {"launcher": "external", "engine": "sglang", "url": "http://127.0.0.1:1"}
    over_ssh = {"launcher": "ssh", "ssh_host": "h.example", "scope": "user"}
    for target in (changed["targets"]["local"] | over_ssh, external):
        changed["targets"]["local"] = target
        assert any(one.startswith("models.toy.micro: is trained on this machine") for one in problems(root, changed))


def test_a_micro_model_is_for_sglang(root: Path) -> None:
    changed = sglang_tree()
    changed["targets"]["local"] = {"launcher": "local", "engine": "reference"}
    assert any(
        one.startswith(
            "models.toy.micro: is trained for SGLang and by its environment, but sweep[0] serves it on local"
        )
        for one in problems(root, changed)
    )


def test_the_block_sizes_and_threads_are_those_of_the_training() -> None:
    sources = ROOT / "envs" / "sglang" / "micro_models" / "sglang_micro_models"
    assert (
        f"if not {min(MICRO_BLOCK_SIZES)} <= block_size <= {max(MICRO_BLOCK_SIZES)}:"
        in (sources / "identity.py").read_text()
    )
    assert f"\nTHREADS = {THREADS} " in (sources / "training.py").read_text()


def test_the_workflow_waits_for_a_receipt_beside_the_weights(root: Path) -> None:
    project = opened(root)
    micro = micro_of(project)
    assert list(project.micro_models) == [micro], "one training for all servers"
    assert project.micro_receipts(project.plan.servers) == [str(micro.receipt)]
    assert micro.folder not in micro.receipt.parents, "Snakemake removes a receipt before its rule runs again"
    reference = open_project(tree(), root, root / "results")
    assert reference.micro_models == {} and reference.micro_receipts(reference.plan.servers) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"speculative-num-steps": 3}, "'speculative-num-steps' is set by the workflow itself"),
        ({"speculative-ddtree-round-logs": "x"}, "'speculative-ddtree-round-logs' is set by the workflow itself"),
        ({"tensor-parallel-size": 2}, "'tensor-parallel-size' is set by the workflow itself"),
        ({"--expert-parallel-size": 2}, "'--expert-parallel-size' is set by the workflow itself"),
        ({"pp-size": 2}, "'pp-size' is '2', but DDTREE runs without pipeline parallelism only; take it out"),
        ({"--pipeline-parallel-size": 2}, "'--pipeline-parallel-size' is '2', but DDTREE runs without"),
        ({"attention-backend": "fa4"}, "'attention-backend' is 'fa4', which cannot mask a tree of DDTREE; use triton"),
        ({"prefill-attention-backend": "flex"}, "'prefill-attention-backend' is 'flex', which cannot mask a tree"),
        (
            {"speculative-ddtree-round-log": "x.jsonl"},
            "'speculative-ddtree-round-log' is 'x.jsonl', but only DDTREE on SGLang writes a round log, and the block "
            "plans AR on sglang too",
        ),
    ],
)
def test_flags_that_ddtree_cannot_have(root: Path, flags: dict[str, Any], problem: str) -> None:
    changed = sglang_tree()
    changed["targets"]["local"] |= {"sglang_build": "cuda13"}
    changed["sweep"][0]["flags"] = flags
    assert any(one.startswith(f"sweep[0].flags (or the target's): {problem}") for one in problems(root, changed))


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("AR", {"pp-size": 2, "attention-backend": "fa4"}),
        ("DDTREE", {"pp-size": 1, "attention-backend": "fa3", "speculative-ddtree-round-log": "/tmp/x.jsonl"}),
    ],
)
def test_flags_that_a_method_can_have(root: Path, method: str, flags: dict[str, Any]) -> None:
    changed = sglang_tree() | {"allow_missing_baseline": True}
    changed["targets"]["local"] |= {"sglang_build": "cuda13"}
    changed["sweep"][0] |= {"method": method, "flags": flags}
    assert dict(open_project(changed, root, root / "results").plan.servers[0].flags).keys() == flags.keys()


def test_a_tree_must_have_room_for_its_budget(root: Path) -> None:
    changed = sglang_tree()
    changed["sweep"][0] |= {"budget": [7, 8], "topk_cap": 1}
    assert problems(root, changed) == [
        "sweep[0].budget: 8 is more than the 7 nodes that a tree of 7 depths with at most 1 candidates each can have; "
        "lower it, or raise topk_cap"
    ]
    changed["sweep"][0] |= {"budget": [6, 7], "topk_cap": 2, "block_size": 3}
    assert problems(root, changed)[0].startswith("sweep[0].budget: 7 is more than the 6 nodes")
    changed["sweep"][0] |= {"budget": [6]}
    assert len(open_project(changed, root, root / "results").plan.servers) == 3


@pytest.mark.parametrize("flag", ["dtype", "--attention-backend", "enable-metrics"])
def test_what_the_build_sets_is_no_flag_of_ones_own(root: Path, flag: str) -> None:
    changed = sglang_tree()
    changed["targets"]["local"]["flags"] = {flag: "x"}
    assert f"{flag!r} is set by the workflow itself" in problems(root, changed)[0]
    changed["targets"]["local"] |= {"sglang_build": "cuda13", "flags": {"dtype": "bfloat16"}}
    assert open_project(changed, root, root / "results").plan.servers[0].flags == (("dtype", "bfloat16"),)


TRAINER = """
import json, pathlib, sys
print("step 1")
if {fails}:
    sys.exit("out of memory")
folder = pathlib.Path({folder!r})
folder.mkdir(parents=True)
(folder / "micro_model.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(tmp_path / "leases", "test")


def trainer(root: Path, fails: bool) -> MicroModel:
    """A micro model whose training is a script that writes down what it was asked for."""
    micro = micro_of(opened(root))
    (root / "envs" / "sglang" / "micro_models" / "sglang_micro_models" / "__init__.py").write_text("")
    main = root / "envs" / "sglang" / "micro_models" / "sglang_micro_models" / "__main__.py"
    main.write_text(TRAINER.format(fails=fails, folder=str(micro.folder)))
    return micro


def test_it_is_trained_once_with_the_python_of_the_environment(root: Path, launcher: LocalLauncher) -> None:
    micro, said = trainer(root, fails=False), list[str]()
    micro.drafter.mkdir(parents=True)
    train(micro, launcher, sys.executable, said.append)
    asked = json.loads(micro.finished.read_text())
    assert asked == ["--kind", "plain", "--block-size", "8", "--out", str(micro.folder.parent)]
    assert not micro.drafter.exists(), "what was half made is gone"
    assert said == [f"{micro.folder}: training the plain micro model and its drafter", "step 1"]
    train(micro, launcher, "/no/python", said.append)
    assert len(said) == 2


def leased(root: Path, folder: Path) -> Project:
    """The project of `root` with the leases in `folder`."""
    changed = sglang_tree()
    changed["targets"]["local"] |= {"lease_dir": str(folder), "lease_wait_s": 0.2}
    return open_project(changed, root, root / "results")


def test_it_is_trained_beside_no_run_and_waits_for_none_afterwards(
    root: Path, tmp_path: Path, launcher: LocalLauncher
) -> None:
    micro, project = trainer(root, fails=False), leased(root, tmp_path / "leases")
    server = project.plan.servers[0]
    with client_lease(project, "local", "somebody", print):
        with pytest.raises(TargetBusy, match="somebody"):
            train_for(project, server, launcher, sys.executable, print)
        assert not micro.finished.exists()
    train_for(project, server, launcher, sys.executable, print)
    assert micro.finished.exists()
    with client_lease(project, "local", "somebody", print):
        train_for(project, server, launcher, "/no/python", print)


def test_a_signal_ends_the_training_that_serve_waits_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro, project, said = trainer(root, fails=False), leased(root, tmp_path / "leases"), list[str]()
    main = root / "envs" / "sglang" / "micro_models" / "sglang_micro_models" / "__main__.py"
    main.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n")
    monkeypatch.setattr(serve_command, "confirm_deployment", lambda *_: {"python": sys.executable})
    monkeypatch.setattr(serve_command, "serve", lambda *_, **__: said.append("served"))
    server = project.plan.servers[0]
    serve_command.serve_project(project, server, 0, said.append)
    assert said[-1] == f"{server.name}: not started, interrupted by SIGTERM" and not micro.finished.exists()


def test_a_training_that_fails_says_why(root: Path, launcher: LocalLauncher) -> None:
    micro = trainer(root, fails=True)
    with pytest.raises(TargetError, match=r"the plain micro model could not be trained: out of memory"):
        train(micro, launcher, sys.executable, print)


def test_the_prompts_are_those_of_the_language() -> None:
    for path, text in micro_prompts.files().items():
        assert path.read_text(encoding="utf-8") == text, "run: python tests/unit/micro_prompts.py"


def test_the_prompts_serve_the_concurrencies_of_the_configuration() -> None:
    measured, warmup = (read_prompts(path) for path in micro_prompts.files())
    assert len(measured) == 32 and len(warmup) == 8
    assert not {one.sha256 for one in measured} & {one.sha256 for one in warmup}
    assert {one.category for one in measured} == set(micro_prompts.CATEGORIES)
