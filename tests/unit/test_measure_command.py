"""`measure` and `metrics` as a user runs them: arguments, files, what is printed, exit statuses, and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import tokenizers
from rich.console import Console
from scripted_server import DONE, SSE, Script, ScriptedServer, chunk, prompt_of, stream, usage, words

from ddtree_bench import cli
from ddtree_bench.load import requests_table
from ddtree_bench.load.live import Live
from ddtree_bench.load.progress import Display, LiveRate
from ddtree_bench.measuring import measured_folder

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

FILES = {"requests.parquet", "metrics.json", "measurement.json", "server_samples.parquet"}

COLUMNS = {
    *requests_table.SCHEMA.names,
    *("status", "output_tokens", "token_source", "n1", "ttft_s", "e2e_s", "tpot_s", "rounds", "accepted_drafts"),
    *("cached_prompt_tokens", "finish_reason", "retries", "error"),
}

KEYS = {
    *("status", "reason", "requests", "output_tokens", "throughput_tok_s", "throughput_steady_tok_s", "peak_tok_s"),
    *("per_user_tok_s", "ttft_s", "tpot_s", "itl_s", "icl_s", "e2e_s", "accept_length", "accept_length_rounds"),
    *("accept_length_macro", "acceptance_by_depth", "client", "server", "checks", "goodput"),
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Answers every request with four tokens."""
    with ScriptedServer(lambda body: words(4)) as server:
        yield server


RECORDED = ("load", "slos", "client", "counters", "planned", "aborted", "method")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measurement."""
    folder = tmp_path_factory.mktemp("once")
    with ScriptedServer(lambda body: words(4)) as server:
        assert measure(server.base_url, folder) == 0
    return folder / "out"


@pytest.fixture
def measured(once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(once, tmp_path / "measured")


def prompt_file(folder: Path, n: int = 6) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"prompt {i}", "source": "s"}) + "\n" for i in range(n)))
    return path


def arguments(url: str, folder: Path, *more: str, n: int = 6, users: int | None = 2) -> list[str]:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompt_file(folder)
    load = [] if users is None else ["--concurrency", str(users)]
    what = ["measure", "--url", url, "--model", "toy", "--prompts", str(prompts), "--num-requests", str(n)]
    return [*what, "--max-tokens", "4", "--stagger-ms", "0", *load, "--out", str(folder / "out"), *more]


def measure(url: str, folder: Path, *more: str, **given: Any) -> int:
    return cli.main(arguments(url, folder, *more, **given))


def loaded(folder: Path, name: str = "metrics.json") -> dict[str, Any]:
    return json.loads((folder / "out" / name).read_text())


def requests(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "out" / "requests.parquet")


def wrong(argv: list[str]) -> int:
    """The exit status of arguments that may be refused by the parser itself."""
    try:
        return cli.main(argv)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


# What is written and printed


def test_a_measurement_is_four_files_and_a_table(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(f"{server.base_url}/v1/", tmp_path) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    rows, found = requests(tmp_path), loaded(tmp_path)
    assert set(rows.columns) >= COLUMNS
    assert list(rows["index"]) == list(range(6))
    assert list(rows["prompt_id"]) == [str(i) for i in range(6)]
    assert (
        set(rows["status"]) == {"ok"} and set(rows["output_tokens"]) == {4} and set(rows["token_source"]) == {"usage"}
    )
    assert set(found) >= KEYS
    assert (found["status"], found["output_tokens"], found["requests"]["ok"]) == ("ok", 24, 6)
    assert found["requests_planned"] == 6 and found["requests_not_sent"] == 0
    assert set(found["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert found["ttft_s"]["mean"] == pytest.approx(rows["ttft_s"].mean())
    assert found["ttft_s"]["p99"] is None
    assert found["accept_length"] is None
    printed = capsys.readouterr()
    assert "requests ok" in printed.out and "6 of 6" in printed.out and "tokens/s" in printed.out
    assert "status: ok" in printed.out
    assert "6 of 6 requests done, 0 in flight" in printed.err


def test_all_that_was_asked_for_and_sent_is_recorded(server: ScriptedServer, tmp_path: Path) -> None:
    settings = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "20", "--seed", "3", "--ignore-eos"]
    limits = ["--request-timeout", "30", "--idle-timeout", "20", "--deadline", "60"]
    assert measure(server.base_url, tmp_path, *settings, *limits, "--slo", "ttft=5", "--method", "AR") == 0
    found = loaded(tmp_path, "measurement.json")
    body = dict(server.requests[0])
    assert body.pop("messages") == [{"role": "user", "content": "prompt 0"}]
    assert found["sent"] == body
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3, "ignore_eos": True, "max_tokens": 4}
    assert wanted.items() <= body.items()
    assert (found["url"], found["model"], found["method"]) == (server.base_url, "toy", "AR")
    assert found["load"] == {"concurrency": 2, "kind": "closed", "rate": None, "arrivals": None}
    assert {"request_s": 30, "idle_s": 20, "cell_s": 60}.items() <= found["limits"].items()
    assert found["slos"]["ttft_s"] == 5
    assert (found["planned"], found["aborted"], found["stagger_s"]) == (6, None, 0)
    assert len(found["workload"]["prompts_sha256"]) == 64 and found["workload"]["n_prompts"] == 6
    assert found["started_at"] < found["ended_at"] and found["started_at"].endswith("+00:00")
    assert {"ddtree_bench", "python", "numpy"} <= found["versions"].keys()
    assert found["client"]["wall_s"] > 0


def test_goodput_counts_requests_that_meet_every_objective(server: ScriptedServer, tmp_path: Path) -> None:
    assert measure(server.base_url, tmp_path, "--slo", "ttft=50", "--slo", "e2e=50") == 0
    assert loaded(tmp_path)["goodput"] > 0
    assert cli.main(["metrics", str(tmp_path / "out"), "--slo", "ttft=0.0000001"]) == 0
    assert loaded(tmp_path)["goodput"] == 0


def test_completions_are_asked_for_as_such(tmp_path: Path) -> None:
    text = b'data: {"choices": [{"text": "a b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}\n\n'
    with ScriptedServer(lambda body: stream(text, DONE)) as server:
        assert measure(server.base_url, tmp_path, "--endpoint", "completions") == 0
        assert set(server.paths) == {"/v1/completions"}
        assert {body["prompt"] for body in server.requests} == {f"prompt {i}" for i in range(6)}
    assert loaded(tmp_path)["output_tokens"] == 12


def test_prompts_repeat_only_when_asked(server: ScriptedServer, tmp_path: Path) -> None:
    prompt_file(tmp_path, 2)
    assert measure(server.base_url, tmp_path, "--repeat-prompts", n=5, users=1) == 0
    assert [prompt_of(body) for body in server.requests] == [f"prompt {i % 2}" for i in range(5)]
    assert list(requests(tmp_path)["prompt_id"]) == ["0", "1", "0", "1", "0"]


def test_messages_are_sent_as_they_stand(server: ScriptedServer, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "hé"}]}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "c", "messages": chat}) + "\n")
    assert measure(server.base_url, tmp_path, n=1, users=1) == 0
    assert server.requests[0]["messages"] == chat


def test_open_loop_sends_at_its_rate_and_counts_from_the_intended_start(server: ScriptedServer, tmp_path: Path) -> None:
    assert measure(server.base_url, tmp_path, "--rate", "50", "--arrivals", "constant", users=None) == 0
    rows = requests(tmp_path)
    assert np.diff(rows["intended_start"]) == pytest.approx([0.02] * 5)
    assert (rows["t_send"] >= rows["intended_start"]).all()
    assert (rows["ttft_from_intended_s"] >= rows["ttft_s"]).all()
    found = loaded(tmp_path, "measurement.json")["load"]
    assert found == {"concurrency": 6, "kind": "open", "rate": 50, "arrivals": "constant"}


@pytest.fixture
def words_file(tmp_path: Path) -> Path:
    """A tokenizer to which every word is a token."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


UNCOUNTED = stream(chunk(content="one two "), chunk(content="three", finish="length"), DONE)


def test_a_tokenizer_counts_where_the_server_does_not(tmp_path: Path, words_file: Path) -> None:
    with ScriptedServer(lambda body: UNCOUNTED) as server:
        assert measure(server.base_url, tmp_path, "--tokenizer", str(words_file)) == 0
    assert loaded(tmp_path)["output_tokens"] == 18
    assert set(requests(tmp_path)["token_source"]) == {"tokenizer"}
    assert cli.main(["metrics", str(tmp_path / "out")]) == 0
    assert loaded(tmp_path)["output_tokens"] == 18


def test_a_tokenizer_counts_afterwards_and_leaves_the_record_as_it_is(tmp_path: Path, words_file: Path) -> None:
    with ScriptedServer(lambda body: UNCOUNTED) as server:
        assert measure(server.base_url, tmp_path) == 0
    before = requests_table.read(tmp_path / "out" / "requests.parquet")
    assert loaded(tmp_path)["output_tokens"] is None
    assert cli.main(["metrics", str(tmp_path / "out"), "--tokenizer", str(words_file.parent)]) == 0
    assert loaded(tmp_path)["output_tokens"] == 18
    assert set(requests(tmp_path)["output_tokens"]) == {3}
    pd.testing.assert_frame_equal(requests_table.read(tmp_path / "out" / "requests.parquet"), before)


class Guarded(BaseHTTPRequestHandler):
    """Answers those who have the key; `keys` are what was sent with requests."""

    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Authorization"])
        content = b"".join(piece for _, piece in words(4).pieces)
        self.send_response(200 if self.keys[-1] == "Bearer s3cret-key" else 401)
        self.send_header("Content-Type", SSE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_key_is_sent_and_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVER_KEY", "s3cret-key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert measure(url, tmp_path, "--api-key-env", "SERVER_KEY") == 0
        server.shutdown()
        thread.join()
    assert Guarded.keys == ["Bearer s3cret-key"] * 6
    assert not [path for path in (tmp_path / "out").iterdir() if b"s3cret" in path.read_bytes()]
    printed = capfd.readouterr()
    assert "s3cret" not in printed.out + printed.err


# What goes wrong


def test_fault_21_all_requests_failed_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(lambda body: Script([(0, b'{"error": {"message": "no such model"}}')], status=404)) as server:
        assert measure(server.base_url, tmp_path) == 3
    found = loaded(tmp_path)
    assert (found["status"], found["requests"]["http_error"], found["requests"]["ok"]) == ("failed", 6, 0)
    assert found["throughput_tok_s"] is None and found["ttft_s"]["mean"] is None
    assert set(requests(tmp_path)["error"]) == {"HTTP 404: no such model"}
    printed = capsys.readouterr().out
    assert "0 of 6" in printed and "status: failed" in printed and "6 http_error" in printed
    assert cli.main(["metrics", str(tmp_path / "out")]) == 3


def test_no_server_at_all_is_a_result(tmp_path: Path) -> None:
    with ScriptedServer(lambda body: words(1)) as server:
        url = server.base_url
    assert measure(url, tmp_path) == 3
    assert loaded(tmp_path)["requests"]["connect_error"] == 6


def test_some_failed_requests_make_it_partial(tmp_path: Path) -> None:
    cut = stream(chunk(content="a", usage=usage(1)), end="cut")
    with ScriptedServer(lambda body: cut if prompt_of(body) == "prompt 3" else words(4)) as server:
        assert measure(server.base_url, tmp_path) == 0
    found = loaded(tmp_path)
    assert (found["status"], found["requests"]["ok"], found["requests"]["truncated"]) == ("partial", 5, 1)
    assert found["output_tokens"] == 20


def test_a_server_that_dies_in_the_middle_ends_the_cell_before_its_deadline(tmp_path: Path) -> None:
    slow = Script([(0.02, piece) for _, piece in words(4).pieces])
    prompt_file(tmp_path, 400)
    asked = count(1)

    def answer(_: dict[str, Any]) -> Script:
        if next(asked) == 40:
            death.start()
        return slow

    with ScriptedServer(answer) as server:
        death = threading.Thread(target=server.__exit__)
        begun = time.monotonic()
        assert measure(server.base_url, tmp_path, "--deadline", "60", n=400, users=8) == 0
        assert time.monotonic() - begun < 60
        death.join()
    found = loaded(tmp_path)
    assert found["status"] == "partial" and found["reason"]
    assert 0 < found["requests"]["ok"] < 400
    assert found["requests_not_sent"] + len(requests(tmp_path)) == 400
    assert "server" in loaded(tmp_path, "measurement.json")["aborted"]


def test_the_deadline_ends_a_cell_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = stream(chunk(content="a"), end="silence")
    with ScriptedServer(lambda body: words(4) if prompt_of(body) == "prompt 0" else hangs) as server:
        assert measure(server.base_url, tmp_path, "--deadline", "1", users=1) == 0
    found = loaded(tmp_path)
    assert (found["status"], found["requests"]["ok"], found["requests"]["timeout"]) == ("partial", 1, 1)
    assert found["requests_not_sent"] == 4
    assert "deadline" in capsys.readouterr().out


def test_nothing_measured_is_overwritten(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(server.base_url, tmp_path) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert measure(server.base_url, tmp_path) == 2
    assert "requests.parquet: exists, and nothing measured is overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert len(server.requests) == 6


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_folder_with_any_of_the_four_files_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert measure(URL, tmp_path) == 2
    assert f"{name}: exists, and nothing measured is overwritten; give another --out" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_the_requests_are_kept_when_something_else_cannot_be_written(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, value: Any) -> None:
        raise OverflowError("int too big to convert")

    monkeypatch.setattr(measured_folder, "write_json", refuse)
    assert measure(server.base_url, tmp_path) == 1
    assert "out: not all of it could be written (int too big to convert); what is there is kept" in (
        capsys.readouterr().err
    )
    assert len(requests_table.read(tmp_path / "out" / "requests.parquet")) == 6


def test_a_prompt_file_whose_path_is_no_utf_8_is_recorded(server: ScriptedServer, tmp_path: Path) -> None:
    odd = prompt_file(tmp_path).rename(tmp_path / os.fsdecode(b"odd\xff.jsonl"))
    assert measure(server.base_url, tmp_path, "--prompts", str(odd)) == 0
    assert loaded(tmp_path, "measurement.json")["workload"]["prompts"].endswith(r"odd\udcff.jsonl")


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("more", "given", "message"),
    [
        ([], {"users": None}, "--concurrency: is missing; give it, or --rate"),
        ([], {"n": 7}, "--num-requests: 7, and .*prompts.jsonl holds 6 prompts; .*--repeat-prompts"),
        ([], {"n": 0}, "--num-requests: '0'; give a whole number of at least 1"),
        ([], {"users": 0}, "--concurrency: '0'"),
        (["--max-tokens", "x"], {}, "--max-tokens: 'x'; give a whole number"),
        (["--url", "127.0.0.1:9"], {}, "is no URL; give one such as http://localhost:8000"),
        (["--url", "ftp://host"], {}, "is no URL"),
        (["--url", "http://a..b"], {}, "is no URL"),
        (["--url", "http://me:secret@host"], {}, "argument --url: holds a user or a password"),
        (["--url", f"{URL}/v1/chat/completions"], {}, "give the part before /v1"),
        (["--arrivals", "constant"], {}, "--arrivals constant: is of no use without --rate"),
        (["--rate", "0"], {}, "--rate: '0'; give a number of at least 0.001"),
        (["--rate", "nan"], {}, "--rate: 'nan'"),
        (["--top-p", "1.5"], {}, "--top-p: '1.5'; give a number above 0 and at most 1"),
        (["--deadline", "-1"], {}, "--deadline: '-1'"),
        (["--slo", "speed=3"], {}, "--slo: 'speed=3'; give NAME=S with one of ttft, tpot, e2e"),
        (["--slo", "ttft=1", "--slo", "ttft=2"], {}, "--slo: ttft, ttft; give each once"),
        (["--api-key-env", "NO_SUCH_KEY"], {}, "--api-key-env NO_SUCH_KEY: no such variable"),
        (["--prompts", "/no/such.jsonl"], {}, "prompt file /no/such.jsonl: No such file"),
        (["--tokenizer", "/no/such"], {}, "--tokenizer: .*/no/such"),
        (["--method", "EAGLE"], {}, "--method: invalid choice: 'EAGLE'"),
        (["--model", " "], {}, "--model: is empty"),
        (["--model", "\udc80"], {}, r"--model: '\\udc80' is not UTF-8"),
        (["--out", "/tmp/\udc80"], {}, r"--out: '/tmp/\\udc80' is not UTF-8"),
        (["--url", f"{URL}/\udc80"], {}, "--url: .*is no URL"),
        (["--max-tokens", "9" * 20], {}, "--max-tokens: '9{20}'; .* at most 9007199254740991"),
        (["--top-k", "9" * 20], {}, "--top-k: '9{20}'; .* at most 9007199254740991"),
        (["--seed", "9" * 5000], {}, "--seed: '9+'; give a whole number of at least 0"),
        (["--num-requests", "1000001", "--repeat-prompts"], {}, "--num-requests: .* and at most 1000000"),
        (["--concurrency", "9" * 20], {}, "--concurrency: '9{20}'"),
        (["--rate", "1e-320"], {}, "--rate: '1e-320'; give a number of at least 0.001 and at most 1e"),
        (["--rate", "1e300"], {}, "--rate: '1e300'"),
        (["--stagger-ms", "1e20"], {}, "--stagger-ms: '1e20'; give a number of at least 0 and at most 1e"),
        (["--idle-timeout", "1e30"], {}, "--idle-timeout: '1e30'; give a number above 0 and at most 1e"),
        (["--temperature", "1e308"], {}, "--temperature: '1e308'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(
    tmp_path: Path, more: list[str], given: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(arguments(URL, tmp_path, *more, **given)) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_messages_cannot_be_sent_to_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "c", "messages": chat}) + "\n")
    assert measure(URL, tmp_path, "--endpoint", "completions", n=1) == 2
    assert "--endpoint completions: the prompt 'c' has messages" in capsys.readouterr().err


@pytest.mark.parametrize("inside", [True, False])
def test_a_file_cannot_be_the_folder(tmp_path: Path, inside: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    out = tmp_path / "file" / "out" if inside else tmp_path / "file"
    assert measure(URL, tmp_path, "--out", str(out)) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


# Computing again


def test_metrics_computes_the_same_again(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(server.base_url, tmp_path, "--slo", "ttft=5") == 0
    out, table = tmp_path / "out", capsys.readouterr().out
    metrics, rows = (out / "metrics.json").read_bytes(), requests(tmp_path)
    raw = requests_table.read(out / "requests.parquet")
    (out / "metrics.json").unlink()
    requests_table.write(raw, out / "requests.parquet")
    assert cli.main(["metrics", str(out)]) == 0
    assert (out / "metrics.json").read_bytes() == metrics
    pd.testing.assert_frame_equal(requests(tmp_path), rows)
    assert capsys.readouterr().out == table
    assert {path.name for path in out.iterdir()} == FILES


def test_metrics_needs_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", str(tmp_path)]) == 1
    assert f"{tmp_path}/measurement.json: does not exist" in capsys.readouterr().err
    (tmp_path / "measurement.json").write_text('{"format": 0}')
    assert cli.main(["metrics", str(tmp_path)]) == 1
    assert "measurement.json: is not of the format 1" in capsys.readouterr().err
    (tmp_path / "measurement.json").write_text("{")
    assert cli.main(["metrics", str(tmp_path)]) == 1
    assert "measurement.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, ..., f"measurement.json: {key} is missing; restore the file") for key in RECORDED),
        ("load", {"users": 3}, r"measurement.json: load cannot be used \(.*users"),
        ("load", None, "measurement.json: load cannot be used"),
        ("slos", {"ttft_s": -1}, r"measurement.json: slos cannot be used \(ttft_s: -1; an objective must be above 0"),
        ("planned", "six", r"measurement.json: planned cannot be used \(it is 'six'\)"),
    ],
)
def test_metrics_of_a_damaged_record_names_the_file_and_the_key(
    measured: Path, key: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured / "measurement.json"
    found = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps({name: one for name, one in found.items() if one is not ...}))
    assert cli.main(["metrics", str(measured)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_metrics_of_samples_of_something_else_names_the_file(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.DataFrame({"time": [1.0]}).to_parquet(measured / "server_samples.parquet")
    assert cli.main(["metrics", str(measured)]) == 1
    assert "server_samples.parquet: cannot be read (it has no column ['running', 'queued'])" in capsys.readouterr().err


def test_metrics_refuses_what_measure_refuses(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(server.base_url, tmp_path) == 0
    assert cli.main(["metrics", str(tmp_path / "out"), "--tokenizer", "/no/such"]) == 2
    assert "--tokenizer: " in capsys.readouterr().err
    assert wrong(["metrics", str(tmp_path / "out"), "--slo", "ttft=0"]) == 2
    assert loaded(tmp_path)["status"] == "ok"


def test_a_servers_own_load_is_sampled(tmp_path: Path) -> None:
    slow = Script([(0.3, piece) for _, piece in words(4).pieces])
    with ScriptedServer(lambda body: slow, admits=1) as server:
        assert measure(server.base_url, tmp_path, n=2) == 0
    samples = pd.read_parquet(tmp_path / "out" / "server_samples.parquet")
    assert list(samples.columns) == ["time", "running", "queued"]
    assert (samples["running"].iloc[0], samples["queued"].iloc[0]) == (1, 1)
    assert loaded(tmp_path)["server"]["server_running_max"] == 1


# Being told to end


def started(argv: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-m", "ddtree_bench", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cell_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    hangs = stream(chunk(content="a"), end="silence")
    with ScriptedServer(lambda body: words(4) if prompt_of(body) in ("prompt 0", "prompt 1") else hangs) as server:
        process = started(arguments(server.base_url, tmp_path, users=1))
        try:
            assert eventually(lambda: len(server.requests) == 3)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    found = loaded(tmp_path)
    assert (found["status"], found["requests"]["ok"], found["requests_not_sent"]) == ("partial", 2, 3)
    assert loaded(tmp_path, "measurement.json")["aborted"] == f"interrupted by {number.name}"
    assert f"ended early: interrupted by {number.name}" in err and "2 of 6" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


WAITS_FOR_A_SIGNAL = """
import time
from ddtree_bench.measuring.ending import EndRequest
with EndRequest() as end:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if end.reason():
            print(end.reason(), flush=True)
            time.sleep(600)
"""


def test_a_second_ctrl_c_ends_at_once() -> None:
    command = [sys.executable, "-c", WAITS_FOR_A_SIGNAL]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted by SIGINT\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


# What is shown meanwhile


def live(elapsed_s: float, ended: int, tokens: int, exact: bool = True) -> Live:
    return Live(elapsed_s, 10, min(10, ended + 2), ended, min(2, 10 - ended), tokens, exact)


def test_the_live_rate_follows_the_last_seconds() -> None:
    rate = LiveRate()
    assert rate.add(0.0, 0) == 0
    assert rate.add(0.5, 50) == 100
    assert [round(rate.add(0.5 * i, 50 + 5 * (i - 1))) for i in range(2, 8)][-1] == 10


def shown(terminal: bool, *given: Live) -> str:
    output = StringIO()
    with Display(Console(file=output, force_terminal=terminal, width=120)) as display:
        for one in given:
            display(one)
    return output.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    lines = shown(False, *(live(0.5 * i, i // 2, 50 * i) for i in range(1, 21))).splitlines()
    assert lines == [
        "0 of 10 requests done, 2 in flight, 100 tokens/s, 0 s",
        "5 of 10 requests done, 2 in flight, 100 tokens/s, 6 s",
        "10 of 10 requests done, 0 in flight, 100 tokens/s, 10 s",
    ]


def test_a_terminal_shows_a_bar_and_what_is_not_exact() -> None:
    output = shown(True, live(1.0, 3, 100), live(2.0, 4, 300, exact=False))
    assert "3 of 10 requests done, 2 in flight, 100 tokens/s" in output
    assert "4 of 10 requests done, 2 in flight, at least 150 tokens/s" in output
    assert output.endswith("\x1b[?25h")


def test_a_terminal_that_is_gone_disturbs_nothing() -> None:
    class Gone(StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Display(Console(file=Gone(), force_terminal=False)) as display:
        display(live(1.0, 3, 100))
        display.say("something")
