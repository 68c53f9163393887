"""The torch backend against attention written out in fp64, over random shapes and block tables."""

from __future__ import annotations

import random
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine import attention
from pdmesh.engine.attention import QuerySpan, TorchAttention
from pdmesh.model import KvLayout, num_blocks_for
from pdmesh_testing.examples import examples


def reference(query: Tensor, cache: Tensor, span: QuerySpan, scale: float) -> tuple[Tensor, Tensor]:
    """(output, lse) of one span; ``query`` (num_tokens, num_heads, head_dim)."""
    keys, values = cache[list(span.block_table)].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : span.end]
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    positions = torch.arange(span.end)
    scores.masked_fill_(positions > positions[span.start :, None], -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1).t()


@settings(deadline=None, max_examples=examples(60))
@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 16, 24]),
    block_size=st.sampled_from([1, 4, 16]),
    parts=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 60))), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    small_tiles=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    parts: list[tuple[int, int]],
    dtype: str,
    small_tiles: bool,
    seed: int,
) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    spans: list[QuerySpan] = []
    row = block = 0
    total_blocks = sum(num_blocks_for(start + num_tokens, block_size) for start, num_tokens in parts)
    block_ids = random.Random(seed).sample(range(total_blocks), total_blocks)
    for start, num_tokens in parts:
        num_blocks = num_blocks_for(start + num_tokens, block_size)
        spans.append(QuerySpan(row, num_tokens, start, block_ids[block : block + num_blocks]))
        row, block = row + num_tokens, block + num_blocks
    shape = (total_blocks, 2, num_kv_heads, block_size, head_dim)
    cache = torch.randn(shape, generator=generator).to(torch_dtype)
    query = torch.randn(row, num_kv_heads * group, head_dim, generator=generator).to(torch_dtype)
    scale = head_dim**-0.5

    backend = TorchAttention(layout, scale, torch.device("cpu"))
    tile, size = (64, 1) if small_tiles else (attention._TILE_SCORES, attention._GROUP_BYTES)
    with patch.object(attention, "_TILE_SCORES", tile), patch.object(attention, "_GROUP_BYTES", size):
        output, lse = backend.plan(spans).attend(query, cache, with_lse=True)
    assert lse is not None
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for span in spans:
        rows = slice(span.row, span.row + span.num_tokens)
        expected, expected_lse = reference(query[rows], cache, span, scale)
        torch.testing.assert_close(output[rows].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[rows].double(), expected_lse, atol=tolerance, rtol=tolerance)
