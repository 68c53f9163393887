"""SmolLM3: a Llama without rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, listed_windows, windowed
from pdmesh.engine.model_config import ModelConfig

_NAME = "SmolLM3ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    biases = ("attention_bias", "mlp_bias")
    config = dense(fields, _NAME, max_position_embeddings=32768, theta=2_000_000.0, tied=True, biases=biases)
    interval = fields.integer("no_rope_layer_interval", default=4)
    rotates = fields.layer_flags("no_rope_layers", {1: True, 0: False}, config.num_layers) or tuple(
        (number + 1) % interval != 0 for number in range(config.num_layers)
    )
    layers = [
        layer if rotated else replace(layer, rope=None) for layer, rotated in zip(config.layers, rotates, strict=True)
    ]
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window") else None
    windows = listed_windows(fields, config.num_layers, lambda number: not rotates[number])
    config = replace(config, layers=tuple(layers))
    return replace(config, layers=windowed(config, window, windows))


ARCHITECTURE = Architecture(_NAME, "smollm3", _describe)
