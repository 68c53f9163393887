"""GPT-2: learned positions instead of rotation, layer norms, biases everywhere, an MLP without gates."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import Activation, LayerConfig, ModelConfig, NormConfig, NormKind
from pdmesh.engine.tensor_names import TensorNames

_NAME = "GPT2LMHeadModel"
_FIELDS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}


def _describe(fields: Fields) -> ModelConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if fields.raw.get(name):
            raise fields.error(f"{name} is set, which is not supported")
    if (activation := fields.raw.get("activation_function", "gelu_new")) not in ("gelu_new", "gelu_pytorch_tanh"):
        raise fields.error(f"activation_function is {activation!r}; only 'gelu_new' is supported")
    renamed: dict[str, object] = {"num_key_value_heads": None, "head_dim": None}
    renamed |= {name: fields.raw.get(theirs, fields.raw.get(name)) for name, theirs in _FIELDS.items()}
    size = renamed["hidden_size"]
    if renamed["intermediate_size"] is None and isinstance(size, int):
        renamed["intermediate_size"] = 4 * size
    config = dense(Fields({**fields.raw, **renamed}, fields.where), _NAME, max_position_embeddings=1024, tied=True)
    return replace(
        config,
        layers=(LayerConfig(rope=None),) * config.num_layers,
        max_model_len=config.max_position_embeddings,
        num_learned_positions=config.max_position_embeddings,
        norm=NormConfig(epsilon=fields.number("layer_norm_epsilon", default=1e-5), kind=NormKind.LAYER, has_bias=True),
        activation=Activation.GELU_TANH,
        is_gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        transposes_weights=True,
        names=TensorNames(
            renames=(("transformer.", ""),),
            embedding="wte",
            positions="wpe",
            layer="h.{}",
            norm="ln_f",
            input_norm="ln_1",
            qkv=("attn.c_attn",),
            output="attn.c_proj",
            mlp_norm="ln_2",
            gate_up=("mlp.c_fc",),
            down="mlp.c_proj",
        ),
    )


ARCHITECTURE = Architecture(_NAME, "gpt2", _describe)
