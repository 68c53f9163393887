"""How far the slices of a parallel step may lie apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.policy.pacing import PARALLEL_LAG, ChunkPace, lag, layers_a_piece

SIZES = st.tuples(st.integers(1, 80), st.integers(2, 64))


@given(sizes=SIZES, pace=st.sampled_from(ChunkPace))
def test_a_piece_has_a_layer_at_least_and_half_of_them_at_most(sizes: tuple[int, int], pace: ChunkPace) -> None:
    num_layers, num_members = sizes
    found = [layers_a_piece(pace, num_layers, num_members, behind) for behind in range(1, num_members)]
    assert all(1 <= each <= max(1, num_layers // 2) for each in found)
    assert all(before <= each for before, each in pairwise(found)), "who is further behind is sent no less at once"


@given(sizes=SIZES)
def test_whoever_is_as_far_behind_as_it_may_be_waits_for_no_piece(sizes: tuple[int, int]) -> None:
    """A layer is here when the last layer of its piece was computed there: so many layers later at least."""
    num_layers, num_members = sizes
    assert 0.0 <= lag(num_layers, num_members) * (num_members - 1) <= PARALLEL_LAG
    last = num_members - 1
    waits = layers_a_piece(ChunkPace.IN_PARALLEL, num_layers, num_members, last) - 1
    assert waits <= last * lag(num_layers, num_members) * num_layers + 1e-9


@pytest.mark.parametrize(("num_layers", "num_members", "expected"), [(12, 2, 6), (16, 2, 8), (16, 8, 2), (32, 4, 6)])
def test_layers_that_the_next_one_is_sent_at_once(num_layers: int, num_members: int, expected: int) -> None:
    assert layers_a_piece(ChunkPace.IN_PARALLEL, num_layers, num_members, 1) == expected
    assert layers_a_piece(ChunkPace.AT_ONCE, num_layers, num_members, 1) == 1
