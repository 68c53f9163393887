"""First tokens by a planner alone: prompts are spread as they come, and instances do what they are given in order.

No steps, no decodes, no preemption, and every chunk takes what Eq. 1 says: what Tetris's own simulator does, which
finds the best improvement rates (§6). `pdmesh_lab.sim.simulator` is the one that drives the scheduling core.

`first_tokens` plans each prompt when it comes, as Tetris does. `first_tokens_by_price` has prompts wait in line until
somebody is free for them, so that each is planned with what is known then.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from pdmesh.model import InstanceId
from pdmesh.policy.improvement import ImprovementTable
from pdmesh.policy.sequence_parallel import FreeAt, PlannedChunk, SequenceParallelPlanner
from pdmesh_lab.studies.price import Demand


class PromptArrival(NamedTuple):
    """Arrival of a prompt, in seconds after the first one."""

    arrival_s: float
    num_tokens: int


class PricedPlanner(Protocol):
    """A planner for which instances have a price (`pdmesh.policy.sequence_parallel.ElasticPlanner`)."""

    def plan(
        self,
        num_tokens: int,
        num_done_tokens: int,
        held: Collection[InstanceId],
        pool: Sequence[FreeAt],
        *,
        price: float,
        within_s: float,
    ) -> tuple[PlannedChunk, ...]: ...


def poisson(lengths: Sequence[int], requests_per_s: float, num_requests: int, seed: int) -> list[PromptArrival]:
    """Prompts of lengths drawn from ``lengths``, at random times."""
    rng = random.Random(seed)
    prompts: list[PromptArrival] = []
    now_s = 0.0
    for _ in range(num_requests):
        prompts.append(PromptArrival(now_s, rng.choice(lengths)))
        now_s += rng.expovariate(requests_per_s)
    return prompts


def first_tokens(
    prompts: Sequence[PromptArrival], num_instances: int, planner_at: Callable[[float], SequenceParallelPlanner]
) -> list[float]:
    """Each prompt's time to first token; ``planner_at`` is asked at every arrival for its planner."""
    instances = _Instances(num_instances)
    ttfts_s: list[float] = []
    for now_s, num_tokens in prompts:
        plan = planner_at(now_s).plan(num_tokens, 0, (), instances.pool(now_s))
        instances.give(plan, now_s)
        ttfts_s.append(plan[-1].end_s)
    return ttfts_s


def first_tokens_by_price(
    prompts: Sequence[PromptArrival],
    num_instances: int,
    planner: PricedPlanner,
    work_s: Callable[[int], float],
    target_s: float = math.inf,
) -> list[float]:
    """Each prompt's time to first token, where they wait in line for an instance that is free.

    ``work_s`` is what a prompt of so many tokens takes one instance. In the order in which they came; but one
    that cannot have its first token within ``target_s`` any more lets those pass that can.
    """
    line = _Line(prompts, num_instances, planner, work_s, target_s)
    agenda = [(prompt.arrival_s, index) for index, prompt in enumerate(prompts)]
    heapq.heapify(agenda)
    while agenda:
        now_s, index = heapq.heappop(agenda)
        if index >= 0:
            line.arrived(index)
        for end_s in line.begin(now_s):
            heapq.heappush(agenda, (end_s, -1))
    return line.ttfts_s


class _Instances:
    def __init__(self, num_instances: int) -> None:
        self._frees_s = {InstanceId(f"prefill-{index:03d}"): 0.0 for index in range(num_instances)}

    def pool(self, now_s: float) -> list[FreeAt]:
        return [(max(0.0, free_s - now_s), name) for name, free_s in self._frees_s.items()]

    def give(self, plan: Sequence[PlannedChunk], now_s: float) -> None:
        for chunk in plan:
            for name in chunk.members:
                self._frees_s[name] = now_s + chunk.end_s


class _Line:
    """Prompts that wait, and the instances that they wait for."""

    def __init__(
        self,
        prompts: Sequence[PromptArrival],
        num_instances: int,
        planner: PricedPlanner,
        work_s: Callable[[int], float],
        target_s: float,
    ) -> None:
        self._prompts = prompts
        self._num_instances = num_instances
        self._instances = _Instances(num_instances)
        self._planner = planner
        self._works_s = [work_s(prompt.num_tokens) for prompt in prompts]
        self._target_s = target_s
        self._demand = Demand()
        self._waiting: list[int] = []
        self._late: list[int] = []  # behind those
        self.ttfts_s = [math.nan] * len(prompts)

    def arrived(self, index: int) -> None:
        self._demand.arrived(self._prompts[index].arrival_s, self._works_s[index])
        self._waiting.append(index)

    def begin(self, now_s: float) -> list[float]:
        """Give instances to those that are next while any is free; when those instances are free again."""
        ends_s: list[float] = []
        while self._waiting or self._late:
            pool = self._instances.pool(now_s)
            if min(pool)[0] > 0:
                break
            is_late = not self._waiting
            index = (self._late if is_late else self._waiting).pop(0)
            plan = self._plan(index, pool, now_s)
            in_time = self._prompts[index].arrival_s + self._target_s - now_s
            if plan[-1].end_s > in_time and not is_late and self._waiting:
                self._late.append(index)
                continue
            self._instances.give(plan, now_s)
            ends_s.append(now_s + plan[-1].end_s)
            self.ttfts_s[index] = ends_s[-1] - self._prompts[index].arrival_s
        return ends_s

    def _plan(self, index: int, pool: Sequence[FreeAt], now_s: float) -> tuple[PlannedChunk, ...]:
        after = [*self._waiting, *self._late]
        queued_s = sum([free_s for free_s, _ in pool], 0.0) + sum(
            [self._works_s[each] for each in (index, *after)], 0.0
        )
        arrival_s, num_tokens = self._prompts[index]
        return self._planner.plan(
            num_tokens,
            0,
            (),
            pool,
            price=self._demand.price(now_s, queued_s, len(after), self._num_instances),
            within_s=arrival_s + self._target_s - now_s,
        )


def improvement_table(
    planners: Sequence[tuple[float, SequenceParallelPlanner]],
    num_instances: int,
    lengths: Sequence[int],
    requests_per_s: Sequence[float],
    *,
    num_requests: int = 400,
    seed: int = 0,
) -> ImprovementTable:
    """Return, for each of ``requests_per_s``, the improvement rate whose planner has the least mean TTFT.

    All planners see the same prompts. Of equal ones the first is taken.
    """
    rows: list[tuple[float, float]] = []
    for arrivals_per_s in sorted(requests_per_s):
        prompts = poisson(lengths, arrivals_per_s, num_requests, seed)
        totals_s = {rate: sum(first_tokens(prompts, num_instances, _always(planner))) for rate, planner in planners}
        rows.append((arrivals_per_s, min(totals_s, key=totals_s.__getitem__)))
    return ImprovementTable(tuple(rows))


def _always(planner: SequenceParallelPlanner) -> Callable[[float], SequenceParallelPlanner]:
    return lambda _: planner
