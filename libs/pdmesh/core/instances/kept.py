"""KV that stays for other requests: which granules are kept where, which requests use them, and which go first.

The core is the truth of this, as of all state: a granule is *kept* on an instance from when it is known to be computed
there, or to have landed, until a command says to *drop* it. What live requests there have in their chains is *in use*
and never dropped; all else is *idle* and counts as free: it goes when a command takes its blocks, the longest unused of
tenants first that have more than their share (`pdmesh.core.instances.idle`). A chain is let go of from its tail to its
head, so leaves go before parents, and what is kept of a chain is always its beginning.

Of two requests that compute the same granule at once the first one's is kept. The other's blocks stay its own, and it
counts as a user all the same, so that both sides agree whatever crosses on the way.

Where an instance has an offload tier (`pdmesh.core.instances.offloaded`), what goes in the cache goes there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdmesh.core.instances.idle import IdleGranules, IdleLine
from pdmesh.core.instances.kept_where import KeptWhere
from pdmesh.core.instances.offloaded import OffloadedHere
from pdmesh.model import PrefixHash, blocks_of_granule
from pdmesh.plans import NO_EVICTIONS, Evictions


class HeldGranules:
    """The granules of one request on an instance."""

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, chain: Sequence[PrefixHash], line: IdleLine) -> None:
        self.chain = chain
        self.line = line  # of its tenant
        self.num_computed = 0  # from the first on
        self.kept = 0  # a bit for each granule that is kept in this request's own blocks, or those that it shares
        self.num_lost = 0  # of these, that the instance turned out not to keep: it refuses the request, or will


NOTHING = HeldGranules((), IdleLine())


class KeptHere:
    """What one instance keeps."""

    def __init__(self, where: KeptWhere, number: int, block_size: int, num_offload_granules: int = 0) -> None:
        """``number`` is the instance's, of which there is one at a time; its tier holds ``num_offload_granules``."""
        self.granule_blocks = blocks_of_granule(block_size)  # 0: nothing is kept
        self._where = where
        self._bit = 1 << number
        self._users: dict[PrefixHash, int] = {}  # live requests; also of what is not kept, or not yet
        self._in_use: dict[PrefixHash, IdleLine] = {}  # by whose they are
        self._idle = IdleGranules()
        self._num_held = 0  # kept granules in blocks of live requests, as often as they have them
        self.last_begun = 0  # the number of the last request with a chain, in the order in which they began anywhere
        self._orphans: dict[PrefixHash, None] = {}  # kept there for nothing: to be dropped
        self.offloaded: OffloadedHere | None = None  # where there is a tier
        if num_offload_granules and self.granule_blocks:
            self.offloaded = OffloadedHere(where.offloaded, self._bit, num_offload_granules)

    @property
    def is_empty(self) -> bool:
        return not self._in_use and not len(self._idle)

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle) * self.granule_blocks

    @property
    def num_saved_blocks(self) -> int:
        """Return how many fewer blocks are taken than live requests have, each counted by itself, since they share."""
        num_stranded = sum([granule in self._users for granule in self._orphans]) if self._orphans else 0
        return (self._num_held - len(self._in_use) - num_stranded) * self.granule_blocks

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self._in_use or granule in self._idle

    def depth(self, chain: Sequence[PrefixHash], most: int) -> int:
        """How many of the first ``most`` granules of a chain are kept."""
        low, high = 0, 0 if self.is_empty else most
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self:
                low = middle
            else:
                high = middle - 1
        return low

    def num_loadable(self, chain: Sequence[PrefixHash], num_kept: int) -> int:
        """Return how many granules behind the first ``num_kept`` of a chain the tier has."""
        offloaded = self.offloaded
        if offloaded is None:
            return 0
        behind = chain[num_kept:]
        return next((number for number, granule in enumerate(behind) if granule not in offloaded), len(behind))

    # --- live requests ---

    def begin(
        self, chain: Sequence[PrefixHash], num_reused: int, tenant: str | None = None, share: int = 1
    ) -> HeldGranules:
        """A request begins that shares the first ``num_reused`` granules of its chain, and none behind these.

        What it loads from the tier is in its own blocks, and kept once a chunk behind it is computed.
        """
        if not self.granule_blocks or not chain:
            return NOTHING
        self.last_begun = self._where.number_request()
        held = HeldGranules(chain, self._idle.line_of(tenant, share))
        held.line.num_live += 1
        held.num_computed = num_reused
        held.kept = (1 << num_reused) - 1
        for granule in chain[:num_reused]:
            if granule not in self:
                self._keep(granule, held.line)  # of a request that was here before we were
            self._use(granule, held.line)
        users, idle, is_idle = self._users, self._idle, self._idle.line_by_granule
        for granule in chain[num_reused:]:
            users[granule] = users.get(granule, 0) + 1
            if granule in is_idle:  # kept, and computed again: it may be found there
                self._in_use[granule] = idle.used_by(idle.remove(granule), held.line)
        self._num_held += num_reused
        if self.offloaded is not None:
            self.offloaded.use(chain, held.line, idle)
        return held

    def claim(self, held: HeldGranules, tenant: str, share: int) -> None:
        """It becomes known whose a request is: what it has is used by that tenant, as what it draws will be."""
        if held is NOTHING:
            return
        line = self._idle.line_of(tenant, share)
        held.line.num_live -= 1
        line.num_live += 1
        held.line = line
        in_use, idle = self._in_use, self._idle
        for granule in held.chain:
            if granule in in_use:
                in_use[granule] = idle.used_by(in_use[granule], line)
        if self.offloaded is not None:
            self.offloaded.use(held.chain, line, idle)

    def num_idle_blocks_of(self, chain: Sequence[PrefixHash]) -> int:
        """How many blocks a chain has here that nobody uses."""
        return sum([granule in self._idle for granule in chain]) * self.granule_blocks

    def num_shared_blocks(self, held: HeldGranules) -> int:
        """How many blocks of a request stay taken when it ends, since others have them, too."""
        shared = [granule for index, granule in enumerate(held.chain) if held.kept >> index & 1]
        return sum([self._users[granule] > 1 for granule in shared]) * self.granule_blocks

    def computed(self, held: HeldGranules, num_granules: int) -> None:
        """Note that so many granules of a request are computed here, or have landed."""
        start, in_use, idle = held.num_computed, self._in_use, self._idle
        is_idle = idle.line_by_granule
        part = held.chain[start:num_granules]
        for granule in part if self._orphans else ():
            if granule in self._orphans:  # what is before it is kept, too, now
                del self._orphans[granule]
                self._keep(granule, held.line)
        fresh = [granule for granule in part if granule not in in_use and granule not in is_idle]
        if len(fresh) == len(part):
            held.kept |= ((1 << len(part)) - 1) << start
        else:
            of_it = set(fresh)
            for index, granule in enumerate(part, start):
                if granule in of_it:
                    held.kept |= 1 << index
                elif granule in in_use:
                    in_use[granule] = idle.used_by(in_use[granule], held.line)
        self._where.add_all(fresh, self._bit)
        in_use.update(dict.fromkeys(fresh, held.line))  # by this request
        self._num_held += len(fresh)
        held.num_computed = max(start, num_granules)

    def drew(self, granules: Sequence[PrefixHash], num_known: int, tenant: str | None = None, share: int = 1) -> None:
        """A request that gives back its blocks drew ``granules``, which are behind its chain, and stay.

        The first ``num_known`` of them were kept there already. What is not known here any more was dropped while this
        was on its way: nothing behind it is of use.
        """
        if not self.granule_blocks or not granules:
            return
        line, idle = self._idle.line_of(tenant, share), self._idle
        missing = [number for number, granule in enumerate(granules[:num_known]) if granule not in self]
        num_whole = missing[0] if missing else len(granules)
        for granule in granules[max(num_whole, num_known) :]:
            if granule not in self:
                self._orphans[granule] = None
        for granule in reversed(granules[:num_whole]):
            if granule in idle:
                idle.add(granule, idle.used_by(idle.remove(granule), line))  # what is behind must not outlive it
            elif granule in self._in_use:
                self._in_use[granule] = idle.used_by(self._in_use[granule], line)
            else:
                self._keep(granule, line)

    def end(self, held: HeldGranules) -> None:
        """A request gives back its blocks, but for what is kept."""
        if held is NOTHING:
            return
        self._num_held -= held.kept.bit_count()
        held.line.num_live -= 1
        users, in_use, offloaded = self._users, self._in_use, self.offloaded
        idle: list[tuple[PrefixHash, IdleLine]] = []
        for granule in reversed(held.chain):
            number = users.pop(granule) - 1
            if number:
                users[granule] = number
                continue
            if granule in in_use:
                idle.append((granule, in_use.pop(granule)))
            if offloaded is not None:
                offloaded.let_go(granule)
        self._idle.add_all(idle)

    def _keep(self, granule: PrefixHash, line: IdleLine) -> None:
        self._where.add(granule, self._bit)
        if granule in self._users:
            self._in_use[granule] = line
        else:
            self._idle.add(granule, line)

    def _use(self, granule: PrefixHash, line: IdleLine) -> None:
        self._users[granule] = self._users.get(granule, 0) + 1
        before = self._in_use.get(granule)
        if before is None:
            before = self._idle.remove(granule)
        self._in_use[granule] = self._idle.used_by(before, line)

    # --- what is given up ---

    def make_room(self, num_granules: int) -> Evictions:
        """Give up so many idle granules, or all there are, and what is kept there for nothing."""
        orphans, idle = self._take_orphans(), self._idle
        if num_granules <= 0:
            return Evictions(drop=orphans) if orphans else NO_EVICTIONS
        given_up = idle.take(num_granules)
        self._where.discard_all(given_up, self._bit)
        if self.offloaded is None:
            return Evictions(drop=orphans + tuple(given_up))
        room = self.offloaded.take_in(given_up, idle)
        return Evictions(drop=orphans + room.drop, offload=room.offload, evict=room.evict)

    def _take_orphans(self) -> tuple[PrefixHash, ...]:
        """Return what is kept there for nothing: the next command drops it.

        But for what a live request has in its chain: perhaps it computed it meanwhile, and found it there.
        """
        if not self._orphans:
            return ()
        orphans = tuple([granule for granule in self._orphans if granule not in self._users])
        for granule in orphans:
            del self._orphans[granule]
        return orphans

    def replace(
        self,
        kept: Sequence[PrefixHash],
        held: Iterable[HeldGranules],
        offloaded: Sequence[PrefixHash] | None = None,
    ) -> None:
        """The instance keeps exactly this, the longest unused first; ``held`` is what live requests have there.

        ``offloaded`` is what its tier has; None: what is known of that holds.

        But for news of what live requests have in their chains: it could not be dropped for the room that they were
        promised. The instance gives it up itself if it must.
        """
        if self.offloaded is not None and offloaded is not None:
            self.offloaded.replace(offloaded, self._users)
        known = self._idle.lines() | self._in_use
        orphans = self._orphans.keys() & set(kept)
        self._forget()
        if not self.granule_blocks:
            return
        self._orphans = dict.fromkeys([granule for granule in kept if granule in orphans])
        for granule in kept:
            if granule not in self and granule not in orphans and (granule not in self._users or granule in known):
                self._keep(granule, known.get(granule, self._idle.unknown))
        for each in held:
            for index, granule in enumerate(each.chain):
                if each.kept >> index & 1 and granule not in self:
                    each.kept &= ~(1 << index)
                    each.num_lost += 1
            self._num_held += each.kept.bit_count()

    def lose_offloaded(self, granules: Iterable[PrefixHash]) -> None:
        """The tier has these no more, for a reason of its own."""
        if self.offloaded is not None:
            self.offloaded.lose(granules)

    def clear(self) -> None:
        """Forget all: nothing is kept any more."""
        self._forget()
        if self.offloaded is not None:
            self.offloaded.clear()

    def _forget(self) -> None:
        self._where.discard_all((*self._in_use, *self._idle.lines()), self._bit)
        self._in_use.clear()
        self._idle.clear()
        self._orphans.clear()
        self._num_held = 0

    def check_integrity(self, name: str, held: Sequence[HeldGranules]) -> None:
        """AssertionError names what does not balance; ``held`` is what live requests have there."""
        users, num_held = Counter[PrefixHash](), 0
        for each in held:
            users.update(each.chain)
            num_held += each.kept.bit_count()
            for index, granule in enumerate(each.chain):
                assert not each.kept >> index & 1 or granule in self._in_use, f"{name}: a shared granule is not in use"
        assert users == Counter(self._users), f"{name}: granules have other users than recorded"
        assert num_held == self._num_held, f"{name}: {num_held} granules held, recorded: {self._num_held}"
        assert self._in_use.keys() <= self._users.keys(), f"{name}: granules without a user are in use"
        idle = self._idle.lines().keys()
        self._idle.check_integrity(name)
        assert not idle & self._users.keys(), f"{name}: idle granules have users"
        for chain in [each.chain for each in held]:
            is_kept = [granule in self for granule in chain]
            assert is_kept == sorted(is_kept, reverse=True), f"{name}: what is kept of a chain is not its beginning"
        assert self._where.of(self._bit) == self._in_use.keys() | idle, f"{name}: the index has other granules"
        if self.offloaded is not None:
            self.offloaded.check_integrity(name, self._users)
