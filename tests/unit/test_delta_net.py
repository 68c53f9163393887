"""States of gated delta nets: the same bits for any chunks, also if a step is computed again; no state is stale."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdmesh.engine.delta_net import StateSlice, delta_net
from pdmesh.engine.model_config import DeltaNet
from pdmesh.engine.weights import DeltaWeights, Norm

CONFIG = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, num_taps=4)
NUM_TOKENS, BLOCK = 40, 8
PAGE = CONFIG.page(BLOCK, "bfloat16")
WIDTH = CONFIG.num_channels + 2 * CONFIG.num_value_heads


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


def computed(products: Tensor, weights: DeltaWeights, cuts: Sequence[int], cache: Tensor, *, again: bool) -> Tensor:
    """Return the results of chunks that end at ``cuts``, each computed twice if ``again``."""
    table = [7, 2, 9, 4, 11]
    results: list[Tensor] = []
    for start, end in zip((0, *cuts), (*cuts, NUM_TOKENS), strict=True):
        first = max(0, start - 1) // BLOCK
        part = StateSlice(0, start, end - start, table[first : -(-end // BLOCK)])
        found = [delta_net(products[start:end], cache, [part], CONFIG, weights) for _ in range(1 + again)]
        assert torch.equal(found[0], found[-1])
        results.append(found[0])
    return torch.cat(results)


@pytest.mark.parametrize("again", [False, True])
def test_bits_do_not_depend_on_chunks(weights: DeltaWeights, products: Tensor, again: bool) -> None:
    whole = computed(products, weights, [], a_cache(), again=False)
    assert whole.isfinite().all()
    rng = random.Random(3)
    for _ in range(30):
        cuts = sorted(rng.sample(range(1, NUM_TOKENS), rng.randrange(1, 12)))
        assert torch.equal(computed(products, weights, cuts, a_cache(), again=again), whole)
    assert torch.equal(computed(products, weights, range(1, NUM_TOKENS), a_cache(), again=again), whole)


def test_results_do_not_depend_on_other_sequences(weights: DeltaWeights, products: Tensor) -> None:
    whole = computed(products, weights, [], a_cache(), again=False)
    slices = [StateSlice(0, 0, 8, [0]), StateSlice(8, 0, 32, [1, 2, 3, 4])]
    both = delta_net(torch.cat((products[9:17], products[:32])), a_cache(), slices, CONFIG, weights)
    assert torch.equal(both[8:], whole[:32])


def test_a_state_of_another_position_is_not_read(weights: DeltaWeights, products: Tensor) -> None:
    cache = a_cache()
    computed(products, weights, [20], cache, again=False)
    going_on = StateSlice(0, 24, 2, [9, 4])  # the state behind the third block
    assert delta_net(products[24:26], cache, [going_on], CONFIG, weights).isfinite().all()
    for start, pages in ((19, [9]), (21, [9]), (25, [4]), (16, [3])):
        with pytest.raises(RuntimeError, match=f"behind token {start} is not here"):
            delta_net(products[:1], cache, [StateSlice(0, start, 1, pages)], CONFIG, weights)


def test_a_page_holds_two_states() -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        page = CONFIG.page(BLOCK, dtype)
        assert BLOCK * page.head_dim * size >= CONFIG.num_bytes
        assert page.head_dim % 8 == 0
