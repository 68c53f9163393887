"""Improvement rates: what is looked up, and when."""

from __future__ import annotations

import pytest

from pdmesh.policy.improvement import LOOK_EVERY_S, MinimumGain

RATES = ((0.5, 0.05), (1.0, 0.3), (2.0, 0.7))


@pytest.mark.parametrize(
    ("load", "rate"), [(0.0, 0.05), (0.74, 0.05), (0.75, 0.05), (0.8, 0.3), (1.6, 0.7), (50.0, 0.7)]
)
def test_the_nearest_row_is_taken_for_the_load_of_the_last_half_minute_and_not_sooner(load: float, rate: float) -> None:
    gain = MinimumGain(RATES)
    gain.arrived(0.0, LOOK_EVERY_S * load, lambda: 1.0)
    gain.arrived(LOOK_EVERY_S - 1, 0.0, lambda: 1.0)
    assert gain.rate == 0.05
    gain.arrived(LOOK_EVERY_S, 0.0, lambda: 1.0)
    assert gain.rate == rate
    gain.arrived(9000.0, 0.0, lambda: 1.0)
    assert gain.rate == 0.05, "after a silence the rate is of the silence"


def test_work_is_shared_by_those_who_are_there_when_the_rate_is_looked_up() -> None:
    gain = MinimumGain(((0.0, 0.1), (1.0, 0.6)))
    for step in range(30):
        gain.arrived(float(step), 2.0, lambda: 0.0)
    gain.arrived(30.0, 2.0, lambda: 2.0)
    assert gain.rate == 0.6, "60 s of work in 30 s for two"
    for step in range(31, 60):
        gain.arrived(float(step), 2.0, lambda: 0.0)
    gain.arrived(60.0, 2.0, lambda: 8.0)
    assert gain.rate == 0.1
