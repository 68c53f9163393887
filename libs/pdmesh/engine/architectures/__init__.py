"""The architectures that are served: a module each, found by its being here.

A module has an `ARCHITECTURE`, and with it the architecture is in the contract tests, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pdmesh.engine.architectures.base import Architecture
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.quantization import quantization_of
from pdmesh.errors import ConfigError


@cache
def architectures() -> Mapping[str, Architecture]:
    """All that are served, by transformers' class name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    found: list[Architecture] = [importlib.import_module(f"{__name__}.{name}").ARCHITECTURE for name in modules]
    return {architecture.class_name: architecture for architecture in found}


def parse_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a ``config.json``. Raises ConfigError, naming ``where``, for whatever cannot be served exactly."""
    fields = Fields(raw, where)
    config = _architecture(raw, where).describe(fields)
    return replace(config, quantization=quantization_of(fields))


def _architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    served = architectures()
    names = raw.get("architectures")
    if isinstance(names, list) and names:
        name = names[0]
        if isinstance(name, str) and name in served:
            return served[name]
    else:
        name = raw.get("model_type")
        for architecture in served.values():
            if name == architecture.model_type:
                return architecture
    raise ConfigError(f"{where}: the architecture is {name!r}, which is not served; served are {', '.join(served)}")
