"""Blame for the death of an instance: the requests that its current step computed may be the cause.

A request that kills every instance that computes it must end at some time, and a bystander must not. Each restart adds
a share of the *blame* (`pdmesh.core.commands.Restart`), and the gateway sums the shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import RequestId, RequestKey

#: Age, in seconds, up to which earlier deaths count for the blame.
MEMORY_S = 30.0

#: Number of remembered deaths.
MAX_DEATHS = 16


class Deaths:
    """Recent deaths of instances."""

    def __init__(self) -> None:
        # The time of each death, and the requests that were being computed.
        self._recent: deque[tuple[float, Set[RequestId]]] = deque(maxlen=MAX_DEATHS)

    def note(self, instance: InstanceState, now_s: float) -> Mapping[RequestKey, float]:
        """Note a death, and return the blame of each request that the instance was computing.

        The blame is the share of recent deaths at which the request was computed, halved if other requests were
        computed with it.
        """
        keys = computing(instance)
        self._recent.append((now_s, {request_id for request_id, _ in keys}))
        recent = [request_ids for at_s, request_ids in self._recent if at_s >= now_s - MEMORY_S]
        most = 1.0 if len(keys) == 1 else SHARED_BLAME
        return {key: most * sum(key[0] in request_ids for request_ids in recent) / len(recent) for key in keys}


def computing(instance: InstanceState) -> Set[RequestKey]:
    """Return the requests that the current step computes, as far as plans tell.

    Plans run in turn, so the step is the oldest in flight, or the urgent one that interrupts it. Each step also
    computes the residents' decodes, except in a prefill phase.
    """
    plans = list(instance.plans.values())
    under_way = [plan for place, plan in enumerate(plans) if not place or plan.urgent]
    keys = {(chunk.request_id, chunk.epoch) for plan in under_way for chunk in plan.chunks}
    if not any(plan.holds_decodes for plan in under_way):
        keys |= {key for key, each in instance.allocations.items() if each.kind is AllocationKind.RESIDENT}
    return keys
