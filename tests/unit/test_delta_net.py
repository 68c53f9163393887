"""States of delta nets and Mamba-2: the same bits for any chunks, also of steps computed again; no state is stale."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pdmesh.engine.delta_net import delta_net
from pdmesh.engine.levels import processor_levels
from pdmesh.engine.recurrence import Recurrence, load_recurrence_kernel, recur_by_torch
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StateSlice
from pdmesh.engine.weights import DeltaWeights, Norm

DELTA = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=20, num_taps=4)
CONFIGS = {
    "delta": DELTA,
    "tiled": replace(DELTA, tiles_heads=True),
    "additive": replace(DELTA, is_additive=True, has_conv_bias=True),
}
NUM_TOKENS, BLOCK = 40, 8
PAGE = DELTA.page(BLOCK, "bfloat16")
KERNELS = [load_recurrence_kernel(level) for level in processor_levels() if level.is_ordered]
RECURRENCES: list[Recurrence] = [recur_by_torch, *(kernel for kernel in KERNELS if kernel)]


class Net(NamedTuple):
    """A layer, and the products of its tokens."""

    config: DeltaNet
    weights: DeltaWeights
    products: Tensor

    def __call__(self, rows: Tensor, cache: Tensor, slices: Sequence[StateSlice], recur: Recurrence) -> Tensor:
        return delta_net(rows, cache, slices, self.config, self.weights, recur)


@pytest.fixture(scope="module", params=CONFIGS)
def net(request: pytest.FixtureRequest) -> Net:
    config, generator = CONFIGS[request.param], torch.Generator().manual_seed(1)
    sizes = ((4, config.num_channels), (4,), (4,), (4,), (config.num_channels,))
    taps, log, bias, skip, taps_bias = (torch.randn(size, generator=generator) for size in sizes)
    of_mamba = (taps_bias, skip) if config.is_additive else (None, None)
    weights = DeltaWeights(taps, log.exp(), bias, Norm(torch.ones(config.value_dim), None), *of_mamba)
    width = config.num_channels + (1 if config.is_additive else 2) * config.num_value_heads
    return Net(config, weights, torch.randn(NUM_TOKENS, width, generator=generator).bfloat16())


def a_cache() -> Tensor:
    """Pages in which every state was another sequence's."""
    return torch.full((12, 2, 1, BLOCK, PAGE.head_dim), torch.nan, dtype=torch.bfloat16)


def computed(net: Net, cuts: Sequence[int], cache: Tensor, recur: Recurrence) -> Tensor:
    """Return the results of chunks that end at ``cuts``, each computed twice."""
    table = [7, 2, 9, 4, 11]
    results: list[Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        first = max(0, start - 1) // BLOCK
        part = StateSlice(0, start, end - start, table[first : -(-end // BLOCK)])
        found = [net(net.products[start:end], cache, [part], recur) for _ in range(2)]
        assert torch.equal(*found)
        results.append(found[0])
    return torch.cat(results)


@pytest.mark.parametrize("recur", RECURRENCES)
def test_bits_depend_neither_on_chunks_nor_on_the_processor(net: Net, recur: Recurrence) -> None:
    rng = random.Random(3)
    whole = computed(net, [], a_cache(), recur_by_torch)
    assert whole.isfinite().all()
    cuts = [range(1, NUM_TOKENS), *(sorted(rng.sample(range(1, NUM_TOKENS), rng.randrange(1, 12))) for _ in range(30))]
    assert all(torch.equal(computed(net, each, a_cache(), recur), whole) for each in cuts)


@pytest.mark.parametrize("recur", RECURRENCES)
def test_results_do_not_depend_on_sequences_beside(net: Net, recur: Recurrence) -> None:
    whole, products = computed(net, [], a_cache(), recur_by_torch), net.products
    slices = [StateSlice(0, 0, 8, [0]), StateSlice(8, 0, 32, [1, 2, 3, 4])]
    both = net(torch.cat((products[9:17], products[:32])), a_cache(), slices, recur)
    assert torch.equal(both[8:], whole[:32])


def test_a_state_of_another_position_is_not_read(net: Net) -> None:
    cache, products = a_cache(), net.products
    computed(net, [20], cache, recur_by_torch)
    going_on = StateSlice(0, 24, 2, [9, 4])  # the state behind the third block
    assert net(products[24:26], cache, [going_on], recur_by_torch).isfinite().all()
    for start, pages in ((19, [9]), (21, [9]), (25, [4]), (16, [3])):
        with pytest.raises(RuntimeError, match=f"behind token {start} is not here"):
            net(products[:1], cache, [StateSlice(0, start, 1, pages)], recur_by_torch)


def test_a_page_holds_two_states() -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        page = DELTA.page(BLOCK, dtype)
        assert BLOCK * page.head_dim * size >= DELTA.num_bytes
        assert page.head_dim % 8 == 0
