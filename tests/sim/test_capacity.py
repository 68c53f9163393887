"""The search for the smallest pools, over made-up attainments, and what it refuses."""

from __future__ import annotations

import random
from itertools import product

import pytest

from pdmesh.metrics import Slo
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.capacity import ContextRoom, PoolSizes, smallest_pools, unattainable
from pdmesh_lab.sim.workload import Arrival

MODEL = LinearLatencyModel(a_s=0.5, b_s=0.25, c_s=0.0, d_s=0.0, decode_a_s=0.125, decode_s=0.125)
FOREVER = 10**9


@pytest.mark.parametrize("seed", range(50))
def test_no_smaller_pools_are_enough(seed: int) -> None:
    """For any attainment that only grows with either pool; found without trying them all."""
    rng, most = random.Random(seed), 24
    corners = [(rng.randint(1, most), rng.randint(1, most)) for _ in range(4)]

    def attainment(sizes: PoolSizes) -> float:
        return max((0.9 for p, d in corners if p <= sizes.num_prefill and d <= sizes.num_decode), default=0.1)

    search = smallest_pools(attainment, 0.9, most)
    assert search.sizes is not None
    assert attainment(search.sizes) >= 0.9
    assert sum(search.sizes) == min(
        p + d for p, d in product(range(1, most + 1), repeat=2) if attainment(PoolSizes(p, d)) >= 0.9
    )
    assert search.attainments[search.sizes] == 0.9
    assert len(search.attainments) < 150


def test_independent_pools_are_found_in_few_tries() -> None:
    search = smallest_pools(lambda sizes: float(sizes >= (5, 0) and sizes.num_decode >= 9), 1.0, 64)
    assert search.sizes == (5, 9)
    assert len(search.attainments) < 20


def test_pools_that_are_never_enough() -> None:
    search = smallest_pools(lambda sizes: 0.5, 0.9, 8)
    assert search.sizes is None
    assert search.attainments == {(8, 8): 0.5}


@pytest.mark.parametrize(
    ("arrival", "slo", "says"),
    [
        # 0.5 + 6 * 0.25 = 2 s of prefill; a decode takes 0.25 s
        (Arrival(arrival_s=0, num_prompt_tokens=6, num_output_tokens=2), Slo(ttft_s=2.0, tpot_s=0.25), None),
        (Arrival(arrival_s=0, num_prompt_tokens=6, num_output_tokens=2), Slo(ttft_s=1.9), "takes 2 s by itself"),
        (Arrival(arrival_s=0, num_prompt_tokens=6, num_output_tokens=2), Slo(tpot_s=0.2), "takes 0.25 s"),
        (Arrival(arrival_s=0, num_prompt_tokens=6, num_output_tokens=1), Slo(tpot_s=0.2), None),
        (Arrival(arrival_s=0, num_prompt_tokens=6, num_output_tokens=2, slo_ttft_s=3.0), Slo(ttft_s=1.0), None),
        (Arrival(arrival_s=0, num_prompt_tokens=99, num_output_tokens=2), Slo(), "101 tokens of prompt and output"),
    ],
)
def test_what_nothing_could_do_is_known_before(arrival: Arrival, slo: Slo, says: str | None) -> None:
    reason = unattainable([arrival], MODEL, slo, 0.99, ContextRoom(100))
    assert reason is None if says is None else reason is not None and says in reason


def test_a_share_that_may_miss() -> None:
    arrivals = [Arrival(arrival_s=0, num_prompt_tokens=tokens, num_output_tokens=1) for tokens in (1, 1, 1, 8)]
    assert unattainable(arrivals, MODEL, Slo(ttft_s=1.0), 0.75, ContextRoom(FOREVER)) is None
    reason = unattainable(arrivals, MODEL, Slo(ttft_s=1.0), 0.8, ContextRoom(FOREVER))
    assert reason is not None
    assert reason.startswith(
        "1 of 4 requests miss their targets on any number of instances, so at most 75.00% can meet them"
    )


def test_small_chunks_can_be_cheaper_than_their_whole() -> None:
    """Where history costs less than new pairs of tokens: the least is counted."""
    model = LinearLatencyModel(a_s=0.0, b_s=0.0, c_s=0.02, d_s=1.0)
    arrival = Arrival(arrival_s=0, num_prompt_tokens=10, num_output_tokens=1)
    assert unattainable([arrival], model, Slo(ttft_s=1.5), 1.0, ContextRoom(FOREVER)) is None
    assert unattainable([arrival], model, Slo(ttft_s=0.5), 1.0, ContextRoom(FOREVER)) is not None
