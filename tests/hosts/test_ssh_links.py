"""The ssh launcher over a link that is cut: servers go on, and what was measured meanwhile does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Lab
from launching import BIND, TOY, TOY_ENGINE, Ground, once_ended, write_toy_engine
from nspawn import Host
from processes import children, eventually

from ddtree_bench.servers import api
from ddtree_bench.servers.command_line import Place
from ddtree_bench.servers.ready import Ready
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.launcher import LINK_LOST, ServerState, TargetError
from ddtree_bench.targets.ssh.launcher import SshLauncher

SESSIONS = "^sshd: [a-z]"
END_SESSIONS = f"systemctl restart ssh; pkill -KILL -f '{SESSIONS}'"
"""Restart sshd, which leaves connections alone, and end those too."""


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    host = lab.start("links", bind_ro=BIND)
    yield host
    lab.remove(host)


class Watched:
    """States of a launcher as one sees them who asks again and again, and how long each took to be told."""

    def __init__(self, launcher: SshLauncher) -> None:
        self._state = launcher.state
        self.seen: list[ServerState] = []
        self.longest_s = 0.0

    def __call__(self) -> ServerState:
        began = time.monotonic()
        self.seen.append(self._state())
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return self.seen[-1]

    @property
    def lost(self) -> int:
        return sum(state.reason == LINK_LOST for state in self.seen)


def start_toy(ground: Ground, launcher: SshLauncher, watched: Watched) -> Ready:
    """Start the toy engine as a run does, and wait until it is ready."""
    launcher.state = watched  # type: ignore[method-assign]
    return start_server(
        launcher,
        TOY,
        Place(TOY_ENGINE, launcher.free_port(), "s1"),
        log_path=ground.folder / "toy-s1.log",
        stop_grace_s=3,
        timeout_s=60,
        progress=ground.said.append,
    )


def test_a_link_that_is_cut_while_the_server_loads(ground: Ground) -> None:
    write_toy_engine(ground.host, "--load-s", "25")
    with ground.leased() as launcher:
        watched = Watched(launcher)
        cut = threading.Thread(target=cut_for, args=(ground.host, 3, 20))
        cut.start()
        ready = start_toy(ground, launcher, watched)
        cut.join()
        assert 24 < ready.seconds < 45
        assert watched.lost and watched.longest_s < 0.5
        assert "toy-ar: loading for" in "".join(ground.said) and LINK_LOST in "".join(ground.said)
        assert "the link was cut for" in "".join(ground.said)
        launcher.stop()
        assert (ground.folder / "toy-s1.log").read_text() == "loading weights\n"
    assert not children("ssh")


def cut_for(host: Host, after_s: float, seconds: float) -> None:
    time.sleep(after_s)
    with host.link_cut():
        time.sleep(seconds)


def test_sshd_is_restarted_while_the_server_loads_and_while_something_is_measured(ground: Ground) -> None:
    write_toy_engine(ground.host, "--load-s", "5")
    with ground.leased() as launcher:
        threading.Timer(2, ground.host.exec, ["sh", "-c", END_SESSIONS], {"check": False}).start()
        ready = start_toy(ground, launcher, Watched(launcher))
        assert ready.seconds < 25
        url, pid = launcher.base_url(), launcher.state().pid

        with launcher.watched_link() as link:
            ground.host.exec("sh", "-c", END_SESSIONS, check=False)
            assert not answers_at_once(url)
            assert link().broken is not None
        assert eventually(lambda: api.health(launcher.base_url()), 10)
        assert launcher.state().pid == pid and launcher.base_url() == url
        held_again(launcher)


def answers_at_once(url: str) -> bool:
    return eventually(lambda: api.health(url), 0.1)


def held_again(launcher: SshLauncher) -> None:
    """See that what is measured now counts again."""
    assert eventually(lambda: api.health(launcher.base_url()), 10)
    with launcher.watched_link() as link:
        time.sleep(1.5)
        record = link()
    assert record.broken is None and 0 < max(record.round_trips_s) < 1


def test_a_cut_that_the_way_to_the_server_outlives(ground: Ground) -> None:
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        assert eventually(lambda: api.health(launcher.base_url()), 10)
        pid, before = launcher.state().pid, children("ssh")
        with launcher.watched_link() as link:
            with ground.host.link_cut():
                time.sleep(4)
                assert launcher.state().reason == LINK_LOST
            assert link().broken is not None
        assert launcher.state().pid == pid and children("ssh") == before
        held_again(launcher)


def test_a_cut_that_is_longer_than_the_lease(ground: Ground) -> None:
    with ground.leased(lease_ttl_s=5.0, reconnect_s=120.0) as launcher:
        launcher.start(ground.tiny(launcher))
        pid = launcher.state().pid
        with ground.host.link_cut():
            assert eventually(lambda: gone(ground.host, pid), 15)
            assert launcher.state().reason == LINK_LOST
        ended = once_ended(launcher, 30)
        assert ended.reason == "lease" and not ended.ended_by_itself
        assert "the lease has not been renewed for 5 s" in str(ended)
        with pytest.raises(TargetError, match="the lease on the host was lost: its keeper does not answer"):
            launcher.start(ground.tiny(launcher))
        assert launcher.stop() == ended
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        assert launcher.state().alive


def gone(host: Host, pid: Any) -> bool:
    return "no" in host.exec("sh", "-c", f"test -d /proc/{pid} || echo no")


def test_a_stop_while_the_host_is_out_of_reach(ground: Ground) -> None:
    """It says so in time; what it could not stop ends with the lease, and the next run starts."""
    launcher = ground.launcher(lease_ttl_s=6.0, reconnect_s=3.0)
    lease: Any = launcher.acquire("run", 0, print)
    launcher.start(ground.tiny(launcher))
    pid = launcher.state().pid
    ground.host.exec("systemctl", "stop", "ssh")
    try:
        ground.host.exec("pkill", "-KILL", "-f", SESSIONS)
        began = time.monotonic()
        with pytest.raises(TargetError, match=r"root@links: .*not found again within 3 s"):
            launcher.stop()
        assert time.monotonic() - began < 10 and not children("ssh")
        assert eventually(lambda: gone(ground.host, pid), 15)
        lease.release()
        launcher.close()
    finally:
        ground.host.exec("systemctl", "start", "ssh")
    with ground.leased() as following:
        following.start(ground.tiny(following))
        assert following.state().alive
    clear_leftovers(ground)


def clear_leftovers(ground: Ground) -> None:
    """Remove the unit files of what ended by itself."""
    ground.host.exec("sh", "-c", "rm -f /run/systemd/system/ddtree-bench-*; systemctl daemon-reload")
