"""OLMoE: a Llama with experts, and one norm over all of a token's queries (keys)."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, experts_of
from pdmesh.engine.model_config import ModelConfig, QkNorm

_NAME = "OlmoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    if fields.raw.get("clip_qkv") is not None:
        raise fields.error("clip_qkv is set: clipped queries, keys and values are not supported")
    config = dense(fields, _NAME, max_position_embeddings=4096, epsilon=1e-5, biases=["attention_bias"])
    experts = experts_of(
        fields,
        intermediate_size="intermediate_size",
        normalizes=fields.boolean("norm_topk_prob"),
    )
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts) for layer in config.layers),
        qk_norm=QkNorm.ALL_HEADS,
    )


ARCHITECTURE = Architecture(_NAME, "olmoe", _describe)
