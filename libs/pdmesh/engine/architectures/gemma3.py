"""Gemma 3, text: windows in five of six layers, which rotate by a base of their own; norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.gemma import gemma
from pdmesh.engine.architectures.gemma2 import NAMES
from pdmesh.engine.config_fields import Fields, listed_windows, windowed, with_layered_ropes
from pdmesh.engine.model_config import ModelConfig, QkNorm

_NAME = "Gemma3ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    if fields.raw.get("use_bidirectional_attention"):
        raise fields.error(
            "use_bidirectional_attention is set, so the model is an encoder; only decoders are supported"
        )
    config = gemma(fields, _NAME, max_position_embeddings=131072)
    pattern = fields.integer("sliding_window_pattern", default=6)
    windows = listed_windows(fields, config.num_layers, lambda number: (number + 1) % pattern != 0)
    config = with_layered_ropes(fields, config, windows, local_theta=10_000.0, theta=1_000_000.0)
    window = fields.optional_integer("sliding_window", default=4096)
    return replace(
        config,
        layers=windowed(config, window, windows),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        max_model_len=config.max_position_embeddings,
        score_cap=fields.optional_number("attn_logit_softcapping"),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        qk_norm=QkNorm.HEAD,
        names=NAMES,
    )


ARCHITECTURE = Architecture(_NAME, "gemma3_text", _describe)
