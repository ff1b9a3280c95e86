from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ddtree_reference import cli, fault, lossless, tree
from ddtree_reference.method import Method

HELDOUT = Path(__file__).parents[2] / "config" / "prompts" / "heldout.jsonl"


def test_files_names_what_a_probe_fingerprints(capsys: pytest.CaptureFixture[str]) -> None:
    for name, suffix in (("smollm2", (".gguf", ".safetensors")), ("toy", (".py", ".py"))):
        assert cli.main(["files", "--model", name]) == 0
        files = json.loads(capsys.readouterr().out)
        assert (Path(files["model"]).suffix, Path(files["drafter"]).suffix) == suffix
        assert all(Path(file).is_file() for file in files.values())


def test_help_of_serve_names_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "DDTREE" in out and "--speculative-ddtree-topk-cap" in out


def test_numbers_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--speculative-ddtree-budget", "0"])
    assert "0 is less than 1" in capsys.readouterr().err
    assert cli.main(["serve", "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "5000"]) == 2
    assert "budget 5000" in caplog.text


def test_each_effective_configuration_is_checked_once() -> None:
    methods = lossless.default_methods()
    names = [lossless.name_of(method) for method in methods]
    assert len(names) == len(set(names)) == 1 + 1 + 2 + 2 + 4 * 3
    assert {"DFLASH:8", "DDTREE:1:1", "DDTREE:15:8", "DDTREE:64:64"} <= set(names)
    assert [lossless.parse_method(name) for name in names] == methods


@pytest.mark.parametrize("text", ["AR", "DFLASH:x", "DFLASH:8:2", "DDTREE", "DDTREE:0", "DDTREE:8:8:8", "tree:4"])
def test_other_configurations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"configuration '{text}'"):
        lossless.parse_method(text)


def test_differing_tokens_count_from_the_first_difference() -> None:
    assert lossless.differing([1, 2, 3], [1, 2, 3]) == 0
    assert lossless.differing([1, 2, 3], [1, 9, 3]) == 2
    assert lossless.differing([1, 2, 3], [1, 2]) == 1
    assert lossless.differing([], [4, 5]) == 2


def check(tmp_path: Path, *more: str) -> tuple[int, dict[str, object]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "x", "prompt": "hello"}\n{"id": "b", "prompt": "Write a poem"}\n')
    output = tmp_path / "result.json"
    options = ["--model", "toy", "--prompts", str(prompts), "--tokens", "24", "--output", str(output)]
    status = cli.main(["check-lossless", *options, *more])
    return status, json.loads(output.read_text())


def test_check_lossless_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = check(tmp_path, "--configs", "DFLASH", "DDTREE:8:4", "DDTREE:16")
    assert status == 0 and result["differing_tokens"] == 0 and result["prompts"] == 2
    assert set(result["configurations"]) == {"DFLASH:8", "DDTREE:8:4", "DDTREE:16:16"}  # type: ignore[call-overload]
    captured = capsys.readouterr()
    assert "DDTREE:16:16: 48 tokens, 0 differing" in captured.err
    assert "DDTREE:16:16" in captured.out
    assert check(tmp_path, "--limit", "1", "--configs", "DFLASH")[1]["prompts"] == 1


def test_check_lossless_compares_batches_with_ar_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = check(tmp_path, "--configs", "DDTREE:8:4", "--batch", "2")
    assert status == 0 and result["batch"] == 2
    assert set(result["configurations"]) == {"AR", "DDTREE:8:4"}  # type: ignore[call-overload]
    assert "2 at a time" in capsys.readouterr().out


def test_speed_is_told_beside_the_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "speed.json"
    options = ["--model", "toy", "--prompts", str(HELDOUT), "--tokens", "12", "--limit", "4", "--repeats", "2"]
    options += ["--configs", "AR", "DDTREE:4", "--concurrency", "1", "4", "--output", str(output)]
    assert cli.main(["speed", *options]) == 0
    result = json.loads(output.read_text())
    assert len(result["bytes_per_second"]) == 2 and min(result["bytes_per_second"]) > 1e8
    assert result["weight_bytes"] == 2 * (2 * (192 * 64 + 3 * 64 * 128) + 258 * 64)
    rows = {(s["configuration"], s["concurrency"], s["repeat"]): s for s in result["speeds"]}
    assert len(rows) == len(result["speeds"]) == 2 * 2 * 2
    for (configuration, concurrency, _), row in rows.items():
        assert row["seconds"] > 0 and row["tokens"] >= row["rounds"] * concurrency
        assert configuration != "AR" or row["tokens"] == 4 * 11 == row["rounds"] * concurrency
    table = capsys.readouterr().out
    assert "of limit" in table and "DDTREE:4:4" in table


def test_check_lossless_fails_when_a_wrong_draft_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = tree.walk

    def credulous(parents: Sequence[int], tokens: Sequence[int], choose: Callable[[int], int]) -> tuple[list[int], int]:
        path, token = genuine(parents, tokens, choose)
        if path[-1] not in parents:
            return path, token
        child = parents.index(path[-1])
        return [*path, child], choose(child)

    monkeypatch.setattr(tree, "walk", credulous)
    status, result = check(tmp_path, "--configs", "DDTREE:8")
    assert status == 1
    tally = result["configurations"]["DDTREE:8:8"]  # type: ignore[index]
    assert result["differing_tokens"] == tally["differing_tokens"] > 0
    assert tally["differing_prompts"]


def test_check_lossless_wants_to_be_told_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-lossless", "--model", "toy"])
    assert ended.value.code == 2
    assert "required: --prompts" in capsys.readouterr().err


def test_the_repositorys_prompts_are_enough_for_the_bar() -> None:
    assert len({entry["prompt"] for entry in lossless.read_prompts(HELDOUT)}) >= 48


def test_prompts_without_an_id_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"prompt": "y"}\n')
    assert cli.main(["check-lossless", "--model", "toy", "--prompts", str(path)]) == 2
    assert "p.jsonl:2" in caplog.text


def test_faults_are_for_one_method_and_budget() -> None:
    eight = Method("DDTREE", budget=8)
    assert fault.parse(None, eight) is None
    assert fault.parse("DDTREE:8@start", eight) == fault.Fault("start")
    assert fault.parse("DDTREE@prompt=a=b@c", eight) == fault.Fault("prompt", "a=b@c")
    assert fault.parse("DDTREE:8@raise=x", eight) == fault.Fault("raise", "x")
    assert fault.parse("DDTREE:16@start", eight) is None
    assert fault.parse("AR@start", eight) is None
    for wrong in ("DDTREE", "DDTREE@later", "TREE@start", "DDTREE@start=x", "DDTREE@raise"):
        with pytest.raises(ValueError, match="METHOD"):
            fault.parse(wrong, eight)
