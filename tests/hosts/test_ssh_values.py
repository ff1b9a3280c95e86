"""What a user writes reaches a server on a host exactly, or is refused: nothing runs that was not meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lab import Lab
from launching import PYTHON, TOY, Ground, once_ended
from nspawn import Host

from ddtree_bench.plan import ModelRef
from ddtree_bench.servers.command_line import Place, launch_argv
from ddtree_bench.targets.launcher import Launch, TargetError
from ddtree_bench.targets.ssh.failures import ConnectionFailed
from ddtree_bench.targets.ssh.unit import UnitRefused

INJECTED = "/opt/injected"
TOUCH = f"touch {INJECTED}"
TOLD = "/opt/told.json"

TELL = f"""#!{PYTHON}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({TOLD!r}, "w"))
"""

ROOT = "/opt/a b%c$d ü;e#f"
QUOTED_ROOT = "/opt/a b%c$d'e"

NASTY = (
    " leading and trailing ",
    "quotes \" and ' and `",
    "%n %% %h",
    "$HOME ${HOME} $$ $(" + TOUCH + ")",
    f"; {TOUCH}",
    f"& {TOUCH} |",
    f"\nExecStartPre=/usr/bin/{TOUCH}\n",
    f'"\n[Service]\nExecStartPost=/usr/bin/{TOUCH}\n"',
    f"'; {TOUCH}; '",
    f"x\\\nExecStopPost=/usr/bin/{TOUCH}",
    "back \\ slash \\n \\x41 \\",
    "tab\tand line\nbreak",
    "漢字 🚀 é",
    "#comment",
    "@+!:-",
)


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    host = lab.start("values")
    host.write_file(f"{ROOT}/env/bin/python", TELL, mode=0o755)
    host.write_file(f"{QUOTED_ROOT}/env/bin/python", TELL, mode=0o755)
    yield host
    lab.remove(host)


@pytest.fixture
def ground(lab: Lab, host: Host, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lab, host, tmp_path)
    host.exec("rm", "-f", INJECTED, TOLD)
    yield ground
    ground.close()
    assert ground.left() == ""
    assert "injected" not in host.exec("ls", "/opt")


def planned(ground: Ground, root: str, *values: str) -> Launch:
    """The start of a planned server of SGLang's with values wherever the configuration has free text."""
    flags = tuple((value, value) for value in values)
    server = replace(TOY, engine="sglang", model=ModelRef(values[0], "1"), flags=flags)
    place = Place(f"{root}/env/bin/python", 30000, values[-1], model_path="/models/" + "/".join(values))
    shown, hidden = ({f"{kind}_{n}": value for n, value in enumerate(values)} for kind in ("SHOWN", "HIDDEN"))
    return ground.launch(30000, *launch_argv(server, place), env=shown, private_env=hidden)


def told(ground: Ground) -> tuple[list[str], dict[str, str]]:
    """The arguments and the variables that the server has seen."""
    argv, environ = json.loads(ground.host.exec("cat", TOLD))
    return argv, environ


def test_free_text_reaches_the_server_as_it_is(ground: Ground) -> None:
    with ground.leased(root=ROOT) as launcher:
        assert launcher.tools().startswith(f"{ROOT}/tools/")
        for values in (NASTY[::3], NASTY[1::3], NASTY[2::3]):
            launch = planned(ground, ROOT, *values)
            launcher.start(launch)
            assert once_ended(launcher).exit_code == 0, launcher.state()
            argv, environ = told(ground)
            assert tuple(argv) == launch.argv[1:] and set(values) <= set(argv)
            assert {**environ, **launch.env, **launch.private_env} == environ
            launcher.stop()


def test_what_cannot_be_exact_is_refused_and_nothing_is_started(ground: Ground) -> None:
    with ground.leased(root=QUOTED_ROOT) as launcher:
        launch = planned(ground, ROOT, "x")
        refused = (
            (replace(launch, argv=(*launch.argv, "a\0b")), r"argument \d+ of the command: has a NUL character"),
            (replace(launch, argv=(*launch.argv, "a\udcffb")), r"argument \d+ of the command: is not valid UTF-8"),
            (replace(launch, env={"SHOWN": "a\0b"}), "variable SHOWN: has a NUL character"),
            (replace(launch, env={"A=B\n": "1"}), "variable 'A=B.n': the name must be"),
            (replace(launch, private_env={"HIDDEN": "secret\0"}), "variable HIDDEN: has a NUL character"),
            (planned(ground, QUOTED_ROOT, "x"), 'systemd starts none with "\'" in its path; move it'),
        )
        for start, words in refused:
            with pytest.raises(UnitRefused, match=words) as error:
                launcher.start(start)
            assert "secret" not in str(error.value)
            launcher.stop()
        assert "told" not in ground.host.exec("ls", "/opt")


def test_a_root_with_a_quote_holds_the_tools(ground: Ground) -> None:
    with ground.leased(root=QUOTED_ROOT) as launcher:
        launcher.start(planned(ground, ROOT, "x"))
        assert once_ended(launcher).exit_code == 0
        assert launcher.tools().startswith(f"{QUOTED_ROOT}/tools/")


def test_the_name_of_a_host_is_never_an_option_or_a_command(ground: Ground, tmp_path: Path) -> None:
    here = tmp_path / "injected"
    names = (
        f"-oProxyCommand=touch {here}",
        f"-F/dev/null -oProxyCommand=touch {here}",
        f"$(touch {here})@values",
        f"x;touch {here};@values",
        f"`touch {here}`",
        f"values\nProxyCommand touch {here}",
        f"values;touch {here}",
        "values -oPermitLocalCommand=yes",
    )
    for name in names:
        with pytest.raises((ConnectionFailed, TargetError)):
            ground.launcher(ssh_host=name).run_command(["true"], timeout_s=10)
    assert not here.exists()
    assert ground.launcher(ssh_host="values").run_command(["true"], timeout_s=10).exit_code == 0
