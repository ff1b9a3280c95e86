"""Where the plugin reaches into SGLang, all through SGLang's own hook registry; no file of it is changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ddtree import options

SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
ENGINE_MODULE = "sglang.srt.entrypoints.engine"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
SIZING = "sglang.srt.mem_cache.allocation_sizing"
METRICS_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"


def install() -> None:
    """The hooks of every process: how options come in and are shown."""
    HookRegistry.register(f"{SERVER_ARGS}.add_cli_args", _add_options, HookType.AFTER)
    HookRegistry.register(f"{SERVER_ARGS}.from_cli_args", _keep_options, HookType.AROUND)
    HookRegistry.register(f"{SERVER_ARGS}.resolved_dict", _echo_options, HookType.AFTER)
    if ENGINE_MODULE in sys.modules:  # only a process that has it can make an Engine
        _accept_engine_options(sys.modules[ENGINE_MODULE])


def install_in_scheduler() -> None:
    """The hooks of the process that runs the models of a DDTREE server; called while its worker is made.

    Raises RuntimeError if one could not be put in place: SGLang itself only logs that, and would go on without it.
    """
    from sglang_ddtree import graphs, reports, requests, reserve, sampling

    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {
        "sglang.srt.speculative.dflash_utils.validate_dflash_request": (requests.refuse, HookType.AFTER),
        "sglang.srt.speculative.eagle_utils.eagle_sample": (sampling.sample, HookType.AROUND),
        "sglang.srt.speculative.spec_info.create_dummy_verify_input": (graphs.dummy_verify_input, HookType.AROUND),
        f"{GRAPH_RUNNER}.get_spec_info": (graphs.spec_info, HookType.AROUND),
        f"{SIZING}.get_req_to_token_extra_context_len": (reserve.row_headroom, HookType.AFTER),
        "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter": (reports.count_rounds, HookType.AFTER),
        f"{METRICS_REPORTER}.snapshot_spec_decode_metrics": (reports.snapshot_as_dflash, HookType.BEFORE),
    }
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    missing = sorted(hooks.keys() - HookRegistry._patched)
    if missing:
        raise RuntimeError(f"DDTREE: could not hook {', '.join(missing)}; SGLang's log above says why")


def _add_options(_result: None, parser: argparse.ArgumentParser) -> None:
    options.add_to_parser(parser)


def _keep_options(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """`from_cli_args` keeps declared fields only; ours ride on the record."""
    chosen = options.given(vars(args))
    record = options.attach(original(cls, args), chosen)
    options.require_algorithm(record, args.speculative_algorithm)
    return record


def _echo_options(shown: dict[str, Any], server_args: Any) -> dict[str, Any]:
    return {**shown, **options.echoed(server_args, shown.get("speculative_algorithm"))}


def _accept_engine_options(engine: Any) -> None:
    server_args_class = engine.Engine.server_args_class

    def server_args(**values: Any) -> Any:
        rest, chosen = options.split(values)
        record = options.attach(server_args_class(**rest), chosen)
        options.require_algorithm(record, rest.get("speculative_algorithm"))
        return record

    engine.Engine.server_args_class = staticmethod(server_args)
