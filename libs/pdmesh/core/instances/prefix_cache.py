"""Prefix cache of one instance: the cached granules, the requests that use them, and the order of eviction.

The core decides about caches, as about all state. A granule is cached (*kept*) from when it is known to be computed on
the instance, or to have landed, until a command says to *drop* it. Granules in live requests' chains are *in use* and
never dropped. All others are *idle* and count as free: they are dropped when a command takes their blocks, in the order
of `pdmesh.core.instances.idle`. A chain is evicted from its tail to its head. So the cached granules of a chain are
always its beginning.

If two requests compute the same granule at once, the first one's copy is cached. The other request's blocks stay its
own, and it counts as a user all the same, so that core and instance agree whatever messages cross on the way.

Where the model has states, requests continue only behind granules with a state (`pdmesh.core.instances.cached_states`).

If an instance has an offload tier (`pdmesh.core.instances.offloaded`), granules evicted from the cache go there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.cached_states import CachedStates, StateUse
from pdmesh.core.instances.idle import IdleGranules, IdleLine
from pdmesh.core.instances.kept_chains import NO_GRANULE, KeptChains
from pdmesh.core.instances.offloaded import OffloadedHere
from pdmesh.kv_layout import blocks_of_granule
from pdmesh.model import LastUse, PrefixHash
from pdmesh.plans import NO_EVICTIONS, Evictions


class HeldGranules:
    """The granules of one request on an instance.

    ``line`` is the line of the request's tenant. The first ``num_computed`` granules are computed. ``kept`` has a bit
    for each granule that is cached in the request's own or shared blocks. ``num_lost`` counts granules that the
    instance turned out not to have: it refuses the request, or will. ``use`` is the request's use of states, None where
    no layer has some.
    """

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, chain: Sequence[PrefixHash], line: IdleLine) -> None:
        self.chain = chain
        self.line = line
        self.num_computed = 0
        self.kept = 0
        self.num_lost = 0
        self.use: StateUse | None = None

    @property
    def computed(self) -> Sequence[PrefixHash]:
        """The granules that are computed."""
        return self.chain[: self.num_computed]


NOTHING = HeldGranules((), IdleLine())

#: Lines of granules whose users are known.
Lines = Mapping[PrefixHash, IdleLine]

NO_LINES: Final[Lines] = {}


class PrefixCache:
    """Prefix cache of one instance, as the core knows it.

    ``granule_blocks`` is 0 if the instance caches nothing. ``last_begun`` is the mesh-wide number of the last request
    with a chain that began here. ``offloaded`` is the offload tier, and ``states`` are the cached states; None without.
    """

    def __init__(
        self, where: CacheIndex, number: int, block_size: int, num_offload_granules: int = 0, num_states: int = 0
    ) -> None:
        """``number`` is the instance's number in the index ``where``; its tier holds ``num_offload_granules``.

        At most ``num_states`` states are cached; 0 if requests continue without.
        """
        self.granule_blocks = blocks_of_granule(block_size)
        self._where = where
        self._bit = 1 << number
        #: Number of live requests of each granule, also of granules that are not cached yet.
        self._users: dict[PrefixHash, int] = {}
        #: Line of each cached granule in use.
        self._in_use: dict[PrefixHash, IdleLine] = {}
        self._idle = IdleGranules(where.uses, where.leased)
        #: Number of cached granules in blocks of live requests; a shared one counts for each request.
        self._num_held = 0
        self.last_begun = 0
        #: Granules that the instance has but no request can use, since an earlier one of the chain is missing.
        self._orphans: dict[PrefixHash, None] = {}
        self.offloaded: OffloadedHere | None = None
        if num_offload_granules and self.granule_blocks:
            self.offloaded = OffloadedHere(where.offloaded, self._bit, num_offload_granules)
        self.states: CachedStates | None = None
        #: Granules that `make_way` evicted, for the next command.
        self._evicted: tuple[PrefixHash, ...] = ()
        where.with_states &= ~self._bit
        if num_states and self.granule_blocks:
            self.states = CachedStates(where.states, self._bit, num_states, where.leased)
            where.with_states |= self._bit

    @property
    def is_empty(self) -> bool:
        return not self._in_use and not len(self._idle)

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle) * self.granule_blocks

    @property
    def num_saved_blocks(self) -> int:
        """Number of blocks saved by sharing: the sum of the live requests' blocks less the blocks that are taken."""
        num_stranded = sum([granule in self._users for granule in self._orphans]) if self._orphans else 0
        return (self._num_held - len(self._in_use) - num_stranded) * self.granule_blocks

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self._in_use or granule in self._idle

    def depth(self, chain: Sequence[PrefixHash], most: int) -> int:
        """Return how many of the first ``most`` granules of a chain are cached, by bisection."""
        low, high = 0, 0 if self.is_empty else most
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self:
                low = middle
            else:
                high = middle - 1
        return low

    def reusable_depth(self, chain: Sequence[PrefixHash], most: int) -> int:
        """Return how many of the first ``most`` granules of a chain a request can reuse, in which all are computed."""
        depth = self.depth(chain, most)
        return depth if self.states is None else self.states.depth(chain, depth)

    def num_loadable(self, chain: Sequence[PrefixHash], num_cached: int) -> int:
        """Return how many consecutive granules after the first ``num_cached`` the tier has; 0 without a tier."""
        offloaded = self.offloaded
        if offloaded is None:
            return 0
        behind = chain[num_cached:]
        return next((number for number, granule in enumerate(behind) if granule not in offloaded), len(behind))

    # --- live requests ---

    def begin(
        self, chain: Sequence[PrefixHash], num_reused: int, tenant: str | None = None, share: int = 1
    ) -> HeldGranules:
        """Begin a request that shares the first ``num_reused`` granules of its chain, and return its granules.

        Granules that the request loads from the tier are in its own blocks, and cached once a later chunk is computed.
        `NOTHING` without a chain or a cache. The ``tenant`` is None until it is known.
        """
        if not self.granule_blocks or not chain:
            return NOTHING
        self.last_begun = self._where.number_request()
        self._idle.forget_tenants(self._in_use.values())
        held = HeldGranules(chain, self._idle.line_of(tenant, share))
        held.line.num_live += 1
        held.num_computed = num_reused
        held.kept = (1 << num_reused) - 1
        for granule in chain[:num_reused]:
            if granule not in self:
                # Cached by a request from before this scheduler's start.
                self._keep(granule, held.line)
            self._use(granule, held.line)
        users, idle, is_idle = self._users, self._idle, self._idle.line_by_granule
        for granule in chain[num_reused:]:
            users[granule] = users.get(granule, 0) + 1
            # Cached, but computed again: the instance may find it cached.
            if granule in is_idle:
                self._in_use[granule] = idle.used_by(idle.remove(granule), held.line)
        self._num_held += num_reused
        if self.offloaded is not None:
            self.offloaded.use(chain, held.line, idle)
        if self.states is not None:
            held.use = self.states.begin(chain, num_reused)
        return held

    def ask_for_states(self, held: HeldGranules, num_seen: int) -> tuple[int, ...]:
        """Choose the states that a request computes, as `CachedStates.ask` does; none where there are none."""
        if self.states is None or held.use is None:
            return ()
        return self.states.ask(held.use, held.chain, num_seen)

    def claim(self, held: HeldGranules, tenant: str, share: int) -> None:
        """Set the tenant of a request once it is known: the tenant counts as a user of the request's granules."""
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
        """Return how many cached blocks of a chain are idle."""
        return sum([granule in self._idle for granule in chain]) * self.granule_blocks

    def num_shared_blocks(self, held: HeldGranules) -> int:
        """Return how many cached blocks of a request stay taken when it ends, because other requests use them."""
        shared = [granule for index, granule in enumerate(held.chain) if held.kept >> index & 1]
        return sum([self._users[granule] > 1 for granule in shared]) * self.granule_blocks

    def computed(self, held: HeldGranules, num_granules: int) -> None:
        """Cache the first ``num_granules`` of a request, which are computed here or have landed.

        A granule that is cached already is not cached again, but counts as used by the request's tenant.
        """
        start, in_use, idle = held.num_computed, self._in_use, self._idle
        is_idle = idle.line_by_granule
        part = held.chain[start:num_granules]
        for granule in part if self._orphans else ():
            # The earlier granules of the chain are cached now.
            if granule in self._orphans:
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
        in_use.update(dict.fromkeys(fresh, held.line))
        self._num_held += len(fresh)
        held.num_computed = max(start, num_granules)
        if self.states is not None and held.use is not None:
            self.states.computed(held.use, held.chain, start, num_granules, held.kept)

    def drew(self, granules: Sequence[PrefixHash], num_known: int, tenant: str | None = None, share: int = 1) -> None:
        """Cache the ``granules`` of a request that frees its blocks, including granules of its output.

        The first ``num_known`` of them were cached already. If one of these is unknown here, it was dropped while the
        report was on its way. Then later granules are useless, and the next command drops them.
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
                # Later granules of the chain must not outlive this one.
                idle.add(granule, idle.used_by(idle.remove(granule), line))
            elif granule in self._in_use:
                self._in_use[granule] = idle.used_by(self._in_use[granule], line)
            else:
                self._keep(granule, line)

    def end(self, held: HeldGranules, states: Sequence[PrefixHash] = ()) -> None:
        """End a request: its cached granules without another user become idle.

        The instance cached the ``states`` of these granules at the end.
        """
        if self.states is not None:
            self._end_use(self.states, held, states)
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

    def _end_use(self, cached: CachedStates, held: HeldGranules, states: Sequence[PrefixHash]) -> None:
        if states or held.use is not None:
            use = StateUse(0) if held.use is None else held.use
            known = [granule for granule in states if granule in self]
            line = self._idle.unknown if held is NOTHING else held.line
            cached.end(use, held.chain, known, self._idle, line)

    # --- moving to another instance ---

    def owner_of(self, granule: PrefixHash) -> tuple[str | None, int]:
        """Return the tenant that uses a cached granule, or None if it is unknown or not alone, and its share."""
        line = self._in_use.get(granule)
        if line is None:
            line = self._idle.line_by_granule[granule]
        return line.tenant, line.share

    def last_use(self, granule: PrefixHash) -> int:
        """Return the number of a cached granule's last use in the mesh; the latest number while a request uses it."""
        return self._idle.last_use(granule)

    def num_older(self, number: int, most: int) -> int:
        """Return how many idle granules were last used before the use ``number``, at most ``most``."""
        return self._idle.num_older(number, most)

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

    # --- eviction ---

    @property
    def num_leased(self) -> int:
        """Number of idle granules with a lease."""
        return self._idle.num_leased

    def spare(self, chains: Mapping[PrefixHash, Sequence[PrefixHash]], num_granules: int) -> None:
        """Count chains as used just now that an eviction of ``num_granules`` would reach (`IdleGranules.spare`)."""
        self._idle.spare(chains, num_granules)

    def end_leases(self, granules: Sequence[PrefixHash]) -> None:
        """Count idle granules, and states, whose leases ended as used just now."""
        self._idle.end_leases(granules)
        if self.states is not None:
            self.states.end_leases(granules)

    def make_way(self, chain: Sequence[PrefixHash], num_reused: int, num_blocks: int, num_free_blocks: int) -> None:
        """Evict idle granules until a new request fits, which computes granules again for want of a state.

        Granules behind the first ``num_reused`` stay cached while the request computes them, so they take room beside
        the request's other ``num_blocks``, of ``num_free_blocks``. The next `make_room` returns the evicted granules.
        """
        num_own_blocks = num_blocks - num_reused * self.granule_blocks
        if self.states is None or num_own_blocks + len(chain) * self.granule_blocks <= num_free_blocks:
            return
        idle, reused = self._idle, set(chain[:num_reused])
        while (short := num_own_blocks + self.num_idle_blocks_of(chain) - num_free_blocks) > 0:
            taken = idle.take(-(-short // self.granule_blocks) + sum([granule in idle for granule in reused]))
            idle.add_all([(granule, line) for granule, line in taken.items() if granule in reused])
            gone = tuple([granule for granule in taken if granule not in reused])
            if not gone:
                return
            self._where.discard_all(gone, self._bit)
            self.states.discard(gone)
            self._evicted += gone

    def make_room(self, num_granules: int) -> Evictions:
        """Evict ``num_granules`` idle granules, or all if there are fewer, and orphans without a user; return them.

        With an offload tier, evicted granules are offloaded as far as there is room.
        """
        orphans, idle = self._take_orphans(), self._idle
        if num_granules <= 0:
            states = () if self.states is None else self.states.make_room(self._where.protected)
            return Evictions(drop=orphans, states=states) if orphans or states else NO_EVICTIONS
        if self._where.protected:
            idle.spare(self._where.protected, num_granules)
        given_up = idle.take(num_granules)
        self._where.discard_all(given_up, self._bit)
        if self.states is not None:
            self.states.discard(given_up)
            return Evictions(drop=orphans + tuple(given_up), states=self.states.make_room(self._where.protected))
        if self.offloaded is None:
            return Evictions(drop=orphans + tuple(given_up))
        room = self.offloaded.take_in(given_up, idle)
        return Evictions(drop=orphans + room.drop, offload=room.offload, evict=room.evict)

    def _take_orphans(self) -> tuple[PrefixHash, ...]:
        """Remove and return the orphans, which the next command drops, behind the granules that `make_way` evicted.

        An orphan in a live request's chain remains: the request may have found it on the instance meanwhile.
        """
        evicted, self._evicted = self._evicted, ()
        if not self._orphans:
            return evicted
        orphans = tuple([granule for granule in self._orphans if granule not in self._users])
        for granule in orphans:
            del self._orphans[granule]
        return evicted + orphans

    def replace(
        self,
        kept: Sequence[PrefixHash],
        held: Iterable[HeldGranules],
        offloaded: Sequence[PrefixHash] | None = None,
        states: Sequence[PrefixHash] = (),
        lines: Lines = NO_LINES,
    ) -> None:
        """Replace the cache by the instance's report, the longest unused granule first.

        ``held`` are the live requests' granules; ones that the report lacks count as lost. ``offloaded`` is the tier's
        report; None leaves the tier as it is. ``states`` are the reported granules with a state. ``lines`` (`lines_of`)
        has the lines of granules that were unknown before, as far as their users are known.

        A reported granule in a live request's chain that was unknown before is left out: it could not be dropped for
        the room that the request was promised. The instance drops it by itself if necessary.
        """
        if self.offloaded is not None and offloaded is not None:
            self.offloaded.replace(offloaded, self._users)
        known = self._idle.lines() | self._in_use
        line_of = {**lines, **known}
        orphans = self._orphans.keys() & set(kept)
        self._forget()
        if not self.granule_blocks:
            return
        self._orphans = dict.fromkeys([granule for granule in kept if granule in orphans])
        for granule in kept:
            if granule not in self and granule not in orphans and (granule not in self._users or granule in known):
                self._keep(granule, line_of.get(granule, self._idle.unknown))
        for each in held:
            for index, granule in enumerate(each.chain):
                if each.kept >> index & 1 and granule not in self:
                    each.kept &= ~(1 << index)
                    each.num_lost += 1
            self._num_held += each.kept.bit_count()
        if self.states is not None:
            self.states.replace([granule for granule in states if granule in self])

    def lines_of(self, chains: KeptChains, uses: Sequence[LastUse | None]) -> dict[PrefixHash, IdleLine]:
        """Return the lines of reported granules by their last ``uses``. A user of a granule uses all before it, too."""
        idle = self._idle
        lines = [idle.unknown] * len(uses)
        for index, use in enumerate(uses):
            if not chains.depths[index]:
                continue
            if use is not None:
                lines[index] = idle.used_by(lines[index], idle.line_of(use.user.tenant, use.user.share))
            if (to := chains.previous[index]) != NO_GRANULE:
                lines[to] = idle.used_by(lines[to], lines[index])
        return dict(zip(chains.kept, lines, strict=True))

    def lose_offloaded(self, granules: Iterable[PrefixHash]) -> None:
        """Remove granules that the tier lost or dropped by itself."""
        if self.offloaded is not None:
            self.offloaded.lose(granules)

    def clear(self) -> None:
        """Remove all granules from cache and tier."""
        self._forget()
        if self.offloaded is not None:
            self.offloaded.clear()
        if self.states is not None:
            self.states.clear()

    def _forget(self) -> None:
        self._where.discard_all((*self._in_use, *self._idle.lines()), self._bit)
        self._in_use.clear()
        self._idle.clear()
        self._orphans.clear()
        self._num_held = 0

    def check_integrity(self, name: str, held: Sequence[HeldGranules]) -> None:
        """Check users, index and chains against the live requests' granules; AssertionError names the difference."""
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
        if self.states is not None:
            self.states.check_integrity(name, [(each.chain, each.use) for each in held if each.use is not None])
            assert all(granule in self for granule in self.states.granules), f"{name}: a state without its KV"
