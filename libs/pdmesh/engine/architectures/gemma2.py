"""Gemma 2: windows in every second layer, norms around attention and MLP, and capped scores and logits."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.gemma import gemma
from pdmesh.engine.config_fields import Fields, listed_windows, windowed
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Gemma2ForCausalLM"

#: Tensor names of Gemma 2 and 3.
NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def _describe(fields: Fields) -> ModelConfig:
    config = gemma(fields, _NAME)
    window = fields.optional_integer("sliding_window", default=4096)
    windows = listed_windows(fields, config.num_layers, lambda number: number % 2 == 0)
    return replace(
        config,
        layers=windowed(config, window, windows),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        score_cap=fields.optional_number("attn_logit_softcapping", default=50.0),
        logit_cap=fields.optional_number("final_logit_softcapping", default=30.0),
        names=NAMES,
    )


ARCHITECTURE = Architecture(_NAME, "gemma2", _describe)
