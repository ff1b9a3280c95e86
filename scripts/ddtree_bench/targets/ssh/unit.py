"""The systemd unit of a program on a host: its file, with every value exactly what was given, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jinja2

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lease import printable

NAME = re.compile(r"ddtree-bench-[A-Za-z0-9_.-]{1,200}\.service")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

NOT_IN_EXECUTABLE = re.compile(r"[\"'\\\x01-\x1f\x7f]")
"""systemd starts no program whose path has one of these."""

NOT_IN_FILE_NAME = re.compile(r"[*?\[\\]")
"""systemd reads an EnvironmentFile= as a pattern of file names."""

LAST_TWO = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
NONCHARACTER = re.compile(f"[\ufdd0-\ufdef{LAST_TWO}]")
"""Code points that systemd takes for malformed UTF-8: it drops such a variable, and cannot show such a command line."""

MAX_WORD = 128 * 1024 - 1
"""Bytes of one argument, or of one variable with its name, that Linux hands to a program (MAX_ARG_STRLEN)."""

MAX_LINE = 1024 * 1024 - 1
"""Bytes of one line that systemd reads of a unit file (LONG_LINE_MAX)."""


class UnitRefused(TargetError):
    """A value that systemd would not hand to the program exactly as it is."""


@dataclass(frozen=True)
class Unit:
    """A program on a host that systemd runs.

    Attributes
    ----------
    name : str
        ddtree-bench-….service.
    description : str
        Whose it is, and of which workflow. What is not printable is written as an escape.
    argv : tuple of str
        The program's absolute path and its arguments.
    environment : mapping of str to str
        Variables beside those of the service manager, for everybody to see. Without `user` systemd sets no HOME.
    environment_file : str or None
        A file on the host with more of them, as `environment_file` writes it.
    binds_to : str or None
        The unit that it does not outlive.
    user : str or None
        Who runs it, where that is not who asks for it: a login other than root, in the system scope.
    stop_grace_s : float
        Seconds from SIGTERM to SIGKILL.
    kind : str
        `exec` counts as started once the program is executed, `notify` once it has said so (READY=1).
    start_timeout_s : float or None
        Seconds that the start may take; None for no limit.
    """

    name: str
    description: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_file: str | None = None
    binds_to: str | None = None
    working_directory: str = "/"
    user: str | None = None
    stop_grace_s: float = 10.0
    memory_max_bytes: int | None = None
    kind: Literal["exec", "notify"] = "exec"
    start_timeout_s: float | None = None


def render(unit: Unit) -> str:
    """Return the text of a unit's file. Raises UnitRefused, which names the value that cannot be exact, and why."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddtree_bench.targets.ssh", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("unit.service.j2").render(
        name=checked_name(unit.name),
        description=_line("description", printable(unit.description)),
        binds_to=None if unit.binds_to is None else checked_name(unit.binds_to),
        kind=unit.kind,
        user=None if unit.user is None else _line("user", unit.user),
        working_directory=_path("working directory", unit.working_directory),
        environment=_assignments(unit.environment),
        environment_file=None if unit.environment_file is None else _file_name(unit.environment_file),
        executable=_executable(unit.argv),
        words=[_quoted(_argument_name(place), word) for place, word in enumerate(unit.argv)],
        start_timeout="infinity" if unit.start_timeout_s is None else _milliseconds(unit.start_timeout_s),
        stop_timeout=_milliseconds(unit.stop_grace_s),
        memory_max_bytes=unit.memory_max_bytes,
    )
    longest = max(len(line.encode()) for line in text.split("\n"))
    if longest > MAX_LINE:
        raise UnitRefused(
            f"unit {unit.name}: the command line has {longest} bytes; systemd reads {MAX_LINE} at most, give fewer"
        )
    return text


def environment_file(values: Mapping[str, str]) -> str:
    """Return the text of an EnvironmentFile= with the variables given.

    Raises UnitRefused, which names the variable and never its value, for one that cannot be exact.
    """
    lines = []
    for name, value in values.items():
        _require_variable(name, value)
        escaped = re.sub(r'([\\"`$])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


def checked_name(name: str) -> str:
    """Return a unit's name if it is one of this package's; raises UnitRefused."""
    if not NAME.fullmatch(name):
        raise UnitRefused(f"unit {name!r}: must be named ddtree-bench-….service, of letters, digits, '.', '_' and '-'")
    return name


def _executable(argv: Sequence[str]) -> str:
    if not argv or not argv[0].startswith("/"):
        raise UnitRefused(f"program {argv[0] if argv else ''!r}: must be an absolute path on the target")
    if found := NOT_IN_EXECUTABLE.search(argv[0]):
        raise UnitRefused(f"program {argv[0]!r}: systemd starts none with {found.group()!r} in its path; move it")
    return _quoted("program", argv[0])


def _argument_name(place: int) -> str:
    return f"argument {place} of the command"


def _assignments(values: Mapping[str, str]) -> list[str]:
    for name, value in values.items():
        _require_variable(name, value)
    return [_quoted(f"variable {name}", f"{name}={value}") for name, value in values.items()]


def _require_variable(name: str, value: str) -> None:
    if not VARIABLE.fullmatch(name):
        raise UnitRefused(f"variable {name!r}: the name must be of letters, digits and '_', and begin with no digit")
    _require_text(f"variable {name}", f"{name}={value}")


def _require_text(what: str, value: str) -> None:
    """Raise UnitRefused for what no argument or variable of a program can be, or systemd cannot carry."""
    if "\0" in value:
        raise UnitRefused(f"{what}: has a NUL character, which no program can be given")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise UnitRefused(f"{what}: is not valid UTF-8 at character {error.start}; rename what it names") from error
    if found := NONCHARACTER.search(value):
        raise UnitRefused(
            f"{what}: has U+{ord(found.group()):04X}, which systemd does not pass on; rename what it names"
        )
    if size > MAX_WORD:
        raise UnitRefused(f"{what}: has {size} bytes, and Linux passes on {MAX_WORD} at most")


def _quoted(what: str, value: str) -> str:
    """A word of a list of systemd's, in quotes: exact, whatever it holds."""
    _require_text(what, value)
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character == "%":
        return "%%"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _line(what: str, value: str) -> str:
    """A value that systemd takes as the rest of a line, which has no escapes but that of specifiers."""
    if not value or not value.isprintable() or value != value.strip() or value.endswith("\\"):
        raise UnitRefused(
            f"{what} {value!r}: must be one line of printable characters that neither begins nor ends with a blank, "
            "nor ends with a backslash; systemd cannot be given another"
        )
    return value.replace("%", "%%")


def _path(what: str, value: str) -> str:
    if not value.startswith("/"):
        raise UnitRefused(f"{what} {value!r}: must be an absolute path on the target")
    return _line(what, value)


def _file_name(value: str) -> str:
    if found := NOT_IN_FILE_NAME.search(value):
        raise UnitRefused(f"environment file {value!r}: systemd takes {found.group()!r} for part of a pattern")
    return _path("environment file", value)


def _milliseconds(seconds: float) -> str:
    """A time span of systemd's, for which 0 is no limit at all."""
    return f"{max(1, round(seconds * 1000))}ms"
