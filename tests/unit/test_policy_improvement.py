"""Improvement rates: what is looked up, and when."""

from __future__ import annotations

import pytest

from pdmesh.policy.improvement import LOOK_EVERY_S, ImprovementInForce, ImprovementTable

TABLE = ImprovementTable(((0.5, 0.05), (1.0, 0.3), (2.0, 0.7)))


@pytest.mark.parametrize(
    ("requests_per_s", "rate"), [(0.0, 0.05), (0.74, 0.05), (0.75, 0.05), (0.8, 0.3), (1.6, 0.7), (50.0, 0.7)]
)
def test_the_nearest_row_is_taken(requests_per_s: float, rate: float) -> None:
    assert TABLE.nearest(requests_per_s) == rate


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="has no row"):
        ImprovementTable(())


def test_the_rate_follows_the_arrivals_of_the_last_half_minute_and_not_sooner() -> None:
    in_force = ImprovementInForce(TABLE)
    busy = [in_force.arrived(step * 0.5) for step in range(int(2 * LOOK_EVERY_S))]  # two requests a second
    assert busy == [0.05] * len(busy)
    assert in_force.arrived(LOOK_EVERY_S) == 0.7
    assert in_force.arrived(2 * LOOK_EVERY_S - 1) == 0.7  # the next half minute had two
    assert in_force.arrived(2 * LOOK_EVERY_S) == 0.05


def test_after_a_silence_the_rate_is_of_the_silence() -> None:
    in_force = ImprovementInForce(ImprovementTable(((0.0, 0.1), (10.0, 0.6))))
    for step in range(400):
        in_force.arrived(1000.0 + step * 0.1)
    assert in_force.arrived(1041.0) == 0.6
    assert in_force.arrived(9000.0) == 0.1


def test_work_is_shared_by_those_who_are_there_when_the_rate_is_looked_up() -> None:
    in_force = ImprovementInForce(ImprovementTable(((0.0, 0.1), (1.0, 0.6))))
    for step in range(30):
        in_force.arrived(float(step), 2.0, lambda: 0.0)
    assert in_force.arrived(30.0, 2.0, lambda: 2.0) == 0.6, "60 s of work in 30 s for two"
    for step in range(31, 60):
        in_force.arrived(float(step), 2.0, lambda: 0.0)
    assert in_force.arrived(60.0, 2.0, lambda: 8.0) == in_force.rate == 0.1
