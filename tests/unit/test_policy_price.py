"""The price of an instance's second: how many first tokens it delays."""

from __future__ import annotations

import pytest

from pdmesh_lab.studies.price import OVER_S, Demand


def steady(per_s: float, work_s: float, for_s: float) -> Demand:
    demand = Demand()
    for step in range(int(for_s * per_s) + 1):
        demand.arrived(step / per_s, work_s)
    return demand


def test_nothing_that_waits_or_comes_makes_instances_free() -> None:
    assert Demand().price(0.0, 5.0, 0, 8) == 0.0
    once = Demand()
    once.arrived(0.0, 3.0)
    assert once.price(0.5, 3.0, 0, 8) == 0.0, "one arrival says nothing of a rate"


def test_each_who_waits_is_delayed_by_an_instances_share() -> None:
    assert Demand().price(0.0, 5.0, 6, 8) == 6 / 8


def test_those_who_come_before_the_queues_are_empty_are_delayed_too() -> None:
    demand = steady(per_s=2.0, work_s=2.0, for_s=10 * OVER_S)  # 4 of 8 instances are busy
    empty_after_s = 12.0 / (8 * 0.5)
    assert demand.price(10 * OVER_S, 12.0, 3, 8) == pytest.approx((3 + 2.0 * empty_after_s) / 8, rel=0.05)


def test_what_came_long_ago_is_forgotten() -> None:
    demand = steady(per_s=2.0, work_s=2.0, for_s=100.0)
    assert demand.price(100.0 + 10 * OVER_S, 12.0, 0, 8) < 0.01 * demand.price(100.0, 12.0, 0, 8)


def test_more_work_than_there_is_time_for_has_a_finite_price_too() -> None:
    overload, busy = steady(4.0, 4.0, 100.0), steady(4.0, 1.9, 100.0)
    assert busy.price(100.0, 10.0, 0, 8) <= overload.price(100.0, 10.0, 0, 8) < 1000
