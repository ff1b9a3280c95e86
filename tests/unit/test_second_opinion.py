"""The second opinion: what bench_serving is asked, and both clients' words held together."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from raw_rows import frame, row

from ddtree_bench import metrics
from ddtree_bench.cli import main
from ddtree_bench.load.exchange import DEFAULT_LIMITS
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.measuring import bench_serving
from ddtree_bench.measuring.bench_serving import OpinionFailed, Result
from ddtree_bench.measuring.measure_options import Asked, UsageError
from ddtree_bench.measuring.measured_folder import FolderError
from ddtree_bench.measuring.second_opinion import compare, rendered, restated
from ddtree_bench.plan import Load, Workload

PROMPTS = (Prompt("a", 1, "", "one"), Prompt("b", 1, "", "two"))
RESULT = {
    "completed": 2,
    "total_output_tokens": 20,
    "duration": 4.0,
    "output_throughput": 5.0,
    "max_output_tokens_per_s": 3.0,
    "mean_ttft_ms": 500.0,
    "mean_tpot_ms": 100.0,
    "itls": [[0.5, 0.7], [0.3]],
    "mean_itl_ms": 77.0,
    "mean_e2e_latency_ms": 2000.0,
}


def asked(endpoint: str = "completions", **more: Any) -> Asked:
    workload = Workload("w", "p.jsonl", None, 2, "0" * 64, 32, 0.0, 1.0, -1, 7, True, False, endpoint)  # type: ignore[arg-type]
    given: dict[str, Any] = {"tokenizer": Path("/m/target"), "load": Load(4), "limits": DEFAULT_LIMITS, **more}
    return Asked(
        "http://127.0.0.1:1",
        "m",
        None,
        workload,
        PROMPTS,
        stagger_s=0,
        seed=7,
        slos=None,
        **given,
    )


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def test_it_is_asked_for_the_same_load() -> None:
    argv = bench_serving.arguments("/env/python", asked(), Path("/m/target"), Path("/out"))
    assert argv[:3] == ["/env/python", "-m", "sglang.benchmark.serving"]
    assert {name: option(argv, name) for name in ("backend", "dataset-name", "num-prompts", "max-concurrency")} == {
        "backend": "sglang-oai",
        "dataset-name": "custom",
        "num-prompts": "2",
        "max-concurrency": "4",
    }
    assert option(argv, "sharegpt-output-len") == "32" and "--flush-cache" in argv
    body = json.loads(option(argv, "extra-request-body"))
    assert (body["temperature"], body["seed"], body["ignore_eos"], body["top_k"]) == (0.0, 7, True, -1)
    assert body["stream_options"] == {"include_usage": False, "continuous_usage_stats": True}
    assert not {"prompt", "model", "max_tokens", "return_spec_tokens_details"} & set(body)


def test_prompts_go_in_the_form_of_its_datasets() -> None:
    assert [line["conversations"][0]["content"] for line in bench_serving.dataset(asked())] == ["one", "two"]
    assert bench_serving.dataset(asked("chat")) == [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 32} for text in ("one", "two")
    ]


def test_a_load_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rate: the two clients are compared under a fixed concurrency only"):
        bench_serving.run("python", asked(load=Load(4, "open", 2.0, "poisson")), tmp_path, {})
    with pytest.raises(UsageError, match="--tokenizer: is missing"):
        bench_serving.run("python", asked(tokenizer=None), tmp_path, {})


def stand_in(folder: Path, code: str) -> dict[str, str]:
    """An environment in which `python -m sglang.benchmark.serving` runs `code`."""
    package = folder / "sglang" / "benchmark"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").write_text("")
    (package / "serving.py").write_text(
        f"import json, sys\nout = sys.argv[sys.argv.index('--output-file') + 1]\n{code}\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "result.jsonl").write_text("measured")
    with pytest.raises(
        FolderError, match=r"result\.jsonl: exists, and nothing measured is overwritten; give another --out"
    ):
        bench_serving.run(sys.executable, asked(), tmp_path, {})
    assert (tmp_path / "result.jsonl").read_text() == "measured"


@pytest.mark.parametrize(("headers", "sent"), [({}, [None, None]), ({"Authorization": "Bearer k1"}, ["k1", None])])
def test_the_key_of_the_server_is_sent_and_no_other(tmp_path: Path, headers: dict[str, str], sent: list[Any]) -> None:
    code = "import os; keys = [os.environ.get(name) for name in ('OPENAI_API_KEY', 'API_KEY')]\n"
    code += f"open(out, 'w').write(json.dumps({RESULT!r})); print(json.dumps(keys))"
    env = {**stand_in(tmp_path, code), "OPENAI_API_KEY": "mine", "API_KEY": "mine too"}
    bench_serving.run(sys.executable, asked(headers=headers), tmp_path / "out", env)
    assert json.loads((tmp_path / "out" / "log.txt").read_text().splitlines()[0]) == sent


def test_what_it_cannot_do_is_said_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text(json.dumps({"id": "a", "prompt": "one"}) + "\n")
    command = ["second-opinion", "--url", "http://127.0.0.1:1", "--model", "m", "--python", "p", "--prompts"]
    command += [str(prompts), "--concurrency", "1", "--num-requests", "1", "--max-tokens", "2", "--out", str(out)]
    assert main(command) == 2
    assert "--tokenizer: is missing, and bench_serving counts with it" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(tmp_path / "absent")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert not out.exists()


def test_its_last_result_is_read(tmp_path: Path) -> None:
    env = stand_in(tmp_path, f"open(out, 'a').write(json.dumps({RESULT!r}) + '\\n'); print('said')")
    found = bench_serving.run(sys.executable, asked(), tmp_path / "out", env)
    assert (found.completed, found.output_tokens, found.ttft_s, found.e2e_s) == (2, 20, 0.5, 2.0)
    assert found.itl_s == 0.5, "the mean gap, whatever it calls its ITL"
    assert "said" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('no module named datasets')", "ended with 1: no module named datasets; all of it: .*log.txt"),
        ("open(out, 'w').write('{}\\n')", "result.jsonl: is no result of sglang.benchmark.serving"),
        ("pass", "ended with 0"),
    ],
)
def test_a_failure_says_what_it_said(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(OpinionFailed, match=message):
        bench_serving.run(sys.executable, asked(), tmp_path / "out", stand_in(tmp_path, code))


def two_requests() -> Any:
    """10 tokens in events of 1, 4 and 5 at 1, 2 and 4 s; the same from 1 s on, but all later events 1 s earlier."""
    first = row([(1.0, "a", 1), (2.0, "bcde", 5), (4.0, "fghij", 10)], tokens=10)
    second = row([(2.0, "a", 1), (2.5, "bcde", 5), (4.0, "fghij", 10)], index=1, t_send=1.0, tokens=10)
    return frame(first, second)


def test_ours_by_their_definitions() -> None:
    found = restated(two_requests())
    ends = 4.001
    assert (found.completed, found.output_tokens) == (2, 20)
    assert found.ttft_s == pytest.approx(1.0) and found.e2e_s == pytest.approx((ends + ends - 1) / 2)
    assert found.tpot_s == pytest.approx(((ends - 1) / 9 + (ends - 2) / 9) / 2)
    assert found.itl_s == pytest.approx((1.0 + 2.0 + 0.5 + 1.5) / 4)
    assert found.throughput_tok_s == pytest.approx(20 / ends)
    assert found.peak_tok_s == 3, "events between 2 and 3 s; tokens were 9"


def test_connecting_is_in_their_times() -> None:
    requests = two_requests()
    requests["connect_s"] = [0.25, None]
    assert restated(requests).ttft_s == pytest.approx(1.125)


def test_no_answer_is_no_opinion() -> None:
    requests = two_requests()
    requests["status"] = "timeout"
    found = restated(requests)
    assert (found.completed, found.output_tokens) == (0, 0) and math.isnan(found.ttft_s)


OWN = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "e2e_s": "e2e_s", "itl_s": "itl_mean_s", "icl_s": "icl_mean_s"}


def test_both_side_by_side() -> None:
    theirs = Result(2, 20, 4.0, 5.0, 3.0, 0.9, 0.3, 1.25, 3.5)
    own = metrics.request_metrics(two_requests())
    document = {name: {"mean": own[column].mean()} for name, column in OWN.items()} | {"requests": {"ok": 2}}
    lines = {line.name: line for line in compare(theirs, restated(two_requests()), document)}
    assert lines["TTFT, mean"].difference == pytest.approx(1.0 / 0.9 - 1)
    assert lines["ITL, mean"].ours < lines["ITL, mean"].restated == lines["ICL, mean"].ours
    assert lines["TPOT, mean"].ours == pytest.approx((3 / 9 + 2 / 9) / 2)
    text = rendered(list(lines.values()))
    assert "+11.1%" in text and "divides it over the tokens" in text
    assert max(len(part) for part in text.splitlines()) <= 160
