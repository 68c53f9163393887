"""The compiled kernels against their torch reference, and what only they promise: bits that no batching changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pdmesh.engine.attention import QuerySpan, TorchAttention
from pdmesh.engine.kernels import Elementwise, Rotation, TorchKernels
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import WeightMemory, tile_linear
from pdmesh.engine.model_config import NormConfig
from pdmesh.engine.native import NativeAttention, NativeKernels
from pdmesh_testing.attention import PagedCase, paged_case
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import ARCHITECTURE_LEVELS, library_or_skip

TOLERANCE = 2e-2
KINDS = Elementwise(NormConfig(epsilon=1e-5))


@pytest.fixture(
    scope="module", params=[(level, dtype) for level in ARCHITECTURE_LEVELS for dtype in level.suffixes], ids="-".join
)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return library_or_skip(*request.param)


@st.composite
def cases(draw: st.DrawFn, parts: st.SearchStrategy[tuple[int, int]]) -> PagedCase:
    """Sequences of (start, tokens)."""
    return paged_case(
        draw(st.lists(parts, min_size=1, max_size=6)),
        draw(st.integers(0, 2**32)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.one_of(st.integers(1, 5), st.sampled_from([8, 16, 20]))),
        head_dim=draw(st.sampled_from([32, 64, 96, 128])),
        block_size=draw(st.sampled_from([16, 48])),
    )


DECODES = st.tuples(st.integers(0, 600), st.just(1))
FEW_TOKENS = st.tuples(st.integers(0, 600), st.integers(1, 80))
CHUNKS = st.tuples(st.integers(0, 350), st.integers(1, 700))


def behind_keys(case: PagedCase, schedule: random.Random) -> PagedCase:
    """Return the case with some spans behind a range of keys, which ends anywhere before the span."""

    def behind(span: QuerySpan) -> QuerySpan:
        if not span.start or schedule.random() < 0.5:
            return span
        return replace(span, num_keys=schedule.choice([1, span.start, schedule.randint(1, span.start)]))

    return case._replace(spans=[behind(span) for span in case.spans])


@settings(deadline=None, max_examples=examples(25))
@given(
    case=cases(st.one_of(DECODES, FEW_TOKENS, CHUNKS)), wide=st.booleans(), schedule=st.randoms(use_true_random=False)
)
def test_attention_equals_the_reference(
    library: KernelLibrary, case: PagedCase, wide: bool, schedule: random.Random
) -> None:
    case = behind_keys(case.in_dtype(library.dtype), schedule)
    plan = NativeAttention(library, case.layout, case.scale).plan(case.spans)
    output, lse = plan.attend(case.query, case.cache, with_lse=True, wide=wide)
    layout = replace(case.layout, dtype="float32")
    reference = TorchAttention(layout, case.scale, torch.device("cpu")).plan(case.spans)
    expected, expected_lse = reference.attend(case.query.float(), case.cache.float(), with_lse=True)
    assert output.dtype == (torch.float32 if wide else TORCH_DTYPES[library.dtype])
    assert lse is not None
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


@settings(deadline=None, max_examples=examples(20))
@given(case=cases(st.one_of(FEW_TOKENS, CHUNKS)), wide=st.booleans(), schedule=st.randoms(use_true_random=False))
def test_attention_gives_the_same_bits_in_any_pieces(
    library: KernelLibrary, case: PagedCase, wide: bool, schedule: random.Random
) -> None:
    """Many rows and few are computed by different code, which sums in one order."""
    case = behind_keys(case.in_dtype(library.dtype), schedule)
    backend = NativeAttention(library, case.layout, case.scale)
    expected = backend.plan(case.spans).attend(case.query, case.cache, with_lse=True, wide=wide)
    pieces: list[QuerySpan] = []
    for span in case.spans:
        first = 0
        while first < span.num_tokens:
            size = min(schedule.choice([1, 2, 5, 16, 17, 100]), span.num_tokens - first)
            pieces.append(replace(span, row=span.row + first, num_tokens=size, start=span.start + first))
            first += size
    actual = backend.plan(pieces).attend(case.query, case.cache, with_lse=True, wide=wide)
    assert expected.lse is not None
    assert actual.lse is not None
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.lse, expected.lse)


@settings(deadline=None, max_examples=examples(20))
@given(
    num_rows=st.one_of(st.integers(1, 40), st.integers(120, 140), st.integers(1000, 1100)),
    shape=st.one_of(
        st.sampled_from([(32, 64), (160, 1280), (96, 512)]), st.tuples(st.integers(1, 100), st.integers(1, 600))
    ),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_linear_equals_the_reference_and_each_row_is_itself(
    library: KernelLibrary, num_rows: int, shape: tuple[int, int], with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[library.dtype]
    num_outputs, num_inputs = shape
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if with_bias else None
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    linear = tile_linear(weight, bias, WeightMemory(), library)

    output = linear(rows)
    expected = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE * num_inputs**0.5, rtol=TOLERANCE)
    sums = linear(rows, wide=True)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.to(dtype), output)
    for first in (num_rows // 2, num_rows - 1):
        assert torch.equal(linear(rows[first:]), output[first:])
    token_ids = torch.randint(num_outputs, (7,), generator=generator)
    assert torch.equal(linear.embed(token_ids), weight[token_ids])
    for foreign in (-1, num_outputs):
        with pytest.raises(IndexError, match="vocabulary"):
            linear.embed(torch.tensor([0, foreign]))


@settings(deadline=None, max_examples=examples(20))
@given(num_tokens=st.integers(1, 40), width=st.integers(1, 6), with_delta=st.booleans(), seed=st.integers(0, 2**32))
def test_kernels_equal_the_reference(
    library: KernelLibrary, num_tokens: int, width: int, with_delta: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    native = NativeKernels(library, KINDS)
    reference = TorchKernels(KINDS, dtype=TORCH_DTYPES[library.dtype])

    def draw(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(shape, generator=generator)).to(TORCH_DTYPES[library.dtype])

    hidden, weight = torch.randn(num_tokens, 16 * width, generator=generator), draw(16 * width).float()
    delta = torch.randn(num_tokens, 16 * width, generator=generator)
    expected_pair = reference.add_norm(hidden, delta if with_delta else None, weight)
    for actual, expected in zip(
        native.add_norm(hidden.clone(), delta if with_delta else None, weight), expected_pair, strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for rows in (hidden, hidden.to(TORCH_DTYPES[library.dtype])):
        actual, expected = native.norm(rows, weight), reference.norm(rows, weight)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    gate_up = 8 * draw(num_tokens, 32 * width)
    torch.testing.assert_close(native.activate(gate_up), reference.activate(gate_up), atol=TOLERANCE, rtol=TOLERANCE)

    num_heads, num_kv_heads, block_size, head_dim = 2 * width, width, 16, 32
    qkv, angles = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim), draw(num_tokens, head_dim // 2)
    slots = torch.randperm(48, generator=generator)[:num_tokens]
    rotation = Rotation(cos=angles.cos(), sin=angles.sin(), slots=slots)
    caches = [torch.zeros(3, 2, num_kv_heads, block_size, head_dim).to(qkv.dtype) for _ in range(2)]
    heads, scale = qkv[:, :num_heads], draw(head_dim).float()
    for actual, expected in (
        (native.norm_heads(qkv.clone()[:, :num_heads], scale), reference.norm_heads(heads, scale)),
        (native.gate(heads.contiguous().clone(), qkv[:, -num_heads:]), reference.gate(heads, qkv[:, -num_heads:])),
    ):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    expected_query = reference.rotate_and_store(qkv, num_heads, rotation, caches[0])
    beside = torch.cat((qkv, qkv), dim=1)  # heads in a wider row
    query = native.rotate_and_store(beside[:, : qkv.shape[1]], num_heads, rotation, caches[1])
    assert torch.equal(beside[:, qkv.shape[1] :], qkv)
    # the reference rounds each product, the kernel only their sum
    torch.testing.assert_close(query, expected_query, atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(caches[1], caches[0], atol=4e-2, rtol=2e-2)
