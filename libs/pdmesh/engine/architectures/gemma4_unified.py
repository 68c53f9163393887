"""Gemma 4 12B, text: a Gemma 4 without experts and embeddings by layer."""

from __future__ import annotations

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.architectures.gemma4 import gemma4
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig

_NAME = "Gemma4UnifiedForCausalLM"
_ABSENT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}


def _describe(fields: Fields) -> ModelConfig:
    defaults = {"max_position_embeddings": 262_144, "sliding_window": 1024}
    return gemma4(Fields({**defaults, **fields.raw, **_ABSENT}, fields.where), _NAME)


ARCHITECTURE = Architecture(_NAME, "gemma4_unified_text", _describe)
