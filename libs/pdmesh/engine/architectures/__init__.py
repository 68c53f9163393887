"""Served architectures, one module each. A module is discovered by being in this package.

Each module defines an `ARCHITECTURE`, which also adds it to the contract tests. ``undescribed`` lists the architectures
without a module, which transformers' own modules compute.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import ModelConfig, Quantization, QuantizedFormat, UndescribedModel
from pdmesh.engine.quantization import quantization_of
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.errors import ConfigError

#: Vision-language models whose text part is served, with the default ``model_type`` of the text part.
WITH_TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
}

#: Text models that equal another model under another name. A text token's three positions are equal, so M-RoPE is plain
#: RoPE.
_SAME_MODELS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}

#: Models whose fused experts store gates before ups. In the text-only releases of these models, the experts are not
#: fused.
_FUSING_EXPERTS = ("Qwen3VLMoeForConditionalGeneration",)

#: Prefixes of a wrapped text model's tensor names: (prefix in the file, prefix here).
_RENAMES = (("language_model.", ""), ("model.language_model.", "model."))


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return the described architectures by transformers' class name."""
    others = ("description", "undescribed")
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in others)
    found: list[Architecture] = [importlib.import_module(f"{__name__}.{name}").ARCHITECTURE for name in modules]
    return {architecture.class_name: architecture for architecture in found}


@cache
def undescribed_architectures() -> Mapping[str, Architecture]:
    """Return the architectures that transformers' own modules compute, by transformers' class name."""
    from pdmesh.engine.architectures.undescribed import FAMILIES

    return {architecture.class_name: architecture for architecture in FAMILIES}


def parse_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig | UndescribedModel:
    """Parse a ``config.json``.

    Raise ConfigError, naming ``where``, for a model that cannot be served exactly.
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
    elif (quantization.format is QuantizedFormat.MXFP4) is not _is_gpt_oss(config):
        method = quantization.format.value
        raise fields.error(
            f"a {config.architecture} with weights in {method} is not supported: MXFP4 is supported for gpt-oss only"
        )
    return replace(config, quantization=quantization)


def _is_gpt_oss(config: ModelConfig) -> bool:
    return config.names.fuses_experts and not config.names.gates_first


def _of_gguf(config: ModelConfig, quantization: Quantization) -> ModelConfig:
    """Return the configuration of a model as GGUF files store it.

    Rotated rows keep the file's order, and norm weights include the offset. The file's tensors decide how projections
    are divided and which have biases, whatever the architecture.
    """
    names, tiles_heads = config.names, quantization.tiles_heads
    if names.fuses_experts:
        names = replace(names, expert_gate_up=TensorNames().expert_gate_up, fuses_experts=False)
    return replace(
        config,
        interleaves_rotation=quantization.interleaves_rotation,
        norm=replace(config.norm, offset=0.0),
        qkv_bias="qkv" in quantization.biases,
        output_bias="output" in quantization.biases,
        mlp_bias="mlp" in quantization.biases,
        names=replace(names, **dict(quantization.names)),
        transposes_weights=False,
        layers=tuple(
            layer if layer.delta is None else replace(layer, delta=replace(layer.delta, tiles_heads=tiles_heads))
            for layer in config.layers
        ),
    )


def _text_part(fields: Fields) -> ModelConfig | UndescribedModel | None:
    """Return the text model of a vision-language checkpoint, or None for any other checkpoint."""
    raw = text_fields(fields.raw)
    if raw is None:
        return None
    name, where = fields.raw["architectures"][0], f"{fields.where}: text_config"
    config = _architecture(raw, where).describe(Fields(raw, where))
    if isinstance(config, UndescribedModel):
        return replace(config, is_wrapped=True)
    names = replace(config.names, renames=_RENAMES)
    if name in _FUSING_EXPERTS:
        names = replace(names, expert_gate_up=("gate_up_proj",), fuses_experts=True, gates_first=True)
    return replace(config, architecture=name, names=names)


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's ``config.json`` fields of a vision-language checkpoint, or None for any other checkpoint.

    Older checkpoints have the text model's fields at the top level.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str) or names[0] not in WITH_TEXT_PARTS:
        return None
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        text = {name: value for name, value in raw.items() if name not in ("vision_config", "model_type")}
    model_type = text.get("model_type", WITH_TEXT_PARTS[names[0]])
    inherited = {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    if names[0] in _FUSING_EXPERTS:
        inherited["norm_topk_prob"] = True
        text = {name: value for name, value in text.items() if name != "norm_topk_prob"}
    own = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    ropes = {name: _plain_rope(text[name]) for name in ("rope_parameters", "rope_scaling") if name in text}
    return {
        **inherited,
        **text,
        **own,
        **ropes,
        "architectures": None,
        "model_type": _SAME_MODELS.get(str(model_type), model_type),
    }


def _plain_rope(rope: object) -> object:
    """Return RoPE parameters with ``default`` for ``mrope``: a text token's three positions are equal."""
    if not isinstance(rope, Mapping):
        return rope
    return {
        name: "default" if name in ("type", "rope_type") and value == "mrope" else value for name, value in rope.items()
    }


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
    raise ConfigError(f"{where}: the architecture is {name!r}, which is not supported; use one of {known}")
