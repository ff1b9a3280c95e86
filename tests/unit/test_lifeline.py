"""How a measuring process ends: by signals, and when those that started it are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
from processes import Owner, alive, end, eventually

from ddtree_bench.targets.lifeline import Interrupted, Interruption

START_OWNER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from processes import Owner
owner = Owner(Path({folder!r}), tie=True, through_shell=True)
print(owner.server["watchdog_pid"], owner.server["server_pid"], owner.process.pid, flush=True)
owner.process.wait()
"""


def test_a_killed_snakemake_ends_the_measuring_process_behind_a_shell(tmp_path: Path) -> None:
    program = START_OWNER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    snakemake = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert snakemake.stdout is not None
    watchdog, server, shell = map(int, snakemake.stdout.readline().split())
    measuring = [child.pid for child in psutil.Process(shell).children()]
    pids = [watchdog, server, *measuring]
    try:
        assert len(measuring) == 1 and all(alive(pid) for pid in pids)
        end(snakemake.pid)
        snakemake.wait()
        assert eventually(lambda: not any(alive(pid) for pid in pids), 10)
        assert '"requested"' in (tmp_path / "server.state.json").read_text()
    finally:
        snakemake.stdout.close()
        for pid in (snakemake.pid, shell, *pids):
            end(pid)


def test_a_killed_parent_ends_the_measuring_process(tmp_path: Path) -> None:
    owner = Owner(tmp_path, tie=True, through_shell=True)
    measuring = psutil.Process(owner.process.pid).children()[0].pid
    try:
        end(owner.process.pid)
        assert eventually(lambda: not any(alive(pid) for pid in (measuring, *owner.pids)), 10)
    finally:
        end(measuring)
        owner.close()


def test_a_signal_that_another_thread_receives_interrupts_a_sleeping_main_thread() -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    assert other.ident is not None
    began = time.monotonic()
    try:
        with pytest.raises(Interrupted, match="SIGTERM"), Interruption():
            signal.pthread_kill(other.ident, signal.SIGTERM)
            time.sleep(20)
        assert time.monotonic() - began < 10
    finally:
        ended.set()
        other.join()


def test_the_first_signal_raises_and_later_ones_are_ignored() -> None:
    with pytest.raises(Interrupted, match="SIGTERM") as caught, Interruption():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_status == 143


def test_a_signal_in_a_shielded_block_raises_at_its_end() -> None:
    done = []
    with pytest.raises(Interrupted), Interruption() as interruption:
        with interruption.shielded():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("stopped")
        done.append("not reached")
    assert done == ["stopped"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert not issubclass(Interrupted, Exception)


def test_a_signal_that_meets_a_finalizer_is_not_lost() -> None:
    class Thing:
        pass

    def interrupted_here() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    thing = Thing()
    weakref.finalize(thing, interrupted_here)
    began = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"), Interruption():
        del thing
        time.sleep(20)
    assert time.monotonic() - began < 10


def test_a_signal_lost_in_a_finalizer_at_the_end_of_the_block_still_counts() -> None:
    class Thing:
        pass

    thing = Thing()
    weakref.finalize(thing, lambda: [os.kill(os.getpid(), signal.SIGINT), time.sleep(0.01)])
    with pytest.raises(Interrupted, match="SIGINT"), Interruption():
        del thing
