"""Llama, TinyLlama, SmolLM2, DeepSeek's distilled Llamas."""

from __future__ import annotations

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig

_NAME = "LlamaForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return dense(fields, _NAME, biases=("attention_bias", "mlp_bias"))


ARCHITECTURE = Architecture(_NAME, "llama", _describe)
