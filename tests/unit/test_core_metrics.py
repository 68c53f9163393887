from __future__ import annotations

import pytest

from pdmesh import metrics
from pdmesh.metrics import Slo


def test_latencies_of_a_request() -> None:
    times_s = [1.0, 1.5, 2.5]
    assert metrics.ttft_s(0.25, times_s) == 0.75
    assert metrics.e2e_s(0.25, times_s) == 2.25
    assert metrics.tpot_s(times_s) == 0.75
    assert metrics.itl_s(times_s) == [0.5, 1.0]


def test_what_is_undefined_is_none() -> None:
    assert metrics.ttft_s(0.0, []) is None
    assert metrics.e2e_s(0.0, []) is None
    assert metrics.tpot_s([1.0]) is None
    assert metrics.itl_s([1.0]) == []
    assert metrics.slo_attainment([]) is None
    assert metrics.goodput([True], 0.0) is None
    assert metrics.percentile([], 50) is None


def test_objectives() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    assert metrics.meets_slo(slo, 0.0, [1.0, 1.5])
    assert not metrics.meets_slo(slo, 0.0, [1.1, 1.5])
    assert not metrics.meets_slo(slo, 0.0, [1.0, 1.6])
    assert metrics.meets_slo(slo, 0.0, [1.0])
    assert not metrics.meets_slo(Slo(), 0.0, [])
    assert metrics.slo_attainment([True, False, True, True]) == 0.75
    assert metrics.goodput([True, False, True], 4.0) == 0.5


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2), (75, 3), (76, 4), (100, 4)])
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert metrics.percentile([4, 2, 1, 3], percent) == value
