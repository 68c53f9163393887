"""Qwen3-Next: a Qwen3.5 with experts, whose delta nets' projections are stored by key head."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.qwen3_5 import qwen3_5
from pdmesh.engine.architectures.qwen3_moe import with_experts
from pdmesh.engine.config_fields import Fields, gated_experts_of
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Qwen3NextForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = qwen3_5(fields, _NAME)
    experts = gated_experts_of(fields, normalizes=fields.boolean("norm_topk_prob", default=True))
    return replace(
        config,
        layers=with_experts(fields, config.layers, experts),
        names=TensorNames(delta_in=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
    )


ARCHITECTURE = Architecture(_NAME, "qwen3_next", _describe)
