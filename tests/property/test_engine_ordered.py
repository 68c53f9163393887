"""What only the ordered attention promises, and the contexts that are hardest for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import KernelLibrary, load_library
from pdmesh.engine.native import NativeAttention
from pdmesh.kv_layout import KvLayout, num_blocks_for
from pdmesh_testing.attention import defined_attention
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import library_or_skip, ordered_levels

SEGMENT = 2048  # keys that `csrc/ordered/attention.cpp` attends to apart
SCALE = 0.1


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    """The best level's; test_cpu_levels.py compares the others with it."""
    levels = ordered_levels()
    if not levels:
        pytest.skip("no kernels: built without a compiler")
    return library_or_skip(levels[0], request.param)


def attend(
    library: KernelLibrary,
    spans: list[QuerySpan],
    query: torch.Tensor,
    cache: torch.Tensor,
    *,
    num_threads: int = 1,
    window: int | None = None,
    score_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    num_kv_heads, block_size, head_dim = cache.shape[2:]
    layout = KvLayout(
        num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=library.dtype
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        plan = NativeAttention(library, layout, SCALE, score_cap).plan(spans)
        output, lse = plan.attend(query, cache, window=window, with_lse=True)
    finally:
        torch.set_num_threads(before)
    assert lse is not None
    return output, lse


def pages(start: int, num_tokens: int, block_size: int, seed: int) -> QuerySpan:
    """One sequence's rows, its blocks in any order."""
    num_blocks = num_blocks_for(start + num_tokens, block_size)
    return QuerySpan(0, num_tokens, start, random.Random(seed).sample(range(num_blocks), num_blocks))


def draw(library: KernelLibrary, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[library.dtype])


@settings(deadline=None, max_examples=examples(25))
@given(
    num_tokens=st.one_of(st.integers(1, 40), st.integers(1, 120)),
    start=st.one_of(st.integers(0, 300), st.integers(SEGMENT - 40, SEGMENT + 5), st.integers(1900, 4300)),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 8)),
    head_dim=st.integers(1, 20).map(lambda eights: 8 * eights),
    block_size=st.sampled_from([1, 3, 16]),
    key_scale=st.sampled_from([0.0, 1.0, 100.0]),
    masks=st.fixed_dictionaries(
        {
            "window": st.one_of(st.none(), st.integers(1, 40), st.integers(100, 300), st.integers(2000, 2200)),
            "score_cap": st.sampled_from([None, 1.5, 50.0]),
        }
    ),
    num_threads=st.sampled_from([1, 20]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference(
    library: KernelLibrary,
    num_tokens: int,
    start: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    key_scale: float,
    masks: dict[str, Any],
    num_threads: int,
    seed: int,
) -> None:
    """Also where all scores are equal, or one is far above the others, and whatever lies in pages not written yet.

    Chunks and other levels have the same bits.
    """
    num_kv_heads, group = heads
    span = pages(start, num_tokens, block_size, seed)
    cache = draw(library, seed, len(span.block_table), 2, num_kv_heads, block_size, head_dim)
    cache[:, 0] *= key_scale
    query = draw(library, seed + 1, num_tokens, num_kv_heads * group, head_dim)
    expected, expected_lse = defined_attention(span, query, cache, SCALE, **masks)
    if span.end % block_size:
        cache[span.block_table[-1], :, :, span.end % block_size :] = torch.nan
    output, lse = attend(library, [span], query, cache, num_threads=num_threads, **masks)
    unit = torch.finfo(query.dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=unit, atol=unit / 4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    cut = num_tokens // 3
    pieces = [QuerySpan(0, cut, start, span.block_table)] if cut else []
    pieces.append(QuerySpan(cut, num_tokens - cut, start + cut, span.block_table))
    others = [each for level in ordered_levels()[1:] if (each := load_library(level, library.dtype)) is not None]
    for other, spans in ((library, pieces), *((other, [span]) for other in others)):
        found = attend(other, spans, query, cache, num_threads=num_threads, **masks)
        assert all(torch.equal(one, another) for one, another in zip(found, (output, lse), strict=True))


@settings(deadline=None, max_examples=examples(8))
@given(
    num_tokens=st.integers(1, 20),
    num_segments=st.integers(1, 3),
    beyond=st.integers(-130, 130),
    num_threads=st.sampled_from([2, 3, 8]),
    seed=st.integers(0, 2**32),
)
def test_threads_that_share_a_long_context_change_no_bit(
    library: KernelLibrary, num_tokens: int, num_segments: int, beyond: int, num_threads: int, seed: int
) -> None:
    """Fewer tasks than threads: each thread takes some of the keys."""
    span = pages(num_segments * SEGMENT + beyond, num_tokens, 16, seed)
    cache = draw(library, seed, len(span.block_table), 2, 1, 16, 32)
    query = draw(library, seed + 1, num_tokens, 3, 32)
    alone = attend(library, [span], query, cache)
    shared = attend(library, [span], query, cache, num_threads=num_threads)
    one_by_one = [
        attend(
            library, [QuerySpan(0, 1, span.start + row, span.block_table)], query[row : row + 1], cache, num_threads=2
        )
        for row in (0, num_tokens - 1)
    ]
    for number in range(2):
        assert torch.equal(shared[number], alone[number])
        for row, result in zip((0, num_tokens - 1), one_by_one, strict=True):
            assert torch.equal(result[number], alone[number][row : row + 1])
