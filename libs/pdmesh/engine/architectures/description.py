"""What a module of an architecture has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig, UndescribedModel


@dataclass(frozen=True, slots=True)
class Architecture:
    """How transformers calls it, and how its ``config.json`` is read."""

    class_name: str
    model_type: str
    describe: Callable[[Fields], ModelConfig | UndescribedModel]
