"""Models that transformers' own modules compute here, and their shape from ``config.json``. Torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dtype_of, experts_of
from pdmesh.engine.model_config import DecoderShape, LayerConfig, UndescribedModel
from pdmesh.engine.rope_config import RopeType
from pdmesh.errors import ConfigError

#: Model type by transformers' class name. The contract tests cover each entry. A model must use transformers' attention
#: interface once per layer, and keep no state of a sequence but keys and values.
_MODEL_TYPES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "CwmForCausalLM": "cwm",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "FlexOlmoForCausalLM": "flex_olmo",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Jais2ForCausalLM": "jais2",
    "Ministral3ForCausalLM": "ministral3",
    "NanoChatForCausalLM": "nanochat",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "OPTForCausalLM": "opt",
    "PersimmonForCausalLM": "persimmon",
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "SeedOssForCausalLM": "seed_oss",
    "StableLmForCausalLM": "stablelm",
    "VaultGemmaForCausalLM": "vaultgemma",
}

#: Names of fields in older configurations.
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

#: RoPE types that change with a sequence's length. Modules keep the rotation of the longest sequence seen, which other
#: sequences share.
_CHANGING_ROPES = {RopeType.DYNAMIC.value, RopeType.LONGROPE.value}


def check_installed(model: DecoderShape) -> None:
    """Raise ConfigError if transformers must compute the model and is not installed."""
    if isinstance(model, UndescribedModel) and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"a {model.architecture} is computed by transformers' own modules, and transformers is not installed: "
            'run `pip install "pdmesh[fallback]"`'
        )


def _shape(class_name: str, fields: Fields) -> UndescribedModel:
    raw = fields.raw
    if raw.get("quantization_config") is not None:
        raise fields.error(f"a quantised {class_name} is not supported: give a checkpoint in bf16, fp16 or fp32")
    for rope_type in _rope_types(raw.get("rope_parameters") or raw.get("rope_scaling")):
        if rope_type in _CHANGING_ROPES:
            raise fields.error(f"RoPE scaling {rope_type!r} is not supported for a {class_name}")
    fields = Fields({**raw, **{name: raw.get(name, raw.get(older)) for name, older in _NAMES.items()}}, fields.where)
    experts = None
    if "num_local_experts" in raw or "num_experts" in raw:
        experts = experts_of(fields, intermediate_size="intermediate_size", normalizes=False)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return UndescribedModel(
        architecture=class_name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", default=4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=max(1, hidden_size // num_heads)),
        layers=(LayerConfig(rope=None, experts=experts),) * fields.num_layers(),
        max_model_len=fields.integer("max_position_embeddings"),
        dtype=dtype_of(fields),
    )


def _rope_types(parameters: object) -> list[object]:
    """Return the RoPE types that are named: one, or one for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested: Mapping[str, Any] = parameters
    parts = [nested, *(part for part in nested.values() if isinstance(part, Mapping))]
    return [part.get("rope_type") or part.get("type") for part in parts]


FAMILIES = [
    Architecture(class_name, model_type, partial(_shape, class_name)) for class_name, model_type in _MODEL_TYPES.items()
]
