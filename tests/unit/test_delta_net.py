"""States of gated delta nets: the same bits for any chunks, also if a step is computed again; no state is stale."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdmesh.engine.delta_net import delta_net
from pdmesh.engine.levels import processor_levels
from pdmesh.engine.recurrence import Recurrence, load_recurrence_kernel, recur_by_torch
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StateSlice
from pdmesh.engine.weights import DeltaWeights, Norm

CONFIG = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=20, num_taps=4)
NUM_TOKENS, BLOCK = 40, 8
PAGE = CONFIG.page(BLOCK, "bfloat16")
WIDTH = CONFIG.num_channels + 2 * CONFIG.num_value_heads
KERNELS = [load_recurrence_kernel(level) for level in processor_levels() if level.is_ordered]
RECURRENCES: list[Recurrence] = [recur_by_torch, *(kernel for kernel in KERNELS if kernel)]


@pytest.fixture(scope="module")
def weights() -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)
    taps, log, bias = (torch.randn(size, generator=generator) for size in ((4, CONFIG.num_channels), (4,), (4,)))
    return DeltaWeights(taps, log, bias, Norm(torch.ones(CONFIG.value_dim), None))


@pytest.fixture(scope="module")
def products() -> Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()


def a_cache() -> Tensor:
    """Pages in which every state was another sequence's."""
    return torch.full((12, 2, 1, BLOCK, PAGE.head_dim), torch.nan, dtype=torch.bfloat16)


def computed(inputs: tuple[Tensor, DeltaWeights], cuts: Sequence[int], cache: Tensor, recur: Recurrence) -> Tensor:
    """Return the results of chunks that end at ``cuts``, each computed twice."""
    table = [7, 2, 9, 4, 11]
    results: list[Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        first = max(0, start - 1) // BLOCK
        part = StateSlice(0, start, end - start, table[first : -(-end // BLOCK)])
        found = [delta_net(inputs[0][start:end], cache, [part], CONFIG, inputs[1], recur) for _ in range(2)]
        assert torch.equal(*found)
        results.append(found[0])
    return torch.cat(results)


@pytest.mark.parametrize("recur", RECURRENCES)
def test_bits_depend_neither_on_chunks_nor_on_the_processor(
    weights: DeltaWeights, products: Tensor, recur: Recurrence
) -> None:
    inputs, rng = (products, weights), random.Random(3)
    whole = computed(inputs, [], a_cache(), recur_by_torch)
    assert whole.isfinite().all()
    cuts = [range(1, NUM_TOKENS), *(sorted(rng.sample(range(1, NUM_TOKENS), rng.randrange(1, 12))) for _ in range(30))]
    assert all(torch.equal(computed(inputs, each, a_cache(), recur), whole) for each in cuts)


@pytest.mark.parametrize("recur", RECURRENCES)
def test_results_do_not_depend_on_sequences_beside(weights: DeltaWeights, products: Tensor, recur: Recurrence) -> None:
    whole = computed((products, weights), [], a_cache(), recur_by_torch)
    slices = [StateSlice(0, 0, 8, [0]), StateSlice(8, 0, 32, [1, 2, 3, 4])]
    both = delta_net(torch.cat((products[9:17], products[:32])), a_cache(), slices, CONFIG, weights, recur)
    assert torch.equal(both[8:], whole[:32])


def test_a_state_of_another_position_is_not_read(weights: DeltaWeights, products: Tensor) -> None:
    cache = a_cache()
    computed((products, weights), [20], cache, recur_by_torch)
    going_on = StateSlice(0, 24, 2, [9, 4])  # the state behind the third block
    assert delta_net(products[24:26], cache, [going_on], CONFIG, weights, recur_by_torch).isfinite().all()
    for start, pages in ((19, [9]), (21, [9]), (25, [4]), (16, [3])):
        with pytest.raises(RuntimeError, match=f"behind token {start} is not here"):
            delta_net(products[:1], cache, [StateSlice(0, start, 1, pages)], CONFIG, weights, recur_by_torch)


def test_a_page_holds_two_states() -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        page = CONFIG.page(BLOCK, dtype)
        assert BLOCK * page.head_dim * size >= CONFIG.num_bytes
        assert page.head_dim % 8 == 0
