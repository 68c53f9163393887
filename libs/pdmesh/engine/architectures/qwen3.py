"""Qwen3: a Llama whose queries and keys are normalised, head by head."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.qwen2 import qwen_layers
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig, QkNorm

_NAME = "Qwen3ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, head_dim=128, max_position_embeddings=32768, biases=["attention_bias"])
    return replace(config, layers=qwen_layers(fields, config), qk_norm=QkNorm.HEAD)


ARCHITECTURE = Architecture(_NAME, "qwen3", _describe)
