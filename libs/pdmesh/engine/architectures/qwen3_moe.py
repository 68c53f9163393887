"""Qwen3 with experts: 30B-A3B, 235B-A22B, Coder."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.qwen2 import qwen_layers
from pdmesh.engine.config_fields import Fields, dense, experts_of
from pdmesh.engine.model_config import ModelConfig, QkNorm

_NAME = "Qwen3MoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=32768, biases=["attention_bias"])
    experts = experts_of(
        fields,
        intermediate_size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob"),
    )
    step, dense_layers = fields.integer("decoder_sparse_step", default=1), fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise fields.error(f"mlp_only_layers is {dense_layers!r}; it must be a list of layers")
    layers = [
        layer if number in dense_layers or (number + 1) % step else replace(layer, experts=experts)
        for number, layer in enumerate(qwen_layers(fields, config))
    ]
    return replace(config, layers=tuple(layers), qk_norm=QkNorm.HEAD)


ARCHITECTURE = Architecture(_NAME, "qwen3_moe", _describe)
