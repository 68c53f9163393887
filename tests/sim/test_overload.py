"""Overload, with targets: what is served within its target stays what it was at the peak."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdmesh.core.commands import Outcome
from pdmesh.policy.base import PolicyConfig
from pdmesh.sim.mesh import study_core
from pdmesh.sim.result import RequestRun
from pdmesh.sim.simulator import Simulator
from pdmesh.sim.workload import Synthetic, synthetic
from pdmesh.testing.sim import UNEVEN_MODEL, tiny_mesh

TTFT_S = 1.0
DURATION_S = 40.0


def kept(run: RequestRun, ttft_s: float) -> bool:
    return run.outcome is Outcome.FINISHED and run.ttft_s is not None and run.ttft_s <= ttft_s


def goodput_per_s(
    bundle: str,
    requests_per_s: float,
    *,
    refuses_early: bool,
    output: int,
    seats: int,
    long_share: float,
    ttft_s: float = TTFT_S,
) -> float:
    """Requests within their target, per second."""
    shape = Synthetic(
        num_requests=int(requests_per_s * DURATION_S),
        requests_per_s=requests_per_s,
        median_prompt_tokens=40,
        median_output_tokens=output,
        max_prompt_tokens=90,
        max_output_tokens=60,
        long_share=long_share,
        long_range=(200, 500),
    )
    arrivals = [replace(arrival, slo_ttft_s=ttft_s) for arrival in synthetic(shape, random.Random(1))]
    policy = PolicyConfig(chunk_tokens=64, latency=UNEVEN_MODEL, long_prompt_tokens=200)
    core = study_core(bundle, policy, 0, refuses_early=refuses_early)
    mesh = tiny_mesh({"prefill": 2, "decode": 2}, max_num_seqs=seats)
    result = Simulator(core, mesh.instances(UNEVEN_MODEL), arrivals).run()
    return sum(kept(run, ttft_s) for run in result.requests) / DURATION_S


@pytest.mark.parametrize("bundle", ["fcfs", "pdmesh"])
@pytest.mark.parametrize(
    ("output", "seats", "long_share"), [(12, 16, 0.02), (40, 4, 0.02)], ids=["computing limits", "decoding limits"]
)
def test_goodput_at_five_times_the_load_is_that_of_the_peak(
    bundle: str, output: int, seats: int, long_share: float
) -> None:
    load = {"output": output, "seats": seats, "long_share": long_share}
    rates = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0)
    per_s = {rate: goodput_per_s(bundle, rate, refuses_early=False, **load) for rate in rates}  # type: ignore[arg-type]
    peak = max(rates, key=lambda rate: per_s[rate])
    assert goodput_per_s(bundle, 5 * peak, refuses_early=False, **load) < 0.5 * per_s[peak]  # type: ignore[arg-type]
    assert goodput_per_s(bundle, 5 * peak, refuses_early=True, **load) >= 0.95 * per_s[peak]  # type: ignore[arg-type]
    assert goodput_per_s(bundle, peak / 2, refuses_early=True, **load) >= 0.98 * peak / 2  # type: ignore[arg-type]


@pytest.mark.parametrize("ttft_s", [0.3, 0.4])
def test_targets_as_short_as_a_few_steps_are_kept_too(ttft_s: float) -> None:
    """Nobody waited when one came, and yet it was late: behind the steps in flight. All that were taken were late."""
    load = {"output": 12, "seats": 16, "long_share": 0.0, "ttft_s": ttft_s}
    peak = goodput_per_s("pdmesh", 14.0, refuses_early=False, **load)  # type: ignore[arg-type]
    assert goodput_per_s("pdmesh", 70.0, refuses_early=True, **load) >= 0.95 * peak  # type: ignore[arg-type]
