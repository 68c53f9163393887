"""Granite 4: Mamba-2 in most layers, attention that is mostly not rotated in the others, perhaps experts."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.granite import granite
from pdmesh.engine.config_fields import NO_LIMITS, Fields, check_delta_net, experts_of
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.kv_layout import STATE_WINDOW

_NAME = "GraniteMoeHybridForCausalLM"
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}

_NAMES = TensorNames(
    parts=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ),
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}",
    expert_gate_up=("gate_up_proj",),
    fuses_experts=True,
    gates_first=True,
    outputs_first=True,
    delta_in=("mamba.in_proj",),
    delta_conv="mamba.conv1d",
    decay_log="mamba.A_log",
    decay_bias="mamba.dt_bias",
    delta_norm="mamba.norm",
    delta_out="mamba.out_proj",
)


def _describe(fields: Fields) -> ModelConfig:
    inner_size = fields.integer("shared_intermediate_size", default=1024)
    config = granite(Fields({**fields.raw, "intermediate_size": inner_size}, fields.where), _NAME)
    experts = None
    if fields.count("num_local_experts", default=8):
        experts = experts_of(fields, intermediate_size="intermediate_size", normalizes=True)
        experts = replace(experts, shared_size=inner_size)
    names = _NAMES if experts else replace(_NAMES, fuses_experts=False)
    listed = fields.layer_flags("layer_types", _KINDS, config.num_layers)
    listed = listed or fields.layer_flags("layers_block_type", _KINDS, config.num_layers)
    delta = _state_space(fields, config) if listed is None or any(listed) else None

    has_rotation = fields.raw.get("position_embedding_type") == "rope"
    kinds = zip(config.layers, listed or [True] * config.num_layers, strict=True)
    layers = tuple(
        replace(
            layer,
            rope=layer.rope if has_rotation else None,
            experts=experts,
            delta=delta if has_state else None,
            window=STATE_WINDOW if has_state else None,
        )
        for layer, has_state in kinds
    )
    return replace(config, layers=layers, names=names)


def _state_space(fields: Fields, config: ModelConfig) -> DeltaNet:
    num_values = fields.integer("mamba_expand", default=2) * config.hidden_size
    num_heads = fields.integer("mamba_n_heads", default=128)
    head_dim = fields.raw.get("mamba_d_head", "auto")
    delta = DeltaNet(
        num_key_heads=fields.integer("mamba_n_groups", default=1),
        num_value_heads=num_heads,
        key_dim=fields.integer("mamba_d_state", default=256),
        value_dim=max(1, num_values // num_heads) if head_dim == "auto" else fields.integer("mamba_d_head"),
        num_taps=fields.integer("mamba_d_conv", default=4),
        is_additive=True,
        has_conv_bias=fields.boolean("mamba_conv_bias", default=True),
    )
    if delta.num_values != num_values:
        raise fields.error(f"mamba_n_heads and mamba_d_head make {delta.num_values}, but mamba_expand {num_values}")
    limits = fields.raw.get("time_step_limit")
    if fields.boolean("mamba_proj_bias") or limits not in NO_LIMITS:
        raise fields.error("mamba_proj_bias and time_step_limit are not supported: remove them")
    return check_delta_net(fields, delta)


ARCHITECTURE = Architecture(_NAME, "granitemoehybrid", _describe)
