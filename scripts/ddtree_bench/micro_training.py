"""The training of the micro model of a server, where it is needed: beside no run."""

from __future__ import annotations

from ddtree_bench.client_machine import training_lease
from ddtree_bench.micro_models import train
from ddtree_bench.plan import Server
from ddtree_bench.project import Project, Report
from ddtree_bench.targets.launcher import Launcher


def train_for(project: Project, server: Server, launcher: Launcher, python: str, report: Report) -> None:
    """Train the micro model that a server serves, unless there is none or its weights are there.

    `python` is that of the server's environment. Waits for whoever measures on this machine; raises TargetBusy when
    that takes longer than `lease_wait_s`, and TargetError when the training fails. Call it within an Interruption: a
    signal then ends the training too.
    """
    micro = project.micro_model(server)
    if micro is None or micro.finished.is_file():
        return
    with training_lease(project, micro.rule, report):
        train(micro, launcher, python, report)
