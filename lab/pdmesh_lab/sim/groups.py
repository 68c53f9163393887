"""Groups of simulated instances that compute prompts in turn, and the waits of their members.

A step with a chunk of a shared prompt is computed, and then waits for the KV before the chunk if that is missing. When
a member was lost, steps planned before end instead, with nothing computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from pdmesh.instance.sequence import Sequence
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.policy.pacing import lag
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.departures import SimulatedDepartures
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.planned_step import PlannedStep


class SimulatedGroups:
    """The prefill groups of one instance. ``end`` ends the running step."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        exchange: SimulatedExchange,
        departures: SimulatedDepartures,
        sequences: dict[RequestKey, Sequence],
        end: Callable[[], None],
        go_on: Callable[[PlannedStep], None],
        parallel_step_s: float = 0.0,
    ) -> None:
        self._profile = profile
        self._agenda = agenda
        self._exchange = exchange
        self._departures = departures
        self._sequences = sequences
        self._parallel_step_s = parallel_step_s
        self._end = end
        self._go_on = go_on

    def lead(self, sequence: Sequence, steps: Iterable[StepPlan]) -> None:
        """Set the group of a prompt that this instance leads, so that its KV goes to the members.

        If the group is new, running ``steps`` with chunks of the prompt count as begun now.
        """
        key, group = sequence.key, sequence.prompt.group
        assert group is not None
        is_new = not self._exchange.is_shared(key)
        self._exchange.set_group(
            key,
            group,
            num_computed_tokens=sequence.prompt.num_computed_tokens,
            token_bytes=self._departures.token_bytes,
            last_layer_share=self._departures.last_layer_share,
            landed=partial(self._departures.came, key),
        )
        if is_new:
            for chunk in [chunk for step in steps for chunk in step.chunks]:
                if (chunk.request_id, chunk.epoch) == key:
                    self._exchange.began(key, chunk, self._profile.instance_id)

    def num_present_tokens(self, key: RequestKey) -> int:
        block_size = self._profile.kv_layout.block_size
        return self._exchange.prefix_tokens(key) // block_size * block_size

    def uncomputed(self, plan: StepPlan) -> set[RequestKey]:
        """Return the prompts of a plan's chunks that end without the KV before them."""
        keys = [((chunk.request_id, chunk.epoch), chunk) for chunk in plan.chunks]
        return {key for key, chunk in keys if self._exchange.is_shared(key) and self._since_s(key, chunk) is None}

    def waits(self, step: PlannedStep) -> bool:
        """Return whether a computed step has to wait for other members.

        If so, schedule the step's end, or have the exchange call `go_on` when the missing KV comes.
        """
        if step.plan.in_parallel and self._parallel_step_s and not step.has_met:
            step.has_met = step.waits = True
            step.end_s = self._agenda.now_s + self._parallel_step_s
            step.end = self._agenda.at(step.end_s, self._end)
            return True
        for chunk in step.plan.chunks:
            key = (chunk.request_id, chunk.epoch)
            if not self._exchange.is_shared(key) or (sequence := self._sequences.get(key)) is None:
                continue
            since_s = self._since_s(key, chunk)
            if since_s is None:
                if step.plan.plan_id in sequence.prompt.given_up:
                    continue
                step.waits, step.end = True, None
                self._exchange.wait(key, self._profile.instance_id, chunk.start, partial(self._go_on, step))
                return True
            end_s = since_s + step.duration_s * self._share_behind(key, step.plan)
            if end_s > self._agenda.now_s:
                step.waits = True
                step.end = self._agenda.at(end_s, self._end)
                return True
        return False

    def _since_s(self, key: RequestKey, chunk: ChunkPlan) -> float | None:
        return self._exchange.since_s(key, self._profile.instance_id, chunk.start)

    def _share_behind(self, key: RequestKey, plan: StepPlan) -> float:
        """Return the smallest share of a chunk's time that is left when all KV before the chunk has come."""
        if plan.at_once:
            return 0.0  # the last layer's input was written a layer's time before the end of the slice before
        if plan.in_parallel:
            return lag(self._profile.kv_layout.num_layers, self._exchange.num_members(key))
        return self._departures.last_layer_share
