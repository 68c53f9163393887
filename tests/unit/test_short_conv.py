"""Compiled short convolutions have the bits of torch's, at each level, for any chunks."""

from __future__ import annotations

import pytest
import torch

from pdmesh.engine.levels import CpuLevel
from pdmesh.engine.short_conv import ShortConvolution, TorchShortConv, fastest_short_conv, load_short_conv_kernel
from pdmesh.engine.weights import ConvTaps
from pdmesh_testing.levels import ordered_levels

NUM_TOKENS, BLOCK, NUM_HEADS, HEAD_DIM = 45, 8, 2, 24
HIDDEN = 2 * NUM_HEADS * HEAD_DIM
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def kernel_or_skip(level: CpuLevel, dtype: str) -> ShortConvolution:
    if (kernel := load_short_conv_kernel(level, dtype)) is None:
        pytest.skip(f"{level} kernels were not compiled")
    return kernel


def computed(conv: ShortConvolution, dtype: torch.dtype, taps: ConvTaps, cuts: list[int]) -> list[torch.Tensor]:
    """Return the results of chunks of one sequence that end at ``cuts``, and the cache of all heads behind them."""
    generator = torch.Generator().manual_seed(5)
    products = torch.randn(NUM_TOKENS, 3 * HIDDEN, generator=generator).to(dtype)
    caches = torch.full((9, 2, NUM_HEADS + 1, BLOCK, HEAD_DIM), torch.nan, dtype=dtype)
    cache = caches[:, :, 1:]
    slots = (
        torch.tensor([7, 2, 5, 8, 1, 3])[torch.arange(NUM_TOKENS) // BLOCK] * BLOCK + torch.arange(NUM_TOKENS) % BLOCK
    )
    positions = torch.arange(NUM_TOKENS)[:, None] - torch.arange(5)
    earlier = torch.where(positions < 0, -1, slots[positions.clamp(min=0)])
    results: list[torch.Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        conv.store(products[start:end], slots[start:end], cache)
        results.append(conv.convolve(products[start:end], cache, earlier[start:end], taps))
    return [torch.cat(results), caches.nan_to_num()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [level for level in CpuLevel if level.is_ordered])
def test_kernels_have_the_bits_of_the_reference(level: CpuLevel, dtype: str) -> None:
    if level not in ordered_levels():
        pytest.skip(f"this processor lacks {level}")
    kernel, generator = kernel_or_skip(level, dtype), torch.Generator().manual_seed(6)
    for num_taps, has_bias in ((3, False), (5, True)):
        taps = torch.randn(num_taps, HIDDEN, generator=generator)
        weights = ConvTaps(taps, torch.randn(HIDDEN, generator=generator) if has_bias else None)
        expected = computed(TorchShortConv(), DTYPES[dtype], weights, [])
        for cuts in ([], list(range(1, NUM_TOKENS)), [1, 8, 9, 30]):
            found = computed(kernel, DTYPES[dtype], weights, cuts)
            assert all(map(torch.equal, found, expected))


def test_other_dtypes_and_devices_have_the_reference() -> None:
    assert isinstance(fastest_short_conv(torch.float32, "cpu"), TorchShortConv)
    assert isinstance(fastest_short_conv(torch.bfloat16, "cuda"), TorchShortConv)
