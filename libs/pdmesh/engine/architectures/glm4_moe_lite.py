"""GLM-4.7-Flash: a DeepSeek V3 with listed dense layers."""

from __future__ import annotations

from pdmesh.engine.architectures.deepseek_v3 import latent_decoder, with_sigmoid_experts
from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig

_NAME = "Glm4MoeLiteForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = latent_decoder(fields, _NAME, epsilon=1e-5)
    listed = fields.layer_flags("mlp_layer_types", {"dense": False, "sparse": True}, config.num_layers)
    num_dense = fields.count("first_k_dense_replace", default=1)
    return with_sigmoid_experts(fields, config, listed or [number >= num_dense for number in range(config.num_layers)])


ARCHITECTURE = Architecture(_NAME, "glm4_moe_lite", _describe)
