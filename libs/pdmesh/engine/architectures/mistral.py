"""Mistral: a Llama with a sliding window in its first versions."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, windowed
from pdmesh.engine.model_config import ModelConfig

_NAME = "MistralForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=131072)
    window = fields.optional_integer("sliding_window", default=4096)
    return replace(config, layers=windowed(config, window))


ARCHITECTURE = Architecture(_NAME, "mistral", _describe)
