import pytest
import torch

from sglang_ddtree import stage_clock
from sglang_ddtree.stage_clock import NO_CLOCK, DeviceClock, WallClock, new_clock


def test_a_cpu_has_wall_times_that_leave_no_gap(monkeypatch):
    ticks = iter((5.0, 5.25, 5.25, 6.0))
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(ticks))
    clock = new_clock("cpu")
    for stage in ("draft", "tree", "verify"):
        clock.mark(stage)
    assert isinstance(clock, WallClock)
    assert clock.seconds() == {"draft": 0.25, "tree": 0.0, "verify": 0.75}


def test_a_clock_that_nobody_asks_knows_nothing():
    NO_CLOCK.mark("draft")
    assert NO_CLOCK.seconds() == {}


class FakeDevice:
    """A device whose queue runs on a clock of its own, in milliseconds, and only when told."""

    def __init__(self):
        self.queue = []
        self.now = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.at = None

            def record(self):
                device.queue.append(self)

            def elapsed_time(self, end):
                return end.at - self.at

        self.Event = Event

    def work(self, milliseconds):
        self.queue.append(milliseconds)

    def run(self):
        for item in self.queue:
            if isinstance(item, float):
                self.now += item
            else:
                item.at = self.now


def marked(device, split=None):
    clock = DeviceClock(device)
    device.work(4.0)
    clock.mark("draft")
    if split is not None:
        clock.split("draft", "head_topk", split)
    device.work(2.0)
    clock.mark("tree")
    return clock


def test_device_times_are_those_of_the_devices_work_not_of_its_launch():
    device = FakeDevice()
    clock = marked(device)
    device.run()
    assert clock.seconds() == pytest.approx({"draft": 0.004, "tree": 0.002})


def test_a_stage_inside_a_captured_graph_is_taken_out_of_the_graphs_time():
    device = FakeDevice()
    nanoseconds = torch.tensor([1_500_000])
    clock = marked(device, nanoseconds)
    clock.copy_to_host(lambda tensor: tensor.clone())
    nanoseconds.fill_(9)  # the next replay's
    device.run()
    assert clock.seconds() == pytest.approx({"draft": 0.0025, "head_topk": 0.0015, "tree": 0.002})


def test_a_coarse_clock_inside_the_graph_makes_no_time_negative():
    device = FakeDevice()
    clock = marked(device, torch.tensor([4_200_000]))
    device.run()
    assert clock.seconds() == pytest.approx({"draft": 0.0, "head_topk": 0.004, "tree": 0.002})
