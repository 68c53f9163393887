"""Operations between a layer's matrix products: the reference in torch, and the interface of faster ones."""

from __future__ import annotations

import math
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
    """Rotation of a step's queries and keys, and the slots of its keys and values.

    ``cos`` and ``sin`` are (num_tokens, head_dim / 2). ``slots`` (num_tokens,) are block * block_size + offset.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor


#: Number of values that torch's loops compute together: two of the widest vectors, of bf16.
_LOOP_VALUES = 64

#: Least number of values per thread in most loops (ATen's ``GRAIN_SIZE``). gelu's loop always uses all threads.
_THREAD_VALUES = 32768

#: Factor of the sigmoid's input in a clamped activation.
_SWISH_FACTOR = 1.702


class Kernels(Protocol):
    """Operations between matrix products. Calls may change the given tensors, and may return one of them."""

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``hidden + delta``, and its norm in the dtype of products.

        Weights in fp32 multiply before the result is rounded, others after.
        """
        ...

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the norm of each row, in the rows' dtype."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the norm of each head (num_tokens, heads, head_dim), perhaps in place."""
        ...

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        """Return the rotated queries of ``qkv`` (num_tokens, heads, head_dim). Write keys and values to the cache."""
        ...

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Return rows * sigmoid(gates) for heads (num_tokens, heads, head_dim)."""
        ...

    def activate(self, rows: Tensor) -> Tensor:
        """Return the input of an MLP's last product: activation(gate) * up. Rows hold gates, then ups.

        Without gates, return activation(rows).
        """
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The model's operations between matrix products. ``limit`` is a clamped activation's."""

    norm: NormConfig
    activation: Activation = Activation.SILU
    is_gated: bool = True
    limit: float = 0.0

    @classmethod
    def of(cls, config: ModelConfig) -> Elementwise:
        return cls(config.norm, config.activation, config.is_gated, config.activation_limit)


@dataclass(frozen=True, slots=True)
class TorchKernels:
    """Kernels for any device, dtype and model. They compute as transformers does.

    ``deterministic`` rounds a row alike whatever the rows beside it, which copies gates. ``dtype`` is the dtype of
    products; None means the dtype of hidden states.
    """

    kinds: Elementwise
    deterministic: bool = False
    dtype: torch.dtype | None = None

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            hidden = hidden + delta
        return hidden, self._normed(hidden, weight, bias, self.dtype or hidden.dtype)

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._normed(rows, weight, bias, rows.dtype)

    def _normed(self, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the norm, computed in fp32. `Kernels.add_norm` says when the result is rounded."""
        wide, epsilon = rows.float(), self.kinds.norm.epsilon
        if self.kinds.norm.kind is NormKind.LAYER:
            scale, shift = weight.float(), None if bias is None else bias.float()
            return functional.layer_norm(wide, weight.shape, scale, shift, epsilon).to(dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        if weight.dtype == torch.float32:
            return (wide * weight).to(dtype)
        return weight * wide.to(dtype)

    def norm_heads(self, heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.norm(heads.contiguous(), weight, bias)

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        return (rows.float() * by_value(torch.sigmoid, gates.float())).to(rows.dtype)

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        num_rotated = num_heads + cache.shape[2]
        rotated = rotate(qkv[:, :num_rotated], rotation.cos, rotation.sin)
        store_heads(cache, rotation.slots, rotated[:, num_heads:], qkv[:, num_rotated:])
        return rotated[:, :num_heads]

    def activate(self, rows: Tensor) -> Tensor:
        activated = partial(_activated, activation=self.kinds.activation)
        if not self.kinds.is_gated:
            return by_value(activated, rows)
        gate, up = rows.chunk(2, dim=-1)
        if self.kinds.activation is Activation.CLAMPED_SWISH:
            limit = self.kinds.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * by_value(torch.sigmoid, gate * _SWISH_FACTOR))
        return (by_value(activated, gate) if self.deterministic else activated(gate)) * up


def by_value(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to each value, rounded alike wherever the value is. Rows that are not contiguous are copied.

    On a CPU, torch gives each thread an equal share of a tensor's values. Its loops compute up to 64 values together.
    Other instructions compute the rest of a share, and may round otherwise. A row's bits would then depend on the rows
    beside it. Padding therefore makes shares end where loops do.
    """
    if rows.device.type != "cpu":
        return function(rows)
    values, num_values = rows.reshape(-1), rows.numel()
    if num_missing := _num_whole(num_values) - num_values:
        values = functional.pad(values, (0, num_missing))
    return function(values)[:num_values].view(rows.shape)


def _num_whole(num_values: int) -> int:
    """Return the least number from ``num_values`` on that gives every thread whole loops."""
    num_threads = torch.get_num_threads()
    while True:
        num_sharing = min(num_threads, max(1, -(-num_values // _THREAD_VALUES)))
        num_left = -num_values % (_LOOP_VALUES * math.lcm(num_sharing, num_threads))
        if not num_left:
            return num_values
        num_values += num_left


def store_heads(cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write tokens' keys and values, each (num_tokens, num_kv_heads, head_dim), to their slots in a layer's cache."""
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
        case Activation.RELU2:
            return functional.relu(rows).square()
        case Activation.CLAMPED_SWISH:
            raise ValueError("a clamped activation has gates")
