"""`mla_moe`: latent attention and a mixture of experts in the manner of DeepSeek-V3 and Kimi-K2, four layers."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from sglang_micro_models import tokenizer

FEATURE_LAYERS = (0, 1, 2)


def build() -> DeepseekV3ForCausalLM:
    """The untrained model, fp32, its weights drawn from torch's global generator.

    As in Kimi-K2: one dense layer first, one group of experts, sigmoid scores with a correction bias, the chosen
    scores normalised and scaled, one shared expert, YaRN positions.
    """
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=tokenizer.VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=32,
            kv_lora_rank=256,  # with 32 for positions 288: SGLang's Triton decode kernel takes that and 576
            qk_nope_head_dim=16,
            qk_rope_head_dim=32,
            v_head_dim=16,
            first_k_dense_replace=1,
            # Keys of the original configurations, which SGLang reads and transformers takes for granted.
            moe_layer_freq=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.0,
            num_nextn_predict_layers=0,
            max_position_embeddings=2048,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=tokenizer.BEGIN_ID,
            eos_token_id=tokenizer.END_ID,
            pad_token_id=tokenizer.PAD_ID,
        )
    ).float()
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        # Trained models have a bias that moves the choice of experts but not their weights; a zero would hide mistakes.
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.02)
    return model
