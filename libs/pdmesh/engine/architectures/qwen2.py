"""Qwen2 and Qwen2.5: a Llama with biases of queries, keys and values. Later layers may have windows."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, listed_windows, windowed
from pdmesh.engine.model_config import LayerConfig, ModelConfig

_NAME = "Qwen2ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=32768)
    return replace(config, qkv_bias=True, layers=qwen_layers(fields, config))


def qwen_layers(fields: Fields, config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return the layers with their windows.

    Without ``use_sliding_window`` no layer has a window. ``layer_types`` lists the layers that have one; without this
    list, layers from ``max_window_layers`` on have one.
    """
    window = fields.optional_integer("sliding_window", default=4096) if fields.boolean("use_sliding_window") else None
    first = fields.integer("max_window_layers", default=28)
    windows = listed_windows(fields, config.num_layers, lambda number: number >= first)
    return windowed(config, window, windows)


ARCHITECTURE = Architecture(_NAME, "qwen2", _describe)
