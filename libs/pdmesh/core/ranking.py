"""Instances sorted by a policy's key, by those that changed: nobody looks at all of them to find the first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from pdmesh.core.decoding import DecodingSums
from pdmesh.core.lengths import Lengths
from pdmesh.core.state import InstanceBooks
from pdmesh.model import InstanceId, Request
from pdmesh.policy.base import DecodePlacement, InstanceView
from pdmesh.policy.handover import RunAhead

#: An instance behind its key and its id, which no two share: so entries compare without the instances.
Ranked = tuple[tuple[float, ...], InstanceId, InstanceBooks]


class Ranking:
    """Members are put in their places only when somebody asks, so that what changes often costs little."""

    def __init__(self, key: Callable[[InstanceView], tuple[float, ...]]) -> None:
        self._key = key
        self.members: dict[InstanceId, InstanceBooks] = {}  # to be looked at alone
        self._changed: dict[InstanceId, None] = {}  # since the line was last sorted
        self._entries: dict[InstanceId, Ranked] = {}
        self._line: list[Ranked] = []

    def put(self, instance: InstanceBooks) -> None:
        """It is a member, and has perhaps another place from now on."""
        self.members[instance.instance_id] = instance
        self._changed[instance.instance_id] = None

    def discard(self, instance_id: InstanceId) -> None:
        """It is no member, or no longer."""
        if self.members.pop(instance_id, None) is not None:
            self._changed[instance_id] = None

    def line(self) -> list[Ranked]:
        """The members, sorted. Not to be changed, and good until the next call of `put` or `discard`."""
        for instance_id in self._changed:
            old, instance = self._entries.get(instance_id), self.members.get(instance_id)
            new = None if instance is None else (self._key(instance.view), instance_id, instance)
            if old == new:
                continue
            if old is not None:
                del self._line[bisect_left(self._line, old)]
                del self._entries[instance_id]
            if new is not None:
                insort(self._line, new)
                self._entries[instance_id] = new
        self._changed.clear()
        return self._line


class _KvGroup:
    """The instances that KV of one layout can move to, and how many tokens each has room for."""

    def __init__(self, placement: DecodePlacement) -> None:
        self.ranking = Ranking(placement.key)
        self.rooms = Lengths()
        self._room_of: dict[InstanceId, int] = {}

    def set_room(self, instance_id: InstanceId, num_tokens: int) -> None:
        old = self._room_of.pop(instance_id, 0)
        if num_tokens:
            self._room_of[instance_id] = num_tokens
        if old == num_tokens:
            return
        if old:
            self.rooms.remove(old)
        if num_tokens:
            self.rooms.add(num_tokens)


class Decoders:
    """The instances with room for one more request to decode, and a seat: by KV group, in the order of the policy."""

    def __init__(self, placement: DecodePlacement, run_ahead: RunAhead | None, *, by_credit: bool) -> None:
        self.sums = DecodingSums(run_ahead)  # of those without room, too
        self._placement = placement
        self._by_credit = by_credit
        self._groups: dict[str, _KvGroup] = {}
        self._group_of: dict[InstanceId, _KvGroup] = {}
        self._changed: dict[InstanceId, InstanceBooks | None] = {}  # since somebody asked

    def look_at(self, instance_id: InstanceId, instance: InstanceBooks | None) -> None:
        """It changed; None: it is gone."""
        self._changed[instance_id] = instance
        self.sums.look_at(instance_id, instance)

    def _look_at(self, instance_id: InstanceId, instance: InstanceBooks | None) -> None:
        room = 0 if instance is None else instance.num_decode_tokens
        known = self._group_of.get(instance_id)
        if not room and known is None:
            return
        if instance is None or not room:
            group = None
        elif (group := self._groups.get(instance.kv_group)) is None:
            group = self._groups[instance.kv_group] = _KvGroup(self._placement)
        if known is not None and known is not group:
            known.set_room(instance_id, 0)
            known.ranking.discard(instance_id)
            del self._group_of[instance_id]
        if instance is not None and group is not None:
            group.set_room(instance_id, room)
            group.ranking.put(instance)
            self._group_of[instance_id] = group

    def firsts(self, request: Request) -> dict[str, InstanceBooks]:
        """The first of every KV group with room for the whole request, where there is one."""
        for instance_id, instance in self._changed.items():
            self._look_at(instance_id, instance)
        self._changed.clear()
        num_tokens = request.num_prompt_tokens if self._by_credit else request.max_total_tokens
        firsts: dict[str, InstanceBooks] = {}
        for kv_group, group in self._groups.items():
            if group.rooms.greatest >= num_tokens:
                for _, _, instance in group.ranking.line():
                    if instance.can_decode(request):
                        firsts[kv_group] = instance
                        break
        return firsts
