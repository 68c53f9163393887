"""The pools and the bundle that would have kept the targets of recorded requests best, by simulation.

The same number of instances gets other roles, and the requests of the last minutes are sent again. The present mesh is
simulated, too: only simulated figures are compared with each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from statistics import fmean
from typing import NamedTuple

from pdmesh.metrics import Slo
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.operations import PoolCounts
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.sim.faults import NoisyModel
from pdmesh_lab.sim.recorded import RecordedRun, arrival_of
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.result import RequestRun, SimResult
from pdmesh_lab.sim.simulator import Core, Simulator
from pdmesh_lab.sim.workload import Arrival

#: Share of the best score by which a proposal's may be less and still count as alike. Among alike proposals the smaller
#: change is better.
TIE = 0.01

#: Share by which pools with mixed instances beside others need more requests in time than pools without. Near overload
#: their simulated figures vary by about as much with the times of single steps.
BOTH_MARGIN = 0.05

#: Share of the best score by which a proposal's may be less and still be simulated again, and how often. Each time the
#: steps' times differ from the model's as they did in the recording.
CLOSE, NUM_AGAIN = 0.1, 2

#: Factor by which the time per output token may grow if no target limits it.
TPOT_STRETCH = 1.1

#: Largest number of splits to try. With more instances, only some of the splits are tried.
MAX_SPLITS = 16

#: Share of the instances, as its inverse, that first change their roles together.
FIRST_STEP = 4


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
    """Simulated results of a proposal, and the share of requests in time when it was simulated `again`."""

    proposal: Proposal
    figures: SimReport
    again: tuple[float, ...] = ()

    @property
    def attainment(self) -> float:
        """The mean share of requests in time."""
        return fmean([self.figures.all.slo_attainment or 0.0, *self.again])

    @property
    def score(self) -> float:
        """The share of requests in time, less `BOTH_MARGIN` for mixed instances beside others."""
        pools = self.proposal.pools
        return self.attainment / (1 + BOTH_MARGIN * (0 < pools.mixed < pools.total))

    @property
    def tpot_s(self) -> float:
        """The p99 of the time per output token; 0 without one."""
        return self.figures.all.tpot_s.p99 or 0.0

    @property
    def rank(self) -> tuple[float, float, float]:
        """A key that sorts the better proposal first: by `score`, then goodput, then p99 of the time to first token."""
        ttft_s = self.figures.all.ttft_s.p99
        return -self.score, -(self.figures.goodput_per_s or 0.0), float("inf") if ttft_s is None else ttft_s


def tpot_limit_s(now: PoolForecast, slo: Slo, arrivals: Sequence[Arrival], default_s: float) -> float:
    """Return the largest p99 of the time per output token, in seconds, for a proposal; infinite if requests have a
    target.

    Without a limit, the best split would be one that starts answers early, however slowly it decodes. ``default_s`` is
    the target that the policies themselves use.
    """
    if slo.tpot_s is not None or any(arrival.slo_tpot_s is not None for arrival in arrivals):
        return inf
    return max(default_s, TPOT_STRETCH * now.tpot_s)


def ranked(outlooks: Sequence[PoolForecast], now: PoolForecast, limit_s: float) -> list[PoolForecast]:
    """Return the proposals, the best first. Among alike ones (`TIE`) the present mesh comes first, then smaller
    changes.

    Proposals whose time per output token is beyond ``limit_s`` come last.
    """

    best = max(each.score for each in outlooks if each.tpot_s <= limit_s)

    def rank(each: PoolForecast) -> tuple[bool, bool, int, tuple[float, float, float]]:
        is_alike = each.score >= best * (1 - TIE)
        changes = each.proposal.num_changes(now.proposal) if is_alike else 0
        return each.tpot_s > limit_s, not is_alike, changes, each.rank

    return sorted(outlooks, key=rank)


def splits(total: int) -> Iterator[PoolCounts]:
    """Yield the ways to divide ``total`` instances into prefill and decode pools, and all mixed.

    Beyond `MAX_SPLITS` instances, only some divisions are yielded.
    """
    step = max(1, total // MAX_SPLITS)
    for prefill in range(1, total, step):
        yield PoolCounts(prefill=prefill, decode=total - prefill)
    yield PoolCounts(prefill=0, decode=0, mixed=total)


def neighbours(pools: PoolCounts, number: int) -> Iterator[PoolCounts]:
    """Yield the pools that can serve requests and differ by the role of ``number`` instances."""
    for before, after in permutations(Role, 2):
        counts = {role: pools.of(role) + number * ((role is after) - (role is before)) for role in Role}
        if min(counts.values()) >= 0:
            changed = PoolCounts(**{str(role): count for role, count in counts.items()})
            if changed.why_not is None:
                yield changed


def search(
    present: PoolForecast, bundles: Sequence[str], forecast: Callable[[Proposal], PoolForecast], limit_s: float
) -> Sequence[PoolForecast]:
    """Return the forecasts of the present mesh, of all `splits` under ``bundles``, and of pools that mix the roles.

    The last ones begin at the best split. Ever fewer instances change their roles, as long as more requests are in
    time. A proposal whose p99 of the time per output token is above ``limit_s`` is no beginning.
    """
    found = {present.proposal: present}

    def best_with(proposals: Iterable[Proposal]) -> PoolForecast:
        for each in proposals:
            if each not in found:
                found[each] = forecast(each)
        return min(found.values(), key=lambda each: (each.tpot_s > limit_s, each.rank))

    total = present.proposal.pools.total
    best = best_with(Proposal(pools, bundle) for pools in splits(total) for bundle in bundles)
    number = max(1, total // FIRST_STEP)
    while number and best.score < 1:
        before, bundle = best, best.proposal.bundle
        best = best_with(Proposal(pools, bundle) for pools in neighbours(best.proposal.pools, number))
        if best.score <= before.score:
            number //= 2
    return list(found.values())


def recent(run: RecordedRun, last_s: float) -> list[RequestRun]:
    """Return the finished and refused requests of the last ``last_s`` seconds, in the order of arrival."""
    runs = sorted([*run.result.requests, *run.refused], key=lambda each: each.request.arrival_s)
    return [each for each in runs if each.request.arrival_s >= runs[-1].request.arrival_s - last_s]


@dataclass(frozen=True, slots=True)
class Advice:
    """The proposals, the best one first, and the mesh as it is now.

    `recorded` has the real figures; all others are simulated. `min_gain` is the least gain that counts, as a share of
    the requests in time. `tpot_limit_s` bounds the p99 of the time per output token if no target does.
    """

    recorded: PoolForecast
    now: PoolForecast
    outlooks: Sequence[PoolForecast]
    num_requests: int
    min_gain: float
    tpot_limit_s: float = inf

    @property
    def best(self) -> PoolForecast | None:
        """The proposal to change to; None if none is better by `min_gain`."""
        best = self.outlooks[0]
        return best if self._gains(best, self.now) else None

    @property
    def too_slow(self) -> PoolForecast | None:
        """A proposal that has more requests in time by `min_gain`, but is ruled out by its time per output token."""
        others = (each for each in self.outlooks if each.tpot_s > self.tpot_limit_s)
        other = max(others, key=lambda each: each.attainment, default=None)
        return None if other is None or not self._gains(other, self.outlooks[0]) else other

    def _gains(self, other: PoolForecast, one: PoolForecast) -> bool:
        return other.score > one.score * (1 + self.min_gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Requests that were recorded in `runs`, in the order of arrival, and the simulated mesh that serves them again.

    Instances have the profile `like`, but for ids and roles, and the step times of `latency`. `noise` is the relative
    standard deviation of recorded times from these. `new_core` makes the core of a bundle. A request's own targets
    override `slo`.
    """

    runs: Sequence[RequestRun]
    like: InstanceProfile
    latency: LatencyModel
    noise: float
    slo: Slo
    long_tokens: int
    new_core: Callable[[str], Core]

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """The requests, moved to begin at 0."""
        start_s = self.runs[0].request.arrival_s
        arrivals = map(arrival_of, self.runs)
        return [replace(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in arrivals]

    def forecast(self, proposal: Proposal, seed: int | None = None) -> PoolForecast:
        """Simulate a proposal, with noise if there is a ``seed``."""
        rng = random.Random(seed)
        latency = self.latency if seed is None else NoisyModel(self.latency, self.noise, rng)
        instances = [
            (replace(self.like, instance_id=InstanceId(f"{role}-{index}"), role=role), latency)
            for role in Role
            for index in range(proposal.pools.of(role))
        ]
        result = Simulator(self.new_core(proposal.bundle), instances, self.arrivals).run()
        return PoolForecast(proposal, report(result, long_tokens=self.long_tokens, slo=self.slo))

    def advise(
        self,
        now: Proposal,
        bundles: Sequence[str],
        *,
        min_gain: float,
        default_tpot_s: float,
        on_forecast: Callable[[], None] = lambda: None,
    ) -> Advice:
        """Simulate the present mesh and what could replace it; call ``on_forecast`` after each simulation.

        ``default_tpot_s`` is the target that the policies use for requests without one.
        """

        def forecast(proposal: Proposal, seed: int | None = None) -> PoolForecast:
            found = self.forecast(proposal, seed)
            on_forecast()
            return found

        def settled(one: PoolForecast) -> PoolForecast:
            again = (forecast(one.proposal, seed).attainment for seed in range(NUM_AGAIN))
            return replace(one, again=tuple(again))

        present = forecast(now)
        limit_s = tpot_limit_s(present, self.slo, self.arrivals, default_tpot_s)
        found = search(present, bundles, forecast, limit_s)
        best = max(each.score for each in found if each.tpot_s <= limit_s)
        if present.score < best * (1 - TIE):
            close = best * (1 - CLOSE)
            found = [settled(each) if each is present or each.score >= close else each for each in found]
            present = found[0]
        was = SimResult(self.runs, [], 0, 0)
        return Advice(
            recorded=PoolForecast(now, report(was, long_tokens=self.long_tokens, slo=self.slo)),
            now=present,
            outlooks=ranked(found, present, limit_s),
            num_requests=len(self.arrivals),
            min_gain=min_gain,
            tpot_limit_s=limit_s,
        )
