"""Qwen3.5 and 3.6 with experts: a Qwen3.5 with experts and a gated shared one in each layer."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.qwen3_5 import qwen3_5
from pdmesh.engine.config_fields import Fields, gated_experts_of
from pdmesh.engine.model_config import ModelConfig

_NAME = "Qwen3_5MoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    experts = gated_experts_of(fields, normalizes=True)
    config = qwen3_5(Fields({**fields.raw, "intermediate_size": experts.intermediate_size}, fields.where), _NAME)
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts) for layer in config.layers),
        names=replace(
            config.names, expert_gate_up=("gate_up_proj",), fuses_experts=True, gates_first=True, outputs_first=True
        ),
    )


ARCHITECTURE = Architecture(_NAME, "qwen3_5_moe_text", _describe)
