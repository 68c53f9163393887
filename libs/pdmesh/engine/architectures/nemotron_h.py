"""Nemotron-H and Nemotron 3: Mamba-2, attention without rotation, and MLPs or experts without gates, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import MAX_LAYERS, NO_LIMITS, Fields, check_delta_net, dense, sigmoid_experts_of
from pdmesh.engine.model_config import Activation, LayerConfig, ModelConfig, NormConfig
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.kv_layout import STATE_WINDOW

_NAME = "NemotronHForCausalLM"
#: Parts of a model by their letters and names in a ``config.json``. Each has a norm of its own.
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"
_KINDS = {
    "mamba": _MAMBA, "linear_attention": _MAMBA, "attention": _ATTENTION, "full_attention": _ATTENTION, "mlp": _MLP,
    "moe": _EXPERTS,
}  # fmt: skip
_NAMES = TensorNames(
    renames=(("backbone.", "model."),),
    embedding="model.embeddings",
    norm="model.norm_f",
    input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    mlp_norm="norm",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    preferences="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}",
    expert_gate_up=("up_proj",),
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    delta_in=("mixer.in_proj",),
    delta_conv="mixer.conv1d",
    decay_log="mixer.A_log",
    decay_bias="mixer.dt_bias",
    delta_norm="mixer.norm",
    delta_out="mixer.out_proj",
    delta_skip="mixer.D",
)


def _describe(fields: Fields) -> ModelConfig:
    refused = ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "moe_latent_size", "sliding_window")
    if (name := next((name for name in refused if fields.raw.get(name)), None)) is not None:
        raise fields.error(f"{name} is not supported")
    if fields.raw.get("time_step_limit") not in NO_LIMITS or fields.raw.get("mamba_hidden_act") not in (None, "silu"):
        raise fields.error("time_step_limit and a mamba_hidden_act other than silu are not supported")
    parts = _parts(fields)
    own = {"num_hidden_layers": len(parts), "hidden_act": None}
    config = dense(Fields({**fields.raw, **own}, fields.where), _NAME, head_dim=128, max_position_embeddings=4096)
    return replace(
        config,
        layers=tuple(_layers(fields, parts)),
        norm=NormConfig(epsilon=fields.number("layer_norm_epsilon", default=1e-5), in_float32=True),
        is_gated=False,
        activation=fields.choice("mlp_hidden_act", Activation, default=Activation.RELU2),
        names=_NAMES,
    )


def _parts(fields: Fields) -> str:
    """Return the letter of each part of the model. Raise ConfigError for a malformed list."""
    listed = next((fields.raw[name] for name in ("layers_block_type", "layer_types") if fields.raw.get(name)), None)
    if listed is None:
        listed = fields.raw.get("hybrid_override_pattern")
    known = {**_KINDS, **{letter: letter for letter in _KINDS.values()}}
    letters = [str(each) for each in listed] if isinstance(listed, str | list) else []
    if not 0 < len(letters) <= MAX_LAYERS or not known.keys() >= set(letters):
        raise fields.error(f"layers_block_type must list 1 to {MAX_LAYERS} parts, each one of {', '.join(_KINDS)}")
    return "".join(known[each] for each in letters)


def _layers(fields: Fields, parts: str) -> Sequence[LayerConfig]:
    """Return the layers: each has a mixer, and the MLP or the experts if these follow in the file."""
    delta = _state_space(fields) if _MAMBA in parts else None
    experts = None
    if _EXPERTS in parts:
        size = fields.integer("moe_shared_expert_intermediate_size", default=7688)
        experts = replace(sigmoid_experts_of(fields, num_groups=1), shared_size=size)
    layers: list[LayerConfig] = []
    for number, part in enumerate(parts):
        if part in (_MAMBA, _ATTENTION):
            layer = LayerConfig(rope=None, has_mlp=False, stored_as=(number, number))
            state = replace(layer, delta=delta, window=STATE_WINDOW)
            layers.append(state if part == _MAMBA else layer)
            continue
        if not layers or layers[-1].has_mlp:
            raise fields.error(f"part {number} of the model is an MLP that follows no attention and no state")
        own = experts if part == _EXPERTS else None
        layers[-1] = replace(layers[-1], has_mlp=True, experts=own, stored_as=(number - 1, number))
    return layers


def _state_space(fields: Fields) -> DeltaNet:
    delta = DeltaNet(
        num_key_heads=fields.integer("n_groups", default=8),
        num_value_heads=fields.integer("mamba_num_heads", default=128),
        key_dim=fields.integer("ssm_state_size", default=128),
        value_dim=fields.integer("mamba_head_dim", default=64),
        num_taps=fields.integer("conv_kernel", default=4),
        is_additive=True,
        has_conv_bias=fields.boolean("use_conv_bias", default=True),
    )
    return check_delta_net(fields, delta)


ARCHITECTURE = Architecture(_NAME, "nemotron_h", _describe)
