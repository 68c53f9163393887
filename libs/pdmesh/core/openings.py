"""Openings: the instances that can be given a step plan now.

One has an opening for a *regular* plan while it has fewer than its plans in flight, and for an *urgent* one, beyond
them, while some request may run before all that it has in flight: at most one at a time, and not into a step of a
group, of which all members would have to wait.

They are kept up to date by the instances that changed, so that an event costs what it changes, not what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pdmesh.core.books import Books
from pdmesh.core.queue import in_order
from pdmesh.core.state import Instance, RequestState
from pdmesh.model import InstanceId
from pdmesh.policy.base import Bundle
from pdmesh.policy.interruption import StepInFlight
from pdmesh.policy.latency import ChunkShape, StepShape

_BY_NUMBER = attrgetter("number")


@dataclass(frozen=True, slots=True)
class _Interruptible:
    """An instance whose steps may be interrupted, by a prompt of at most ``max_tokens``."""

    instance: Instance
    states: list[RequestState]  # of the requests in flight
    max_tokens: int


class Openings:
    def __init__(self, books: Books, plans_in_flight: int) -> None:
        self._books = books
        self._plans_in_flight = plans_in_flight
        self._bundle: Bundle | None = None
        self._computing: dict[InstanceId, Instance] = {}  # with room for a regular plan, and prompts for it
        self._idle: dict[InstanceId, Instance] = {}  # with room for one, and no prompt
        self._spare: dict[InstanceId, Instance] = {}  # those that only decode, and have room in their steps
        self._perhaps_spare: dict[InstanceId, Instance] = {}  # the same, not looked at yet: nobody has waited since
        self._interruptible: dict[InstanceId, _Interruptible] = {}

    def update(self, bundle: Bundle) -> None:
        """Look again at the instances that have changed; at all of them under another bundle."""
        books = self._books
        if bundle is not self._bundle:
            self._bundle = bundle
            books.changed.update(dict.fromkeys(books.instances))
        for instance_id in books.changed:
            self._computing.pop(instance_id, None)
            self._idle.pop(instance_id, None)
            self._spare.pop(instance_id, None)
            self._perhaps_spare.pop(instance_id, None)
            self._interruptible.pop(instance_id, None)
            instance = books.instances.get(instance_id)
            if instance is not None and instance.reachable:
                self._look_at(instance, bundle)
        books.changed.clear()

    def _look_at(self, instance: Instance, bundle: Bundle) -> None:
        if self.has_room(instance):
            if instance.prefills:
                self._computing[instance.instance_id] = instance
            elif instance.role.can_prefill:
                self._idle[instance.instance_id] = instance
            elif bundle.local_prompt_tokens and instance.decode_room:
                self._perhaps_spare[instance.instance_id] = instance
        interruptible = self._look_inside(instance, bundle)
        if interruptible is not None:
            self._interruptible[instance.instance_id] = interruptible

    def _look_inside(self, instance: Instance, bundle: Bundle) -> _Interruptible | None:
        plans = instance.plans.values()
        if bundle.interruption is None or not plans or any(plan.urgent or plan.group for plan in plans):
            return None
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
        max_tokens = bundle.interruption.max_prompt_tokens(steps)
        return _Interruptible(instance, in_flight, max_tokens) if max_tokens > 0 else None

    def has_room(self, instance: Instance) -> bool:
        """Whether it can be given a regular plan."""
        return instance.num_regular_plans < self._plans_in_flight

    def instances(self) -> list[Instance]:
        """Those with prompts to compute, or steps that someone may interrupt, in the order in which they joined."""
        queue = self._books.queue
        found = dict(self._computing)
        for instance_id, entry in self._interruptible.items():
            instance = entry.instance
            if instance.prefills or (queue.has_line and queue.least_prompt_tokens <= entry.max_tokens):
                found[instance_id] = instance
        return sorted(found.values(), key=_BY_NUMBER)

    def idle(self) -> dict[InstanceId, Instance]:
        """Those with nothing to compute, if someone waits; those that only decode, if someone may be short enough."""
        queue, bundle = self._books.queue, self._bundle
        if bundle is None or not queue.has_line:
            return {}
        if queue.least_prompt_tokens > bundle.local_prompt_tokens:
            return dict(self._idle)
        for instance_id, instance in self._perhaps_spare.items():
            if bundle.packing.takes_local(instance.view):
                self._spare[instance_id] = instance
        self._perhaps_spare.clear()
        return self._idle | self._spare

    def may_interrupt(self, instance: Instance, state: RequestState, now_s: float) -> bool:
        """Whether a request may run before all that the instance has in flight, of which it is not."""
        entry = self._interruptible.get(instance.instance_id)
        return (
            self._bundle is not None
            and entry is not None
            and state.request.num_prompt_tokens <= entry.max_tokens
            and state not in entry.states
            and in_order(self._bundle.order, [*entry.states, state], now_s)[0] is state
        )
