"""Llama, TinyLlama, SmolLM2, DeepSeek's distilled Llamas."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig

_NAME = "LlamaForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    attention_bias = fields.boolean("attention_bias")
    return replace(
        dense(fields, _NAME),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias"),
    )


ARCHITECTURE = Architecture(_NAME, "llama", _describe)
