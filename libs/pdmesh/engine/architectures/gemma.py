"""Gemma: norms multiply by one more than their weights, embeddings are scaled, and GELU."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import Activation, ModelConfig

_NAME = "GemmaForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return gemma(fields, _NAME)


def gemma(fields: Fields, name: str, *, max_position_embeddings: int = 8192) -> ModelConfig:
    """Describe the part that all Gemma models share."""
    config = dense(
        fields,
        name,
        head_dim=256,
        max_position_embeddings=max_position_embeddings,
        tied=True,
        biases=["attention_bias"],
    )
    return replace(
        config,
        # The first checkpoints set ``hidden_act`` to "gelu" by mistake, so only ``hidden_activation`` is read.
        activation=fields.choice("hidden_activation", Activation, default=Activation.GELU_TANH),
        norm=replace(config.norm, offset=1.0, in_float32=True),
        embedding_scale=config.hidden_size**0.5,
    )


ARCHITECTURE = Architecture(_NAME, "gemma", _describe)
