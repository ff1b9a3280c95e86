"""`hybrid_gdn`: gated delta net and full attention in the manner of Qwen3.5, four layers."""

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from sglang_micro_models import tokenizer

FEATURE_LAYERS = (0, 1, 2)


def build() -> Qwen3_5ForCausalLM:
    """The untrained model, fp32, its weights drawn from torch's global generator."""
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=tokenizer.VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
            full_attention_interval=2,  # says the same to SGLang
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            linear_conv_kernel_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=tokenizer.BEGIN_ID,
            eos_token_id=tokenizer.END_ID,
            pad_token_id=tokenizer.PAD_ID,
        )
    ).float()
