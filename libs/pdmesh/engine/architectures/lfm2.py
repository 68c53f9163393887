"""LFM2: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense
from pdmesh.engine.model_config import LayerConfig, ModelConfig, QkNorm, ShortConv
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.kv_layout import PageShape

_NAME = "Lfm2ForCausalLM"

#: Bounds of numbers in a file. No model has larger numbers.
_MAX_INNER_SIZE, _MAX_TAPS = 1 << 32, 64

_NAMES = TensorNames(
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    norm="model.embedding_norm",
)


def _describe(fields: Fields) -> ModelConfig:
    return lfm2(fields, _NAME, _inner_size(fields))


def lfm2(fields: Fields, name: str, inner_size: int) -> ModelConfig:
    """Describe the part that all LFM2 models share."""
    raw = {
        **fields.raw,
        "intermediate_size": inner_size,
        "rms_norm_eps": fields.number("norm_eps", default=1e-5),
        "tie_word_embeddings": fields.raw.get("tie_embedding", fields.raw.get("tie_word_embeddings")),
        "hidden_act": "silu",
    }
    config = dense(Fields(raw, fields.where), name, max_position_embeddings=128_000, theta=1_000_000.0, tied=True)
    return replace(config, layers=_layers(fields, config), qk_norm=QkNorm.HEAD, names=_NAMES)


def _inner_size(fields: Fields) -> int:
    """Return the size of an MLP: two thirds of the file's size, times a factor, rounded up to a multiple.

    The file's size itself if the file turns that off, and the two thirds if its factor is null. Raise ConfigError for a
    size beyond `_MAX_INNER_SIZE`.
    """
    size = fields.integer("block_ff_dim" if fields.raw.get("block_ff_dim") is not None else "intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    size, factor = 2 * size // 3, fields.optional_number("block_ffn_dim_multiplier", default=1.0)
    if factor is None:
        return size
    if max(size, factor) > _MAX_INNER_SIZE:
        raise fields.error(f"the MLP's size is {size} times {factor}; at most {_MAX_INNER_SIZE} are supported")
    multiple = fields.integer("block_multiple_of", default=256)
    return -(-int(factor * size) // multiple) * multiple


def _layers(fields: Fields, config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return the layers, by ``layer_types`` or by the numbers of layers with attention."""
    attends = fields.layer_flags("layer_types", {"full_attention": True, "conv": False}, config.num_layers)
    if attends is None:
        listed = fields.raw.get("full_attn_idxs")
        if listed is not None and not isinstance(listed, list):
            raise fields.error(f"full_attn_idxs is {listed!r}; it must be a list of layers")
        attends = tuple(listed is None or number in listed for number in range(config.num_layers))
    conv = ShortConv(num_taps=fields.integer("conv_L_cache", default=3), has_bias=fields.boolean("conv_bias"))
    if conv.num_taps > _MAX_TAPS:
        raise fields.error(f"conv_L_cache is {conv.num_taps}; at most {_MAX_TAPS} are supported")
    width, rest = divmod(config.hidden_size, 2 * config.num_kv_heads)
    if rest:
        raise fields.error(f"hidden_size is {config.hidden_size}; it must be a multiple of two per key-value head")
    page = PageShape(config.num_kv_heads, width)
    return tuple(
        layer if has_attention else replace(layer, conv=conv, window=conv.num_taps, page=page)
        for layer, has_attention in zip(config.layers, attends, strict=True)
    )


ARCHITECTURE = Architecture(_NAME, "lfm2", _describe)
