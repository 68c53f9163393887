"""GLM-4-0414 and Z1: a GLM-4 with further norms after attention and MLP."""

from __future__ import annotations

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.glm import glm
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Glm4ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    names = TensorNames(
        gate_up=("mlp.gate_up_proj",),
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    )
    return glm(fields, _NAME, names)


ARCHITECTURE = Architecture(_NAME, "glm4", _describe)
