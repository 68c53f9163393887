"""What a checkpoint's ``config.json`` says, checked and frozen. Torch-free: gateways read it too.

Defaults of absent keys are those of transformers' own configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.model import KvLayout

_DTYPES = ("float32", "bfloat16", "float16")


class Architecture(StrEnum):
    """The model families the engine computes; values are transformers' class names."""

    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


class RopeType(StrEnum):
    """How rotary frequencies follow from the base; see `pdmesh.engine.rope`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; which fields matter depends on ``rope_type``."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: follows from factor and mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and make-up of a dense decoder-only transformer."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint: "float32" | "bfloat16" | "float16"

    @property
    def max_model_len(self) -> int:
        """Tokens the model can attend to. As in vLLM, RoPE scaling stretches it; llama3 states the stretched figure."""
        match self.rope.rope_type:
            case RopeType.DEFAULT | RopeType.LLAMA3:
                return self.max_position_embeddings
            case RopeType.LINEAR | RopeType.DYNAMIC:
                return int(self.max_position_embeddings * self.rope.factor)
            case RopeType.YARN:
                return int(self.rope.original_max_position_embeddings * self.rope.factor)

    @property
    def num_parameters(self) -> int:
        """Weights that a token is multiplied with: layers and vocabulary, no input embedding, no biases and norms."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def compute_dtype(self, dtype: str) -> str:
        """The dtype to compute in when ``dtype`` is asked for; "auto" is the checkpoint's."""
        if dtype == "auto":
            return self.dtype
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype!r}: use auto, {' or '.join(_DTYPES)}")
        return dtype

    def kv_layout(self, *, dtype: str, block_size: int) -> KvLayout:
        """Layout of this model's KV cache; ``dtype`` as in `compute_dtype`."""
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.compute_dtype(dtype),
        )


_MODEL_TYPES = {"llama": Architecture.LLAMA, "qwen2": Architecture.QWEN2, "qwen3": Architecture.QWEN3}
_MAX_POSITION_EMBEDDINGS = {Architecture.LLAMA: 2048, Architecture.QWEN2: 32768, Architecture.QWEN3: 32768}


def parse_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a ``config.json``. Raises ConfigError, naming ``where``, for whatever cannot be served exactly."""
    fields = _Fields(raw, where)
    architecture = _architecture(fields)
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{where}: quantized checkpoints are not served; use one in float32, bfloat16 or float16")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{where}: hidden_act is {activation!r}; only 'silu' is served")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{where}: {num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    hidden_size = fields.integer("hidden_size")
    default_head_dim = 128 if architecture is Architecture.QWEN3 else max(1, hidden_size // num_heads)
    head_dim = fields.integer("head_dim", default=default_head_dim)
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim is {head_dim}; rotary embeddings need an even one")
    num_layers = fields.integer("num_hidden_layers")
    _refuse_sliding_window(fields, architecture, num_layers)
    attention_bias = fields.boolean("attention_bias")
    max_position_embeddings = fields.integer("max_position_embeddings", default=_MAX_POSITION_EMBEDDINGS[architecture])
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=True if architecture is Architecture.QWEN2 else attention_bias,
        output_bias=False if architecture is Architecture.QWEN2 else attention_bias,
        mlp_bias=fields.boolean("mlp_bias") if architecture is Architecture.LLAMA else False,
        qk_norm=architecture is Architecture.QWEN3,
        dtype=_dtype(fields),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a JSON object; a wrong value is a ConfigError that names the field. null means absent."""

    raw: Mapping[str, Any]
    where: str

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be a positive number")
        return float(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return value


def _architecture(fields: _Fields) -> Architecture:
    names = fields.raw.get("architectures")
    if isinstance(names, list) and names:
        name = names[0]
        if isinstance(name, str) and name in {architecture.value for architecture in Architecture}:
            return Architecture(name)
    else:
        name = fields.raw.get("model_type")
        if isinstance(name, str) and name in _MODEL_TYPES:
            return _MODEL_TYPES[name]
    served = ", ".join(architecture.value for architecture in Architecture)
    raise ConfigError(f"{fields.where}: the architecture is {name!r}, which is not served; served are {served}")


def _refuse_sliding_window(fields: _Fields, architecture: Architecture, num_layers: int) -> None:
    if architecture is Architecture.LLAMA:
        return
    layer_types = fields.raw.get("layer_types")
    if isinstance(layer_types, list):
        used = any(layer_type != "full_attention" for layer_type in layer_types)
    else:
        used = (
            fields.boolean("use_sliding_window")
            and fields.raw.get("sliding_window", 4096) is not None
            and fields.integer("max_window_layers", default=28) < num_layers
        )
    if used:
        raise ConfigError(f"{fields.where}: some layers use sliding-window attention, which is not served")


def _dtype(fields: _Fields) -> str:
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"{fields.where}: dtype is {dtype!r}; served are {', '.join(_DTYPES)}")
    return str(dtype)


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    raw = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{fields.where}: the RoPE parameters are {raw!r}; they must be an object")
    rope = _Fields(raw, f"{fields.where}: RoPE parameters")
    name = raw.get("rope_type") or raw.get("type") or "default"
    if not isinstance(name, str) or name not in {rope_type.value for rope_type in RopeType}:
        served = ", ".join(rope_type.value for rope_type in RopeType)
        raise ConfigError(f"{fields.where}: RoPE scaling {name!r} is not served; served are {served}")
    for scope in (raw, fields.raw):
        if scope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(f"{fields.where}: a partial_rotary_factor other than 1 is not served")
    rope_type = RopeType(name)
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10_000.0))
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta)
    # Transformers lets a top-level value win, then the one beside the factor, then the context length.
    original = fields.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=max_position_embeddings),
    )
    default_factor = max_position_embeddings / original if rope_type is RopeType.YARN else None
    factor = rope.number("factor", default=default_factor)
    if rope_type is RopeType.LLAMA3:
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if rope_type is RopeType.YARN:
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=_optional(rope, "attention_factor"),
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            mscale=_optional(rope, "mscale"),
            mscale_all_dim=_optional(rope, "mscale_all_dim"),
            truncate=rope.boolean("truncate", default=True),
        )
    return RopeConfig(
        rope_type=rope_type, theta=theta, factor=factor, original_max_position_embeddings=max_position_embeddings
    )


def _optional(fields: _Fields, name: str) -> float | None:
    return None if fields.raw.get(name) is None else fields.number(name)
