"""The operations between a layer's matrix products: reference in torch, and the seam for faster ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.model_config import Activation, ModelConfig, NormConfig, NormKind
from pdmesh.engine.rope import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What a step's queries and keys are rotated by, and where its keys and values go."""

    cos: Tensor  # (num_tokens, head_dim / 2)
    sin: Tensor
    slots: Tensor  # (num_tokens,): block * block_size + offset


#: What torch's loops over single values take at once: two vectors of the widest there are, of fp32.
_LOOP_VALUES = 32

#: Of what a clamped activation's sigmoid is given.
_SWISH_FACTOR = 1.702


class Kernels(Protocol):
    """Calls may change the tensors they are given; what they return may be one of these."""

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``hidden + delta``, and its norm. Weights in fp32 multiply before the result is rounded, others after."""
        ...

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        """Rotated queries; rotated keys and the values are in the cache then. ``qkv`` (num_tokens, heads, head_dim)."""
        ...

    def activate(self, rows: Tensor) -> Tensor:
        """What an MLP's last product is given: activation(gate) * up of rows that hold gates, then ups.

        Without gates, activation(rows).
        """
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """What a model has between its matrix products."""

    norm: NormConfig
    activation: Activation = Activation.SILU
    is_gated: bool = True
    limit: float = 0.0  # of a clamped activation

    @classmethod
    def of(cls, config: ModelConfig) -> Elementwise:
        return cls(config.norm, config.activation, config.is_gated, config.activation_limit)


@dataclass(frozen=True, slots=True)
class TorchKernels:
    """Kernels for any device, dtype and model, which compute as transformers does."""

    kinds: Elementwise

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalise in fp32; see `Kernels.add_norm` for when it rounds."""
        if delta is not None:
            hidden = hidden + delta
        wide, epsilon = hidden.float(), self.kinds.norm.epsilon
        if self.kinds.norm.kind is NormKind.LAYER:
            scale, shift = weight.float(), None if bias is None else bias.float()
            return hidden, functional.layer_norm(wide, weight.shape, scale, shift, epsilon).to(hidden.dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        if weight.dtype == torch.float32:
            return hidden, (wide * weight).to(hidden.dtype)
        return hidden, weight * wide.to(hidden.dtype)

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        num_rotated = num_heads + cache.shape[2]
        rotated = rotate(qkv[:, :num_rotated], rotation.cos, rotation.sin)
        store_heads(cache, rotation.slots, rotated[:, num_heads:], qkv[:, num_rotated:])
        return rotated[:, :num_heads]

    def activate(self, rows: Tensor) -> Tensor:
        if not self.kinds.is_gated:
            return by_value(partial(_activated, activation=self.kinds.activation), rows)
        gate, up = rows.chunk(2, dim=-1)
        if self.kinds.activation is Activation.CLAMPED_SWISH:
            limit = self.kinds.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * by_value(torch.sigmoid, gate * _SWISH_FACTOR))
        return _activated(gate, self.kinds.activation) * up


def by_value(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return a function of each value of (num_rows, width), rounded alike wherever the value is.

    torch's loops on a CPU compute 32 values together, and what is left at a tensor's end by other instructions, which
    may round otherwise: a row's bits would depend on the rows beside it.
    """
    width = rows.shape[-1]
    num_left = -width % _LOOP_VALUES
    return function(functional.pad(rows, (0, num_left)))[..., :width] if num_left else function(rows)


def store_heads(cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write tokens' keys and values, each (num_tokens, num_kv_heads, head_dim), to their slots of a layer's cache."""
    block_size = cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    cache[blocks, 0, :, offsets] = keys
    cache[blocks, 1, :, offsets] = values


def _activated(rows: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return functional.silu(rows)
        case Activation.GELU_TANH:
            return functional.gelu(rows, approximate="tanh")
        case Activation.GELU:
            return functional.gelu(rows)
        case Activation.CLAMPED_SWISH:
            raise ValueError("a clamped activation has gates")
