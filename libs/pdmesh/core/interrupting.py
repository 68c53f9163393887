"""Urgent step plans: who may run before all that an instance has in flight, and between two layers of what it runs.

A request may if it is before all requests in flight there in the order, if no chunk of it is among them, and if the
bundle says that it is worth it.
"""

from __future__ import annotations

from pdmesh.core.books import Books
from pdmesh.core.queue import in_order
from pdmesh.core.state import Instance, RequestState
from pdmesh.policy.base import Bundle
from pdmesh.policy.interruption import StepInFlight
from pdmesh.policy.latency import ChunkShape, StepShape


def can_be_interrupted(bundle: Bundle, instance: Instance) -> bool:
    """Whether an urgent plan may be sent to an instance, for whomever: at most one at a time."""
    return bundle.interruption is not None and instance.urgent_plan_id is None and bool(instance.plans)


def may_interrupt(bundle: Bundle, books: Books, instance: Instance, state: RequestState, now_s: float) -> bool:
    """Whether a request with no chunk in flight may run before all that the instance has in flight."""
    if bundle.interruption is None or not can_be_interrupted(bundle, instance):
        return False
    in_flight = _in_flight(books, instance)
    others = [books.requests[request.request_id] for step in in_flight for request in step.requests]
    return (
        state not in others
        and bundle.interruption.may(state.request, in_flight)
        and in_order(bundle.order, [*others, state], now_s)[0] is state
    )


def _in_flight(books: Books, instance: Instance) -> list[StepInFlight]:
    steps: list[StepInFlight] = []
    for plan in instance.plans.values():
        states = [state for chunk in plan.chunks if (state := books.find((chunk.request_id, chunk.epoch))) is not None]
        shape = StepShape(
            tuple([ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks]),
            instance.num_decoding if plan.with_decodes else 0,
            instance.view.num_resident_tokens if plan.with_decodes else 0,
        )
        steps.append(StepInFlight(tuple([state.request for state in states]), shape))
    return steps
