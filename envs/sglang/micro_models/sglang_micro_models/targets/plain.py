"""`plain`: a dense Qwen3 of three layers."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_micro_models import tokenizer

FEATURE_LAYERS = (0, 1)


def build() -> Qwen3ForCausalLM:
    """The untrained model, fp32, its weights drawn from torch's global generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=tokenizer.BEGIN_ID,
            eos_token_id=tokenizer.END_ID,
            pad_token_id=tokenizer.PAD_ID,
        )
    ).float()
