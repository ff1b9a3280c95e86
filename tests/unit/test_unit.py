"""Unit files: what they say, what systemd itself says of them, and values that are refused."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_bench.targets.ssh.unit import MAX_WORD, Unit, UnitRefused, environment_file, render
from ddtree_bench.targets.unit_state import SHOW, parse_show, parse_shown

NAME = "ddtree-bench-0123456789ab.service"
UNIT = Unit(
    NAME,
    "server of ann, workflow /home/ann/w",
    ("/bin/sh", "-c", "sleep 1"),
    environment={"HOME": "/home/ann"},
    environment_file=f"/run/ddtree-bench/{NAME}.env",
    binds_to="ddtree-bench-lease-0123456789ab.service",
    working_directory="/tmp",
    user="daemon",
    stop_grace_s=12.5,
    memory_max_bytes=1 << 30,
)


def verify(unit: Unit, folder: Path) -> str:
    """What systemd finds wrong with a unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    if unit.binds_to:
        (folder / unit.binds_to).write_text("[Service]\nExecStart=/bin/true\n")
    path = folder / unit.name
    path.write_text(render(unit))
    argv = ["systemd-analyze", "verify", "--man=no", str(path)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "\n".join(line for line in result.stderr.splitlines() if unit.name in line)


def lines(unit: Unit) -> list[str]:
    return render(unit).splitlines()


def refused(unit: Unit) -> str:
    with pytest.raises(UnitRefused) as error:
        render(unit)
    return str(error.value)


def test_systemd_takes_a_unit_as_it_is(tmp_path: Path) -> None:
    assert verify(UNIT, tmp_path) == ""
    bare = Unit(NAME, "d", ("/bin/true",), kind="notify", start_timeout_s=3.0)
    assert verify(bare, tmp_path) == ""
    odd = replace(
        UNIT, argv=("/bin/sh", *map(chr, range(1, 256))), description="%n \"'; \\ $x", working_directory="/a b%%"
    )
    assert verify(odd, tmp_path) == ""
    assert "is not executable" in verify(replace(bare, argv=("/no/such/program",)), tmp_path)


def test_a_unit_says_what_is_asked_and_nothing_is_left_to_chance() -> None:
    said = lines(UNIT)
    for line in (
        "Description=server of ann, workflow /home/ann/w",
        "BindsTo=ddtree-bench-lease-0123456789ab.service",
        "After=ddtree-bench-lease-0123456789ab.service",
        "Type=exec",
        "Restart=no",
        "User=daemon",
        "WorkingDirectory=/tmp",
        'Environment="HOME=/home/ann"',
        f"EnvironmentFile=/run/ddtree-bench/{NAME}.env",
        'ExecStart=:@"/bin/sh" "/bin/sh" "-c" "sleep 1"',
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=12500ms",
        "KillMode=control-group",
        "SendSIGKILL=yes",
        "MemoryMax=1073741824",
        "MemorySwapMax=0",
        "CollectMode=inactive",
        "StartLimitIntervalSec=0",
    ):
        assert line in said
    assert "[Install]" not in said


def test_what_a_unit_has_not_is_not_mentioned() -> None:
    text = render(Unit(NAME, "d", ("/bin/true",)))
    for key in ("BindsTo", "After=", "User=", "Environment", "MemoryMax", "MemorySwapMax"):
        assert key not in text


def test_a_keeper_that_ends_well_takes_what_is_bound_to_it_along() -> None:
    said = lines(replace(UNIT, kind="notify"))
    assert "RemainAfterExit=no" in said and "KillMode=mixed" in said
    assert "RemainAfterExit=yes" in lines(UNIT)


def test_no_time_at_all_is_not_taken_for_no_limit() -> None:
    said = lines(replace(UNIT, stop_grace_s=0, start_timeout_s=0))
    assert "TimeoutStopSec=1ms" in said and "TimeoutStartSec=1ms" in said


def test_words_are_quoted_for_systemd() -> None:
    unit = replace(UNIT, argv=("/bin/echo", "", 'a "b" \\ %n $HOME', "\n[Service]\n\t\x7f", "é漢\u2028", "-;@+!"))
    (command,) = [line for line in lines(unit) if line.startswith("ExecStart")]
    assert command == (
        'ExecStart=:@"/bin/echo" "/bin/echo" "" "a \\"b\\" \\\\ %%n $HOME" "\\x0a[Service]\\x0a\\x09\\x7f" '
        '"é漢\\xe2\\x80\\xa8" "-;@+!"'
    )


def test_an_environment_file_is_quoted_as_a_shell_does() -> None:
    assert environment_file({"A": 'a"b\\c`d$e\nf', "B": ""}) == 'A="a\\"b\\\\c\\`d\\$e\nf"\nB=""\n'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"argv": ()}, "program '': must be an absolute path"),
        ({"argv": ("python", "-m", "x")}, "program 'python': must be an absolute path"),
        ({"argv": ("-/bin/sh",)}, "program '-/bin/sh': must be an absolute path"),
        ({"argv": ("/opt/it's/python",)}, 'systemd starts none with "\'" in its path'),
        ({"argv": ("/opt/a\\b/python",)}, "in its path"),
        ({"argv": ("/opt/a\nb/python",)}, "in its path"),
        ({"argv": ("/bin/sh", "a\0b")}, "argument 1 of the command: has a NUL character"),
        ({"argv": ("/bin/sh", "x", "\udcff")}, "argument 2 of the command: is not valid UTF-8 at character 0"),
        ({"argv": ("/bin/sh", "\uffff")}, "argument 1 of the command: has U+FFFF"),
        ({"argv": ("/bin/sh", "a\ufdd0")}, "argument 1 of the command: has U+FDD0"),
        ({"argv": ("/bin/sh", "a" * (MAX_WORD + 1))}, f"has {MAX_WORD + 1} bytes"),
        ({"argv": ("/bin/sh", *["a" * MAX_WORD] * 9)}, f"unit {NAME}: the command line has"),
        ({"environment": {"A-B": "1"}}, "variable 'A-B': the name must be"),
        ({"environment": {"A\n": "1"}}, "variable 'A\\n': the name must be"),
        ({"environment": {"": "1"}}, "variable '': the name must be"),
        ({"environment": {"A": "x\0"}}, "variable A: has a NUL character"),
        ({"environment": {"A": "x\udc80"}}, "variable A: is not valid UTF-8"),
        ({"working_directory": "models"}, "working directory 'models': must be an absolute path"),
        ({"working_directory": "/a\nExecStartPre=/x"}, "must be one line of printable characters"),
        ({"working_directory": "/a "}, "neither begins nor ends with a blank"),
        ({"working_directory": "/a\\"}, "nor ends with a backslash"),
        ({"working_directory": "/a\ud800"}, "must be one line of printable characters"),
        ({"description": ""}, "description '': must be one line"),
        ({"description": " a"}, "description ' a': must be one line"),
        ({"user": "a\nb"}, "user 'a\\nb': must be one line"),
        ({"environment_file": "/run/*.env"}, "systemd takes '*' for part of a pattern"),
        ({"environment_file": "-/run/x.env"}, "environment file '-/run/x.env': must be an absolute path"),
        ({"name": "ssh.service"}, "unit 'ssh.service': must be named ddtree-bench-….service"),
        ({"name": "ddtree-bench-../x.service"}, "must be named"),
        ({"name": "ddtree-bench-a b.service"}, "must be named"),
        ({"name": "ddtree-bench-x.service\n"}, "must be named"),
        ({"binds_to": "ssh.service"}, "unit 'ssh.service': must be named"),
    ],
)
def test_a_value_that_cannot_be_exact_is_refused_and_named(change: dict[str, Any], words: str) -> None:
    assert words in refused(replace(UNIT, **change))


@pytest.mark.parametrize(
    ("given", "said"), [("/home/a\u00a0b", "/home/a\\xa0b"), ("a\nUser=root", "a\\nUser=root"), ("a\udcff", "a\\udcff")]
)
def test_a_description_tells_what_cannot_be_printed_by_an_escape(given: str, said: str) -> None:
    assert f"Description={said}" in lines(replace(UNIT, description=given))


@pytest.mark.parametrize("write", [environment_file, lambda values: render(replace(UNIT, environment=values))])
def test_a_refused_variable_is_named_without_its_value(write: Callable[[dict[str, str]], str]) -> None:
    for value in ("hunter2\0", "hunter2\udcff", "hunter2\uffff"):
        with pytest.raises(UnitRefused) as error:
            write({"TOKEN": value})
        assert "TOKEN" in str(error.value) and "hunter2" not in str(error.value)


@settings(max_examples=200)
@given(st.lists(st.text(), max_size=4), st.text(), st.text())
def test_whatever_the_values_a_unit_keeps_its_lines_or_is_refused(
    words: list[str], value: str, description: str
) -> None:
    """No value adds a line, a section or a key."""
    unit = replace(UNIT, argv=("/bin/sh", *words), environment={"A": value}, description=description)
    try:
        text = render(unit)
    except UnitRefused:
        return
    keys = [line.split("=")[0] for line in text.split("\n")]
    assert keys == [line.split("=")[0] for line in render(UNIT).split("\n")]
    assert not any(line.endswith("\\") for line in text.split("\n"))


SHOWN = """\
Id=ddtree-bench-x.service
Description=server of ann = the first
LoadState=loaded
ActiveState={active}
SubState={sub}
Result={result}
MainPID={pid}
ExecMainCode={code}
ExecMainStatus={status}
InactiveExitTimestampMonotonic=1500
ActiveEnterTimestampMonotonic={entered}
InvocationID=15d93b2c973b4036bb161e3233664b72
User=
BindsTo=ddtree-bench-lease-a.service ddtree-bench-lease-b.service
"""


def shown(**values: Any) -> str:
    defaults = {"active": "active", "sub": "running", "result": "success", "pid": 0, "code": 0, "status": 0}
    return SHOWN.format(**{**defaults, "entered": 1600, **values})


def test_a_unit_that_runs_is_alive() -> None:
    state = parse_show(shown(pid=123))
    assert state.alive and state.main_pid == 123 and state.exit_code is None and state.signal is None
    assert state.was_active and state.started_us == 1500 and state.description == "server of ann = the first"
    assert state.user is None
    assert state.binds_to == ("ddtree-bench-lease-a.service", "ddtree-bench-lease-b.service")
    assert parse_show(shown(active="activating", sub="start")).alive
    assert parse_show(shown(active="deactivating", sub="stop-sigterm")).alive


def test_how_a_unit_ended_is_read() -> None:
    state = parse_show(shown(active="failed", sub="failed", result="exit-code", code=1, status=75))
    assert not state.alive and (state.exit_code, state.signal) == (75, None)
    assert str(state) == "ddtree-bench-x.service is failed, failed, result exit-code, exit status 75"
    state = parse_show(shown(active="failed", sub="failed", result="core-dump", code=3, status=11))
    assert (state.exit_code, state.signal) == (None, "SIGSEGV")
    assert parse_show(shown(active="failed", sub="failed", code=2, status=50)).signal == "signal 50"
    assert parse_show(shown(active="failed", sub="failed", result="oom-kill", code=2, status=9)).oom
    state = parse_show(shown(sub="exited", code=1))
    assert not state.alive and state.exit_code == 0
    assert not parse_show(shown(active="failed", sub="failed", code=1, status=203, entered=0)).was_active


def test_a_unit_that_was_asked_to_stop_and_did_not_is_told_from_one_that_never_started() -> None:
    killed = {"active": "failed", "sub": "failed", "result": "timeout", "code": 2, "status": 9}
    assert parse_show(shown(**killed)).stop_timeout
    assert not parse_show(shown(**killed, entered=0)).stop_timeout
    assert not parse_show(shown(**{**killed, "result": "signal"})).stop_timeout


def test_a_unit_that_is_not_there_is_a_state_too() -> None:
    state = parse_show("Id=ddtree-bench-x.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead\n")
    assert (
        not state.alive
        and state.invocation_id == ""
        and state.binds_to == ()
        and str(state) == "ddtree-bench-x.service is not there"
    )


def test_several_states_are_read_from_one_answer() -> None:
    states = parse_shown(f"{shown(pid=1)}\n{shown(active='failed', sub='failed')}")
    assert [state.alive for state in states] == [True, False]
    assert parse_shown("") == []


def test_an_answer_that_is_no_state_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="printed no state of a unit: 'Failed to connect to bus'"):
        parse_show("Failed to connect to bus")


def test_all_that_is_read_is_asked_for() -> None:
    asked = SHOW[1].removeprefix("--property=").split(",")
    assert asked == [line.split("=")[0] for line in SHOWN.splitlines()]
