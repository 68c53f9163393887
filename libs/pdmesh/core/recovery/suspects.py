"""Which requests may be why an instance died: those that the step under way computed.

A request that kills each instance that computes it has to end some time, and one that is there by chance has not. Each
time a request starts again it gets its share of the *blame* (`pdmesh.core.commands.Restart`), and its gateway adds up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import RequestId, RequestKey

#: What killed other instances so long ago may have killed this one, too.
MEMORY_S = 30.0

#: Deaths that are remembered.
MAX_DEATHS = 16


class Deaths:
    """Deaths of instances, the last ones."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Set[RequestId]]] = deque(
            maxlen=MAX_DEATHS
        )  # when, and what was being computed

    def note(self, instance: InstanceState, now_s: float) -> Mapping[RequestKey, float]:
        """Take note of a death and return the blame of each request that the instance computed.

        It is the share of the recent deaths that the request may have caused, half as much beside other requests.
        """
        keys = computing(instance)
        self._recent.append((now_s, {request_id for request_id, _ in keys}))
        recent = [request_ids for at_s, request_ids in self._recent if at_s >= now_s - MEMORY_S]
        most = 1.0 if len(keys) == 1 else SHARED_BLAME
        return {key: most * sum(key[0] in request_ids for request_ids in recent) / len(recent) for key in keys}


def computing(instance: InstanceState) -> Set[RequestKey]:
    """Return the requests that the step under way computes, as far as plans tell.

    Plans run in turn, so the step is the oldest in flight, or the urgent one that interrupts it. What decodes there is
    in each step, but for those of a prefill phase.
    """
    plans = list(instance.plans.values())
    under_way = [plan for place, plan in enumerate(plans) if not place or plan.urgent]
    keys = {(chunk.request_id, chunk.epoch) for plan in under_way for chunk in plan.chunks}
    if not any(plan.holds_decodes for plan in under_way):
        keys |= {key for key, each in instance.allocations.items() if each.kind is AllocationKind.RESIDENT}
    return keys
