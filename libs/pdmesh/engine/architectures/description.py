"""The description that each architecture's module provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig, UndescribedModel


@dataclass(frozen=True, slots=True)
class Architecture:
    """Name of an architecture in transformers, and the function that reads its ``config.json``."""

    class_name: str
    model_type: str
    describe: Callable[[Fields], ModelConfig | UndescribedModel]
