"""Mixtral: a Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, experts_of, windowed
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "MixtralForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=131072, epsilon=1e-5)
    experts = experts_of(fields, intermediate_size="intermediate_size", normalizes=True)
    layers = windowed(config, fields.optional_integer("sliding_window"))
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts) for layer in layers),
        names=TensorNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}",
            expert_gate_up=("w1", "w3"),
            expert_down="w2",
        ),
    )


ARCHITECTURE = Architecture(_NAME, "mixtral", _describe)
