"""States of delta nets and Mamba-2: the same bits for any chunks, also of steps computed again; no state is stale."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.delta_net import DeltaCompute, DeltaLayer, compute_by_torch, delta_net, load_delta_kernel
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import CpuLevel, processor_levels
from pdmesh.engine.recurrence import exp, normed, sigmoid, silu, softplus
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StateSlice
from pdmesh.engine.weights import DeltaWeights, Norm

DELTA = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=20, num_taps=4)
CONFIGS = {
    "delta": DELTA,
    "tiled": replace(DELTA, tiles_heads=True),
    "additive": replace(DELTA, is_additive=True, has_conv_bias=True),
}
NUM_TOKENS, BLOCK = 158, 32
PAGE = DELTA.page(BLOCK, "bfloat16")
LEVELS = [None, *(level for level in processor_levels() if level.is_ordered)]


class Net(NamedTuple):
    """A layer, and the products of its tokens."""

    config: DeltaNet
    weights: DeltaWeights
    products: Tensor

    def __call__(self, rows: Tensor, cache: Tensor, slices: Sequence[StateSlice], compute: DeltaCompute) -> Tensor:
        return delta_net(rows, cache, slices, DeltaLayer(self.config, self.weights, 1e-6), compute)


@pytest.fixture(scope="module", params=CONFIGS)
def net(request: pytest.FixtureRequest) -> Net:
    config, generator = CONFIGS[request.param], torch.Generator().manual_seed(1)
    sizes = ((4, config.num_channels), (4,), (4,), (4,), (config.num_channels,))
    taps, log, bias, skip, taps_bias = (torch.randn(size, generator=generator) for size in sizes)
    of_mamba = (taps_bias, skip) if config.is_additive else (None, None)
    norm = torch.rand(config.num_values if config.is_additive else config.value_dim, generator=generator)
    weights = DeltaWeights(taps, log.exp(), bias, Norm(norm, None), *of_mamba)
    width = config.num_values + config.num_channels + (1 if config.is_additive else 2) * config.num_value_heads
    return Net(config, weights, torch.randn(NUM_TOKENS, width, generator=generator).bfloat16().float())


def compute_of(level: CpuLevel | None, dtype: str) -> DeltaCompute:
    """Return a level's kernel, or the reference for None."""
    found = compute_by_torch if level is None else load_delta_kernel(level, dtype)
    return found or pytest.skip(f"{level} kernels were not compiled")


def a_cache() -> Tensor:
    """Pages in which every state was another sequence's."""
    return torch.full((12, 2, 1, BLOCK, PAGE.head_dim), torch.nan, dtype=torch.bfloat16)


def computed(
    net: Net, cuts: Sequence[int], cache: Tensor, compute: DeltaCompute = compute_by_torch, dtype: str = "float32"
) -> Tensor:
    """Return the results of chunks that end at ``cuts``, each computed twice."""
    table, products = [7, 2, 9, 4, 11], net.products.to(TORCH_DTYPES[dtype])
    results: list[Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        first = max(0, start - 1) // BLOCK
        part = StateSlice(0, start, end - start, table[first : -(-end // BLOCK)])
        found = [net(products[start:end], cache, [part], compute) for _ in range(2)]
        assert torch.equal(*found)
        results.append(found[0])
    return torch.cat(results)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_depend_neither_on_chunks_nor_on_the_processor(net: Net, level: CpuLevel | None, dtype: str) -> None:
    rng, compute = random.Random(3), compute_of(level, dtype)
    whole = computed(net, [], expected := a_cache(), dtype=dtype)
    assert whole.isfinite().all()
    cuts = [sorted(rng.sample(range(1, NUM_TOKENS), rng.randrange(1, 12))) for _ in range(12 if level else 1)]
    for each in (*cuts, [], range(1, NUM_TOKENS)) if level else cuts:
        assert torch.equal(computed(net, each, cache := a_cache(), compute, dtype), whole)
        assert torch.equal(latest(net, cache), latest(net, expected))


def latest(net: Net, cache: Tensor) -> Tensor:
    """Return the states in the last page's slots behind all tokens."""
    found = cache[11].flatten(1).view(torch.uint8)
    is_last = found[:, -8:].contiguous().view(torch.int64)[:, 0] == NUM_TOKENS
    return found[is_last][:, : net.config.num_bytes - 8]


@pytest.mark.parametrize("level", LEVELS)
def test_results_do_not_depend_on_sequences_beside(net: Net, level: CpuLevel | None) -> None:
    whole, products = computed(net, [], a_cache()), net.products
    lengths, pages = (8, 90, 60), ([0], [1, 2, 3], [4, 5])
    slices = [StateSlice(sum(lengths[:n]), 0, length, pages[n]) for n, length in enumerate(lengths)]
    rows = torch.cat([products[:length] for length in lengths])
    together = net(rows, a_cache(), slices, compute_of(level, "float32"))
    assert all(torch.equal(own, whole[: len(own)]) for own in together.tensor_split((8, 98)))


def test_functions_of_single_values_are_those_of_torch() -> None:
    x = torch.cat((torch.linspace(-80, 80, 4001), torch.linspace(-0.01, 0.01, 401)))
    others = ((exp, torch.exp), (sigmoid, torch.sigmoid), (silu, functional.silu), (softplus, functional.softplus))
    for own, other in others:
        torch.testing.assert_close(own(x), other(x.double()).float(), rtol=6e-6, atol=1e-37)
    assert exp(torch.zeros(1)).item() == 1
    rows, weight = torch.randn(3, 20), torch.rand(20)
    torch.testing.assert_close(normed(rows, weight, 1e-5), functional.rms_norm(rows, (20,), weight, 1e-5))


def test_a_state_of_another_position_is_not_read(net: Net) -> None:
    cache, products = a_cache(), net.products
    computed(net, [80], cache)
    going_on = StateSlice(0, 96, 2, [9, 4])  # the state behind the third block
    assert net(products[96:98], cache, [going_on], compute_by_torch).isfinite().all()
    for start, pages in ((79, [9]), (81, [9]), (97, [4]), (64, [3])):
        with pytest.raises(RuntimeError, match=f"behind token {start} is not here"):
            net(products[:1], cache, [StateSlice(0, start, 1, pages)], compute_by_torch)


def test_a_page_holds_two_states() -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        page = DELTA.page(BLOCK, dtype)
        assert BLOCK * page.head_dim * size >= DELTA.num_bytes
        assert page.head_dim % 8 == 0
