"""The operations between a layer's matrix products: reference in torch, and the seam for faster ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.rope import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What a step's queries and keys are rotated by, and where its keys and values go."""

    cos: Tensor  # (num_tokens, head_dim / 2)
    sin: Tensor
    slots: Tensor  # (num_tokens,): block * block_size + offset


class Kernels(Protocol):
    """Calls may change the tensors they are given; what they return may be one of these."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden + delta``, and its RMS norm."""
        ...

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        """Rotated queries; rotated keys and the values are in the cache then. ``qkv`` (num_tokens, heads, head_dim)."""
        ...

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of rows that hold gates, then ups."""
        ...


@dataclass(frozen=True, slots=True)
class TorchKernels:
    """Kernels for any device and dtype, which compute as transformers does."""

    epsilon: float

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise in fp32 and round before the weight is applied."""
        if delta is not None:
            hidden = hidden + delta
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return hidden, weight * wide.to(hidden.dtype)

    def rotate_and_store(self, qkv: Tensor, num_heads: int, rotation: Rotation, cache: Tensor) -> Tensor:
        num_kv_heads, block_size = cache.shape[2:4]
        rotated = rotate(qkv[:, : num_heads + num_kv_heads], rotation.cos, rotation.sin)
        blocks, offsets = rotation.slots // block_size, rotation.slots % block_size
        cache[blocks, 0, :, offsets] = rotated[:, num_heads:]
        cache[blocks, 1, :, offsets] = qkv[:, num_heads + num_kv_heads :]
        return rotated[:, :num_heads]

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
