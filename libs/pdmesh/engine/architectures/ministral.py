"""Ministral: a Mistral whose configuration lists which layers have a window."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, listed_windows, windowed
from pdmesh.engine.model_config import ModelConfig

_NAME = "MinistralForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=131072)
    window = fields.optional_integer("sliding_window", default=4096)
    windows = listed_windows(fields, config.num_layers, lambda _: True)
    return replace(config, layers=windowed(config, window, windows))


ARCHITECTURE = Architecture(_NAME, "ministral", _describe)
