"""DeepSeek V3, V3.1, R1 and Kimi K2: latent attention, and experts that sigmoids choose from the best groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import MAX_LAYERS, Fields, dense, sigmoid_experts_of
from pdmesh.engine.latent import Latent
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "DeepseekV3ForCausalLM"

#: Bound of a latent's size and of parts of heads, for the compiled kernels. No model has larger ones.
_MAX_WIDTH = 1024
_MAX_QUERY_RANK = 1 << 16

NAMES = TensorNames(
    preferences="mlp.gate.e_score_correction_bias",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)


def _describe(fields: Fields) -> ModelConfig:
    num_dense = fields.count("first_k_dense_replace", default=3)
    config = latent_decoder(fields, _NAME, epsilon=1e-6)
    return with_sigmoid_experts(fields, config, [number >= num_dense for number in range(config.num_layers)])


def latent_decoder(fields: Fields, name: str, *, epsilon: float) -> ModelConfig:
    """Describe a dense model with latent attention."""
    rotated_dim = fields.integer("qk_rope_head_dim", default=64)
    own = {"head_dim": rotated_dim, "num_key_value_heads": None}
    config = dense(Fields({**fields.raw, **own}, fields.where), name, max_position_embeddings=4096, epsilon=epsilon)
    latent = Latent(
        rank=fields.integer("kv_lora_rank", default=512),
        query_rank=fields.optional_integer("q_lora_rank", default=1536, most=_MAX_QUERY_RANK) or 0,
        plain_dim=fields.integer("qk_nope_head_dim", default=128),
        rotated_dim=rotated_dim,
        value_dim=fields.integer("v_head_dim", default=128),
    )
    if max(latent.width, latent.query_dim, latent.value_dim) > _MAX_WIDTH or latent.width % 2:
        raise fields.error(
            f"a latent has {latent.width} values, a query {latent.query_dim} and a value {latent.value_dim}; at most "
            f"{_MAX_WIDTH} are supported, and an even number in a latent"
        )
    if fields.boolean("attention_bias") or config.rotary_dim != rotated_dim:
        raise fields.error("attention_bias and partial_rotary_factor are not supported beside latents: remove them")
    return replace(
        config,
        layers=tuple(replace(layer, latent=latent, page=latent.page) for layer in config.layers),
        attention_scale=_mscale(config) ** 2 / math.sqrt(latent.query_dim),
        interleaves_rotation=fields.boolean("rope_interleave", default=True),
        names=NAMES,
    )


def with_sigmoid_experts(fields: Fields, config: ModelConfig, has_experts: Sequence[bool]) -> ModelConfig:
    """Return the model with experts in some layers, and without the layers that guess further tokens."""
    experts = sigmoid_experts_of(fields, num_groups=1)
    layers = zip(config.layers, has_experts, strict=True)
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts if chosen else None) for layer, chosen in layers),
        num_guessing_layers=fields.count("num_nextn_predict_layers", default=0, most=MAX_LAYERS),
        names=NAMES,
    )


def _mscale(config: ModelConfig) -> float:
    """Return the factor of queries and keys that YaRN adds to the rotation's."""
    rope = config.layers[0].rope
    if rope is None or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


ARCHITECTURE = Architecture(_NAME, "deepseek_v3", _describe)
