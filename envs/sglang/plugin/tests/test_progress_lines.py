"""Bars of the real tqdm, drawn by a process of their own into a pipe or a terminal."""

import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest

pytest.importorskip("tqdm")

from sglang_ddtree.options import START_ID_VARIABLE

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", START_ID_VARIABLE)}
ENVIRONMENT["TRITON_INTERPRET"] = "1"  # where there is no GPU, SGLang cannot be imported without
STARTED = ENVIRONMENT | {START_ID_VARIABLE: "s1"}

INSTALL = """
import time
from sglang_ddtree import progress_lines
progress_lines.install()
from tqdm.auto import tqdm
"""
FAST = "for _ in tqdm(range(3), desc='Loading'): time.sleep(0.15)"
# As SGLang draws them: weight_utils.py, decode_cuda_graph_runner.py.
SHARDS = """
shards = "{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
for _ in tqdm(range(2), desc="Loading shards", bar_format=shards, position=tqdm._get_free_pos()): pass
"""
CAPTURE = """
sizes = tqdm([4, 2, 1])
for bs in sizes: sizes.set_description(f"Capturing batches ({bs=} avail_mem=70.12 GB)")
"""


def drawn(program, environment=STARTED):
    """What a program writes to its stderr, a pipe, after it was told how to draw."""
    command = [sys.executable, "-c", INSTALL + program]
    return subprocess.run(command, check=True, stderr=subprocess.PIPE, env=environment, timeout=60).stderr.decode()


def states(written, name):
    """The counts in the lines of a bar; whatever is written must be whole lines of bars with that name."""
    assert written.endswith("\n")
    found = [re.fullmatch(rf"{name}.*: +\d+%.*\| (\d+/\d+) \[[^]\r\x1b]*\]", line) for line in written[:-1].split("\n")]
    assert all(found), written
    return [line[1] for line in found]


def test_a_state_is_read_while_the_bar_goes_on():
    program = INSTALL + "for _ in tqdm(range(2), desc='Loading'): input(); time.sleep(1)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stderr=pipe, env=STARTED, text=True) as process:
        seen = []
        for _ in range(2):
            seen.append(process.stderr.readline())  # the next step waits for us
            process.stdin.write("\n")
            process.stdin.flush()
        assert states("".join(seen), "Loading") == ["0/2", "1/2"]
        assert states(process.stderr.read(), "Loading")[-1] == "2/2"
    assert process.returncode == 0


def test_a_bar_writes_once_a_second_and_its_end():
    began = time.monotonic()
    seen = states(drawn("for _ in tqdm(range(110), desc='Loading', mininterval=0): time.sleep(0.02)"), "Loading")
    assert 4 <= len(seen) <= 2 + (time.monotonic() - began)
    assert seen[0] == "0/110" and seen[-1] == "110/110"


@pytest.mark.parametrize(
    ("program", "name", "counts"),
    [
        (SHARDS, "Loading shards", ["0/2", "2/2"]),
        (CAPTURE, "Capturing batches", ["0/3", "3/3"]),
        ("list(tqdm(range(3), desc='B', leave=False))", "B", ["0/3", "3/3"]),
        ("list(tqdm(range(3), desc='B', position=2))", "B", ["0/3", "3/3"]),
        ("for _ in tqdm(range(3), desc='B'): break", "B", ["0/3", "0/3"]),
        ("b = tqdm(total=3, desc='B'); b.update(2); tqdm.write('x'); b.clear(); b.close()", "B", ["0/3", "2/3"]),
        ("from tqdm import trange; list(trange(3, desc='B'))", "B", ["0/3", "3/3"]),
        ("outer = tqdm(range(1), desc='B1')\nfor _ in outer: list(tqdm(range(2), desc='B2'))", "B",
         ["0/1", "0/2", "2/2", "1/1"]),
    ],
)  # fmt: skip
def test_every_bar_is_lines_and_shows_its_end(program, name, counts):
    assert states(drawn(program), name) == counts


def test_a_bar_that_is_switched_off_stays_off():
    assert drawn("list(tqdm(range(3), disable=True)); tqdm(total=2, disable=True).close()") == ""


def test_a_server_that_another_started_keeps_its_bars():
    written = drawn(FAST, ENVIRONMENT)
    assert written.count("\r") >= 3 and written.count("\n") == 1


def test_a_terminal_keeps_its_bars():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        subprocess.run([sys.executable, "-c", INSTALL + FAST], check=True, stderr=theirs, env=STARTED, timeout=60)
        os.close(theirs)
        written = terminal.read(65536).decode()
    assert written.count("\rLoading: ") >= 3 and written.count("\n") == 1


def test_sglang_loads_weights_with_lines_once_it_has_loaded_its_plugins(tmp_path):
    pytest.importorskip("sglang.srt")
    import torch
    from safetensors.torch import save_file

    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    program = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.model_loader import weight_utils
print("weights", file=sys.stderr)
list(weight_utils.safetensors_weights_iterator(sys.argv[1:]))
list(weight_utils.DisabledTqdm(range(2)))
"""
    command = [sys.executable, "-c", program, *sorted(map(str, tmp_path.iterdir()))]
    written = subprocess.run(command, check=True, stderr=subprocess.PIPE, env=STARTED, timeout=120).stderr.decode()
    assert states(written.partition("weights\n")[2], "Loading safetensors checkpoint shards") == ["0/2", "2/2"]
