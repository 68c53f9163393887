"""Granite 3: a Llama with multipliers."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig

_NAME = "GraniteForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return granite(fields, _NAME)


def granite(fields: Fields, name: str) -> ModelConfig:
    """Describe the part that all Granite models share."""
    return replace(
        dense(fields, name, biases=("attention_bias", "mlp_bias")),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_scale=1 / fields.number("logits_scaling", default=1.0),
    )


ARCHITECTURE = Architecture(_NAME, "granite", _describe)
