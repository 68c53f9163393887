"""Attention of an instance to a range of another instance's context, over all heads, whatever its ranks and stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.choosing import choose_attention, choose_library
from pdmesh.engine.compute import ComputeOptions
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.ranged_attention import RangedAttention
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class PartAttention:
    """Attention on any thread over the instance's cache. ``caches`` and ``windows`` are the layers'."""

    attention: RangedAttention
    num_heads: int
    windows: Sequence[int | None]
    layout: KvLayout
    caches: Sequence[Tensor]

    def attend(self, number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        """Attend to range ``number`` of another instance's sequence, whose KV is in blocks ``block_ids`` here.

        Return the rows' outputs, then their log-sum-exps, as bytes. Raise ValueError if ``question`` does not fit.
        """
        dtype, head_dim = TORCH_DTYPES[self.layout.dtype], self.layout.head_dim
        layer, start, query, _ = question
        if not query or len(query) % (self.num_heads * head_dim * dtype.itemsize):
            raise ValueError(f"{len(query)} bytes are not query rows of this model")
        if (distance := start - number * self.attention.range_tokens) < self.attention.range_tokens:
            raise ValueError(f"a token at {start} queries range {number}, which does not lie before it")
        rows = torch.frombuffer(bytearray(query), dtype=dtype).view(-1, self.num_heads, head_dim)
        return self.attention.attend_part(rows, distance, self.caches[layer], block_ids, self.windows[layer])


def part_attention(
    config: ModelConfig, layout: KvLayout, options: ComputeOptions, caches: Sequence[Tensor]
) -> PartAttention:
    """Return the attention for other instances' questions, by the kernels that compute the model."""
    kernels = choose_library(config, layout, options.device, cpu_level=options.cpu_level, ordered=options.ordered)
    library = kernels.library if options.native else None
    attention, _ = choose_attention(config, layout, library, deterministic=options.deterministic)
    ranged = RangedAttention(attention, options.range_tokens, layout.block_size)
    windows = [layer.window for layer in config.layers]
    return PartAttention(ranged, config.num_heads, windows, layout, caches)
