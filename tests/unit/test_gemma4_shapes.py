"""The published shapes of Gemma 4: weights and KV of each."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.engine.architectures import parse_model_config
from pdmesh.engine.model_config import ModelConfig

ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}


def described(num_layers: int, period: int, **text: Any) -> ModelConfig:
    """Return the text model of a checkpoint in which every ``period``-th layer has no window."""
    kinds = ["full_attention" if number % period == period - 1 else "sliding_attention" for number in range(num_layers)]
    fields = {
        "model_type": "gemma4_text", "dtype": "bfloat16", "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "num_hidden_layers": num_layers, "layer_types": kinds, "rope_parameters": ROPES,
        "final_logit_softcapping": 30.0, **text,
    }  # fmt: skip
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": fields, "tie_word_embeddings": True}
    config = parse_model_config(raw, "config.json")
    assert isinstance(config, ModelConfig)
    return config


B31 = {
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "hidden_size": 5376, "intermediate_size": 21504, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    "enable_moe_block": False, "num_experts": None, "use_bidirectional_attention": "vision",
}  # fmt: skip
B26 = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "hidden_size": 2816, "intermediate_size": 2112, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
E2B = {
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_global_key_value_heads": None, "hidden_size": 1536,
    "intermediate_size": 6144, "sliding_window": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "weights_b", "active_b", "kib_a_token", "kib_without_windows"),
    [
        (described(60, 6, **B31), 31, 31, 880, 80),
        (described(30, 6, **B26), 25, 4, 220, 20),
        (described(35, 5, **E2B), 2, 2, 18, 6),
    ],
    ids=["31B", "26B-A4B", "E2B"],
)
def test_weights_and_kv_are_of_the_published_models(
    shape: ModelConfig, weights_b: int, active_b: int, kib_a_token: int, kib_without_windows: int
) -> None:
    layout = shape.kv_layout(dtype="auto", block_size=16, frees_windows=True)
    assert (round(shape.num_weights / 1e9), round(shape.num_parameters / 1e9)) == (weights_b, active_b)
    assert layout.token_bytes == kib_a_token << 10
    assert layout.bytes_per_block - layout.bytes_per_frame == 16 * (kib_without_windows << 10)
