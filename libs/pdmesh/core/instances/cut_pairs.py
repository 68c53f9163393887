"""Pairs of peers that could not reach each other lately, though both are alive: work goes around them for a while.

A pair is two instances between which a transfer of KV failed, or a gateway and an instance whose tokens stopped coming.
The scheduler learns of a pair only by that failure: both peers go on reporting to the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import Request

#: Most remembered pairs; the oldest are forgotten.
MAX_PAIRS = 4096

_NOBODY: Set[str] = frozenset()


class CutPairs:
    """Partitioned pairs of instances and gateways, by the id of either peer."""

    def __init__(self, memory_s: float) -> None:
        """A pair is remembered for ``memory_s``; with 0 none is."""
        self._memory_s = memory_s
        #: Time at which each pair is forgotten, the oldest pair first.
        self._until_s: dict[tuple[str, str], float] = {}
        self._others: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._until_s)

    def note(self, one: str, other: str, now_s: float) -> None:
        """Remember a pair for ``memory_s`` from now on, and forget the oldest pair if there are too many."""
        if not self._memory_s:
            return
        self.forgive(one, other)
        self._until_s[_pair(one, other)] = now_s + self._memory_s
        self._others.setdefault(one, set()).add(other)
        self._others.setdefault(other, set()).add(one)
        if len(self._until_s) > MAX_PAIRS:
            self.forgive(*next(iter(self._until_s)))

    def forgive(self, one: str, other: str) -> None:
        """Forget a pair, for example because its peers reached each other. An unknown pair is ignored."""
        if self._until_s.pop(_pair(one, other), None) is None:
            return
        for own, peer in ((one, other), (other, one)):
            self._others[own].discard(peer)
            if not self._others[own]:
                del self._others[own]

    def forget(self, one: str) -> None:
        """Forget all pairs of an instance or gateway that is gone."""
        for other in list(self._others.get(one, ())):
            self.forgive(one, other)

    def expire(self, now_s: float) -> None:
        """Forget the pairs whose time is over."""
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self.forgive(*next(iter(self._until_s)))

    def of(self, one: str) -> Set[str]:
        """Return the ids of the peers that could not reach ``one``, or that it could not reach."""
        return self._others.get(one, _NOBODY)


def have_way(request: Request, instances: Collection[InstanceState], cut: CutPairs) -> bool:
    """Whether a usable prefill and decode instance of one class reach each other and the request's gateway.

    Both may be one instance unless the context is spread. Without a usable instance whose role decodes, one that
    decodes locally and reaches the gateway is enough.
    """
    unreachable = cut.of(request.gateway_id)
    reachable = [each for each in instances if each.is_usable and each.instance_id not in unreachable]
    decoders = [each for each in reachable if each.role_decodes]
    if not any(each.is_usable and each.role_decodes for each in instances):
        return any(each.decodes_locally for each in reachable)
    return any(
        each.arithmetic_class == prefill.arithmetic_class
        and each.instance_id not in cut.of(prefill.instance_id)
        and (each is not prefill or not each.num_parts(request))
        for prefill in reachable
        if prefill.role_prefills
        for each in decoders
    )


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
