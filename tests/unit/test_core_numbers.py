"""The least free number goes to each newcomer, whatever the order in which others left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instances.id_pool import IdPool


@given(leave=st.lists(st.none() | st.integers(0, 9), max_size=60))
def test_a_newcomer_gets_the_least_number_that_nobody_has(leave: list[int | None]) -> None:
    numbers, taken = IdPool(), list[int]()
    for index in leave:
        if index is None or index >= len(taken):
            number = numbers.take()
            assert number == min(set(range(1, len(taken) + 2)) - set(taken))
            taken.append(number)
        else:
            numbers.give_back(taken.pop(index))
        numbers.check_integrity(taken)
