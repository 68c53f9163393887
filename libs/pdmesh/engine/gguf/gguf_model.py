"""A GGUF file's metadata and tensors as an architecture's fields are read from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdmesh.engine.gguf.gguf_reader import F32, GgufHeader
from pdmesh.errors import ConfigError

#: Largest vector that is read: more than half of any head.
_MAX_VECTOR = 1 << 16
#: Most layers for which something is listed: more than any model has.
MAX_LISTED_LAYERS = 1024
#: Tensors with a layer's biases, by the projections of `pdmesh.engine.model_config.Quantization.biases`.
_BIASES = {
    "qkv": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"),
    "output": ("attn_output.bias",),
    "mlp": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model's metadata and tensors in a GGUF file. ``name`` is the architecture's."""

    name: str
    header: GgufHeader
    where: str

    def of(self, key: str) -> Any:
        """Return a field of the architecture, or None if it is absent."""
        return self.header.metadata.get(f"{self.name}.{key}")

    @property
    def head_dim(self) -> Any:
        hidden_size, num_heads = self.of("embedding_length"), self.of("attention.head_count")
        if self.of("attention.key_length") or not are_positive(hidden_size, num_heads):
            return self.of("attention.key_length")
        return hidden_size // num_heads

    @property
    def num_draft_layers(self) -> int:
        """Number of last layers that draft further tokens and are not computed."""
        number = self.of("nextn_predict_layers")
        return number if are_positive(number, self.of("block_count")) and number < self.of("block_count") else 0

    @property
    def num_layers(self) -> Any:
        number = self.of("block_count")
        return number - self.num_draft_layers if are_positive(number) else number

    def has_tensor(self, name: str) -> bool:
        """Return whether some layer has a tensor of this name."""
        return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in self.header.tensors)

    def has_by_layer(self, name: str) -> list[bool]:
        """Return for each layer whether it has a tensor of this name; an empty list for too many layers."""
        if not are_positive(self.num_layers) or self.num_layers > MAX_LISTED_LAYERS:
            return []
        return [f"blk.{number}.{name}" in self.header.tensors for number in range(self.num_layers)]

    def listed(self, key: str) -> list[int]:
        """Return a field's integer for each layer. A single integer counts for all; an empty list is malformed."""
        value = self.of(key)
        if are_positive(self.num_layers) and are_positive(value):
            return [value] * min(self.num_layers, MAX_LISTED_LAYERS)
        is_list = isinstance(value, list) and len(value) <= MAX_LISTED_LAYERS
        return value if is_list and any(value) and are_positive(*filter(None, value)) else []

    def fused(self) -> dict[str, Any]:
        """Return names of tensors of several projections that the file may have, whatever its architecture."""
        names: dict[str, Any] = {}
        if self.has_tensor("ffn_gate_up_exps.weight"):
            names["expert_gate_up"] = ["gate_up_proj"]
        if self.has_tensor("attn_qkv.weight") and not self.has_tensor("attn_q.weight"):
            names["qkv"] = ["self_attn.qkv_proj"]
        return names

    def biases(self) -> list[str]:
        """Return the projections with biases. Some published models have more than their architecture."""
        names = {
            name.split(".", 2)[2] for name in self.header.tensors if name.startswith("blk.") and name.count(".") > 2
        }
        return [place for place, tensors in _BIASES.items() if not names.isdisjoint(tensors)]

    def vector(self, name: str) -> list[float] | None:
        """Return the values of a vector in fp32, or None if there is no such tensor.

        Raises ConfigError for a tensor of another type or shape, or with more than `_MAX_VECTOR` values.
        """
        stored = self.header.tensors.get(name)
        if stored is None:
            return None
        if stored.type_number != F32 or len(stored.shape) != 1 or stored.shape[0] > _MAX_VECTOR:
            raise ConfigError(f"{self.where}: {name!r} must be a vector in fp32 of at most {_MAX_VECTOR} values")
        import numpy as np

        values: list[float] = np.fromfile(
            stored.file, dtype="<f4", count=stored.shape[0], offset=stored.offset
        ).tolist()
        return values

    def rope(self) -> dict[str, Any]:
        """Return the RoPE parameters. Llama 3.1's scaling is a tensor of frequency divisors, Phi's is two.

        Raise ConfigError for a scaling that is not served.
        """
        kind, context = self.of("rope.scaling.type") or "none", self.of("context_length")
        original = self.of("rope.scaling.original_context_length") or context
        base = {"rope_theta": self.of("rope.freq_base") or 10_000.0}
        if kind in ("linear", "yarn"):
            if factors := [name for name in self.header.tensors if name.startswith("rope_f")]:
                raise ConfigError(f"{self.where}: RoPE scaling {kind!r} together with {factors[0]!r} is not supported")
            yarn = {
                "attention_factor": self.of("rope.scaling.yarn_attn_factor"),
                "beta_fast": self.of("rope.scaling.yarn_beta_fast"),
                "beta_slow": self.of("rope.scaling.yarn_beta_slow"),
            }
            return {
                **base,
                "rope_type": kind,
                "factor": self.of("rope.scaling.factor"),
                "original_max_position_embeddings": original,
                **({name: value for name, value in yarn.items() if value is not None} if kind == "yarn" else {}),
            }
        if kind not in ("none", "longrope"):
            raise ConfigError(
                f"{self.where}: RoPE scaling {str(kind)[:64]!r} is not supported from GGUF; give the "
                "safetensors directory"
            )
        long, short = self.vector("rope_factors_long.weight"), self.vector("rope_factors_short.weight")
        if long is not None and short is not None:
            factor = self.of("rope.scaling.attn_factor")
            return {
                **base,
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original,
                **({} if factor is None else {"attention_factor": factor}),
            }
        if kind == "longrope":
            raise ConfigError(f"{self.where} holds no 'rope_factors_long.weight' and '…short.weight' of its longrope")
        divisors = self.vector("rope_freqs.weight")
        if divisors is None:
            return {**base, "rope_type": "default"}
        return {
            **base,
            "rope_type": "longrope",  # a special case of longrope: the same divisors for every length
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }

    def windows(self, *, period: int, default: int | None = None) -> dict[str, Any]:
        """Return which layers have a window: as listed in the file, or all but the last of every ``period`` layers."""
        window = self.of("attention.sliding_window") or default
        pattern, num_layers = self.of("attention.sliding_window_pattern"), self.num_layers
        if not window or not are_positive(num_layers) or num_layers > MAX_LISTED_LAYERS:
            return {"sliding_window": None}
        if not isinstance(pattern, list):
            period = pattern if are_positive(pattern) else period
            pattern = [number % period < period - 1 for number in range(num_layers)]
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern[:num_layers]]
        return {"sliding_window": window, "layer_types": kinds}

    def partial_rotation(self) -> dict[str, Any]:
        """Return the rotated part of a head as ``partial_rotary_factor``, or nothing if the file does not state it."""
        rotated = self.of("rope.dimension_count")
        return {"partial_rotary_factor": rotated / self.head_dim} if are_positive(rotated, self.head_dim) else {}


def are_positive(*values: object) -> bool:
    """Return whether all values are integers above 0."""
    return all(isinstance(value, int) and value > 0 for value in values)
