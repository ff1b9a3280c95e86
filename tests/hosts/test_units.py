"""Units of a real systemd: every value arrives exactly or is refused, and what becomes of a unit is seen and told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lab import Lab
from logins import TIMEOUT_S, Login, Scope, seen
from nspawn import Host

from ddtree_bench.targets.launcher import CommandResult, StopFailed, TargetError
from ddtree_bench.targets.ssh import journal
from ddtree_bench.targets.ssh.reasons import reason
from ddtree_bench.targets.ssh.systemd import ScopeRefused, Systemd
from ddtree_bench.targets.ssh.unit import Unit, UnitRefused
from ddtree_bench.targets.unit_state import UnitState

PYTHON = "/usr/bin/python3"
TOLD = "/var/tmp/told"
INJECTED = f"{TOLD}/injected"
TELL = "/opt/tell.py"

TELL_TEXT = f"""
import json, os
words = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
values = dict(item.split(b"=", 1) for item in open("/proc/self/environ", "rb").read().split(b"\\0") if item)
told = {{
    "words": [word.hex() for word in words],
    "values": {{name.decode(): value.hex() for name, value in values.items()}},
    "folder": os.getcwdb().hex(),
    "user": os.getuid(),
}}
path = "{TOLD}/" + os.environ["INVOCATION_ID"]
with open(path + ".partial", "w") as file:
    json.dump(told, file)
os.rename(path + ".partial", path)
"""

SPECIAL = tuple("\n\t\r\f\x01\x1b\x7f \"'\\%$`;#=@+-!:|~*?[]{}()<>&\u0085\u00a0\u2028\ufeff\ufffdéü漢🚀")
PIECES = (
    "\\n",
    "\\x41",
    "\\u0041",
    "%n",
    "%%",
    "$HOME",
    "${HOME}",
    "$$",
    "\n[Service]\n",
    "\nExecStartPre=",
    " \\\n",
    "a b",
    "é",
)
NOT_A_VALUE = "\0"
words = st.lists(
    st.one_of(
        st.lists(st.sampled_from(SPECIAL + PIECES), max_size=8).map("".join),
        st.text(st.characters(exclude_characters=NOT_A_VALUE, exclude_categories=["Cs", "Cn"]), max_size=20),
    ),
    max_size=30,
)
values = st.dictionaries(
    st.from_regex(r"T_[A-Za-z0-9_]{1,8}", fullmatch=True),
    st.text(
        st.one_of(
            st.sampled_from(SPECIAL), st.characters(exclude_characters=NOT_A_VALUE, exclude_categories=["Cs", "Cn"])
        )
    ),
    max_size=15,
)
folders = st.text(st.sampled_from("ab %$;\"'\\`#~*?é漢🚀-@"), min_size=1, max_size=12).map(lambda name: f"{name}x")


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    """A host with the program that tells, and users: una lingers, sam may use sudo, bob and ned may do nothing."""
    host = lab.start("units")
    host.add_user("una", lingering=True)
    host.add_user("sam", sudo=True)
    host.add_user("bob")
    host.add_user("ned")
    host.write_file(TELL, TELL_TEXT)
    host.exec("mkdir", "-m", "1777", TOLD)
    yield host
    lab.remove(host)


ROOT: tuple[str, Scope] = ("root", "system")
SUDO: tuple[str, Scope] = ("sam", "system")
USER: tuple[str, Scope] = ("una", "user")


@pytest.fixture(params=[ROOT, USER], ids=["root", "user"])
def login(host: Host, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Login]:
    """Each scope."""
    login = Login(lab.client_config, host.name, *request.param)
    yield login
    login.close()


@pytest.fixture(params=[ROOT, SUDO, USER], ids=["root", "sudo", "user"])
def any_login(host: Host, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Login]:
    """Each scope, that of the system with sudo too."""
    login = Login(lab.client_config, host.name, *request.param)
    yield login
    login.close()


@pytest.fixture
def root(host: Host, lab: Lab) -> Iterator[Login]:
    login = Login(lab.client_config, host.name, *ROOT)
    yield login
    login.close()


def told(login: Login, state: UnitState) -> dict[str, Any]:
    """What the program of a unit has told of how it was started."""
    waiting = 'for i in $(seq 1000); do test -e "$1" && exec cat "$1"; sleep 0.01; done'
    return dict(json.loads(login.output("sh", "-c", waiting, "sh", f"{TOLD}/{state.invocation_id}")))


def hexed(text: str) -> str:
    return text.encode().hex()


def assert_told(what: Mapping[str, Any], unit: Unit, secrets: Mapping[str, str]) -> None:
    assert what["words"] == [hexed(word) for word in unit.argv]
    expected = {name: hexed(value) for name, value in {**unit.environment, **secrets}.items()}
    assert {name: what["values"].get(name) for name in expected} == expected
    assert what["folder"] == hexed(unit.working_directory)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(["", "-", "@", "+", "!", ":", "|", "~", ";", *map(chr, range(1, 256))], {"T_": ""}, {}, " x")
@given(words, values, values, folders)
def test_words_values_and_folders_arrive_exactly(
    any_login: Login, words: list[str], environment: dict[str, str], secrets: dict[str, str], folder: str
) -> None:
    folder = f"{TOLD}/{uuid4().hex[:8]} {folder}"
    any_login.output("mkdir", "--", folder)
    unit = any_login.unit(PYTHON, TELL, *words, environment=environment, working_directory=folder)
    shown = {name: value for name, value in secrets.items() if name not in environment}
    assert_told(told(any_login, any_login.start(unit, shown)), unit, shown)
    any_login.clean()


def test_a_program_may_lie_at_an_odd_path(root: Login) -> None:
    folder = f"{TOLD}/a b%n $HOME é;@-"
    root.output("mkdir", folder)
    root.output("ln", "-s", PYTHON, f"{folder}/-py 3")
    unit = root.unit(f"{folder}//-py 3", TELL)
    assert_told(told(root, root.start(unit)), unit, {})


TOUCH = f"/usr/bin/touch {INJECTED}"
INJECTIONS = (
    f"/models/x\n[Service]\nExecStartPre={TOUCH}",
    f"/models/x\r\nExecStartPre={TOUCH}\n",
    f"x\u2028ExecStartPre={TOUCH}",
    f"; {TOUCH}",
    f"x ; {TOUCH}",
    f'" ; {TOUCH} ; "',
    f"x\\\nExecStopPost={TOUCH}",
    f"$({TOUCH})",
    f"`{TOUCH}`",
    f"| {TOUCH} &",
    ";",
    "\\;",
    "%n %H %t %% %",
    "$INVOCATION_ID ${HOME} $$",
)


def test_nothing_runs_that_was_not_meant(login: Login) -> None:
    environment = {f"T_{place}": text for place, text in enumerate(INJECTIONS)}
    secrets = {f"S_{place}": text for place, text in enumerate(INJECTIONS)}
    unit = login.unit(
        PYTHON, TELL, *INJECTIONS, environment=environment, description=f"of ann; $({TOUCH}) %n \"x' \\ y"
    )
    state = login.start(unit, secrets)
    assert_told(told(login, state), unit, secrets)
    assert state.description == unit.description
    login.ended(unit.name)
    login.clean()
    assert login.run(["test", "-e", INJECTED]).exit_code == 1


def test_a_unit_in_the_system_scope_runs_as_the_login(any_login: Login) -> None:
    state = any_login.start(any_login.unit(PYTHON, TELL))
    assert told(any_login, state)["user"] == int(any_login.output("id", "-u"))


def test_secrets_are_there_while_the_unit_starts_and_readable_by_their_owner_alone(
    host: Host, any_login: Login
) -> None:
    unit = any_login.unit("/bin/sleep", "60", kind="notify", start_timeout_s=1.5)
    any_login.systemd.install(unit)
    folder = "/run" if any_login.scope == "system" else f"/run/user/{any_login.output('id', '-u').strip()}"
    secrets = f"{folder}/ddtree-bench"
    owner = "root" if any_login.scope == "system" else any_login.user
    stat = ("stat", "--format=%a %U", secrets, f"{secrets}/{unit.name}.env")
    starting = threading.Thread(target=any_login.systemd.start, args=(unit.name, TIMEOUT_S, {"TOKEN": "a secret"}))
    starting.start()
    seen(lambda: host.exec(*stat, check=False), lambda said: said == f"700 {owner}\n600 {owner}\n")
    assert "secret" not in host.exec("cat", f"{folder}/systemd/{any_login.scope}/{unit.name}")
    starting.join()
    assert host.exec("ls", secrets) == ""


def test_secrets_that_a_lost_link_has_cut_off_start_nothing_and_are_not_left(host: Host, root: Login) -> None:
    def cut_off(argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        return root.run(argv, timeout_s=timeout_s, stdin=stdin.removesuffix('ret"\n'))

    unit = root.unit("/bin/sleep", "60")
    root.systemd.install(unit)
    with pytest.raises(TargetError, match=f"unit {unit.name} did not start"):
        Systemd(cut_off, "system", "lab").start(unit.name, TIMEOUT_S, {"TOKEN": "a secret"})
    assert not root.systemd.state(unit.name).alive
    assert host.exec("ls", "/run/ddtree-bench") == ""


def test_a_unit_that_systemd_cannot_use_is_refused_with_its_words_and_not_left_behind(login: Login) -> None:
    unit = login.unit("/no/such/program")
    with pytest.raises(TargetError, match=r"lab: systemd cannot use unit .*/no/such/program is not executable"):
        login.systemd.install(unit)
    assert login.systemd.state(unit.name).load_state == "not-found"
    lone = login.unit("/bin/true", binds_to="ddtree-bench-lease-gone.service")
    with pytest.raises(TargetError, match=r"ddtree-bench-lease-gone.service not found"):
        login.systemd.install(lone)


def test_a_unit_of_which_systemd_warns_is_used(host: Host, root: Login) -> None:
    unit = root.unit("/bin/sleep", "60")
    folder = f"/run/systemd/system/{unit.name}.d"
    host.write_file(f"{folder}/newer.conf", "[Service]\nUnknownKey=1\n")
    try:
        assert root.start(unit).alive
    finally:
        host.exec("rm", "-r", folder)


def test_how_a_unit_ends_is_seen_and_told(root: Login) -> None:
    def told(script: str, **settings: Any) -> tuple[UnitState, str]:
        unit = root.unit("/bin/sh", "-c", script, **settings)
        root.start(unit)
        state = root.ended(unit.name)
        log, _ = root.systemd.journal(unit.name, None, ended=True)
        return state, reason(state, log, unit)

    state, words = told("sleep 0.2; echo 'RuntimeError: no luck'; exit 3")
    assert (state.exit_code, state.signal, state.result, state.was_active) == (3, None, "exit-code", True)
    assert words == "ended with exit status 3: RuntimeError: no luck"
    state, words = told("exit 0")
    assert (state.exit_code, state.result) == (0, "success")
    assert words == "ended with exit status 0"
    state, words = told("kill -SEGV $$")
    assert (state.exit_code, state.signal) == (None, "SIGSEGV")
    assert words.startswith("killed by SIGSEGV")
    state, words = told("kill -KILL $$", memory_max_bytes=2 << 30)
    assert (state.signal, state.oom) == ("SIGKILL", False)
    assert words == "killed by SIGKILL, as the kernel does to a unit over its memory limit of 2 GiB (memory_max_gib)"


def test_a_program_that_cannot_be_executed_fails_the_start_at_once(login: Login) -> None:
    script = f"{TOLD}/script-{uuid4().hex[:8]}"
    login.output("sh", "-c", 'printf "#!/no/interpreter\\n" >"$1"; chmod 755 "$1"', "sh", script)
    unit = login.unit(script)
    state = login.start(unit)
    assert (state.active_state, state.exit_code, state.was_active) == ("failed", 203, False)
    assert reason(state, "", unit) == f"not started: its program {script} is not there or cannot be executed (203/EXEC)"
    elsewhere = login.unit("/bin/true", working_directory="/no/such/folder")
    state = login.start(elsewhere)
    assert reason(state, "", elsewhere) == (
        "not started: its working directory /no/such/folder cannot be entered (200/CHDIR)"
    )


def test_a_start_that_is_never_said_to_be_done_ends_after_its_time(root: Login) -> None:
    unit = root.unit("/bin/sleep", "60", kind="notify", start_timeout_s=0.5)
    state = root.start(unit)
    assert (state.result, state.was_active) == ("timeout", False)
    assert reason(state, "", unit) == "did not start within 0.5 s"


FAMILY = "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 1000 & sleep 1000\" & echo up; while :; do sleep 1; done"


def test_a_unit_is_stopped_with_all_that_it_has_started_whatever_it_ignores(host: Host, login: Login) -> None:
    unit = login.unit("/bin/sh", "-c", FAMILY, stop_grace_s=0.5)
    assert login.start(unit).alive
    seen(lambda: login.systemd.journal(unit.name, None)[0], lambda log: log == "up\n")
    began = time.monotonic()
    state = login.systemd.stop(unit.name, TIMEOUT_S)
    assert not state.alive and state.stop_timeout and 0.4 < time.monotonic() - began < 5
    assert reason(state, "", unit) == "killed, since it did not stop within 0.5 s"
    assert "sleep 1000" not in host.exec("ps", "-A", "-o", "args")
    assert login.systemd.stop(unit.name, TIMEOUT_S) == state
    login.systemd.remove(unit.name)
    assert login.systemd.state(unit.name).load_state == "not-found"


def test_why_a_unit_cannot_be_stopped_is_told(host: Host, lab: Lab) -> None:
    rights = "/etc/sudoers.d/sam"
    login = Login(lab.client_config, host.name, *SUDO)
    unit = login.unit("/bin/sleep", "1000")
    login.start(unit)
    host.exec("mv", rights, "/root/sam")
    try:
        with pytest.raises(
            StopFailed, match=rf"unit {unit.name} cannot be stopped \(sudo: .*: processes of it are left"
        ):
            login.systemd.stop(unit.name, TIMEOUT_S)
    finally:
        host.exec("mv", "/root/sam", rights)
        login.close()


def test_every_command_may_be_run_twice(host: Host, login: Login) -> None:
    """A command whose answer a lost link has swallowed is run again."""
    once = login.run

    def twice(argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        once(argv, timeout_s=timeout_s, stdin=stdin)
        # Until then the unit has failed: the second command must not start it anew.
        time.sleep(0.1)
        return once(argv, timeout_s=timeout_s, stdin=stdin)

    systemd = Systemd(twice, login.scope, "lab")
    unit = login.unit("/bin/sh", "-c", "echo one start; exit 7")
    systemd.install(unit)
    assert systemd.start(unit.name, TIMEOUT_S, {"TOKEN": "secret"}).exit_code == 7
    assert systemd.journal(unit.name, None, ended=True)[0] == "one start\n"
    log = host.exec("journalctl", "--output=cat", f"--grep={unit.name}: Main process exited")
    assert log.count("status=7") == 1
    assert systemd.stop(unit.name, TIMEOUT_S).exit_code == 7
    systemd.remove(unit.name)
    assert systemd.state(unit.name).load_state == "not-found"


def test_a_failed_unit_can_be_started_again(root: Login) -> None:
    unit = root.unit("/bin/sh", "-c", "echo $INVOCATION_ID; exit 75")
    root.start(unit)
    first = root.ended(unit.name)
    # More often than systemd allows by itself.
    for _ in range(6):
        root.systemd.start(unit.name, TIMEOUT_S)
    second = root.ended(unit.name)
    assert first.exit_code == second.exit_code == 75
    assert first.invocation_id != second.invocation_id
    assert root.systemd.journal(unit.name, None, ended=True)[0] == f"{second.invocation_id}\n"


def test_a_unit_does_not_outlive_what_it_is_bound_to(login: Login) -> None:
    lease = login.unit("/bin/sleep", "1000")
    server = login.unit("/bin/sleep", "1000", binds_to=lease.name)
    login.start(lease)
    assert login.start(server).alive
    login.systemd.stop(lease.name, TIMEOUT_S)
    login.ended(server.name)


def test_the_units_of_the_package_are_listed(login: Login) -> None:
    running, ended = login.unit("/bin/sleep", "1000"), login.unit("/bin/false")
    login.start(running)
    login.start(ended)
    login.ended(ended.name)
    listed = {state.name: state.alive for state in login.systemd.units("ddtree-bench-*.service")}
    assert listed == {running.name: True, ended.name: False}
    login.clean()
    assert login.systemd.units("ddtree-bench-*.service") == []


def test_the_units_of_lost_runs_are_removed_and_no_others(host: Host, root: Login) -> None:
    def installed(program: str, *arguments: str, start: bool = True, old: bool = True, **values: Any) -> str:
        unit = root.unit(program, *arguments, **values)
        root.systemd.install(unit)
        if start:
            root.systemd.start(unit.name, TIMEOUT_S)
        if old:
            host.exec("touch", "--date=2 hours ago", f"/run/systemd/system/{unit.name}")
        return unit.name

    lost = installed("/bin/sleep", "1000", start=False)
    kept = [installed("/bin/sleep", "1000"), installed("/bin/false"), installed("/bin/true", start=False, old=False)]
    lost_server = installed("/bin/sleep", "1000", start=False, binds_to=lost)
    kept.append(installed("/bin/false", binds_to=kept[0]))
    kept.append(installed("/bin/true", start=False, user="bob"))
    root.systemd.remove_ended("ddtree-bench-*.service", None)
    left = {state.name for state in root.systemd.units("ddtree-bench-*.service")}
    assert left == set(kept) and lost_server not in left


ODD = r"""
import os, sys
def put(content):
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
put(b"first\n\n  indented\n<3>not a priority\nnul\0inside\nnot UTF-8: \xff\xfe\n\x1b[31mred\x1b[0m\n")
put("separators \u2028 \u0085 \x0b \x1c é漢🚀\n".encode())
put(b"25%\r50%\r100%\n")
put("é".encode() * 100000 + b" long\n")
print("on stderr", file=sys.stderr, flush=True)
put(b"half a line")
if os.fork() == 0:
    os.write(1, b" and half of a child\n")
    os._exit(0)
os.wait()
put(b"no line break")
"""
WRITTEN = (
    "first\n  indented\n<3>not a priority\nnul\0inside\nnot UTF-8: \ufffd\ufffd\n\x1b[31mred\x1b[0m\n"
    "separators \u2028 \u0085 \x0b \x1c é漢🚀\n25%\r50%\r100%\n"
    f"{'é' * 100000} long\non stderr\nhalf a line and half of a child\nno line break"
)


def test_the_journal_gives_what_was_written(any_login: Login) -> None:
    unit = any_login.unit(PYTHON, "-c", ODD)
    any_login.start(unit)
    any_login.ended(unit.name)
    log, cursor = any_login.systemd.journal(unit.name, None, ended=True)
    assert log == WRITTEN
    assert any_login.systemd.journal(unit.name, cursor) == ("", cursor)


def test_a_log_is_read_as_it_grows_nothing_lost_and_nothing_twice(login: Login) -> None:
    lines = "for i in range(300): print('line', i, flush=True); time.sleep(0.003)"
    unit = login.unit(PYTHON, "-c", f"import time\n{lines}")
    login.start(unit)
    parts: list[str] = []
    cursor = None
    while login.systemd.state(unit.name).alive:
        part, cursor = login.systemd.journal(unit.name, cursor)
        parts.append(part)
    part, cursor = login.systemd.journal(unit.name, cursor, ended=True)
    whole = "".join(f"line {i}\n" for i in range(300))
    assert "".join([*parts, part]) == whole
    assert login.output(*login.systemd.log_argv(unit.name)) == whole
    assert len([part for part in parts if part]) > 2

    # Stopped, and so forgotten by systemd, its log is still there; that of a new start is its own.
    login.systemd.stop(unit.name, TIMEOUT_S)
    assert login.systemd.state(unit.name).invocation_id == ""
    assert login.systemd.journal(unit.name, None)[0].endswith("line 299\n")
    login.start(replace(unit, argv=("/bin/echo", "anew")))
    login.ended(unit.name)
    assert login.systemd.journal(unit.name, None, ended=True)[0] == "anew\n"
    assert login.systemd.journal(unit.name, cursor)[0] == ""


def test_short_lives_leave_their_last_words(login: Login) -> None:
    units = [login.unit("/bin/sh", "-c", f"echo start {i}; echo last words {i} >&2; exit 1") for i in range(2)]
    for i, unit in enumerate(units):
        login.start(unit)
        login.ended(unit.name)
        assert login.systemd.journal(unit.name, None, ended=True)[0] == f"start {i}\nlast words {i}\n"


def test_a_log_of_100_000_lines_is_whole(root: Login) -> None:
    line = "a line about as long as those of a server are, with a number: %d\n"
    unit = root.unit(PYTHON, "-c", f"for i in range(100000): print({line.strip()!r} % i)")
    root.start(unit)
    root.ended(unit.name)
    log, _ = root.systemd.journal(unit.name, None, ended=True)
    assert log == "".join(line % i for i in range(100000))


def test_limits_and_settings_are_those_that_systemd_has(login: Login) -> None:
    unit = login.unit("/bin/sleep", "1000", memory_max_bytes=3 << 30)
    login.start(unit)
    wanted = {
        "Restart": "no",
        "KillMode": "control-group",
        "SendSIGKILL": "yes",
        "TimeoutStopUSec": "5s",
        "TimeoutStartUSec": "infinity",
        "LimitNOFILE": "1048576",
        "LimitMEMLOCK": "infinity",
        "OOMPolicy": "kill",
        "MemoryMax": str(3 << 30),
        "MemorySwapMax": "0",
        "CollectMode": "inactive",
        "StandardOutput": "journal",
        "StandardError": "journal",
        "Type": "exec",
    }
    names = f"--property={','.join(wanted)}"
    shown = login.systemd._systemctl("show", names, unit.name).stdout
    assert dict(line.split("=", 1) for line in shown.splitlines()) == wanted


def test_a_login_that_may_is_let_through(any_login: Login) -> None:
    any_login.systemd.require_rights()


def refusal(lab: Lab, host: Host, user: str, scope: Scope) -> str:
    """Why a login may not."""
    login = Login(lab.client_config, host.name, user, scope)
    try:
        with pytest.raises(ScopeRefused) as refused:
            login.systemd.require_rights()
    finally:
        login.close()
    return str(refused.value)


def test_a_login_without_rights_is_refused_with_the_remedy(lab: Lab, host: Host) -> None:
    said = refusal(lab, host, "bob", "system")
    assert said.startswith("targets.lab.scope: system needs root, and bob may not use sudo without a password (")
    assert "`bob ALL=(root) NOPASSWD: ALL` in sudoers" in said and said.endswith("or set scope: user")
    said = refusal(lab, host, "bob", "user")
    assert "the service manager of bob ends with the last login, and servers with it" in said
    assert "run `loginctl enable-linger bob` on the host, or set scope: system" in said


def test_a_login_that_is_given_no_service_manager_is_refused_with_the_remedy(lab: Lab, host: Host) -> None:
    host.write_file("/etc/ssh/sshd_config.d/no-pam.conf", "UsePAM no\n")
    # Without PAM sshd lets nobody in whose account is locked, as that of a new user is.
    host.exec("usermod", "--password", "*", "ned")
    host.exec("systemctl", "restart", "ssh")
    try:
        said = refusal(lab, host, "ned", "user")
    finally:
        host.exec("rm", "/etc/ssh/sshd_config.d/no-pam.conf")
        host.exec("systemctl", "restart", "ssh")
    assert "ned has no service manager (/run/user/" in said and "loginctl enable-linger ned" in said


def test_a_login_that_cannot_read_the_journal_is_refused_with_the_remedy(
    lab: Lab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "PROBE_S", 1.0)
    drop_in = "/run/systemd/journald.conf.d/lab.conf"
    host.write_file(drop_in, "[Journal]\nStorage=volatile\n")
    host.exec("systemctl", "restart", "systemd-journald")
    try:
        said = refusal(lab, host, "una", "user")
    finally:
        host.exec("rm", drop_in)
        host.exec("systemctl", "restart", "systemd-journald")
    assert "una cannot read what units write (" in said and "usermod -aG systemd-journal una" in said


def test_values_that_cannot_be_exact_are_refused_before_anything_is_written(root: Login) -> None:
    unit = root.unit("/bin/true", "a\0b")
    with pytest.raises(UnitRefused, match="argument 1 of the command: has a NUL character"):
        root.systemd.install(unit)
    assert root.systemd.state(unit.name).load_state == "not-found"
