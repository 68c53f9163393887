"""OLMo 2: norms after attention and MLP instead of before, and one norm over all of a token's queries (keys)."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import ModelConfig, QkNorm
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Olmo2ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    return olmo(fields, _NAME)


def olmo(fields: Fields, name: str) -> ModelConfig:
    """Describe the part that OLMo 2 and 3 share."""
    return replace(
        dense(fields, name, epsilon=1e-5, biases=["attention_bias"]),
        qk_norm=QkNorm.ALL_HEADS,
        names=TensorNames(
            input_norm=None,
            attention_output_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_output_norm="post_feedforward_layernorm",
        ),
    )


ARCHITECTURE = Architecture(_NAME, "olmo2", _describe)
