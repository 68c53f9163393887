"""Attention over latents: the keys and values of all heads are products of one vector per token.

Queries and results are multiplied instead. So a token's key is its latent and a rotated key, its value is the latent,
and all heads attend to the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, PartialBackend, PartialPlan, QuerySpan
from pdmesh.engine.kernels import Elementwise, Rotation, TorchKernels, store_heads
from pdmesh.engine.latent import Latent
from pdmesh.engine.linear import Linear
from pdmesh.engine.model_config import NormConfig
from pdmesh.engine.rope import rotate
from pdmesh.engine.weights import LatentWeights
from pdmesh.kv_layout import num_blocks_for

#: The norms of latents. Their epsilon is in no ``config.json``.
_NORMS = TorchKernels(Elementwise(NormConfig(epsilon=1e-6)))

_Multiply = Callable[[Tensor, Linear], Tensor]


def latent_queries(
    products: Tensor, cache: Tensor, rotation: Rotation, config: Latent, weights: LatentWeights, linear: _Multiply
) -> Tensor:
    """Return queries (num_tokens, heads, width) for latents, and write the tokens' latents to the cache.

    ``products`` has a row for each token: the query or its latent, the token's latent, and the shared part of keys.
    """
    own, latent, key = products.tensor_split((-config.width, -config.rotated_dim), dim=1)
    if weights.query is not None and weights.query_norm is not None:
        own = linear(_NORMS.norm(own.contiguous(), *weights.query_norm), weights.query)
    heads = own.reshape(len(own), len(weights.keys), config.query_dim)
    plain, rotated = heads.tensor_split((config.plain_dim,), dim=2)
    turned = rotate(torch.cat((rotated, key[:, None]), dim=1), rotation.cos, rotation.sin)
    row = torch.cat((_NORMS.norm(latent.contiguous(), *weights.norm), turned[:, -1]), dim=1)
    keys, values = row.view(len(row), 2, 1, -1).unbind(1)
    store_heads(cache, rotation.slots, keys, values)
    return torch.cat((_by_head(plain, weights.keys, linear), turned[:, :-1]), dim=2)


def values_of(output: Tensor, config: Latent, weights: LatentWeights, linear: _Multiply) -> Tensor:
    """Return the heads' results (num_tokens, heads, value_dim) from sums of stored values."""
    return _by_head(output[..., : config.rank], weights.values, linear)


def _by_head(rows: Tensor, linears: Sequence[Linear], linear: _Multiply) -> Tensor:
    """Return the product of each head's rows and the head's weights."""
    return torch.stack([linear(rows[:, head].contiguous(), each) for head, each in enumerate(linears)], dim=1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """An `AttentionBackend` over pages of latents. ``inner`` attends to a copy with whole rows as keys and values."""

    inner: PartialBackend
    block_size: int

    def plan(self, spans: Sequence[QuerySpan]) -> PartialPlan:
        tables = [np.asarray(span.block_table[: num_blocks_for(span.end, self.block_size)], np.int64) for span in spans]
        blocks, numbers = np.unique(np.concatenate(tables), return_inverse=True)
        own = np.split(numbers, list(accumulate(map(len, tables)))[:-1])
        copied = [replace(span, block_table=table.tolist()) for span, table in zip(spans, own, strict=True)]
        return _LatentPlan(self.inner.plan(copied), torch.from_numpy(blocks))


@dataclass(frozen=True, slots=True)
class _LatentPlan:
    inner: PartialPlan
    blocks: Tensor

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False, wide: bool = False
    ) -> AttentionOutput:
        rows = cache[self.blocks].permute(0, 2, 3, 1, 4).flatten(3)
        copied = torch.stack((rows, rows), dim=1)
        return self.inner.attend(query, copied, window=window, with_lse=with_lse, wide=wide)
