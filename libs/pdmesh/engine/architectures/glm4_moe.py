"""GLM-4.5 to 4.7: experts as in DeepSeek V3, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.deepseek_v3 import with_sigmoid_experts
from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig, QkNorm

_NAME = "Glm4MoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=131072, epsilon=1e-5, partial=0.5, biases=["attention_bias"])
    has_norms = fields.boolean("use_qk_norm")
    config = replace(config, output_bias=False, qk_norm=QkNorm.HEAD if has_norms else QkNorm.NONE)
    num_dense = fields.count("first_k_dense_replace", default=1)
    return with_sigmoid_experts(fields, config, [number >= num_dense for number in range(config.num_layers)])


ARCHITECTURE = Architecture(_NAME, "glm4_moe", _describe)
