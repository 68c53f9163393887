"""Qwen3 with experts: 30B-A3B, 235B-A22B, Coder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.qwen2 import qwen_layers
from pdmesh.engine.config_fields import Fields, dense, experts_of
from pdmesh.engine.model_config import ExpertsConfig, LayerConfig, ModelConfig, QkNorm

_NAME = "Qwen3MoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=32768, biases=["attention_bias"])
    experts = experts_of(
        fields,
        intermediate_size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob"),
    )
    layers = with_experts(fields, qwen_layers(fields, config), experts)
    return replace(config, layers=layers, qk_norm=QkNorm.HEAD)


def with_experts(fields: Fields, layers: Sequence[LayerConfig], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Return the layers, with experts in every ``decoder_sparse_step``-th, except in layers listed as dense."""
    step, dense_layers = fields.integer("decoder_sparse_step", default=1), fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise fields.error(f"mlp_only_layers is {dense_layers!r}; it must be a list of layers")
    return tuple(
        layer if number in dense_layers or (number + 1) % step else replace(layer, experts=experts)
        for number, layer in enumerate(layers)
    )


ARCHITECTURE = Architecture(_NAME, "qwen3_moe", _describe)
