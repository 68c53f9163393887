"""Qwen3.5, 3.6 and 3.8, dense: gated delta nets in three of four layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, delta_net_of, dense
from pdmesh.engine.model_config import ModelConfig, QkNorm
from pdmesh.kv_layout import STATE_WINDOW

_NAME = "Qwen3_5ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return qwen3_5(fields, _NAME)


def qwen3_5(fields: Fields, name: str) -> ModelConfig:
    """Describe the part that all models of this family share."""
    config = dense(fields, name, head_dim=256, max_position_embeddings=32768, partial=0.25, biases=["attention_bias"])
    period = fields.integer("full_attention_interval", default=4)
    kinds = {"linear_attention": True, "full_attention": False}
    listed = fields.layer_flags("layer_types", kinds, config.num_layers)
    is_linear = listed or [(number + 1) % period != 0 for number in range(config.num_layers)]
    delta = delta_net_of(fields)
    return replace(
        config,
        layers=tuple(
            replace(layer, delta=delta, window=STATE_WINDOW) if linear else layer
            for layer, linear in zip(config.layers, is_linear, strict=True)
        ),
        norm=replace(config.norm, offset=1.0, in_float32=True),
        qk_norm=QkNorm.HEAD,
        gates_attention=True,
    )


ARCHITECTURE = Architecture(_NAME, "qwen3_5_text", _describe)
