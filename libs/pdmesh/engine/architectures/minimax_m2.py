"""MiniMax-M2: experts that sigmoids choose, norms of whole queries, half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, experts_of
from pdmesh.engine.model_config import ModelConfig, QkNorm
from pdmesh.engine.tensor_names import TensorNames

_NAME = "MiniMaxM2ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    head_dim = fields.integer("head_dim", default=128)
    partial = fields.integer("rotary_dim", default=head_dim) / head_dim
    config = dense(fields, _NAME, head_dim=128, max_position_embeddings=196_608, theta=5_000_000.0, partial=partial)
    experts = experts_of(fields, intermediate_size="intermediate_size", normalizes=True)
    experts = replace(experts, by_sigmoid=True, has_preferences=True)
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts) for layer in config.layers),
        qk_norm=QkNorm.ALL_HEADS,
        names=TensorNames(
            router="block_sparse_moe.gate",
            preferences="block_sparse_moe.e_score_correction_bias",
            expert="block_sparse_moe.experts.{}",
            expert_gate_up=("w1", "w3"),
            expert_down="w2",
        ),
    )


ARCHITECTURE = Architecture(_NAME, "minimax_m2", _describe)
