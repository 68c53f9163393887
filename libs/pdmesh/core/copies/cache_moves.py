"""Copies of cached prefixes away from an instance that is drained or restarted, and after an instance was lost.

Requests leave first. Then each prefix is copied once to an instance of the same arithmetic class, until the operation's
time limit. Prefixes go in the order in which their sessions are expected back; without sessions, the most recently used
goes first. A copy takes only room that is unused, or that holds blocks unused for longer than the prefix. Copies are
fetches (`pdmesh.core.copies.prefix_fetches`) that no request wants.

With pools of prefill and decode instances, the KV of a prompt is mostly cached twice. After an instance was lost, the
prefixes that it had cached, and that one other instance has, are copied again. So their sessions survive the next loss.
Prefixes whose copies cannot begin yet are set aside, and do not hold up the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.model import InstanceId, PrefixHash, PrefixHashes, Role
from pdmesh.policy.links import LinkRates
from pdmesh.policy.reuse import FETCH_OVERHEAD_S

#: Time limit of copies after a loss.
AGAIN_S: Final = 60.0


class _No(Enum):
    """Reason why no instance gets a copy of a prefix."""

    #: An instance has the prefix, or none has room.
    NEEDED = auto()
    #: Another copy must end first.
    YET = auto()


class _Lost(NamedTuple):
    """A prefix of a lost instance with this role, its time limit, and its holder, once that is known."""

    prefix: Sequence[PrefixHash]
    role: Role
    until_s: float
    source_id: InstanceId | None = None


class CacheMoves:
    """Cached prefixes that leave instances."""

    def __init__(self, mesh: MeshState, fetches: Fetches, links: LinkRates) -> None:
        """``links`` predicts when a copy arrives."""
        self._mesh = mesh
        self._fetches = fetches
        self._links = links
        #: Prefixes whose copies have not begun, by source; the next one is last.
        self._left: dict[InstanceId, list[Sequence[PrefixHash]]] = {}
        #: Prefixes of lost instances; the next one is last.
        self._lost: list[_Lost] = []
        #: Lost prefixes whose copies cannot begin yet, the first one first, and the earliest time limit.
        self._aside: list[_Lost] = []
        self._aside_until_s = inf
        #: What `_may_begin` returned when they were set aside.
        self._seen: tuple[int, list[tuple[bool, bool, bool]]] = (0, [])

    def lost(self, instance: InstanceState, now_s: float) -> None:
        """Copy again what a lost instance had cached, as far as one other instance has the prefix."""
        if not instance.draining:
            prefixes = self._mesh.sessions.latest_return_first(instance.recent.oldest_first)
            self._lost += [_Lost(prefix, instance.role, now_s + AGAIN_S) for prefix in prefixes]

    def copy_again(self, now_s: float) -> None:
        """Begin the copies of lost prefixes that may run now."""
        if not self._lost and not self._aside:
            return
        if self._aside and (now_s >= self._aside_until_s or self._seen != self._may_begin()):
            self._lost += reversed(self._aside)
            self._aside.clear()
        if not self._lost:
            return
        receivers = self._receivers()
        while self._lost:
            lost = self._lost.pop()
            if now_s >= lost.until_s:
                continue
            known = None if lost.source_id is None else self._mesh.instances.get(lost.source_id)
            if not receivers or receivers == [known] or (known is not None and not self._fetches.may_send(known)):
                self._aside.append(lost)
                continue
            source_id, destination = self._copy_again(lost, now_s)
            if destination is _No.YET:
                self._aside.append(lost._replace(source_id=source_id))
            elif isinstance(destination, InstanceState):
                receivers = self._receivers()
        self._seen = self._may_begin()
        self._aside_until_s = min([lost.until_s for lost in self._aside], default=inf)

    def _copy_again(self, lost: _Lost, now_s: float) -> tuple[InstanceId | None, InstanceState | _No]:
        """Begin the copy of a lost prefix if possible. Return the source, if there is one, and the destination."""
        depths = self._mesh.cache_index.reusable_depths(lost.prefix, len(lost.prefix))
        if not depths:
            return None, _No.NEEDED
        number = max(depths, key=lambda each: depths[each])
        source, chain = self._mesh.by_number[number], tuple(lost.prefix[: depths[number]])
        may_send = self._fetches.may_send(source)
        destination = self._destination(source, chain, lost.role) if may_send else _No.YET
        if isinstance(destination, InstanceState):
            self._begin(chain, source, destination, lost.until_s, now_s)
        return source.instance_id, destination

    def _receivers(self) -> list[InstanceState]:
        return [each for each in self._mesh.instances.values() if self._fetches.may_receive(each)]

    def _may_begin(self) -> tuple[int, list[tuple[bool, bool, bool]]]:
        """Return what decides whether a copy may begin: the number of ended fetches, and the instances' states."""
        states = [(each.sends_cached, each.takes_new, bool(each.low)) for each in self._mesh.instances.values()]
        return self._fetches.num_ended, states

    def advance(self, source: InstanceState, until_s: float, now_s: float) -> int:
        """Begin the copies that may run now. Return how many prefixes are left, or under way from or to the source.

        The first call lists the prefixes. ``until_s`` is the time limit.
        """
        left = self._left.get(source.instance_id)
        if left is None:
            left = self._mesh.sessions.latest_return_first(source.recent.oldest_first)
            self._left[source.instance_id] = left
        while left and self._fetches.may_send(source):
            chain = tuple(left[-1][: source.kept.reusable_depth(left[-1], len(left[-1]))])
            destination = self._destination(source, chain, source.role) if chain else _No.NEEDED
            if destination is _No.YET:
                break
            left.pop()
            if isinstance(destination, InstanceState):
                self._begin(chain, source, destination, until_s, now_s)
        return len(left) + self._fetches.num_of(source.instance_id)

    def forget(self, instance_id: InstanceId) -> None:
        """Forget which prefixes are left. Copies under way continue."""
        self._left.pop(instance_id, None)

    def _destination(self, source: InstanceState, chain: PrefixHashes, role: Role) -> InstanceState | _No:
        """Return the instance that should get a prefix: if possible one of this role, and the least busy one."""
        last_use = source.kept.last_use(chain[-1])
        num_blocks = len(chain) * source.kept.granule_blocks
        able: list[InstanceState] = []
        for other in self._mesh.instances.values():
            if other is source or not other.takes_new or other.arithmetic_class != source.arithmetic_class:
                continue
            num_there = other.kept.depth(chain, len(chain))
            if num_there == len(chain):
                return _No.NEEDED
            if self._fetches.brings(other, chain[num_there]):
                return _No.YET
            if other.has_room_for_copy(chain, num_there, last_use):
                able.append(other)
        if not able:
            return _No.NEEDED
        able = [each for each in able if self._fetches.may_receive(each)]
        if not able:
            return _No.YET
        cut = self._mesh.cut.of(source.instance_id)
        slow = self._mesh.slow_from(source, num_blocks, [each.instance_id for each in able])
        return min(
            able,
            key=lambda each: (
                each.instance_id in cut,
                each.instance_id in slow,
                each.role is not role,
                self._fetches.num_of(each.instance_id),
                -each.num_free_blocks,
                each.instance_id,
            ),
        )

    def _begin(
        self, chain: PrefixHashes, source: InstanceState, destination: InstanceState, until_s: float, now_s: float
    ) -> None:
        tenant, share = source.kept.owner_of(chain[-1])
        num_blocks = (len(chain) - destination.kept.depth(chain, len(chain))) * source.kept.granule_blocks
        num_bytes = num_blocks * source.block_size * source.profile.kv_layout.token_bytes
        rate = self._links.bytes_per_s(source.view, destination.view)
        self._fetches.begin(
            chain,
            source,
            destination,
            tenant=tenant,
            share=share,
            arrives_s=now_s + FETCH_OVERHEAD_S + num_bytes / rate,
            until_s=until_s,
        )
