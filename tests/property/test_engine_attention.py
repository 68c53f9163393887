"""The torch backends against attention written out in fp64, over random shapes and block tables."""

from __future__ import annotations

from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine import attention
from pdmesh.engine.attention import TorchAttention
from pdmesh.engine.tiled_attention import TiledAttention
from pdmesh_testing.attention import defined_attention, paged_case
from pdmesh_testing.examples import examples


@settings(deadline=None, max_examples=examples(60))
@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 16, 24]),
    block_size=st.sampled_from([1, 4, 16]),
    parts=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 70), st.integers(0, 600)),
            st.one_of(st.just(1), st.integers(1, 60), st.integers(1, 100)),
        ),
        min_size=1,
        max_size=8,
    ),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    small_tiles=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_definition(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    parts: list[tuple[int, int]],
    dtype: str,
    small_tiles: bool,
    seed: int,
) -> None:
    case = paged_case(
        parts, seed, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size
    ).in_dtype(dtype)
    tile, size = (64, 1) if small_tiles else (attention._TILE_SCORES, attention._GROUP_BYTES)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for backend in (
        TorchAttention(case.layout, case.scale, torch.device("cpu")),
        TiledAttention(case.layout, case.scale),
    ):
        with patch.object(attention, "_TILE_SCORES", tile), patch.object(attention, "_GROUP_BYTES", size):
            output, lse = backend.plan(case.spans).attend(case.query, case.cache, with_lse=True)
        assert lse is not None
        for span in case.spans:
            rows = slice(span.row, span.row + span.num_tokens)
            expected, expected_lse = defined_attention(span, case.query, case.cache, case.scale)
            torch.testing.assert_close(output[rows].double(), expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lse[rows].double(), expected_lse, atol=tolerance, rtol=tolerance)
