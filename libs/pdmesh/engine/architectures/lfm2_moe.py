"""LFM2 with experts, which a sigmoid of each chooses, in all but the first layers."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.lfm2 import lfm2
from pdmesh.engine.config_fields import Fields, experts_of
from pdmesh.engine.model_config import ModelConfig

_NAME = "Lfm2MoeForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = lfm2(fields, _NAME, fields.integer("intermediate_size"))
    experts = replace(
        experts_of(
            fields,
            intermediate_size="moe_intermediate_size",
            normalizes=fields.boolean("norm_topk_prob", default=True),
        ),
        by_sigmoid=True,
        has_preferences=fields.boolean("use_expert_bias", default=True),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    num_dense = fields.count("num_dense_layers", default=2)
    return replace(
        config,
        layers=tuple(
            layer if number < num_dense else replace(layer, experts=experts)
            for number, layer in enumerate(config.layers)
        ),
        names=replace(
            config.names,
            router="feed_forward.gate",
            preferences="feed_forward.expert_bias",
            expert="feed_forward.experts.{}",
            expert_gate_up=("w1", "w3"),
            expert_down="w2",
        ),
    )


ARCHITECTURE = Architecture(_NAME, "lfm2_moe", _describe)
