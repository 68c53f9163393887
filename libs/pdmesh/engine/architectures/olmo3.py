"""OLMo 3: an OLMo 2 with windows in three of four layers. RoPE scaling applies to the other layers only."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.olmo2 import olmo
from pdmesh.engine.config_fields import Fields, listed_windows, windowed, with_layered_ropes
from pdmesh.engine.model_config import ModelConfig

_NAME = "Olmo3ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = olmo(fields, _NAME)
    windows = listed_windows(fields, config.num_layers, lambda number: (number + 1) % 4 != 0)
    config = with_layered_ropes(fields, config, windows, theta=10_000.0, local_theta=None)
    window = fields.optional_integer("sliding_window", default=4096)
    return replace(
        config,
        layers=windowed(config, window, windows),
        max_model_len=config.max_position_embeddings,
    )


ARCHITECTURE = Architecture(_NAME, "olmo3", _describe)
