"""systemd of a host: units are installed, started, asked, stopped and removed there, by commands of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from ddtree_bench.targets.launcher import CommandResult, StopFailed, TargetError
from ddtree_bench.targets.ssh import journal
from ddtree_bench.targets.ssh.unit import Unit, UnitRefused, checked_name, environment_file, render
from ddtree_bench.targets.unit_state import SHOW, UnitState, parse_show, parse_shown

Run = Callable[..., CommandResult]
"""run(argv, *, timeout_s, stdin="") runs a command on the host. It may run one again after a lost link."""

COMMAND_S = 60.0

OLD_MIN = 60
"""Minutes after which nobody is about to start a unit that was installed and has not been."""

OPERATIONAL = frozenset({"initializing", "starting", "running", "degraded"})
"""What `systemctl is-system-running` says of a service manager that takes commands."""

# The size tells a text that a lost link has cut off.
WRITE = """
umask 022
mkdir -p -- "${1%/*}" && rm -f -- "$1.partial" && cat >"$1.partial" &&
test "$(wc -c <"$1.partial")" -eq "$2" && mv -f -- "$1.partial" "$1"
"""

# The secrets are there for as long as this runs. Run again after a lost link it must not start once more what has
# started and failed since, nor take the secrets of the other run away before they are in their place.
START = """
name=$1 before=$2 secrets=$3 size=$4; shift 4
umask 077
file=$secrets.$$
trap 'rm -f -- "$file"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p -- "${secrets%/*}" && cat >"$file" && test "$(wc -c <"$file")" -eq "$size" && mv -f -- "$file" "$secrets" ||
    exit 1
file=$secrets
if test "$("$@" show --property=InvocationID --value -- "$name")" = "$before"; then "$@" start -- "$name"; fi
"""

REMOVE = """
name=$1 unit=$2 secrets=$3; shift 3
rm -f -- "$secrets" "$unit"
"$@" reset-failed -- "$name" 2>/dev/null
"$@" daemon-reload
"""

PROCESSES_LEFT = 'find /sys/fs/cgroup -path "*/$1/*" -name cgroup.procs -exec cat {} + 2>/dev/null; true'
"""The processes in a unit's cgroup, which has its name, in every hierarchy of version 1 and 2."""


class ScopeRefused(TargetError):
    """The login may not do on the host what the scope of its units needs."""


class Systemd:
    """The service manager of a host: PID 1 (scope system), or the login's own (scope user).

    Units are runtime units: a reboot leaves nothing of them. Each method may be repeated. All raise TargetError when
    the host's commands fail.
    """

    def __init__(self, run: Run, scope: Literal["system", "user"], target: str) -> None:
        self._run = run
        self._scope = scope
        self._target = target

    def require_rights(self) -> None:
        """Raise ScopeRefused, with the remedy, unless this login can run units in the scope and read their output."""
        if self._scope == "system":
            self._require_root()
        else:
            self._require_user_manager()
        running = self._systemctl("is-system-running").stdout.strip()
        if running not in OPERATIONAL:
            raise self._refused(
                f"the host's service manager is {running or 'not there'}",
                "the ssh launcher needs a host that was booted with systemd",
            )
        if refused := journal.refusal(self._as_owner):
            raise self._refused(
                f"{self._user} cannot read what units write ({refused})",
                f"have an administrator run `usermod -aG systemd-journal {self._user}`, or make the journal persistent "
                "(`mkdir -p /var/log/journal; systemctl restart systemd-journald`)",
            )

    def install(self, unit: Unit) -> None:
        """Write a unit's file and have systemd read it; only `start` can start it.

        Raises UnitRefused before anything is written, and TargetError with what `systemd-analyze verify` finds.
        """
        if unit.environment_file is not None:
            raise UnitRefused(f"unit {unit.name}: has an environment file; give its variables to the start, as secrets")
        text = render(replace(unit, environment_file=self._secrets_path(unit.name)))
        try:
            self._write(self._unit_path(unit.name), text)
            self._verify(unit.name)
            self._checked("daemon-reload")
        except TargetError:
            self.remove(unit.name)
            raise

    def start(self, name: str, timeout_s: float, secrets: Mapping[str, str] | None = None) -> UnitState:
        """Start a unit and return its state; one that runs, or has ended well, is left as it is.

        `secrets` are more variables for it. Only the owner of the service manager may read them, and they are on the
        host's disk at no time: they lie in its memory, and for as long as the start takes.
        A unit that has started and failed at once is a state too. Raises UnitRefused for secrets that cannot be exact,
        and TargetError when it could not be started.
        """
        before, text = self.state(name).invocation_id, environment_file(secrets or {})
        arguments = [name, before, self._secrets_path(name), str(len(text.encode()))]
        result = self._script(START, *arguments, timeout_s=timeout_s, stdin=text)
        after = self.state(name)
        if result.exit_code != 0 and after.invocation_id == before:
            raise self._error(f"unit {name} did not start: {_said(result)}")
        return after

    def state(self, name: str) -> UnitState:
        """What systemd knows of a unit; its load_state is not-found for one that is not there."""
        return parse_show(self._checked(*SHOW, checked_name(name)))

    def units(self, pattern: str) -> list[UnitState]:
        """The units installed whose names match a pattern such as ddtree-bench-*.service."""
        listed = self._systemctl("list-unit-files", "--no-legend", "--plain", "--no-pager", "--", pattern)
        # Where there is none some versions of systemctl fail, without a word.
        if listed.exit_code != 0 and listed.stderr:
            raise self._error(f"systemctl list-unit-files failed: {_said(listed)}")
        names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
        return parse_shown(self._checked(*SHOW, *names)) if names else []

    def stop(self, name: str, timeout_s: float) -> UnitState:
        """Stop a unit and return its state. Raises StopFailed when a process of it is left."""
        result = self._systemctl("stop", "--", checked_name(name), timeout_s=timeout_s)
        left = self._run(["sh", "-c", PROCESSES_LEFT, "sh", name], timeout_s=COMMAND_S).stdout.split()
        if left:
            processes = ", ".join(sorted(set(left), key=int))
            how = "is stopped, but" if result.exit_code == 0 else f"cannot be stopped ({_said(result)}):"
            raise StopFailed(f"{self._target}: unit {name} {how} processes of it are left: {processes}; end them there")
        return self.state(name)

    def remove(self, name: str) -> None:
        """Remove the file of a unit that is stopped, and have systemd forget how it ended."""
        paths = [self._unit_path(checked_name(name)), self._secrets_path(name)]
        result = self._script(REMOVE, name, *paths)
        if result.exit_code != 0:
            raise self._error(f"unit {name} cannot be removed: {_said(result)}")

    def remove_ended(self, pattern: str, user: str | None) -> None:
        """Remove the units of lost runs: those of `user` that match, have ended and are bound to nothing that lives.

        Those that were installed within OLD_MIN may be about to be started.
        """
        old = self._as_owner(["find", self._units_folder, "-maxdepth", "1", "-name", pattern, "-mmin", f"+{OLD_MIN}"])
        names = {path.rpartition("/")[2] for path in old.stdout.splitlines()}
        units = self.units(pattern) if names else []
        alive = {unit.name for unit in units if unit.alive}
        for unit in units:
            # One that is bound to nothing and has failed may be a keeper that waits: it is started again.
            ended = not unit.alive and (bool(unit.binds_to) or unit.active_state == "inactive")
            if unit.name in names and ended and unit.user == user and alive.isdisjoint(unit.binds_to):
                self.remove(unit.name)

    def journal(self, name: str, cursor: str | None, *, ended: bool = False) -> tuple[str, str | None]:
        """Return what a unit's processes wrote to stdout and stderr after a cursor, and the cursor after that.

        Without a cursor: from the beginning of the last start; later calls stay with that one.
        journald keeps no blank lines and no blanks at the ends of lines, and in the scope user it drops what comes
        faster than its own rate limit. With `ended` the unit has ended, and what journald still has to store of it is
        waited for.
        """
        checked_name(name)
        if cursor is None:
            cursor = journal.beginning(self._as_owner, name, self.state(name).started_us)
        if cursor is None:
            return "", None
        if ended:
            return journal.read_all(self._as_owner, cursor)
        return journal.read(self._as_owner, cursor)

    def log_argv(self, name: str) -> list[str]:
        """The command with which this login prints on the host what a unit has written, in all its starts."""
        return self._owned(["journalctl", "--quiet", "--all", "--output=cat", *journal.matches(checked_name(name))])

    def _require_root(self) -> None:
        if self._login[0] == 0:
            return
        result = self._run(["sudo", "-n", "--", "sh", "-c", ":"], timeout_s=COMMAND_S)
        if result.exit_code != 0:
            raise self._refused(
                f"system needs root, and {self._user} may not use sudo without a password ({_said(result)})",
                f"log in as root, have an administrator allow it (`{self._user} ALL=(root) NOPASSWD: ALL` in sudoers), "
                "or set scope: user",
            )

    def _require_user_manager(self) -> None:
        there = self._run(["test", "-d", self._runtime_folder], timeout_s=COMMAND_S).exit_code == 0
        lingers = self._run(["loginctl", "show-user", self._user, "--property=Linger"], timeout_s=COMMAND_S)
        if not there or lingers.stdout.strip() != "Linger=yes":
            has_none = f"{self._user} has no service manager ({self._runtime_folder} is not there)"
            ends = f"the service manager of {self._user} ends with the last login, and servers with it"
            raise self._refused(
                ends if there else has_none,
                f"have an administrator run `loginctl enable-linger {self._user}` on the host, or set scope: system",
            )

    def _verify(self, name: str) -> None:
        argv = ["systemd-analyze", f"--{self._scope}", "--man=no", "verify", self._unit_path(name)]
        result = self._as_owner(argv)
        if result.exit_code != 0:
            # It also tells of other units that it reads on the way.
            about = [line for line in result.stderr.splitlines() if name in line]
            raise self._error(f"systemd cannot use unit {name} as it is: {'; '.join(about) or _said(result)}")

    def _write(self, path: str, text: str) -> None:
        argv = ["sh", "-c", WRITE, "sh", path, str(len(text.encode()))]
        result = self._as_owner(argv, stdin=text)
        if result.exit_code != 0:
            raise self._error(f"cannot write {path}: {_said(result)}")

    def _checked(self, *arguments: str) -> str:
        result = self._systemctl(*arguments)
        if result.exit_code != 0:
            raise self._error(f"systemctl {arguments[0]} failed: {_said(result)}")
        return result.stdout

    def _systemctl(self, *arguments: str, timeout_s: float = COMMAND_S) -> CommandResult:
        return self._as_owner([*self._manager, *arguments], timeout_s=timeout_s)

    def _script(self, script: str, *arguments: str, timeout_s: float = COMMAND_S, stdin: str = "") -> CommandResult:
        """Run a script of sh, whose further arguments are systemctl and the scope."""
        argv = ["sh", "-c", script, "sh", *arguments, *self._manager]
        return self._as_owner(argv, timeout_s=timeout_s, stdin=stdin)

    def _as_owner(self, argv: Sequence[str], *, timeout_s: float = COMMAND_S, stdin: str = "") -> CommandResult:
        """Run a command as whom the service manager belongs to."""
        return self._run(self._owned(argv), timeout_s=timeout_s, stdin=stdin)

    def _owned(self, argv: Sequence[str]) -> list[str]:
        """The command with which this login runs another one as whom the service manager belongs to."""
        if self._scope == "user":
            return ["env", f"XDG_RUNTIME_DIR={self._runtime_folder}", *argv]
        return list(argv) if self._login[0] == 0 else ["sudo", "-n", "--", *argv]

    @property
    def _manager(self) -> list[str]:
        return ["systemctl", f"--{self._scope}"]

    @cached_property
    def _login(self) -> tuple[int, str]:
        """Who this is on the host: number and name."""
        result = self._run(["sh", "-c", "id -u; id -un"], timeout_s=COMMAND_S)
        if result.exit_code != 0:
            raise self._error(f"cannot tell who this is on the host: {_said(result)}")
        number, name = result.stdout.split()
        return int(number), name

    @property
    def _user(self) -> str:
        return self._login[1]

    @property
    def _runtime_folder(self) -> str:
        """What is there is gone after a reboot, and no other user's."""
        return "/run" if self._scope == "system" else f"/run/user/{self._login[0]}"

    @property
    def _units_folder(self) -> str:
        return f"{self._runtime_folder}/systemd/{self._scope}"

    def _unit_path(self, name: str) -> str:
        return f"{self._units_folder}/{name}"

    def _secrets_path(self, name: str) -> str:
        return f"{self._runtime_folder}/ddtree-bench/{name}.env"

    def _error(self, message: str) -> TargetError:
        return TargetError(f"{self._target}: {message}")

    def _refused(self, what: str, remedy: str) -> ScopeRefused:
        return ScopeRefused(f"targets.{self._target}.scope: {what}; {remedy}")


def _said(result: CommandResult) -> str:
    return "; ".join((result.stderr or result.stdout).strip()[-1000:].splitlines())
