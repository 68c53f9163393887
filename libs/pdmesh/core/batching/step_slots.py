"""Step slots: the instances that can be given a step plan now.

An instance has a step slot for a *regular* plan while fewer than its allowed number of plans are in flight. Each stage
after the first allows one more. An instance also has a slot for one *urgent* plan beyond them while some request may
run before all that it has in flight.

Only changed instances are looked at and sorted again, in the order of the bundle's placements. So the cost of an event
depends on the number of changes, not on the size of the mesh.
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
    """Steps in flight on an instance, and the prompts that may interrupt them. Valid while ``num_flights`` stays equal.

    ``states`` are the requests in flight. ``max_tokens`` is the largest number of tokens to compute of a prompt that
    may interrupt; 0 if none may.
    """

    instance: InstanceState
    num_flights: int
    states: list[RequestState]
    max_tokens: int


class StepSlots:
    """Instances with step slots, by their present work: computing prompts, idle, decoding with room, or interruptible.

    ``plans_in_flight`` is the allowed number of regular plans of an instance of one stage.
    """

    def __init__(self, mesh: MeshState, plans_in_flight: int, bundle: Bundle, modes: Modes) -> None:
        self._mesh = mesh
        self._modes = modes
        self._plans_in_flight = plans_in_flight
        self._reset(bundle)

    def _reset(self, bundle: Bundle) -> None:
        """Forget all findings, and mark every instance as changed, under a new bundle."""
        self._bundle = bundle
        # Instances with a regular step slot: with prompts for it, without any, and (last) that only decode. The first
        # two and `_perhaps_spare` are disjoint; `_among` names the container of each instance.
        self._computing: dict[InstanceId, InstanceState] = {}
        self._idle: dict[InstanceId, InstanceState] = {}
        self._spare = Ranking(bundle.prefill_placement.key)
        # Instances that only decode, and were not yet asked whether their steps have room.
        self._perhaps_spare: dict[InstanceId, InstanceState] = {}
        self._among: dict[InstanceId, dict[InstanceId, InstanceState]] = {}
        # Cached findings; the interruptible instances, with the longest prompts that may interrupt them; and the ones
        # that a prompt of their own may interrupt.
        self._inside: dict[InstanceId, _Inside] = {}
        self._interruptible: dict[InstanceId, _Inside] = {}
        self._interruptible_by = Lengths()
        self._with_own: dict[InstanceId, InstanceState] = {}
        # The idle and the interruptible instances.
        self._takers = Ranking(bundle.prefill_placement.key)
        self._with_long: dict[InstanceId, None] = {}
        # Instances that take prompts, the least queued first, by KV group; and the KV group of each.
        self._prefilling: dict[str, Ranking] = {}
        self._prefilling_in: dict[InstanceId, str] = {}
        self.decoders = Decoders(bundle.decode_placement, bundle.run_ahead)
        self._mesh.changed.update(dict.fromkeys(self._mesh.instances))

    def update(self, bundle: Bundle) -> None:
        """Look again at the changed instances, or at all of them under another bundle.

        Decoders are only brought up to date while a request waits.
        """
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
        """Update the room and the order of some instances. `update` decides later whether they have a step slot."""
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
            # An urgent chunk could arrive late, in a decode phase.
            return
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

    # --- questions ---

    def has_room(self, instance: InstanceState) -> bool:
        """Whether an instance can be given a regular plan."""
        return instance.has_step_slot(self._plans_in_flight)

    @property
    def any_long(self) -> bool:
        """Whether some instance computes a long prompt, still has its KV, or decodes a long request."""
        return bool(self._with_long)

    def computing(self) -> list[InstanceState]:
        """Return instances with own prompts for a regular or an urgent plan, in the order in which they joined."""
        if not self._computing and not self._with_own:
            return []
        return sorted((self._computing | self._with_own).values(), key=_BY_NUMBER)

    def for_waiting(self) -> bool:
        """Whether a waiting request may find a step slot. False if certainly none does."""
        queue, bundle = self._mesh.queue, self._bundle
        if not queue.has_line:
            return False
        least = queue.least_work_tokens
        if len(self._mesh.weights) > 1:
            # A request that older weights began may have instances of its own.
            return True
        if self._idle or least <= self._interruptible_by.greatest:
            return True
        return bundle.local_prefill is not None and least < bundle.long_prompt_tokens and self._any_spare()

    def for_prompts(self, opened: Sequence[InstanceState], *, others: bool) -> Iterable[InstanceState]:
        """Return the ``opened`` instances in the order of the placement.

        With ``others``, also the idle and the interruptible instances.
        """
        line = self._takers.line() if others else []
        if not line and len(opened) == 1:
            return opened
        key = self._bundle.prefill_placement.key
        members = self._takers.members if others else ()
        beside = [ranked(instance, key) for instance in opened if instance.instance_id not in members]
        beside.sort()
        return _merged(line, beside)

    def is_taker(self, instance: InstanceState) -> bool:
        """Whether an instance is idle or interruptible."""
        return instance.instance_id in self._takers.members

    def least_queued(self, kv_group: str) -> InstanceState | None:
        """Return the instance of a KV group with the fewest queued tokens that takes prompts and is not held back.

        None without one, and always under a bundle without local prefill.
        """
        ranking = self._prefilling.get(kv_group)
        line = [] if ranking is None else ranking.line()
        return line[0][-1] if line else None

    def is_spare(self, instance: InstanceState) -> bool:
        """Whether an instance only decodes, and has room in its steps."""
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
        """Return instances that prefill by role, with room for a regular plan and no prompt for it."""
        return self._idle.values()

    def is_idle(self, instance: InstanceState) -> bool:
        return instance.instance_id in self._idle

    def is_interruptible(self, instance: InstanceState, num_work_tokens: int = 0) -> bool:
        """Whether an urgent enough prompt with ``num_work_tokens`` to compute may interrupt the instance's steps."""
        inside = self._interruptible.get(instance.instance_id)
        return inside is not None and num_work_tokens <= inside.max_tokens

    def may_interrupt(self, instance: InstanceState, state: RequestState, now_s: float) -> bool:
        """Whether a request, which is not in flight on the instance, may run before all that is.

        A prompt that a group computes may not: its chunk waits for others, which might wait for the steps in flight.
        """
        inside = self._interruptible.get(instance.instance_id)
        return (
            inside is not None
            and state.num_work_tokens <= inside.max_tokens
            and state.group is None
            and state not in inside.states
            and first_of(self._bundle.order, [state, *inside.states], now_s) is state
        )


def _queued_tokens(instance: InstanceView) -> tuple[float, ...]:
    return (instance.num_queued_tokens,)


def _merged(line: Iterable[Ranked], beside: Sequence[Ranked]) -> Iterator[InstanceState]:
    """Yield the instances of two sorted sequences in order. Lazy: usually only the first few are needed."""
    num_taken = 0
    for entry in line:
        while num_taken < len(beside) and beside[num_taken] < entry:
            yield beside[num_taken][-1]
            num_taken += 1
        yield entry[-1]
    for entry in beside[num_taken:]:
        yield entry[-1]
