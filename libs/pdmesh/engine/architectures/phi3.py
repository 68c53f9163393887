"""Phi-3, Phi-3.5 and Phi-4: a Llama with fused projections and longrope. Some rotate only a part of each head."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, windowed
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Phi3ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=4096, epsilon=1e-5)
    return replace(
        config,
        layers=windowed(config, fields.optional_integer("sliding_window")),
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    )


ARCHITECTURE = Architecture(_NAME, "phi3", _describe)
