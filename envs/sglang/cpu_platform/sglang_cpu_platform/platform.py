"""The platform class: what SGLang asks an out-of-tree platform, answered for a CPU under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_cpu_platform import (
    autotuner,
    collectives,
    deterministic,
    device_context,
    dtypes,
    gdn,
    input_embeds,
    interpreted_math,
    pin_memory,
    record_stream,
    recurrent_state,
    spec_tree,
)
from sglang_cpu_platform.cache_locs import speculative_cache_locs

if TYPE_CHECKING:
    import torch

ATTENTION_BACKEND = "triton"


class InterpretedCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device with its Triton code paths, and without the kernel packages its own CPU engine needs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=True)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Refuse bfloat16; use the Triton attention backend in place of Intel's; let an idle scheduler sleep.

        `arg_groups/platform_hook.py:handle_cpu_backends` has already put `intel_amx`, whose kernels are not there,
        where no backend was named. A scheduler that waits by polling takes a whole core from the test that it serves.
        """
        dtypes.refuse_bfloat16_options(server_args)
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND
        server_args.sleep_on_idle = True

    def init_backend(self) -> None:
        """Apply what needs only torch: this runs while `model_runner` is still being imported."""
        record_stream.ignore_cpu_tensors()
        pin_memory.skip_without_accelerator()
        device_context.add_for_cpu()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Check the weights, and apply what changes modules of SGLang: all of them are imported by now."""
        dtypes.refuse_bfloat16_weights(model)
        input_embeds.keep_model_dtype()
        autotuner.take_first_configuration()
        gdn.allow_float32_on_cpu()
        recurrent_state.commit_in_torch()
        interpreted_math.look_up_late()
        spec_tree.use_triton_kernels()
        deterministic.allow_on_cpu()
        collectives.gather_without_operator()

    def get_default_attention_backend(self) -> str:
        """Name the one attention backend that needs no kernel package and reads tree masks."""
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:  # noqa: ARG002
        """Name the same backend for drafters."""
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:  # noqa: ARG002
        """Allow every algorithm: `arg_groups/speculative_hook.py:291` refuses DFLASH on a CPU otherwise."""
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:  # noqa: ARG002
        """Allow only the Triton backend for drafters."""
        return backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the torch form of the KV slot lookup."""
        return speculative_cache_locs

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Allow snapshots of recurrent states, which speculative decoding of hybrid models needs."""
        return True

    def get_dispatch_key_name(self) -> str:
        """Select the `forward_native` of SGLang's fused operations: plain torch."""
        return "native"
