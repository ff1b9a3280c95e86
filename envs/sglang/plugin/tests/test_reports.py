"""What the worker sends along with a result, on the way that SGLang takes it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt")
prometheus_client = pytest.importorskip("prometheus_client")

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.auxiliary_output import CommittedTokens
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.observability.forward_pass_metrics import ScheduledRequestMetrics

from sglang_ddtree.counters import RoundCounters
from sglang_ddtree.reports import Reports, snapshot_as_dflash
from sglang_ddtree.rounds import RequestRound, Round
from sglang_ddtree.stage_clock import NO_CLOCK
from sglang_ddtree.tree import build_tree

BUDGET = 4
# A chain, and a root with four children.
LOG_PROBS = torch.tensor([[[-0.1, -9.0, -9.0, -9.0]] * 4, [[-1.0] * 4] + [[-9.0] * 4] * 3])


def result(reports, clock):
    """A round's result, as the worker gives it to the scheduler."""
    verified = GenerationBatchResult(
        logits_output=SimpleNamespace(hidden_states=None, auxiliary_device_output=None, sampling_mask_output=None),
        next_token_ids=torch.zeros(2 * (BUDGET + 1), dtype=torch.int32),
        accept_lens=torch.tensor([4, 1], dtype=torch.int32),
        can_run_cuda_graph=True,
        copy_done=SimpleNamespace(record=lambda: None),
    )
    reports.add(verified, build_tree(LOG_PROBS, BUDGET), clock)
    return verified


def test_without_a_listener_a_round_measures_and_sends_nothing():
    reports = Reports(BUDGET, "cpu")
    assert reports.clock() is NO_CLOCK
    assert result(reports, reports.clock()).logits_output.auxiliary_device_output is None


def test_numbers_come_with_the_result_that_sglang_copies_to_the_host():
    heard = []
    reports = Reports(BUDGET, "cpu")
    reports.listeners.append(heard.append)
    clock = reports.clock()
    clock.mark("draft")
    verified = result(reports, clock)
    verified.copy_to_cpu(return_logprob=False)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    verified.auxiliary_host_output.consume(batch, [CommittedTokens(5, (7, 8, 9)), None])
    (done,) = heard
    assert list(done.requests) == [RequestRound("a", accepted=3, committed=3, branching_nodes=0, depth=4)]
    assert (done.discarded, done.budget, done.cuda_graph) == (1, BUDGET, True)
    assert done.seconds == clock.seconds()
    verified.auxiliary_host_output.consume(batch, [None, CommittedTokens(5, (7,))])
    assert list(heard[1].requests) == [RequestRound("b", accepted=0, committed=1, branching_nodes=1, depth=1)]


def test_another_output_of_the_same_round_stays():
    reports = Reports(BUDGET, "cpu")
    reports.listeners.append(print)
    other = SimpleNamespace(copy_to_host=lambda copy: "other")
    verified = GenerationBatchResult(
        logits_output=SimpleNamespace(auxiliary_device_output=other), accept_lens=torch.tensor([1, 1])
    )
    reports.add(verified, build_tree(LOG_PROBS, BUDGET), reports.clock())
    assert verified.logits_output.auxiliary_device_output.outputs[0] is other


class Registered:
    """Metrics in a registry of their own, through the classes that SGLang's collector may name."""

    def __init__(self):
        self.registry = prometheus_client.CollectorRegistry()
        self.labels = {"model_name": "m", "tp_rank": 0}

    def _counter_cls(self, *args, **kwargs):
        return prometheus_client.Counter(*args, registry=self.registry, **kwargs)

    def _histogram_cls(self, *args, **kwargs):
        return prometheus_client.Histogram(*args, registry=self.registry, **kwargs)

    def value(self, name, **more):
        return self.registry.get_sample_value("sglang:ddtree_" + name, {"model_name": "m", "tp_rank": "0", **more})


def test_counters_add_rounds_up():
    collector = Registered()
    count = RoundCounters(collector, depth=3)
    requests = [RequestRound("a", 3, 4, 1, 3), RequestRound("b", 0, 1, 2, 2)]
    count(Round(requests, 1, BUDGET, True, {"draft": 0.5, "verify": 2.0}))
    count(Round(requests[1:], 0, BUDGET, True, {"draft": 0.25, "head_topk": 0.125}))
    names = ("rounds", "request_rounds", "discarded_request_rounds", "nodes", "branching_nodes")
    assert [collector.value(f"{name}_total") for name in names] == [2, 3, 1, 3 * BUDGET, 5]
    assert collector.value("accepted_drafts_total") == 3
    assert collector.value("committed_tokens_total") == 6
    at_most = [collector.value("accepted_drafts_per_round_bucket", le=f"{k}.0") for k in range(4)]
    assert at_most == [2, 2, 2, 3]
    seconds = {s: collector.value("stage_seconds_total", stage=s) for s in ("draft", "head_topk", "tree", "verify")}
    assert seconds == {"draft": 0.75, "head_topk": 0.125, "tree": 0, "verify": 2.0}


def test_a_collector_without_classes_of_its_own_gets_prometheus_clients():
    collector = SimpleNamespace(_counter_cls=None, _histogram_cls=None, labels={"model_name": "plain"})
    RoundCounters(collector, depth=1)(Round([], 0, BUDGET, False, {}))
    found = prometheus_client.REGISTRY.get_sample_value("sglang:ddtree_rounds_total", {"model_name": "plain"})
    assert found == 1


def test_forward_pass_metrics_are_taken_before_a_round_is_settled_as_for_dflash():
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    reporter = SimpleNamespace(scheduler=SimpleNamespace(enable_fpm=True))
    batch = SimpleNamespace(spec_algorithm="DDTREE", reqs=[SimpleNamespace(seqlen=11), SimpleNamespace(seqlen=21)])
    found = SimpleNamespace()
    args, kwargs = snapshot_as_dflash(reporter, batch, found)
    SchedulerMetricsReporter.snapshot_spec_decode_metrics(*args, **kwargs)
    assert isinstance(found.fpm_scheduled_requests, ScheduledRequestMetrics)
    assert found.fpm_scheduled_requests.sum_decode_kv_tokens == 30
