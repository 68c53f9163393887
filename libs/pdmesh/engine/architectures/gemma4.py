"""Gemma 4, text: wider heads in layers without a window, and in some models experts beside the MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.gemma import gemma
from pdmesh.engine.architectures.gemma2 import NAMES
from pdmesh.engine.config_fields import Fields, experts_of, listed_windows, page_of, windowed, with_layered_ropes
from pdmesh.engine.model_config import LayerConfig, LayerEmbedding, ModelConfig, QkNorm
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.kv_layout import PageShape

_NAME = "Gemma4ForCausalLM"

#: Rotations of a configuration that names none.
_ROPES: Mapping[str, Mapping[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

_EXPERT_NAMES: TensorNames = replace(
    NAMES,
    router="router.proj",
    expert="experts.{}",
    expert_gate_up=("gate_up_proj",),
    fuses_experts=True,
    gates_first=True,
    outputs_first=True,
)


def _describe(fields: Fields) -> ModelConfig:
    return gemma4(fields, _NAME)


def gemma4(fields: Fields, name: str) -> ModelConfig:
    """Describe the part that all Gemma 4 models share."""
    if fields.raw.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention is 'all': it is an encoder, and only decoders are supported")
    fields = Fields({**fields.raw, "rope_parameters": fields.raw.get("rope_parameters") or _ROPES}, fields.where)
    config = gemma(fields, name, max_position_embeddings=131072)
    windows = [*listed_windows(fields, config.num_layers, lambda number: (number + 1) % 6 != 0)]
    windows[-1] = False
    config = with_layered_ropes(fields, config, windows, local_theta=10_000.0, theta=1_000_000.0)
    config = replace(config, layers=windowed(config, fields.integer("sliding_window", default=512), windows))
    has_experts = fields.boolean("enable_moe_block")
    return replace(
        config,
        layers=_layers(fields, config, windows),
        norm=replace(config.norm, offset=0.0),
        rotary_dim=0,
        attention_scale=1.0,
        max_model_len=config.max_position_embeddings,
        logit_cap=fields.optional_number("final_logit_softcapping"),
        qk_norm=QkNorm.HEAD,
        norms_values=True,
        scales_layers=True,
        embedding_by_layer=_embedding_by_layer(fields, config.vocab_size),
        names=_EXPERT_NAMES if has_experts else NAMES,
    )


def _layers(fields: Fields, config: ModelConfig, windows: Sequence[bool]) -> tuple[LayerConfig, ...]:
    """Return the layers with their heads, and the layer that each reads KV of."""
    shares_projection = fields.boolean("attention_k_eq_v")
    experts = None
    if fields.boolean("enable_moe_block"):
        fields = Fields({**fields.raw, "num_experts_per_tok": fields.raw.get("top_k_experts")}, fields.where)
        experts = replace(
            experts_of(fields, intermediate_size="moe_intermediate_size", normalizes=True), is_beside_mlp=True
        )
    num_sharing = fields.raw.get("num_kv_shared_layers") or 0
    num_own = config.num_layers - (0 if num_sharing == 0 else fields.integer("num_kv_shared_layers"))
    sources = {has_window: number for number, has_window in enumerate(windows[: max(0, num_own)])}
    if not set(windows) <= set(sources):
        raise fields.error(f"num_kv_shared_layers is {num_sharing}: no layer is left whose KV these could read")
    is_wide = fields.boolean("use_double_wide_mlp")
    return tuple(
        replace(
            layer,
            page=_page(fields, config, number, has_window=has_window),
            keys_are_values=shares_projection and not has_window,
            reads=None if number < num_own else sources[has_window],
            intermediate_size=2 * config.intermediate_size if is_wide and number >= num_own else None,
            experts=experts,
        )
        for number, (layer, has_window) in enumerate(zip(config.layers, windows, strict=True))
    )


def _page(fields: Fields, config: ModelConfig, number: int, *, has_window: bool) -> PageShape | None:
    """Return the heads of a layer's KV, or None for the model's.

    Newer files list the differences by layer. Others have fields for the layers without a window.
    """
    if (listed := fields.part("per_layer_config")) is not None:
        own = listed.part(str(number))
    elif has_window:
        own = None
    else:
        num_heads = fields.raw.get("num_global_key_value_heads") if fields.raw.get("attention_k_eq_v") else None
        wide = {"head_dim": fields.raw.get("global_head_dim", 512), "num_key_value_heads": num_heads}
        own = Fields(wide, fields.where)
    return None if own is None else page_of(own, config)


def _embedding_by_layer(fields: Fields, vocab_size: int) -> LayerEmbedding | None:
    if fields.raw.get("hidden_size_per_layer_input") == 0:
        return None
    num_embedded = fields.integer("vocab_size_per_layer_input", default=262_144)
    if num_embedded < vocab_size:
        raise fields.error(f"vocab_size_per_layer_input is {num_embedded}; it must be {vocab_size}, the vocab_size")
    return LayerEmbedding(vocab_size=num_embedded, size=fields.integer("hidden_size_per_layer_input", default=256))


ARCHITECTURE = Architecture(_NAME, "gemma4_text", _describe)
