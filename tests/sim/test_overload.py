"""Overload, with targets: what is served within its target stays what it was at the peak."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.commands import Command, ForgetRequest, Outcome, Reject
from pdmesh.core.events import Event, RequestArrived
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.errors import RequestRejected
from pdmesh.policy.config import PolicyConfig
from pdmesh_gateway.reject_cache import RejectCache, RequestKind
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic
from pdmesh_testing.sim import UNEVEN_MODEL, tiny_mesh

TTFT_S = 1.0
DURATION_S = 40.0

#: Of the runs behind a reject cache.
REJECT_TTL_S = 12.0


class CoreBehindARejectCache:
    """In the place of a core: a gateway's reject cache before it. Requests have the keys of ``tenants`` in turn."""

    def __init__(self, core: SchedulerCore, tenants: Sequence[str] = ("",), *, caches_rejects: bool = True) -> None:
        self.core = core
        self.turned_away: list[str] = []  # whose
        self.tenant_of: dict[str, str] = {}
        self._tenants, self._caches_rejects = tenants, caches_rejects
        self._now_s = 0.0
        self._reject_cache = RejectCache(lambda: self._now_s)
        self._kinds: dict[str, RequestKind] = {}

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self._now_s = now_s
        if isinstance(event, RequestArrived):
            tenant = self._tenants[len(self.tenant_of) % len(self._tenants)]
            request = replace(event.request, tenant=tenant)
            self.tenant_of[request.request_id] = tenant
            size = request.num_prompt_tokens.bit_length()
            kind = RequestKind("chat", tenant, request.priority, request.slo_ttft_s, request.slo_tpot_s, size)
            try:
                self._reject_cache.check(kind)
            except RequestRejected:
                self.turned_away.append(tenant)
                ended = ForgetRequest(
                    gateway_id=request.gateway_id,
                    request_id=request.request_id,
                    epoch=request.epoch,
                    outcome=Outcome.REJECTED,
                )
                return [ended]
            self._kinds[request.request_id] = kind
            event = RequestArrived(request)
        commands = self.core.handle(event, now_s)
        for command in commands:
            if isinstance(command, Reject) and command.reject_ttl_s and self._caches_rejects:
                answer = RequestRejected(command.message, reject_ttl_s=command.reject_ttl_s)
                self._reject_cache.refused(self._kinds[command.request_id], answer)
        return commands

    def check_integrity(self) -> None:
        self.core.check_integrity()


def kept(run: RequestRun, ttft_s: float) -> bool:
    return run.outcome is Outcome.FINISHED and run.ttft_s is not None and run.ttft_s <= ttft_s


def load(
    requests_per_s: float,
    *,
    output: int,
    seats: int,
    long_share: float,
    ttft_s: float = TTFT_S,
    duration_s: float = DURATION_S,
) -> tuple[Sequence[Arrival], MeshShape]:
    """Requests with a target, and who serves them."""
    shape = Synthetic(
        num_requests=int(requests_per_s * duration_s),
        requests_per_s=requests_per_s,
        median_prompt_tokens=40,
        median_output_tokens=output,
        max_prompt_tokens=90,
        max_output_tokens=60,
        long_share=long_share,
        long_range=(200, 500),
    )
    arrivals = [replace(arrival, slo_ttft_s=ttft_s) for arrival in synthetic(shape, random.Random(1))]
    return arrivals, tiny_mesh({"prefill": 2, "decode": 2}, max_num_seqs=seats)


def core_of(bundle: str, *, refuses_early: bool) -> SchedulerCore:
    policy = PolicyConfig(chunk_tokens=64, latency=UNEVEN_MODEL, long_prompt_tokens=200)
    return study_core(bundle, policy, 0, refuses_early=refuses_early)


def goodput_per_s(
    bundle: str, requests_per_s: float, *, refuses_early: bool, ttft_s: float = TTFT_S, **of: Any
) -> float:
    """Requests within their target, per second."""
    arrivals, mesh = load(requests_per_s, ttft_s=ttft_s, **of)
    core = core_of(bundle, refuses_early=refuses_early)
    result = Simulator(core, mesh.instances(UNEVEN_MODEL), arrivals).run()
    return sum(kept(run, ttft_s) for run in result.requests) / DURATION_S


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["fcfs", "pdmesh"])
@pytest.mark.parametrize(
    ("output", "seats", "long_share"), [(12, 16, 0.02), (40, 4, 0.02)], ids=["computing limits", "decoding limits"]
)
def test_goodput_at_five_times_the_load_is_that_of_the_peak(
    bundle: str, output: int, seats: int, long_share: float
) -> None:
    of: dict[str, Any] = {"output": output, "seats": seats, "long_share": long_share}
    rates = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0)
    per_s = {rate: goodput_per_s(bundle, rate, refuses_early=False, **of) for rate in rates}
    peak = max(rates, key=lambda rate: per_s[rate])
    assert goodput_per_s(bundle, 5 * peak, refuses_early=False, **of) < 0.5 * per_s[peak]
    assert goodput_per_s(bundle, 5 * peak, refuses_early=True, **of) >= 0.95 * per_s[peak]
    assert goodput_per_s(bundle, peak / 2, refuses_early=True, **of) >= 0.98 * peak / 2


@pytest.mark.parametrize("ttft_s", [0.3, 0.4])
def test_targets_as_short_as_a_few_steps_are_kept_too(ttft_s: float) -> None:
    """Nobody waited when one came, and yet it was late: behind the steps in flight. All that were taken were late."""
    of: dict[str, Any] = {"output": 12, "seats": 16, "long_share": 0.0, "ttft_s": ttft_s}
    peak = goodput_per_s("pdmesh", 14.0, refuses_early=False, **of)
    assert goodput_per_s("pdmesh", 70.0, refuses_early=True, **of) >= 0.95 * peak


# --- with a gateway's reject cache before it ---

COMPUTING: dict[str, Any] = {"output": 12, "seats": 16, "long_share": 0.02}
FLOOD_PER_S = 120.0


@pytest.mark.parametrize(
    ("bundle", "ttft_s", "least_share"),
    [("fcfs", 1.0, 0.4), ("pdmesh", 0.4, 0.3), ("pdmesh", 1.0, 0.4), ("pdmesh", 4.0, 0.7)],
)
def test_the_door_costs_no_goodput_and_spares_the_scheduler_refusals(
    bundle: str, ttft_s: float, least_share: float
) -> None:
    arrivals, mesh = load(FLOOD_PER_S, ttft_s=ttft_s, duration_s=REJECT_TTL_S, **COMPUTING)
    open_core = CoreBehindARejectCache(core_of(bundle, refuses_early=True), caches_rejects=False)
    alone = Simulator(open_core, mesh.instances(UNEVEN_MODEL), arrivals).run().requests
    core = CoreBehindARejectCache(core_of(bundle, refuses_early=True))
    runs = Simulator(core, mesh.instances(UNEVEN_MODEL), arrivals).run().requests
    assert sum(kept(run, ttft_s) for run in runs) >= 0.95 * sum(kept(run, ttft_s) for run in alone)
    num_refused = sum(run.outcome is Outcome.REJECTED for run in runs)
    assert len(core.turned_away) > least_share * num_refused


@pytest.mark.parametrize("bundle", ["fcfs", "pdmesh"])
def test_one_key_that_floods_closes_no_door_to_another(bundle: str) -> None:
    arrivals, mesh = load(FLOOD_PER_S, duration_s=REJECT_TTL_S, **COMPUTING)
    core = CoreBehindARejectCache(core_of(bundle, refuses_early=True), ["quiet", *59 * ["floods"]])
    runs = Simulator(core, mesh.instances(UNEVEN_MODEL), arrivals).run().requests
    assert len(core.turned_away) > len(runs) / 4
    assert "quiet" not in core.turned_away
    outcomes = [run.outcome for run in runs if core.tenant_of[run.request.request_id] == "quiet"]
    assert outcomes.count(Outcome.REJECTED) <= 1, "within its share it waits for nobody"
