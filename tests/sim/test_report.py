from __future__ import annotations

import pytest

from pdmesh.metrics import Slo
from pdmesh_lab.sim.report import Percentiles, report
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.sim import simulate

NOTHING = Percentiles(p50=None, p90=None, p99=None)


def test_figures_of_a_tiny_run() -> None:
    """One mixed instance: r0 has its first token at 0.5 s, r1, which waits for it and wants 0.5 s, at 1.0 s."""
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=1),
        Arrival(arrival_s=0.25, num_prompt_tokens=16, num_output_tokens=1, slo_ttft_s=0.5),
        Arrival(arrival_s=0.25, num_prompt_tokens=5000, num_output_tokens=1),
    ]
    figures = report(simulate(arrivals, mixed=1), long_tokens=1000, slo=Slo(ttft_s=0.5))
    assert (figures.short.num_requests, figures.short.num_finished) == (2, 2)
    assert figures.short.ttft_s == Percentiles(p50=0.5, p90=0.75, p99=0.75)
    assert figures.short.queueing_s == Percentiles(p50=0.0, p90=0.25, p99=0.25)
    assert figures.short.tpot_s == NOTHING
    assert figures.short.slo_attainment == 0.5
    assert figures.short.requests_per_s == 2.0
    assert figures.makespan_s == 1.0
    assert figures.goodput_per_s == 1.0
    assert figures.busy_share == 1.0
    # The long one fits no instance: it is rejected, and keeps no objective.
    assert (figures.long.num_requests, figures.long.num_finished) == (1, 0)
    assert figures.long.slo_attainment == 0.0
    assert figures.long.ttft_s == NOTHING
    assert figures.all.slo_attainment == pytest.approx(1 / 3)


def test_a_run_of_nothing_has_no_figures() -> None:
    figures = report(simulate([], mixed=1), long_tokens=1000, slo=Slo())
    assert figures.all.num_requests == 0
    assert figures.all.ttft_s == NOTHING
    assert figures.all.requests_per_s is None
    assert figures.goodput_per_s is None
    assert figures.busy_share is None
