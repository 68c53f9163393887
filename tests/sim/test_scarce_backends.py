"""One transfer backend an instance, and 64 requests that want it: served in the order of first offers, all of them."""

from __future__ import annotations

import pytest

from pdmesh.core.commands import Outcome
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.result import RequestRun, SimResult
from pdmesh_lab.sim.simulator import SimConfig
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.sim import UNEVEN_MODEL, simulate

NUM_REQUESTS = 64

#: Of the throughput with a backend for each request.
LEAST_SHARE = 0.9


def run(num_backends: int, bundle: str, *, port_bytes_per_s: float) -> SimResult:
    arrivals = [
        Arrival(arrival_s=0.0, num_prompt_tokens=64 + 16 * (number % 5), num_output_tokens=8 + number % 7)
        for number in range(NUM_REQUESTS)
    ]
    return simulate(
        arrivals,
        prefill=4,
        decode=1,
        bundle=bundle,
        model=UNEVEN_MODEL,
        policy=PolicyConfig(chunk_tokens=16, latency=UNEVEN_MODEL),
        num_transfer_backends=num_backends,
        num_kv_tokens=100_000,
        max_num_seqs=NUM_REQUESTS,
        config=SimConfig(port_bytes_per_s=port_bytes_per_s),
    )


def last_s(requests: tuple[RequestRun, ...] | list[RequestRun]) -> float:
    return max(request.token_times_s[-1] for request in requests)


@pytest.mark.parametrize(
    ("bundle", "port_bytes_per_s"),
    [(bundle, port) for bundle in ("fcfs", "sjf", "pdmesh") for port in (float("inf"), 1e6, 200_000.0, 30_000.0)],
)
def test_one_backend_serves_nearly_as_much_as_sixty_four(bundle: str, port_bytes_per_s: float) -> None:
    scarce, plenty = (run(number, bundle, port_bytes_per_s=port_bytes_per_s) for number in (1, NUM_REQUESTS))
    for result in (scarce, plenty):
        assert all(request.outcome is Outcome.FINISHED for request in result.requests), "somebody starved"
        assert not any(request.num_restarts for request in result.requests)
    assert last_s(list(plenty.requests)) / last_s(list(scarce.requests)) >= LEAST_SHARE


@pytest.mark.parametrize("bundle", ["fcfs", "sjf", "pdmesh"])
def test_the_backend_goes_round_in_the_order_of_first_offers(bundle: str) -> None:
    result = run(1, bundle, port_bytes_per_s=30_000.0)
    moved = [request for request in result.requests if request.granted_s is not None and not request.num_preemptions]
    assert len(moved) > NUM_REQUESTS // 2, "there is nothing to see"
    offered = sorted(moved, key=lambda request: (request.started_s or 0.0, request.granted_s or 0.0))
    granted = [request.granted_s for request in offered]
    assert granted == sorted(granted, key=lambda at_s: at_s or 0.0)
    waited = [request for request in moved if request.granted_s != request.started_s]
    assert waited, "nobody had to wait"
