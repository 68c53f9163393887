"""The architectures that are served: a module each, found by its being here.

A module has an `ARCHITECTURE`, and with it the architecture is in the contract tests, too. ``undescribed`` lists those
that have no module and are computed by transformers' own.
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
from pdmesh.engine.model_config import ModelConfig, Quantization, QuantizedFormat, TensorNames, UndescribedModel
from pdmesh.engine.quantization import quantization_of
from pdmesh.errors import ConfigError

#: Models that see images, too, of which text is served; and what their text model is if it is not said.
WITH_TEXT_PARTS = {"Gemma3ForConditionalGeneration": "gemma3_text", "Mistral3ForConditionalGeneration": "mistral"}


@cache
def architectures() -> Mapping[str, Architecture]:
    """All that are described, by transformers' class name."""
    others = ("base", "undescribed")
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in others)
    found: list[Architecture] = [importlib.import_module(f"{__name__}.{name}").ARCHITECTURE for name in modules]
    return {architecture.class_name: architecture for architecture in found}


@cache
def undescribed_architectures() -> Mapping[str, Architecture]:
    """All that transformers' own modules compute, by its class name."""
    from pdmesh.engine.architectures.undescribed import FAMILIES  # imported late, as are the others

    return {architecture.class_name: architecture for architecture in FAMILIES}


def parse_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig | UndescribedModel:
    """Read a ``config.json``.

    Raises ConfigError, naming ``where``, for whatever cannot be served exactly.
    """
    fields = Fields(raw, where)
    config = _text_part(fields) or _architecture(raw, where).describe(fields)
    if isinstance(config, UndescribedModel):
        return config
    quantization = quantization_of(fields)
    if quantization is None:
        return config
    if quantization.format is QuantizedFormat.GGUF:
        config = _of_gguf(config, quantization)
    elif (quantization.format is QuantizedFormat.MXFP4) is not config.names.fuses_experts:
        method = quantization.format.value
        raise fields.error(f"a {config.architecture} with weights in {method} is not served; MXFP4 is, of gpt-oss")
    return replace(config, quantization=quantization)


def _of_gguf(config: ModelConfig, quantization: Quantization) -> ModelConfig:
    """How a GGUF file keeps a model: rows in their own order, whole weights of norms, experts side by side.

    A file's tensors say where there are biases, whatever the architecture.
    """
    names = config.names
    if names.fuses_experts:
        names = replace(names, expert_gate_up=TensorNames().expert_gate_up, fuses_experts=False)
    return replace(
        config,
        interleaves_rotation=quantization.interleaves_rotation,
        norm=replace(config.norm, offset=0.0),
        qkv_bias="qkv" in quantization.biases,
        output_bias="output" in quantization.biases,
        mlp_bias="mlp" in quantization.biases,
        names=names,
    )


def _text_part(fields: Fields) -> ModelConfig | None:
    """The text model of a checkpoint that sees images, too; None where it is not such a one."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in WITH_TEXT_PARTS:
        return None
    text = fields.part("text_config")
    if text is None:
        raise fields.error("text_config is missing")
    model_type = text.raw.get("model_type", WITH_TEXT_PARTS[names[0]])
    inherited = {name: fields.raw[name] for name in ("dtype", "torch_dtype") if name in fields.raw}
    raw = {**inherited, **text.raw, "architectures": None, "model_type": model_type}
    config = _architecture(raw, text.where).describe(Fields(raw, text.where))
    if isinstance(config, UndescribedModel):
        raise fields.error(f"the text model is a {config.architecture}, which is not served inside of a {names[0]}")
    renames = (("language_model.", ""), ("model.language_model.", "model."))
    return replace(config, architecture=names[0], names=replace(config.names, renames=renames))


def _architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    served = {**architectures(), **undescribed_architectures()}
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
    known = ", ".join([*served, *WITH_TEXT_PARTS])
    raise ConfigError(f"{where}: the architecture is {name!r}, which is not served; served are {known}")
