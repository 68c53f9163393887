"""GLM-4 (2024): half of each head is rotated, neighbour by neighbour; gates and ups are fused."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "GlmForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return glm(fields, _NAME, TensorNames(gate_up=("mlp.gate_up_proj",)))


def glm(fields: Fields, name: str, names: TensorNames) -> ModelConfig:
    """Describe the part that all GLM-4 models share."""
    return replace(
        dense(fields, name, head_dim=128, max_position_embeddings=131072, epsilon=1.5625e-7, partial=0.5),
        interleaves_rotation=True,
        qkv_bias=fields.boolean("attention_bias", default=True),
        names=names,
    )


ARCHITECTURE = Architecture(_NAME, "glm", _describe)
