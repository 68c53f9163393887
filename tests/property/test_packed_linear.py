"""Linear layers with packed weights give what their definition does, at every level and in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.gguf.gguf_blocks import GROUPED, values_of
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.grouped import CODE_BITS, CodeKind, Factors, GroupedWeight, join_rows, of_blocks, of_float8
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import CpuLevel, KernelLibrary, load_library, processor_levels
from pdmesh.engine.linear import WeightMemory, tile_linear
from pdmesh.engine.packed import packed_linear
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import library_or_skip, ordered_levels


def libraries(dtype: str, *, of_all_kinds: bool = False) -> list[KernelLibrary]:
    levels = processor_levels() if of_all_kinds else ordered_levels()
    found = [load_library(level, dtype) for level in levels if dtype in level.suffixes]
    if not found:
        pytest.skip("no kernels: built without a compiler")
    return [library for library in found if library is not None]


def draw_factors(
    generator: torch.Generator, shape: tuple[int, int], groups_per_base: int, dtype: torch.dtype, *, multiplied: bool
) -> Factors:
    num_outputs, num_groups = shape
    shape_of_bases = (num_outputs, -(-num_groups // groups_per_base))
    if dtype == torch.uint8:
        bases = torch.randint(100, 130, shape_of_bases, generator=generator).to(dtype)  # exponents
    else:
        bases = torch.rand(shape_of_bases, generator=generator).to(dtype)
    multipliers = torch.randint(-128, 128, shape, generator=generator).to(torch.int8) if multiplied else None
    return Factors(bases, groups_per_base, multipliers)


@st.composite
def weights(draw: Any) -> GroupedWeight:
    bits, group_size = draw(st.sampled_from(CODE_BITS)), draw(st.sampled_from([16, 32, 64, 128]))
    num_outputs, num_inputs = draw(st.integers(1, 70)), draw(st.integers(1, 500))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (num_outputs, -(-num_inputs // group_size))
    factors = [
        draw_factors(
            generator,
            shape,
            draw(st.sampled_from([1, 2, 8, 1000])),
            draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.uint8])),
            multiplied=draw(st.booleans()),
        )
        for _ in range(2)
    ]
    kinds = [CodeKind.SIGNED] if bits == 8 else [CodeKind.UNSIGNED, CodeKind.SIGNED]
    kinds += [CodeKind.FLOAT] if bits == 4 else []
    return GroupedWeight(
        codes=torch.randint(0, 1 << bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8),
        bits=bits,
        kind=draw(st.sampled_from(kinds)),
        group_size=group_size,
        scales=factors[0],
        minima=factors[1] if draw(st.booleans()) else None,
        order=torch.randperm(num_inputs, generator=generator) if draw(st.booleans()) else None,
    )


@st.composite
def rounded_weights(draw: Any) -> GroupedWeight:
    """Floats of 8 bits, or of 4 bits numbers of a table, perhaps with scales that are numbers of another."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_outputs, groups_per_base = draw(st.integers(1, 70)), draw(st.sampled_from([1, 2, 8, 1000]))
    if draw(st.booleans()):
        group_size, num_inputs = draw(st.sampled_from([16, 32, 64, 128])), draw(st.integers(1, 500))
        shape = (num_outputs, -(-num_inputs // group_size))
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
        codes = torch.randint(0, 0x7F, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
        signs = torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
        scales = draw_factors(generator, shape, groups_per_base, dtype, multiplied=False)
        return GroupedWeight(codes=codes | signs, bits=8, kind=CodeKind.FLOAT8, group_size=group_size, scales=scales)
    num_groups = draw(st.integers(1, 9))
    scales = draw_factors(generator, (num_outputs, num_groups), groups_per_base, torch.float32, multiplied=False)
    if draw(st.booleans()):
        scales = replace(
            scales,
            multipliers=torch.randint(0, 256, (num_outputs, num_groups), generator=generator, dtype=torch.uint8),
            table=torch.randn(256, generator=generator),
            offsets=torch.randn(num_outputs, generator=generator),
        )
    return GroupedWeight(
        codes=torch.randint(0, 16, (num_outputs, 64 * num_groups), generator=generator, dtype=torch.uint8),
        bits=4,
        kind=CodeKind.TABLE,
        group_size=64,
        scales=scales,
        table=torch.randn(16, generator=generator),
    )


def codes_of(weight: GroupedWeight) -> torch.Tensor:
    """As numbers, in fp32."""
    codes, half = weight.codes.int(), 1 << (weight.bits - 1)
    if weight.kind is CodeKind.FLOAT:
        mantissas, exponents = (codes % 2).float(), codes % 8 // 2
        sizes = torch.where(exponents == 0, mantissas, (1 + mantissas / 2) * 2.0**exponents)
        return torch.where(codes >= half, -sizes, sizes)
    return torch.where(codes >= half, codes - 2 * half, codes).float() if weight.kind else codes.float()


def sums_of(rows: torch.Tensor) -> npt.NDArray[Any]:
    """Each row's sum, by lane of 16, then in one tree."""
    lanes: npt.NDArray[Any] = np.zeros((len(rows), 16), dtype=np.float32)
    for first in range(0, rows.shape[1], 16):
        part = rows[:, first : first + 16].numpy()
        lanes[:, : part.shape[1]] += part
    for apart in (8, 4, 2, 1):
        lanes = lanes[:, :apart] + lanes[:, apart : 2 * apart]
    return lanes[:, 0]


def by_definition(rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Sums of a group's products, input after input; scaled, and added to the total group after group."""
    wide = rows.float() if weight.order is None else rows.float()[:, weight.order]
    codes, size = codes_of(weight), weight.group_size
    scales = weight.scales.by_group(weight.num_groups).numpy()
    total: npt.NDArray[Any] = np.zeros((len(rows), len(codes)), dtype=np.float32)
    for group in range(weight.num_groups):
        part = slice(group * size, (group + 1) * size)
        left, right = wide[:, part].numpy(), codes[:, part].numpy()
        product = np.zeros_like(total)
        for number in range(left.shape[1]):
            product = product + left[:, number, None] * right[None, :, number]
        total = total + scales[None, :, group] * product
        if weight.minima is not None:
            minima = weight.minima.by_group(weight.num_groups).numpy()
            total = total - minima[None, :, group] * sums_of(wide[:, part])[:, None]
    if bias is not None:
        total = total + bias.float().numpy()
    return torch.from_numpy(total).to(rows.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(deadline=None, max_examples=examples(40))
@given(
    weight=weights(),
    num_rows=st.one_of(st.integers(1, 14), st.integers(15, 250)),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_sums_of_groups_are_scaled_in_order(
    dtype: str, weight: GroupedWeight, num_rows: int, with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs = weight.codes.shape
    rows = (torch.randn(num_rows, num_inputs, generator=generator) / num_inputs).to(TORCH_DTYPES[dtype])
    bias = torch.randn(num_outputs, generator=generator).to(rows.dtype) if with_bias else None
    expected = by_definition(rows, weight, bias)
    for library in libraries(dtype):
        found = packed_linear(weight, bias, WeightMemory(), library)(rows)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), library.level


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(deadline=None, max_examples=examples(60))
@given(
    weight=rounded_weights(),
    num_rows=st.one_of(st.integers(1, 14), st.integers(15, 250)),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_numbers_that_are_no_integers_give_the_bits_of_plain_weights(
    dtype: str, weight: GroupedWeight, num_rows: int, with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs = weight.codes.shape
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(TORCH_DTYPES[dtype])
    bias = torch.randn(num_outputs, generator=generator).to(rows.dtype) if with_bias else None
    plain = weight.values().to(rows.dtype)
    for library in libraries(dtype, of_all_kinds=True):
        expected = tile_linear(plain, bias, WeightMemory(), library)(rows)
        found = packed_linear(weight, bias, WeightMemory(), library)(rows)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), library.level


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [2.0**-120, 0.01, 127.0])
def test_every_float_of_8_bits_is_rounded_as_torch_does(dtype: str, scale: float) -> None:
    """Subnormal ones too, and weights that are too small or too large for the type."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no numbers
    floats = codes.view(256, 1).view(torch.float8_e4m3fn)
    weight = of_float8(floats, torch.full((256, 1), scale), torch.zeros(1, dtype=torch.int64))
    assert weight is not None
    ones = torch.ones(1, 1, dtype=TORCH_DTYPES[dtype])
    expected = (floats.float() * scale).to(ones.dtype)
    for library in libraries(dtype, of_all_kinds=True):
        linear = packed_linear(weight, None, WeightMemory(), library)
        assert torch.equal(linear.embed(torch.arange(256)), expected)
        plain = tile_linear(expected, None, WeightMemory(), library)(ones)  # dot products have no subnormal factors
        assert torch.equal(linear(ones), plain), library.level
        assert torch.equal(plain[0], expected[:, 0]) or not library.level.is_ordered


@settings(deadline=None, max_examples=examples(40))
@given(weight=weights(), num_rows=st.integers(1, 150), seed=st.integers(0, 2**32))
def test_dot_products_come_close_and_know_nothing_of_the_batch(weight: GroupedWeight, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_inputs = weight.codes.shape[1]
    rows = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    linear = packed_linear(weight, None, WeightMemory(), library_or_skip(CpuLevel.AVX512_BF16))
    found = linear(rows)
    wide = rows.double() if weight.order is None else rows.double()[:, weight.order]
    torch.testing.assert_close(found.double(), wide @ weight.values().double().t(), rtol=2e-2, atol=0.3)
    chosen = int(torch.randint(num_rows, (), generator=generator))
    assert torch.equal(linear(rows[chosen : chosen + 1])[0], found[chosen])


@settings(deadline=None, max_examples=examples(30))
@given(weight=st.one_of(weights(), rounded_weights()), seed=st.integers(0, 2**32))
def test_rows_are_what_their_codes_stand_for(weight: GroupedWeight, seed: int) -> None:
    ids = torch.randint(len(weight.codes), (9,), generator=torch.Generator().manual_seed(seed))
    for library in libraries("bfloat16"):
        linear = packed_linear(weight, None, WeightMemory(), library)
        expected = weight.values()[ids]
        assert torch.equal(linear.embed(ids), expected.bfloat16() if weight.kind.is_rounded else expected)
        with pytest.raises(IndexError, match="in a vocabulary of"):
            linear.embed(torch.tensor([len(weight.codes)]))


@settings(deadline=None, max_examples=examples(20))
@given(weight=st.one_of(weights(), rounded_weights()), cut=st.integers(0, 70))
def test_weights_that_are_taken_apart_and_joined_are_the_same(weight: GroupedWeight, cut: int) -> None:
    numbers = torch.arange(len(weight.codes))
    parts = [weight.rows(part) for part in (numbers[:cut], numbers[cut:]) if len(part)]
    joined = join_rows(parts)
    assert len(joined) == (len(parts) if weight.order is not None else 1)
    assert torch.equal(torch.cat([part.values() for part in joined]), weight.values())


#: Types of codes that kernels multiply as they lie in the file.
AS_STORED = (2, 3, 6, 7, 8, 12, 13, 14, 39)


@pytest.mark.parametrize("type_number", GROUPED)
def test_memory_of_a_weight_is_that_of_its_file(type_number: int) -> None:
    """Within a twentieth, for types of codes that kernels have; others take wider codes, and 1.5 bits for factors."""
    stored = TYPES[type_number]
    num_outputs, num_inputs = 128, 2048
    shape = (num_outputs * num_inputs // stored.num_values, stored.num_bytes)
    data = torch.randint(0, 120, shape, dtype=torch.uint8)  # scales that are numbers
    weight = of_blocks(GROUPED[type_number](data), num_outputs)
    most = 1.05 * data.nbytes if type_number in AS_STORED else weight.codes.numel() * (weight.bits + 1.5) / 8
    for library in libraries("bfloat16")[:1]:
        packed = packed_linear(weight, None, WeightMemory(), library)
        assert sum(each.nbytes for each in packed.memory) <= most
        ids = torch.arange(num_outputs)
        expected = values_of(type_number, data).view(num_outputs, -1)
        assert torch.equal(packed.embed(ids), expected)
