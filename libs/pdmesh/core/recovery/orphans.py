"""Requests known from one side alone after a scheduler's restart: see `pdmesh.core.recovery.reconcile`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from typing import Generic, TypeVar

from pdmesh.model import GatewayId, InstanceId, RequestId, RequestKey

OwnerT = TypeVar("OwnerT", InstanceId, GatewayId)


class Orphan(Generic[OwnerT]):
    """A request known from one side, ``owner``. ``gateway_id`` is the request's gateway."""

    # Not a dataclass: mypyc cannot compile one that is generic (mypyc issue 827).
    __slots__ = ("deadline_s", "gateway_id", "key", "owner")

    def __init__(self, key: RequestKey, owner: OwnerT, gateway_id: GatewayId, deadline_s: float) -> None:
        self.key = key
        self.owner: OwnerT = owner
        self.gateway_id = gateway_id
        self.deadline_s = deadline_s


class Orphans(Generic[OwnerT]):
    """Orphans of one kind by request, oldest first. All have the same grace, so deadlines have the same order."""

    def __init__(self) -> None:
        self._orphans: OrderedDict[RequestId, Orphan[OwnerT]] = OrderedDict()
        self._of_owner: dict[OwnerT, dict[RequestId, None]] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def __iter__(self) -> Iterator[Orphan[OwnerT]]:
        return iter(self._orphans.values())

    def add(self, key: RequestKey, owner: OwnerT, gateway_id: GatewayId, deadline_s: float) -> None:
        if key[0] in self._orphans:
            self._take(key[0])
        self._orphans[key[0]] = Orphan(key, owner, gateway_id, deadline_s)
        self._of_owner.setdefault(owner, {})[key[0]] = None

    def get(self, request_id: RequestId) -> Orphan[OwnerT] | None:
        return self._orphans.get(request_id)

    def pop(self, request_id: RequestId, gateway_id: GatewayId) -> Orphan[OwnerT] | None:
        """Remove and return the request; None if it is unknown or belongs to another gateway."""
        orphan = self._orphans.get(request_id)
        return self._take(request_id) if orphan is not None and orphan.gateway_id == gateway_id else None

    def drop_owner(self, owner: OwnerT) -> None:
        for request_id in self._of_owner.pop(owner, ()):
            del self._orphans[request_id]

    def pop_due(self, now_s: float) -> list[Orphan[OwnerT]]:
        due: list[Orphan[OwnerT]] = []
        while self.next_deadline_s <= now_s:
            due.append(self._take(next(iter(self._orphans))))
        return due

    def _take(self, request_id: RequestId) -> Orphan[OwnerT]:
        orphan = self._orphans.pop(request_id)
        others = self._of_owner[orphan.owner]
        del others[request_id]
        if not others:
            del self._of_owner[orphan.owner]
        return orphan

    @property
    def next_deadline_s(self) -> float:
        """Deadline of the oldest orphan; infinite if there is none."""
        return next(iter(self._orphans.values())).deadline_s if self._orphans else inf
