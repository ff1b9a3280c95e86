"""A loaded engine as it is served, and what it says of itself."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from ddtree_reference import __version__
from ddtree_reference.method import Method
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Worker


@dataclass(frozen=True)
class Service:
    """A loaded engine as it is served: what the endpoints need."""

    opened: Opened
    worker: Worker
    served_model_name: str
    max_running_requests: int
    threads: int
    start_id: str
    load_seconds: float

    @property
    def method(self) -> Method:
        """The method every request is decoded with."""
        return self.worker.method

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.opened.engine.target.config.max_context

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.opened.engine.target.config.vocab_size


def server_info(service: Service, last_gen_throughput: float) -> dict[str, Any]:
    """The body of /server_info; `last_gen_throughput` is in tokens per second, the KV cache in GiB and in tokens."""
    method, opened, engine = service.method, service.opened, service.opened.engine
    speculative, is_tree = method.algorithm != "AR", method.algorithm == "DDTREE"
    counters = service.worker.snapshot()
    rounds, accepted = counters["verify_calls_total"], counters["accepted_drafts_total"]
    return {
        "version": __version__,
        "model_path": str(opened.model_path),
        "served_model_name": service.served_model_name,
        "speculative_algorithm": method.algorithm if speculative else None,
        "speculative_ddtree_budget": method.budget if is_tree else None,
        "speculative_ddtree_topk_cap": method.effective_cap if is_tree else None,
        "speculative_dflash_block_size": method.block_size if speculative else None,
        "speculative_num_draft_tokens": method.verify_width if speculative else None,
        "max_running_requests": service.max_running_requests,
        "max_context": service.max_context,
        "disable_radix_cache": not engine.pool.reuse_prefixes,
        "threads": service.threads,
        "numerics": engine.target.numerics,
        "bit_exact": opened.self_test.passed,
        "self_test": asdict(opened.self_test),
        "pid": os.getpid(),
        "start_id": service.start_id,
        "load_seconds": service.load_seconds,
        "internal_states": [
            {
                "avg_spec_accept_length": (rounds + accepted) / rounds if rounds else None,
                "last_gen_throughput": last_gen_throughput,
                "effective_max_running_requests_per_dp": service.max_running_requests,
                "memory_usage": {
                    "kvcache": round((engine.cache.nbytes + engine.draft_cache.nbytes) / 2**30, 3),
                    "token_capacity": counters["kv_tokens_total"],
                },
            }
        ],
        "counters": counters,
    }


def model_list(service: Service) -> dict[str, Any]:
    """The body of /v1/models."""
    name = service.served_model_name
    card = {"id": name, "object": "model", "created": 0, "owned_by": "ddtree-reference", "root": name}
    return {"object": "list", "data": [card | {"max_model_len": service.max_context}]}
