"""Ordered kernels attend through windows and capped scores as torch does, with the same bits in any chunk and level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.attention import QuerySpan, TorchAttention
from pdmesh.engine.levels import load_library
from pdmesh.engine.native import NativeAttention
from pdmesh.model import KvLayout
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import ordered_levels

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 4, 2, 24, 16, 0.3
LAYOUT = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="bfloat16")


@settings(deadline=None, max_examples=examples(25))
@given(
    num_tokens=st.integers(1, 300),
    start=st.one_of(st.integers(0, 400), st.integers(1900, 4300)),
    window=st.one_of(st.none(), st.integers(1, 40), st.integers(100, 300), st.integers(2000, 2200)),
    score_cap=st.sampled_from([None, 1.5, 50.0]),
    num_threads=st.sampled_from([1, 20]),
    seed=st.integers(0, 2**32),
)
def test_windows_and_caps(
    num_tokens: int, start: int, window: int | None, score_cap: float | None, num_threads: int, seed: int
) -> None:
    libraries = [library for level in ordered_levels() if (library := load_library(level)) is not None]
    if not libraries:
        pytest.skip("no kernels: built without a compiler")
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
    query = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator).bfloat16()
    cache = torch.randn(num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator).bfloat16()
    table = torch.randperm(num_blocks, generator=generator).tolist()
    spans = [QuerySpan(0, num_tokens, start, table)]
    torch_attention = TorchAttention(LAYOUT, SCALE, torch.device("cpu"), score_cap)
    expected = torch_attention.plan(spans).attend(query.float(), cache.float(), window=window, with_lse=True)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = [
            NativeAttention(library, LAYOUT, SCALE, score_cap)
            .plan(spans)
            .attend(query, cache, window=window, with_lse=True)
            for library in libraries
        ]
        cut = num_tokens // 3
        parts = [QuerySpan(0, cut, start, table)] if cut else []
        parts.append(QuerySpan(cut, num_tokens - cut, start + cut, table))
        chunked = (
            NativeAttention(libraries[0], LAYOUT, SCALE, score_cap).plan(parts).attend(query, cache, window=window)
        )
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0].output.float(), expected.output, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[0].lse, expected.lse, rtol=1e-4, atol=1e-3)
    for other in [each.output for each in found[1:]] + [chunked.output]:
        assert torch.equal(other.view(torch.int16), found[0].output.view(torch.int16))
