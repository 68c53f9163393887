"""What a modelled instance does as a member of groups that compute prompts in turn: it waits for others, or for nobody.

A step with such a chunk is computed, and then waits for the KV before it if that is not here. When a member was lost,
what was planned before ends instead, with nothing computed; the leader says what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pdmesh.core.events import Event, GroupPrefix
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.plans import PrefillGroup, StepPlan
from pdmesh.policy.pacing import lag
from pdmesh.sim.agenda import Agenda
from pdmesh.sim.departures import Prefill, SimulatedDepartures
from pdmesh.sim.exchange import SimulatedExchange
from pdmesh.sim.planned_step import PlannedStep


class SimulatedGroups:
    """The prefill groups of one instance. ``end`` ends the step that is running."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        exchange: SimulatedExchange,
        departures: SimulatedDepartures,
        report: Callable[[Event], None],
        end: Callable[[], None],
        go_on: Callable[[PlannedStep], None],
        parallel_step_s: float = 0.0,
    ) -> None:
        self._profile = profile
        self._agenda = agenda
        self._exchange = exchange
        self._departures = departures
        self._parallel_step_s = parallel_step_s
        self._report = report
        self._end = end
        self._go_on = go_on
        self._num_lost: dict[RequestKey, int] = {}  # members of the groups that it is in
        self._given_up: set[int] = set()  # plans that wait for nobody

    def tell(
        self, key: RequestKey, group: PrefillGroup, plans: Iterable[StepPlan], steps: Sequence[PlannedStep]
    ) -> None:
        """Members were added, or lost: then what is under way here, ``plans`` and ``steps``, waits for nobody."""
        prefill = self._departures.prefills.get(key)
        num_lost = len(group.lost_ids)
        is_loss = num_lost > self._num_lost.get(key, num_lost if prefill is None else 0)
        self._num_lost[key] = num_lost
        if prefill is not None:
            self._lead(key, prefill, group, steps)
        if not is_loss:
            return
        self._given_up |= {plan.plan_id for plan in plans if _has_chunk(plan, key)}
        for step in steps:
            step.gives_up |= _has_chunk(step.plan, key)
        if prefill is not None:
            block_size = self._profile.kv_layout.block_size
            num_tokens = self._exchange.prefix_tokens(key) // block_size * block_size
            self._report(GroupPrefix(self._profile.instance_id, *key, num_tokens, num_lost))

    def _lead(self, key: RequestKey, prefill: Prefill, group: PrefillGroup, steps: Sequence[PlannedStep]) -> None:
        """The leader's KV goes to those who joined; what it is computing now, as it is computed."""
        is_new = not self._exchange.is_shared(key)
        self._exchange.set_group(
            key,
            group,
            num_computed_tokens=prefill.num_computed_tokens,
            token_bytes=self._departures.token_bytes,
            last_layer_share=self._departures.last_layer_share,
            landed=partial(self._departures.came, key),
        )
        if is_new:
            for chunk in [chunk for step in steps for chunk in step.plan.chunks]:
                if (chunk.request_id, chunk.epoch) == key:
                    self._exchange.began(key, chunk, self._profile.instance_id)

    def forget(self, key: RequestKey) -> None:
        """Forget a prompt that is computed, or freed."""
        self._num_lost.pop(key, None)

    def began(self, step: PlannedStep) -> None:
        step.gives_up = step.plan.plan_id in self._given_up
        self._given_up.discard(step.plan.plan_id)

    def waits(self, step: PlannedStep) -> bool:
        """Whether a step that is computed waits for others; it goes on by itself, or when its end is due."""
        if step.plan.in_parallel and self._parallel_step_s and not step.has_met:
            step.has_met = step.waits = True
            step.end_s = self._agenda.now_s + self._parallel_step_s
            step.end = self._agenda.at(step.end_s, self._end)
            return True
        for chunk in step.plan.chunks:
            key = (chunk.request_id, chunk.epoch)
            if not self._exchange.is_shared(key) or chunk in step.undone:
                continue
            since_s = self._exchange.since_s(key, self._profile.instance_id, chunk.start)
            if since_s is None and step.gives_up:
                step.undone = (*step.undone, chunk)
                continue
            if since_s is None:
                step.waits, step.end = True, None
                self._exchange.wait(key, self._profile.instance_id, chunk.start, partial(self._go_on, step))
                return True
            end_s = since_s + step.duration_s * self._share_behind(key, step.plan)
            if end_s > self._agenda.now_s:
                step.waits = True
                step.end = self._agenda.at(end_s, self._end)
                return True
        return False

    def _share_behind(self, key: RequestKey, plan: StepPlan) -> float:
        """What is left of a chunk when all KV before it is here, at least."""
        if plan.at_once:
            return 0.0  # what its last layer waited for was written a layer's time before the end of the slice before
        if plan.in_parallel:
            return lag(self._profile.kv_layout.num_layers, self._exchange.num_members(key))
        return self._departures.last_layer_share


def _has_chunk(plan: StepPlan, key: RequestKey) -> bool:
    return any((chunk.request_id, chunk.epoch) == key for chunk in plan.chunks)
