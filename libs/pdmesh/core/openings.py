"""Openings: the instances that can be given a step plan now.

One has an opening for a *regular* plan while it has fewer than its plans in flight, and for an *urgent* one, beyond
them, while some request may run before all that it has in flight: at most one at a time, and not into a step of a
group, of which all members would have to wait.

They are kept up to date, and sorted as the bundle's placements have it, by the instances that changed: so an event
costs what it changes, not what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter

from pdmesh.core.batching import Modes
from pdmesh.core.books import Books
from pdmesh.core.lengths import Lengths
from pdmesh.core.queue import first_of
from pdmesh.core.ranking import Decoders, Ranking
from pdmesh.core.state import InstanceBooks, RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.base import Bundle
from pdmesh.policy.batching import Mode
from pdmesh.policy.interruption import StepInFlight
from pdmesh.policy.latency import ChunkShape, StepShape

_BY_NUMBER = attrgetter("number")


@dataclass(frozen=True, slots=True)
class _Interruptible:
    """An instance whose steps may be interrupted, by a prompt of at most ``max_tokens``."""

    instance: InstanceBooks
    states: list[RequestState]  # of the requests in flight
    max_tokens: int


class Openings:
    def __init__(self, books: Books, plans_in_flight: int, bundle: Bundle, modes: Modes) -> None:
        self._books = books
        self._modes = modes
        self._plans_in_flight = plans_in_flight
        self._reset(bundle)

    def _reset(self, bundle: Bundle) -> None:
        """Everything is to be looked at, under this bundle."""
        self._bundle = bundle
        self._computing: dict[InstanceId, InstanceBooks] = {}  # with room for a regular plan, and prompts for it
        self._idle = Ranking(bundle.prefill_placement.key)  # with room for one, and no prompt
        self._spare = Ranking(bundle.prefill_placement.key)  # those that only decode, and have room in their steps
        self._perhaps_spare: dict[InstanceId, InstanceBooks] = {}  # the same, not yet looked at: nobody waited since
        self._interruptible: dict[InstanceId, _Interruptible] = {}
        self._interruptible_line = Ranking(bundle.prefill_placement.key)  # of the same
        self._interruptible_by = Lengths()  # the most tokens of who may interrupt them
        self._with_own: dict[InstanceId, InstanceBooks] = {}  # of the same: where one placed there may interrupt
        self._with_long: dict[InstanceId, None] = {}
        self.decoders = Decoders(bundle.decode_placement)
        self._books.changed.update(dict.fromkeys(self._books.instances))

    def update(self, bundle: Bundle) -> None:
        """Look again at the instances that have changed; at all of them under another bundle."""
        if bundle is not self._bundle:
            self._reset(bundle)
        self.refresh(self._books.changed)
        for instance_id in self._books.changed:
            self._computing.pop(instance_id, None)
            self._idle.discard(instance_id)
            self._spare.discard(instance_id)
            self._perhaps_spare.pop(instance_id, None)
            if (entry := self._interruptible.pop(instance_id, None)) is not None:
                self._interruptible_line.discard(instance_id)
                self._interruptible_by.remove(entry.max_tokens)
                self._with_own.pop(instance_id, None)
            instance = self._books.instances.get(instance_id)
            if instance is not None and instance.reachable:
                self._look_at(instance)
        self._books.changed.clear()

    def refresh(self, instance_ids: Iterable[InstanceId]) -> None:
        """These have changed: see what room they have. Whether they have an opening is left to `update`."""
        for instance_id in instance_ids:
            instance = self._books.instances.get(instance_id)
            self.decoders.look_at(instance_id, instance)
            if instance is None or not instance.has_long:
                self._with_long.pop(instance_id, None)
            else:
                self._with_long[instance_id] = None
            for ranking in (self._idle, self._spare, self._interruptible_line):
                if instance is not None and instance_id in ranking:
                    ranking.put(instance)

    def _look_at(self, instance: InstanceBooks) -> None:
        bundle = self._bundle
        if self.has_room(instance):
            if instance.prefills:
                self._computing[instance.instance_id] = instance
            elif instance.role.can_prefill:
                self._idle.put(instance)
            elif bundle.local_prompt_tokens and instance.decode_room:
                self._perhaps_spare[instance.instance_id] = instance
        self._look_inside(instance)

    def _look_inside(self, instance: InstanceBooks) -> None:
        """Note it if its steps may be interrupted."""
        plans, interruption = instance.plans.values(), self._bundle.interruption
        if interruption is None or not plans or self._modes.mode_of(instance) is Mode.EXCLUSIVE:
            return  # an urgent chunk could come late, into a decode phase
        if any(plan.urgent or plan.group for plan in plans):
            return
        steps: list[StepInFlight] = []
        in_flight: list[RequestState] = []
        for plan in plans:
            found = (self._books.find((chunk.request_id, chunk.epoch)) for chunk in plan.chunks)
            states = [state for state in found if state is not None]
            chunks = tuple([ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks])
            num_decodes = instance.num_decoding if plan.with_decodes else 0
            num_context_tokens = instance.view.num_resident_tokens if plan.with_decodes else 0
            shape = StepShape(chunks, num_decodes, num_context_tokens)
            steps.append(StepInFlight(tuple([state.request for state in states]), shape))
            in_flight += states
        max_tokens = interruption.max_prompt_tokens(steps)
        if max_tokens <= 0:
            return
        self._interruptible[instance.instance_id] = _Interruptible(instance, in_flight, max_tokens)
        self._interruptible_line.put(instance)
        self._interruptible_by.add(max_tokens)
        if any(s.request.num_prompt_tokens <= max_tokens and s not in in_flight for s in instance.prefills):
            self._with_own[instance.instance_id] = instance

    # --- what there is ---

    def has_room(self, instance: InstanceBooks) -> bool:
        """Whether it can be given a regular plan."""
        return instance.num_regular_plans < self._plans_in_flight

    @property
    def any_long(self) -> bool:
        """Whether some instance computes or decodes a long request."""
        return bool(self._with_long)

    def computing(self) -> list[InstanceBooks]:
        """Those with prompts of their own for a regular plan, perhaps for an urgent one; in the order they joined."""
        return sorted((self._computing | self._with_own).values(), key=_BY_NUMBER)

    def for_waiting(self) -> bool:
        """Whether somebody who waits may find one."""
        queue, bundle = self._books.queue, self._bundle
        if not queue.has_line:
            return False
        least = queue.least_prompt_tokens
        if self._idle or least <= self._interruptible_by.greatest:
            return True
        if least <= bundle.local_prompt_tokens and self.spare():
            return True
        # A group may take someone whatever its members do.
        return bool(self._books.groups) and any(entry.instance.prefills for entry in self._interruptible.values())

    def for_prompts(self, opened: Mapping[InstanceId, InstanceBooks], *, others: bool) -> Iterator[InstanceBooks]:
        """Those ``opened``, and the ``others`` that may have an opening, in the order of the placement."""
        key = self._bundle.prefill_placement.key
        lines = [line for line in (self._idle.line(), self._interruptible_line.line()) if line and others]
        if not lines and len(opened) == 1:
            yield from opened.values()
            return
        lines.append(sorted([(key(instance.view), name, instance) for name, instance in opened.items()]))
        last: InstanceBooks | None = None
        for *_, instance in merge(*lines):
            if instance is not last:  # it may be in several of them
                yield instance
            last = instance

    def spare(self) -> list[InstanceBooks]:
        """Those that only decode, with room in their steps, as the placement sorts them."""
        for instance in self._perhaps_spare.values():
            if self._bundle.packing.takes_local(instance.view):
                self._spare.put(instance)
        self._perhaps_spare.clear()
        return [instance for _, _, instance in self._spare.line()]

    def is_idle(self, instance: InstanceBooks) -> bool:
        return instance.instance_id in self._idle

    def is_interruptible(self, instance: InstanceBooks, num_prompt_tokens: int = 0) -> bool:
        """Whether a prompt of this length may interrupt its steps, if it is urgent enough."""
        entry = self._interruptible.get(instance.instance_id)
        return entry is not None and num_prompt_tokens <= entry.max_tokens

    def may_interrupt(self, instance: InstanceBooks, state: RequestState, now_s: float) -> bool:
        """Whether a request may run before all that the instance has in flight, of which it is not."""
        entry = self._interruptible.get(instance.instance_id)
        return (
            entry is not None
            and state.request.num_prompt_tokens <= entry.max_tokens
            and state not in entry.states
            and first_of(self._bundle.order, [state, *entry.states], now_s) is state
        )
