"""Sums over the instances that decode, updated by changed instances only: a query does not look at all of them."""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import InstanceId, Request
from pdmesh.policy.handover import Decoding, RunAhead

#: Unit of summed rates, per second. Whole multiples are summed, so that sums return to exactly 0.
_RATE_UNIT = 1e-9


class _Sums(NamedTuple):
    """Decoding requests and free capacity of one instance or several.

    ``token_rate`` is the rate of all decodes, in `_RATE_UNIT`.
    """

    num_requests: int = 0
    num_blocks: int = 0
    num_free_seats: int = 0
    num_free_blocks: int = 0
    token_rate: int = 0

    def plus(self, other: _Sums, sign: int) -> _Sums:
        return _Sums(*[mine + sign * more for mine, more in zip(self, other, strict=True)])


class _Kind:
    """Instances that could take the same requests."""

    def __init__(self) -> None:
        self.members: dict[InstanceId, InstanceState] = {}
        self.sums = _Sums()


class DecodingSums:
    """Sums over instances that take requests to decode, one for each kind of instance; empty without a ``rule``."""

    def __init__(self, rule: RunAhead | None) -> None:
        self._rule = rule
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._known: dict[InstanceId, tuple[tuple[object, ...], _Sums]] = {}
        #: Instances that changed since the last query.
        self._changed: dict[InstanceId, InstanceState | None] = {}

    def look_at(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        """Note that an instance changed; None if it is gone."""
        if self._rule is None:
            return
        if instance is None or instance.role_decodes or instance_id in self._known:
            self._changed[instance_id] = instance
        else:
            # An earlier process of the same name may have decoded.
            self._changed.pop(instance_id, None)

    def decoding(self, kv_group: str, mean_tokens: float, request: Request | None = None) -> Decoding | None:
        """Return the decodes and free capacity of a KV group's instances, assuming ``mean_tokens`` more per decode.

        With ``request``, only kinds of instance that could ever take it. None without such an instance.
        """
        sums = _Sums()
        kinds = self._of(kv_group, request)
        for kind in kinds:
            sums = sums.plus(kind.sums, 1)
        return Decoding(*sums[:-1], sums.token_rate * _RATE_UNIT / mean_tokens) if kinds else None

    def _of(self, kv_group: str, request: Request | None) -> list[_Kind]:
        self._catch_up(self._rule)
        firsts = ((kind, next(iter(kind.members.values()))) for kind in self._kinds.values())
        return [
            kind
            for kind, first in firsts
            if first.kv_group == kv_group and (request is None or first.could_decode(request))
        ]

    def _catch_up(self, rule: RunAhead | None) -> None:
        for instance_id, instance in self._changed.items():
            if (known := self._known.pop(instance_id, None)) is not None:
                self._forget(instance_id, *known)
            if rule is not None and instance is not None and instance.role_decodes and instance.takes_new:
                self._learn(instance, rule)
        self._changed.clear()

    def _learn(self, instance: InstanceState, rule: RunAhead) -> None:
        allocated = instance.allocated
        sums = _Sums(
            allocated.num_seats_taken,
            instance.num_taken_blocks,
            instance.max_num_seqs - allocated.num_seats_taken,
            max(0, int(instance.room.open)),
            round(rule.tokens_per_s(instance.view) / _RATE_UNIT),
        )
        kind = self._kinds.setdefault(instance.kind, _Kind())
        kind.members[instance.instance_id] = instance
        kind.sums = kind.sums.plus(sums, 1)
        self._known[instance.instance_id] = instance.kind, sums

    def _forget(self, instance_id: InstanceId, name: tuple[object, ...], sums: _Sums) -> None:
        kind = self._kinds[name]
        del kind.members[instance_id]
        kind.sums = kind.sums.plus(sums, -1)
        if not kind.members:
            del self._kinds[name]
