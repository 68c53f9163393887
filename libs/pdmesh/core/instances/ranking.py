"""Instances sorted by a policy's key. Only changed instances are sorted again, so finding the first one is cheap."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from types import MappingProxyType

from pdmesh.core.instances.decoding import DecodingSums
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.lengths import Lengths
from pdmesh.model import InstanceId, Request
from pdmesh.policy.handover import RunAhead
from pdmesh.policy.seams import DecodePlacement
from pdmesh.policy.views import InstanceView

#: Cached granules by instance number, for a prompt that is cached nowhere.
NOTHING_KEPT: Mapping[int, int] = MappingProxyType({})

#: Instances are about as good if the last parts of their keys differ by no more than this share.
_ALIKE = 0.1

#: Most such instances that are compared by their cached granules.
_MAX_COMPARED = 8

#: Sort entry of an instance: key, number of its last request with a chain, id, and the instance. Ids are unique, so
#: instances themselves are never compared.
Ranked = tuple[tuple[float, ...], int, InstanceId, InstanceState]


def ranked(instance: InstanceState, key: Callable[[InstanceView], tuple[float, ...]]) -> Ranked:
    """Return the sort entry of an instance.

    Of instances with equal keys the least recently used comes first, by the last request with a chain. If ids decided,
    one instance would get all requests: its cache would soon be flushed, and the others' memory would stay unused.
    """
    return key(instance.view), instance.kept.last_begun, instance.instance_id, instance


class Ranking:
    """Instances sorted by a key. Changes are sorted in only on a query, so frequent changes cost little.

    ``members`` must not be changed from outside.
    """

    def __init__(self, key: Callable[[InstanceView], tuple[float, ...]]) -> None:
        self._key = key
        self.members: dict[InstanceId, InstanceState] = {}
        #: Members that changed since the line was last sorted.
        self._changed: dict[InstanceId, None] = {}
        self._entries: dict[InstanceId, Ranked] = {}
        self._line: list[Ranked] = []

    def put(self, instance: InstanceState) -> None:
        """Add an instance, or note that its place may have changed."""
        self.members[instance.instance_id] = instance
        self._changed[instance.instance_id] = None

    def discard(self, instance_id: InstanceId) -> None:
        """Remove an instance, if it is a member."""
        if self.members.pop(instance_id, None) is not None:
            self._changed[instance_id] = None

    def line(self) -> list[Ranked]:
        """Return the sorted entries. The caller must not change the list. Valid until the next `put` or `discard`."""
        for instance_id in self._changed:
            old, instance = self._entries.get(instance_id), self.members.get(instance_id)
            new = None if instance is None else ranked(instance, self._key)
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


def _are_alike(key: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two keys differ only in their last part, and by no more than `_ALIKE`."""
    return key[:-1] == other[:-1] and abs(other[-1] - key[-1]) <= _ALIKE * abs(key[-1])


class _ExactGroup:
    """The instances of one KV group and arithmetic class, with each one's room for one more request, in blocks."""

    def __init__(self, placement: DecodePlacement) -> None:
        self._ranking = Ranking(placement.key)
        #: Room of each instance for an open request, and for a bounded one (`GrowthSums`).
        self._open, self._bounded = Lengths(), Lengths()
        self._room_of: dict[InstanceId, tuple[int, int]] = {}

    def put(self, instance: InstanceState) -> None:
        """Add an instance, or note that its place and room may have changed."""
        self._ranking.put(instance)
        room = int(instance.room.open), int(instance.room.bounded)
        if self._room_of.get(instance.instance_id) != room:
            self._forget_room(instance.instance_id)
            self._room_of[instance.instance_id] = room
            self._open.add(room[0])
            self._bounded.add(room[1])

    def discard(self, instance_id: InstanceId) -> None:
        """Remove an instance, if it is a member."""
        self._ranking.discard(instance_id)
        self._forget_room(instance_id)

    def _forget_room(self, instance_id: InstanceId) -> None:
        room = self._room_of.pop(instance_id, None)
        if room is not None:
            self._open.remove(room[0])
            self._bounded.remove(room[1])

    def members(self, home: InstanceState, request: Request, out: Collection[str]) -> list[InstanceState]:
        """Return shard holders, one range each, for a context that decodes on ``home``; fewer than needed if scarce.

        None of them is in ``out``.
        """
        key = (request.request_id, request.epoch)
        line = (instance for _, _, _, instance in self._ranking.line())
        able = (
            each
            for each in line
            if each is not home
            and each.instance_id not in out
            and key not in each.allocations
            and home.part_blocks <= each.room.bounded
        )
        return list(islice(able, home.num_parts(request)))

    def first(self, request: Request, depths: Mapping[int, int], avoided: Collection[str] = ()) -> InstanceState | None:
        """Return the first instance with room for the whole request that is not ``avoided``; None without one.

        Of up to `_MAX_COMPARED` instances with about equal keys, the one with most of the prompt in its cache.
        """
        some = next(iter(self._ranking.members.values()), None)
        if some is None:
            return None
        # The same number on each instance of the group.
        wanted, is_open = some.wanted_blocks(request)
        if wanted > (self._open if is_open else self._bounded).greatest:
            return None
        found: InstanceState | None = None
        first_key: tuple[float, ...] = ()
        deepest = num_found = 0
        for key, _, _, instance in self._ranking.line():
            if found is not None and (num_found == _MAX_COMPARED or not _are_alike(first_key, key)):
                break
            if not instance.can_decode(request) or instance.instance_id in avoided:
                continue
            if not depths:
                return instance
            num_found += 1
            depth = depths.get(instance.number, 0)
            if found is None:
                found, first_key, deepest = instance, key, depth
            elif depth > deepest:
                found, deepest = instance, depth
        return found


class Decoders:
    """The instances with room and a seat for one more request to decode, by arithmetic class, in the policy's order.

    ``sums`` also covers decode instances without room.
    """

    def __init__(self, placement: DecodePlacement, run_ahead: RunAhead | None) -> None:
        self.sums = DecodingSums(run_ahead)
        self._placement = placement
        self._groups: dict[str, _ExactGroup] = {}
        self._group_of: dict[InstanceId, _ExactGroup] = {}
        #: Instances that changed since the last query.
        self._changed: dict[InstanceId, InstanceState | None] = {}

    def look_at(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        """Note that an instance changed; None if it is gone."""
        if instance is None or instance.role_decodes or instance_id in self._group_of:
            self._changed[instance_id] = instance
        else:
            # An earlier process of the same name may have decoded.
            self._changed.pop(instance_id, None)
        self.sums.look_at(instance_id, instance)

    def catch_up(self) -> None:
        """Look at the changed instances now, so that the next query need not."""
        for instance_id, instance in self._changed.items():
            self._look_at(instance_id, instance)
        self._changed.clear()

    def _look_at(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        known, group = self._group_of.get(instance_id), None
        if instance is not None and instance.num_decode_tokens:
            group = self._groups.get(instance.arithmetic_class)
            if group is None:
                group = self._groups[instance.arithmetic_class] = _ExactGroup(self._placement)
            group.put(instance)
            self._group_of[instance_id] = group
        if known is not None and known is not group:
            known.discard(instance_id)
            if group is None:
                del self._group_of[instance_id]

    def firsts(self, request: Request, depths: Mapping[int, int] = NOTHING_KEPT) -> dict[str, InstanceState]:
        """Return each arithmetic class's first instance with room for the whole request, by the class's name.

        Classes without any are left out. ``depths``: cached granules of the prompt, by the instance's
        number.
        """
        self.catch_up()
        firsts: dict[str, InstanceState] = {}
        for name, group in self._groups.items():
            first = group.first(request, depths)
            if first is not None:
                firsts[name] = first
        return firsts

    def first_in(
        self, arithmetic_class: str, request: Request, depths: Mapping[int, int], avoided: Collection[str]
    ) -> InstanceState | None:
        """Return the first instance of an arithmetic class with room for the whole request; None if there is none.

        ``avoided`` instances are passed over.
        """
        self.catch_up()
        group = self._groups.get(arithmetic_class)
        return None if group is None else group.first(request, depths, avoided)

    def spread(
        self, source: InstanceState, request: Request, avoided: Collection[str] = ()
    ) -> tuple[InstanceState | None, list[InstanceState]]:
        """Return the decode instance for a spread context, and the shard holders of its first ranges, in order.

        All have the arithmetic class of ``source``, which computes the prompt, and none is ``source``. (None, []) if
        there are too few. The decode instance is not ``avoided``: its gateway must reach it, unlike the shard holders.
        """
        out = {source.instance_id, *avoided}
        home = self.first_in(source.arithmetic_class, request, NOTHING_KEPT, out)
        if home is None:
            return None, []
        members = self._groups[source.arithmetic_class].members(home, request, {source.instance_id})
        return (None, []) if len(members) < home.num_parts(request) else (home, members)

    def across(self, firsts: dict[str, InstanceState], source: InstanceState) -> InstanceState | None:
        """Return the first of ``firsts`` that ``source`` can send KV to, in any arithmetic class; None without one."""
        others = [first for first in firsts.values() if first.kv_group == source.kv_group]
        key = self._placement.key
        return min(others, default=None, key=lambda first: (key(first.view), first.instance_id))
