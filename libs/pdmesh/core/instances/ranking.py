"""Instances sorted by a policy's key, by those that changed: nobody looks at all of them to find the first."""

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

#: Nothing of a request's prompt is kept anywhere.
NOTHING_KEPT: Mapping[int, int] = MappingProxyType({})

#: Instances are about as good if the last parts of their keys differ by no more than this share.
_ALIKE = 0.1

#: So many of these are compared by what they keep.
_MAX_COMPARED = 8

#: An instance behind its key, when it was last given something to keep, and its id, which no two share: so entries
#: compare without the instances.
Ranked = tuple[tuple[float, ...], int, InstanceId, InstanceState]


def ranked(instance: InstanceState, key: Callable[[InstanceView], tuple[float, ...]]) -> Ranked:
    """Return an instance with its place in a line.

    Of those with equal keys the one comes first that was longest given nothing to keep: if it were always the same
    one, as it is where ids decide, what it keeps would soon be flushed, and the others' memory would lie idle.
    """
    return key(instance.view), instance.kept.last_begun, instance.instance_id, instance


class Ranking:
    """Members are put in their places only when somebody asks, so that what changes often costs little."""

    def __init__(self, key: Callable[[InstanceView], tuple[float, ...]]) -> None:
        self._key = key
        self.members: dict[InstanceId, InstanceState] = {}  # to be looked at alone
        self._changed: dict[InstanceId, None] = {}  # since the line was last sorted
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
        """The members, sorted. Not to be changed, and good until the next call of `put` or `discard`."""
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
    """Whether two keys are of one class of load."""
    return key[:-1] == other[:-1] and abs(other[-1] - key[-1]) <= _ALIKE * abs(key[-1])


class _ExactGroup:
    """The instances of one KV group and arithmetic class, and for how many blocks of one more request each has room."""

    def __init__(self, placement: DecodePlacement) -> None:
        self._ranking = Ranking(placement.key)
        self._open, self._bounded = Lengths(), Lengths()  # of those that may grow, and of the others
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
        self._ranking.discard(instance_id)
        self._forget_room(instance_id)

    def _forget_room(self, instance_id: InstanceId) -> None:
        room = self._room_of.pop(instance_id, None)
        if room is not None:
            self._open.remove(room[0])
            self._bounded.remove(room[1])

    def members(self, home: InstanceState, request: Request, out: Collection[str]) -> list[InstanceState]:
        """Those that hold a range each of a context that decodes on ``home``; fewer than it takes if no more can."""
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
        """The first with room for the whole request; of those that are about as free, the one that keeps most of it.

        Nobody is looked at if there is none. It is none of the ``avoided`` ids.
        """
        some = next(iter(self._ranking.members.values()), None)
        if some is None:
            return None
        wanted, is_open = some.wanted_blocks(request)  # the same anywhere
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
    """The instances with room for one more request to decode, and a seat.

    By exact group, and in it in the order of the policy.
    """

    def __init__(self, placement: DecodePlacement, run_ahead: RunAhead | None) -> None:
        self.sums = DecodingSums(run_ahead)  # of those without room, too
        self._placement = placement
        self._groups: dict[str, _ExactGroup] = {}
        self._group_of: dict[InstanceId, _ExactGroup] = {}
        self._changed: dict[InstanceId, InstanceState | None] = {}  # since somebody asked

    def look_at(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        """Note that an instance changed; None if it is gone."""
        if instance is None or instance.role_decodes or instance_id in self._group_of:
            self._changed[instance_id] = instance
        else:
            self._changed.pop(instance_id, None)  # perhaps of the process before it
        self.sums.look_at(instance_id, instance)

    def catch_up(self) -> None:
        """Look at those that changed now, so that it need not be done when somebody asks."""
        for instance_id, instance in self._changed.items():
            self._look_at(instance_id, instance)
        self._changed.clear()

    def _look_at(self, instance_id: InstanceId, instance: InstanceState | None) -> None:
        known, group = self._group_of.get(instance_id), None
        if instance is not None and instance.num_decode_tokens:
            group = self._groups.get(instance.exact_group)
            if group is None:
                group = self._groups[instance.exact_group] = _ExactGroup(self._placement)
            group.put(instance)
            self._group_of[instance_id] = group
        if known is not None and known is not group:
            known.discard(instance_id)
            if group is None:
                del self._group_of[instance_id]

    def firsts(self, request: Request, depths: Mapping[int, int] = NOTHING_KEPT) -> dict[str, InstanceState]:
        """The first of every exact group with room for the whole request, where there is one.

        ``depths`` say how much of its prompt is kept where, by the instance's number.
        """
        self.catch_up()
        firsts: dict[str, InstanceState] = {}
        for name, group in self._groups.items():
            first = group.first(request, depths)
            if first is not None:
                firsts[name] = first
        return firsts

    def first_in(
        self, exact_group: str, request: Request, depths: Mapping[int, int], avoided: Collection[str]
    ) -> InstanceState | None:
        """The first of one exact group that is none of the ``avoided`` ids."""
        self.catch_up()
        group = self._groups.get(exact_group)
        return None if group is None else group.first(request, depths, avoided)

    def spread(
        self, source: InstanceState, request: Request, avoided: Collection[str] = ()
    ) -> tuple[InstanceState | None, list[InstanceState]]:
        """Where a request decodes whose context is spread, and who holds its first ranges, in their order.

        All are in the exact group of ``source``, which computes its prompt, and none is ``source``. It decodes on none
        of ``avoided``, which its gateway may not hear: those that only hold ranges send it nothing.
        """
        out = {source.instance_id, *avoided}
        home = self.first_in(source.exact_group, request, NOTHING_KEPT, out)
        if home is None:
            return None, []
        members = self._groups[source.exact_group].members(home, request, {source.instance_id})
        return (None, []) if len(members) < home.num_parts(request) else (home, members)

    def across(self, firsts: dict[str, InstanceState], source: InstanceState) -> InstanceState | None:
        """The first that ``source`` can send KV to though it is of another arithmetic class; of what `firsts` gave."""
        others = [first for first in firsts.values() if first.kv_group == source.kv_group]
        key = self._placement.key
        return min(others, default=None, key=lambda first: (key(first.view), first.instance_id))
