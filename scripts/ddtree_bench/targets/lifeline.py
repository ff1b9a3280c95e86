"""How a measuring process notices that it should end: its ancestors are gone, or a signal says so.

A rule's script outlives a killed snakemake, and would go on renewing its lease for ever. So it asks the kernel for
a signal when its parent dies, and once a second looks whether the ancestors it started with are still there:
snakemake starts scripts through a shell, and the shell outlives snakemake.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from ddtree_bench.working_folder import main_process

PR_SET_PDEATHSIG = 1
CHECK_EVERY_S = 1.0
AGAIN_AFTER_S = 0.05
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """The process was told to end. Not an Exception, so that nothing which handles failures holds it up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_status(self) -> int:
        """What a shell reports for a process that this signal has ended."""
        return 128 + self.number


class Interruption:
    """Within the block, the first SIGTERM, SIGINT or SIGHUP raises Interrupted and later ones are ignored.

    A signal that the process was started to ignore (nohup, a script's background job) stays ignored. Work that must
    not be cut short, such as stopping a server, goes into a `shielded` block: a signal that comes meanwhile raises
    when that block ends. Enter it in the main thread.

    Python runs handlers in the main thread only, but the kernel may deliver a signal to any thread (it does when the
    main thread has just been continued after a stop), and then a main thread that sleeps sleeps on. So a thread of
    its own hears of every signal and delivers it to the main thread once more.

    What a handler raises while a finalizer runs (in a garbage collection) goes nowhere: Python reports it and goes on.
    So a signal whose exception was lost like that is delivered again a moment later.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._raised = False
        self._shields = 0
        self._previous: dict[int, object] = {}
        self._pipe = (-1, -1)
        self._previous_wakeup = -1
        self._previous_hook = sys.unraisablehook
        self._again: threading.Timer | None = None

    def __enter__(self) -> Interruption:
        self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe[1], False)
        self._forwarder = threading.Thread(target=self._forward, name="signals", daemon=True)
        self._forwarder.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._lost
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._shields += 1
        if self._again is not None:
            self._again.join()
        sys.unraisablehook = self._previous_hook
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._pipe[1])
        self._forwarder.join()
        os.close(self._pipe[0])
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._shields -= 1
        self._raise_if_due()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Hold back signals until the block has ended."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self._raise_if_due()

    def _forward(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while numbers := os.read(self._pipe[0], 1):
            if self._received is None and numbers[0] in self._previous:
                signal.pthread_kill(main, numbers[0])

    def _lost(self, lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Interrupted):
            self._previous_hook(lost)
            return
        main = threading.main_thread().ident
        assert main is not None
        self._raised = False
        # Not here: the finalizer is still running.
        self._again = threading.Timer(AGAIN_AFTER_S, signal.pthread_kill, (main, lost.exc_value.number))
        self._again.start()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._received is not None and not self._raised and self._shields == 0:
            self._raised = True
            raise Interrupted(self._received)


@contextmanager
def tied_to_ancestors(check_every_s: float = CHECK_EVERY_S) -> Iterator[None]:
    """Within the block this process gets SIGTERM when one of its ancestors up to the first that is no shell ends.

    The main process of the pass counts as one, also when it was gone before the block began. Enter it in the main
    thread, inside an Interruption, which turns the signal into an exception.
    """
    try:
        main = main_process()
    except psutil.NoSuchProcess:
        os.kill(os.getpid(), signal.SIGTERM)
        main = None
    ancestors = _ancestors() + ([main] if main is not None else [])
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ancestors, ended, check_every_s), name="lifeline", daemon=True)
    _set_parent_death_signal(signal.SIGTERM)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        _set_parent_death_signal(0)


def _ancestors() -> list[psutil.Process]:
    """This process's parent and, while those are shells, their parents; psutil knows them by pid and start time."""
    found: list[psutil.Process] = []
    parent = psutil.Process().parent()
    while parent is not None and parent.pid > 1:
        found.append(parent)
        if parent.name() not in SHELLS:
            break
        parent = parent.parent()
    return found


def _watch(ancestors: list[psutil.Process], ended: threading.Event, check_every_s: float) -> None:
    while not ended.wait(check_every_s):
        if not all(_lives(ancestor) for ancestor in ancestors):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _set_parent_death_signal(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
