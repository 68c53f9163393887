"""The pools and the bundle that would have kept the targets of recorded requests best, by simulation.

The same number of instances gets other roles, and the requests of the last minutes are sent again. The present mesh is
simulated, too: only simulated figures are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pdmesh.metrics import Slo
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.operations import PoolCounts
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.result import RequestRun
from pdmesh_lab.sim.simulator import Core, Simulator
from pdmesh_lab.sim.workload import Arrival

#: Difference of shares of requests in time up to which two proposals count as alike. Then the smaller change is better.
TIE = 0.01

#: Factor by which the time per output token may grow if no target limits it.
TPOT_STRETCH = 1.1

#: Largest number of splits to try. With more instances, only some of the splits are tried.
MAX_SPLITS = 16


class Proposal(NamedTuple):
    """Other pools, or another bundle."""

    pools: PoolCounts
    bundle: str

    def num_changes(self, now: Proposal) -> int:
        """Return the number of changed roles, plus 1 if the bundle changes."""
        roles = sum(max(0, self.pools.of(role) - now.pools.of(role)) for role in Role)
        return roles + (self.bundle != now.bundle)


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """Simulated results of a proposal."""

    proposal: Proposal
    figures: SimReport

    @property
    def attainment(self) -> float:
        return self.figures.all.slo_attainment or 0.0

    @property
    def rank(self) -> tuple[float, float, float]:
        """A key that sorts the better proposal first: by share of requests in time, then goodput, then p99 of TTFT."""
        ttft_s = self.figures.all.ttft_s.p99
        return -self.attainment, -(self.figures.goodput_per_s or 0.0), float("inf") if ttft_s is None else ttft_s


def tpot_limit_s(now: PoolForecast, slo: Slo, arrivals: Sequence[Arrival], default_s: float) -> float:
    """Return the largest p99 of the time per output token, in seconds, for a proposal; infinite if requests have a
    target.

    Without a limit, the best split would be one that starts answers early, however slowly it decodes. ``default_s`` is
    the target that the policies themselves use.
    """
    if slo.tpot_s is not None or any(arrival.slo_tpot_s is not None for arrival in arrivals):
        return inf
    return max(default_s, TPOT_STRETCH * (now.figures.all.tpot_s.p99 or 0.0))


def ranked(outlooks: Sequence[PoolForecast], now: PoolForecast, limit_s: float) -> list[PoolForecast]:
    """Return the proposals, the best first. Among alike ones (`TIE`) the present mesh comes first, then smaller
    changes.

    Proposals whose time per output token is beyond ``limit_s`` come last.
    """

    def breaks(each: PoolForecast) -> bool:
        return (each.figures.all.tpot_s.p99 or 0.0) > limit_s

    best = max(each.attainment for each in outlooks if not breaks(each))

    def rank(each: PoolForecast) -> tuple[bool, bool, int, tuple[float, float, float]]:
        is_alike = each.attainment >= best - TIE
        changes = each.proposal.num_changes(now.proposal) if is_alike else 0
        return breaks(each), not is_alike, changes, each.rank

    return sorted(outlooks, key=rank)


def splits(total: int) -> Iterator[PoolCounts]:
    """Yield the ways to divide ``total`` instances into prefill and decode pools, and all mixed.

    Beyond `MAX_SPLITS` instances, only some divisions are yielded.
    """
    step = max(1, total // MAX_SPLITS)
    for prefill in range(1, total, step):
        yield PoolCounts(prefill=prefill, decode=total - prefill)
    yield PoolCounts(prefill=0, decode=0, mixed=total)


def recent(arrivals: Sequence[Arrival], last_s: float) -> list[Arrival]:
    """Return the arrivals of the last ``last_s`` seconds, moved to begin at 0."""
    if not arrivals:
        return []
    end_s = max(arrival.arrival_s for arrival in arrivals)
    kept = [arrival for arrival in arrivals if arrival.arrival_s >= end_s - last_s]
    start_s = min(arrival.arrival_s for arrival in kept)
    return [replace(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in kept]


def recent_runs(runs: Sequence[RequestRun], last_s: float) -> list[RequestRun]:
    """Return the runs of the requests that arrived in the last ``last_s`` seconds."""
    end_s = max((run.request.arrival_s for run in runs), default=0.0)
    return [run for run in runs if run.request.arrival_s >= end_s - last_s]


def outlook(
    proposal: Proposal,
    core: Core,
    arrivals: Sequence[Arrival],
    like: InstanceProfile,
    latency: LatencyModel,
    slo: Slo,
    long_tokens: int,
    on_ended: Callable[[int], None] | None = None,
) -> PoolForecast:
    """Simulate a proposal on instances with the profile ``like``, but for ids and roles."""
    instances = [
        (replace(like, instance_id=InstanceId(f"{role}-{index}"), role=role), latency)
        for role in Role
        for index in range(proposal.pools.of(role))
    ]
    result = Simulator(core, instances, arrivals).run(on_ended)
    return PoolForecast(proposal, report(result, long_tokens=long_tokens, slo=slo))
