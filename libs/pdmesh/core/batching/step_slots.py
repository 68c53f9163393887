"""Step slots: the instances that can be given a step plan now.

One has a step slot for a *regular* plan while it has fewer than its plans in flight, of which it has one more for each
stage but the first; and for an *urgent* one, beyond them, while some request may run before all that it has in flight:
at most one at a time.

They are kept up to date, and sorted as the bundle's placements have it, by the instances that changed: so an event
costs what it changes, not what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from pdmesh.core.batching.modes import Modes
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.lengths import Lengths
from pdmesh.core.instances.ranking import Decoders, Ranked, Ranking, ranked
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.queue import first_of
from pdmesh.model import InstanceId
from pdmesh.policy.batching import Mode
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.interruption import ShortInterruptsLong, StepInFlight
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.policy.views import InstanceView

_BY_NUMBER = attrgetter("number")


class _Inside(NamedTuple):
    """What may interrupt the steps that an instance has in flight, as long as those stay as they are."""

    instance: InstanceState
    num_flights: int  # of the instance when it was looked at
    states: list[RequestState]  # of the requests in flight
    max_tokens: int  # to compute, of the longest prompt that may; 0: none


class StepSlots:
    def __init__(self, mesh: MeshState, plans_in_flight: int, bundle: Bundle, modes: Modes) -> None:
        self._mesh = mesh
        self._modes = modes
        self._plans_in_flight = plans_in_flight
        self._reset(bundle)

    def _reset(self, bundle: Bundle) -> None:
        """Everything is to be looked at, under this bundle."""
        self._bundle = bundle
        self._computing: dict[InstanceId, InstanceState] = {}  # with room for a regular plan, and prompts for it
        self._idle: dict[InstanceId, InstanceState] = {}  # with room for one, and no prompt
        self._spare = Ranking(bundle.prefill_placement.key)  # those that only decode, and have room in their steps
        self._perhaps_spare: dict[InstanceId, InstanceState] = {}  # the same, not yet looked at: nobody waited since
        self._among: dict[InstanceId, dict[InstanceId, InstanceState]] = {}  # which of these each is in
        self._inside: dict[InstanceId, _Inside] = {}  # of those with plans in flight, and a bundle that interrupts
        self._interruptible: dict[InstanceId, _Inside] = {}  # of those that somebody may interrupt
        self._interruptible_by = Lengths()  # the most tokens of a prompt that may interrupt them
        self._with_own: dict[InstanceId, InstanceState] = {}  # of the same: where one placed there may interrupt
        self._takers = Ranking(bundle.prefill_placement.key)  # the idle and the interruptible
        self._with_long: dict[InstanceId, None] = {}
        self._prefilling: dict[str, Ranking] = {}  # by KV group: those that take prompts, the least queued first
        self._prefilling_in: dict[InstanceId, str] = {}  # the KV group of each of those
        self.decoders = Decoders(bundle.decode_placement, bundle.run_ahead)
        self._mesh.changed.update(dict.fromkeys(self._mesh.instances))

    def update(self, bundle: Bundle) -> None:
        """Look again at the instances that have changed; at all of them under another bundle."""
        if bundle is not self._bundle:
            self._reset(bundle)
        if self._mesh.changed:
            self._look_at_changed()
        if self._mesh.queue.has_line:
            self.decoders.catch_up()

    def _look_at_changed(self) -> None:
        for instance_id in self._mesh.changed:
            instance = self._mesh.instances.get(instance_id)
            self._note(instance_id, instance)
            if (among := self._among.pop(instance_id, None)) is not None:
                among.pop(instance_id, None)
            if instance_id in self._spare.members:
                self._spare.discard(instance_id)
            self._with_own.pop(instance_id, None)
            before = self._interruptible.pop(instance_id, None)
            if instance is None:
                self._inside.pop(instance_id, None)
            elif instance.reachable:
                self._look_at(instance)
            inside = self._interruptible.get(instance_id)
            if inside is not before:
                if before is not None:
                    self._interruptible_by.remove(before.max_tokens)
                if inside is not None:
                    self._interruptible_by.add(inside.max_tokens)
            if instance is not None and (inside is not None or instance_id in self._idle):
                self._takers.put(instance)
            elif instance_id in self._takers.members:
                self._takers.discard(instance_id)
        self._mesh.changed.clear()

    def refresh(self, instances: Iterable[InstanceState]) -> None:
        """Look at the room of instances that changed. Whether they have a step slot is left to `update`."""
        for instance in instances:
            self._note(instance.instance_id, instance)
            for ranking in (self._spare, self._takers):
                if instance.instance_id in ranking.members:
                    ranking.put(instance)

    def _note(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        self.decoders.look_at(instance_id, instance)
        self._note_prefilling(instance_id, instance)
        if instance is None or not instance.has_long:
            self._with_long.pop(instance_id, None)
        else:
            self._with_long[instance_id] = None

    def _note_prefilling(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        bundle = self._bundle
        if bundle.local_prefill is None:
            return
        takes = instance is not None and instance.takes_prompts and instance.may_add_waiting(0, bundle.waiting_kv_share)
        before = self._prefilling_in.get(instance_id)
        if before is not None and (instance is None or not takes or instance.kv_group != before):
            self._prefilling[before].discard(instance_id)
            del self._prefilling_in[instance_id]
        if instance is not None and takes:
            if instance.kv_group not in self._prefilling:
                self._prefilling[instance.kv_group] = Ranking(_queued_tokens)
            self._prefilling[instance.kv_group].put(instance)
            self._prefilling_in[instance_id] = instance.kv_group

    def _look_at(self, instance: InstanceState) -> None:
        instance_id = instance.instance_id
        if self.has_room(instance):
            among = None
            if instance.prefills:
                among = self._computing
            elif instance.role_prefills:
                among = self._idle
            elif self._bundle.local_prefill is not None and instance.num_decode_tokens:
                among = self._perhaps_spare
            if among is not None:
                among[instance_id] = instance
                self._among[instance_id] = among
        interruption = self._bundle.interruption
        if interruption is None or not instance.plans or self._modes.mode_of(instance) is Mode.EXCLUSIVE:
            return  # an urgent chunk could come late, into a decode phase
        inside = self._look_inside(instance, interruption)
        if inside.max_tokens > 0:
            self._interruptible[instance_id] = inside
            states, max_tokens = inside.states, inside.max_tokens
            if any(s.num_work_tokens <= max_tokens and s not in states for s in instance.prefills):
                self._with_own[instance_id] = instance

    def _look_inside(self, instance: InstanceState, interruption: ShortInterruptsLong) -> _Inside:
        known = self._inside.get(instance.instance_id)
        if known is not None and known.instance is instance and known.num_flights == instance.num_flights:
            return known
        steps: list[StepInFlight] = []
        in_flight: list[RequestState] = []
        plans = instance.plans.values()
        for plan in plans:
            found = [self._mesh.find((chunk.request_id, chunk.epoch)) for chunk in plan.chunks]
            states = [state for state in found if state is not None]
            chunks = tuple([ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks])
            num_decodes = instance.allocated.num_decoding if plan.with_decodes else 0
            num_context_tokens = instance.view.num_resident_tokens if plan.with_decodes else 0
            shape = StepShape(chunks, num_decodes, num_context_tokens).shared_by(instance.num_stages)
            longest = max([state.num_work_tokens for state in states], default=0)
            steps.append(StepInFlight(longest, shape, instance.num_stages))
            in_flight += states
        may_be = not any(plan.urgent for plan in plans)
        max_tokens = interruption.max_tokens(steps) if may_be else 0
        inside = self._inside[instance.instance_id] = _Inside(instance, instance.num_flights, in_flight, max_tokens)
        return inside

    # --- what there is ---

    def has_room(self, instance: InstanceState) -> bool:
        """Whether it can be given a regular plan."""
        return instance.has_step_slot(self._plans_in_flight)

    @property
    def any_long(self) -> bool:
        """Whether some instance computes or decodes a long request."""
        return bool(self._with_long)

    def computing(self) -> list[InstanceState]:
        """Return instances with own prompts for a regular or an urgent plan, in the order they joined."""
        if not self._computing and not self._with_own:
            return []
        return sorted((self._computing | self._with_own).values(), key=_BY_NUMBER)

    def for_waiting(self) -> bool:
        """Whether a waiting request may find one."""
        queue, bundle = self._mesh.queue, self._bundle
        if not queue.has_line:
            return False
        least = queue.least_work_tokens
        if len(self._mesh.weights) > 1:
            return True  # a request that was begun may have instances of its own
        if self._idle or least <= self._interruptible_by.greatest:
            return True
        return bundle.local_prefill is not None and least < bundle.long_prompt_tokens and self._any_spare()

    def for_prompts(self, opened: Sequence[InstanceState], *, others: bool) -> Iterable[InstanceState]:
        """Return instances ``opened``, and ``others`` that may have a step slot, in the order of the placement."""
        line = self._takers.line() if others else []
        if not line and len(opened) == 1:
            return opened
        key = self._bundle.prefill_placement.key
        members = self._takers.members if others else ()
        beside = [ranked(instance, key) for instance in opened if instance.instance_id not in members]
        beside.sort()
        return _merged(line, beside)

    def is_taker(self, instance: InstanceState) -> bool:
        """Whether it is idle, or somebody may interrupt it."""
        return instance.instance_id in self._takers.members

    def least_queued(self, kv_group: str) -> InstanceState | None:
        """Return the least queued instance that takes prompts and is not held back; asked with local prefill only."""
        ranking = self._prefilling.get(kv_group)
        line = [] if ranking is None else ranking.line()
        return line[0][-1] if line else None

    def is_spare(self, instance: InstanceState) -> bool:
        """Whether it only decodes, and has room in its steps."""
        return self._any_spare() and instance.instance_id in self._spare.members

    def spare(self) -> Iterator[InstanceState]:
        """Yield instances that only decode and have room in their steps, in the order of the placement."""
        if self._any_spare():
            for *_, instance in self._spare.line():
                yield instance

    def _any_spare(self) -> bool:
        if self._perhaps_spare:
            takes_local = self._bundle.packing.takes_local
            for instance in self._perhaps_spare.values():
                if takes_local(self._modes.beside(instance)):
                    self._spare.put(instance)
            self._perhaps_spare.clear()
        return bool(self._spare.members)

    def idle(self) -> Iterable[InstanceState]:
        """Return instances with room for a regular plan, and no prompt for it."""
        return self._idle.values()

    def is_idle(self, instance: InstanceState) -> bool:
        return instance.instance_id in self._idle

    def is_interruptible(self, instance: InstanceState, num_work_tokens: int = 0) -> bool:
        """Whether a prompt with so many tokens to compute may interrupt its steps, if it is urgent enough."""
        inside = self._interruptible.get(instance.instance_id)
        return inside is not None and num_work_tokens <= inside.max_tokens

    def may_interrupt(self, instance: InstanceState, state: RequestState, now_s: float) -> bool:
        """Whether a request may run before all that the instance has in flight, of which it is not."""
        inside = self._interruptible.get(instance.instance_id)
        return (
            inside is not None
            and state.num_work_tokens <= inside.max_tokens
            and state.group is None  # it waits for others, which might wait for what is in flight here
            and state not in inside.states
            and first_of(self._bundle.order, [state, *inside.states], now_s) is state
        )


def _queued_tokens(instance: InstanceView) -> tuple[float, ...]:
    return (instance.num_queued_tokens,)


def _merged(line: Iterable[Ranked], beside: Sequence[Ranked]) -> Iterator[InstanceState]:
    """Two that are sorted as one. Usually only the first few are asked for."""
    num_taken = 0
    for entry in line:
        while num_taken < len(beside) and beside[num_taken] < entry:
            yield beside[num_taken][-1]
            num_taken += 1
        yield entry[-1]
    for entry in beside[num_taken:]:
        yield entry[-1]
