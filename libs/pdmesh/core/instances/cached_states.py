"""States behind cached granules of one instance: which are kept for reuse, and the order of eviction.

A request continues only from a granule whose *state* is cached (docs/terms.md). States are large, so the core chooses:

* At admission, a prompt's last granule, and the granule where other prompts were seen to diverge from it (*second
  sighting*). As far as there is room, also granules in between, evenly spaced: another prompt may diverge there.
* At the end of an answer, the instance caches the state behind the last granule, and reports it.

States that a longer one of the same conversation replaces, and states in between, are *spare*, and are evicted first.
Then follows the longest unused state, of tenants with more than their share. Of one tenant's states, leased ones go
last: the longest state that a lease covers is not spare, though the answer left a longer one. States in use by live
requests are not evicted. The state of an evicted granule goes with the granule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdmesh.core.instances.cache_index import GranuleIndex
from pdmesh.core.instances.idle import NO_LEASES, IdleGranules, IdleLine
from pdmesh.model import PrefixHash


class StateUse:
    """Use of states by one request, which continues from state ``num_reused`` and computes the states ``asked``.

    Numbers count the granules of the request's chain that a state covers; 0 is no state. ``branch`` is the asked state
    where other prompts diverged.
    """

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, num_reused: int) -> None:
        self.num_reused = num_reused
        self.asked: tuple[int, ...] = ()
        self.branch = 0


class CachedStates:
    """Cached states of one instance, named by the last granule that they cover. At most ``most`` are kept."""

    def __init__(self, where: GranuleIndex, bit: int, most: int, leased: Mapping[PrefixHash, int] = NO_LEASES) -> None:
        """``bit`` stands for the instance in the index ``where``. ``leased`` has the granules that are leased now."""
        self._where, self._bit, self._most, self._leased = where, bit, most, leased
        self._spare, self._lasting = IdleGranules(), IdleGranules(leased=leased)
        #: States that live requests continue from or have computed, and whether each is lasting.
        self._in_use: dict[PrefixHash, bool] = {}
        #: Number of live requests that continue from a state, or were asked for it.
        self._users: dict[PrefixHash, int] = {}
        #: Number of requests that continued from each state.
        self._num_uses: dict[PrefixHash, int] = {}
        #: Last granule of the prompt before each state at the end of an answer.
        self._prompts: dict[PrefixHash, PrefixHash] = {}

    def __len__(self) -> int:
        return len(self._in_use) + len(self._spare) + len(self._lasting)

    def __contains__(self, granule: PrefixHash) -> bool:
        return granule in self._in_use or granule in self._lasting or granule in self._spare

    @property
    def granules(self) -> set[PrefixHash]:
        """The granules with a state."""
        return {*self._in_use, *self._spare.line_by_granule, *self._lasting.line_by_granule}

    @property
    def _num_coming(self) -> int:
        return sum([granule not in self for granule in self._users])

    def depth(self, chain: Sequence[PrefixHash], most: int) -> int:
        """Return how many of the first ``most`` granules of a chain a cached state covers, at most."""
        return next((number for number in range(most, 0, -1) if chain[number - 1] in self), 0)

    # --- live requests ---

    def begin(self, chain: Sequence[PrefixHash], num_reused: int) -> StateUse:
        """Begin a request that continues behind ``num_reused`` granules."""
        use = StateUse(num_reused if num_reused and chain[num_reused - 1] in self else 0)
        if use.num_reused:
            granule = chain[num_reused - 1]
            self._users[granule] = self._users.get(granule, 0) + 1
            self._num_uses[granule] = self._num_uses.get(granule, 0) + 1
            if granule not in self._in_use:
                self._in_use[granule] = self._remove(granule)
        return use

    def ask(self, use: StateUse, chain: Sequence[PrefixHash], num_seen: int) -> tuple[int, ...]:
        """Choose the states that a new request computes, and return their numbers, ascending.

        Other prompts share the first ``num_seen`` granules.
        """
        end, num_coming = len(chain), self._num_coming
        lasting = [number for number in dict.fromkeys((end, num_seen)) if use.num_reused < number <= end]
        lasting = lasting[: max(0, self._most - len(self._in_use) - num_coming)]
        num_free = self._most - len(self) - num_coming - len(lasting)
        spaced = _spaced(use.num_reused, end, max(0, num_free + len(self._spare) // 2))
        use.asked = tuple(sorted({*lasting, *spaced}))
        use.branch = num_seen if num_seen in lasting else 0
        for number in use.asked:
            granule = chain[number - 1]
            self._users[granule] = self._users.get(granule, 0) + 1
        return use.asked

    def computed(self, use: StateUse, chain: Sequence[PrefixHash], start: int, end: int, cached: int) -> None:
        """Add the asked states behind the granules from number ``start`` + 1 to ``end``, which are computed.

        ``cached`` has a bit for each granule of the chain that is cached in the request's own blocks. The instance
        reports other states at the request's end.
        """
        for number in use.asked:
            granule = chain[number - 1]
            if start < number <= end and cached >> (number - 1) & 1 and granule not in self:
                self._where.add(granule, self._bit)
                self._in_use[granule] = number in (len(chain), use.branch)

    def end(
        self,
        use: StateUse,
        chain: Sequence[PrefixHash],
        reported: Sequence[PrefixHash],
        idle: IdleGranules,
        line: IdleLine,
    ) -> None:
        """End a request, of the tenant with ``line`` in ``idle``. The instance cached the states ``reported``, too.

        States that it continued from, or computed, are spare if a longer state of the request replaces them, and no
        other request continued from them. The state behind a leased prompt is not, but replaces the ones before it.
        """
        self._spare.forget_tenants()
        self._lasting.forget_tenants()
        numbers = [number for number in (use.num_reused, *use.asked) if number]
        own = [chain[number - 1] for number in numbers]
        is_replaced = any(granule not in own for granule in reported)
        branch = chain[use.branch - 1] if use.branch else None
        leased = chain[-1] if chain and chain[-1] in self._leased else None
        if leased is not None and (leased in self._in_use or leased in reported):
            self._demote_leased(chain[:-1])
        for granule in own:
            self._users[granule] -= 1
            if self._users[granule]:
                continue
            del self._users[granule]
            if granule in self._in_use:
                is_lasting = self._in_use.pop(granule)
                if is_replaced and granule not in (branch, leased) and self._num_uses.get(granule, 0) < 2:
                    is_lasting = False
                self._add(granule, is_lasting, idle, line)
        for granule in reported:
            if granule not in self:
                self._where.add(granule, self._bit)
                is_end = granule not in own or (granule == chain[-1] and not is_replaced)
                is_lasting = is_end or granule in (branch, leased)
                if chain and granule not in own:
                    self._prompts[granule] = chain[-1]
                if granule in self._users:
                    self._in_use[granule] = is_lasting
                else:
                    self._add(granule, is_lasting, idle, line)

    def _demote_leased(self, granules: Sequence[PrefixHash]) -> None:
        """Make idle states spare that are leased for nothing, because the lease covers a longer state of the chain."""
        lasting = self._lasting.line_by_granule
        for granule in granules:
            if granule in lasting and granule in self._leased and self._num_uses.get(granule, 0) < 2:
                line = self._lasting.remove(granule)
                self._spare.add(granule, self._spare.line_like(line, self._lasting))

    def _add(self, granule: PrefixHash, is_lasting: bool, idle: IdleGranules, line: IdleLine) -> None:
        granules = self._lasting if is_lasting else self._spare
        granules.add(granule, granules.line_like(line, idle))

    def _remove(self, granule: PrefixHash) -> bool:
        """Remove a state that no request uses, and return whether it was lasting."""
        is_lasting = granule in self._lasting
        (self._lasting if is_lasting else self._spare).remove(granule)
        return is_lasting

    # --- eviction ---

    def end_leases(self, granules: Sequence[PrefixHash]) -> None:
        """Count idle states whose leases ended as used just now."""
        self._lasting.end_leases(granules)

    def make_room(self, protected: Mapping[PrefixHash, Sequence[PrefixHash]]) -> tuple[PrefixHash, ...]:
        """Evict the states beyond the limit, counting asked states, too, and return them.

        Lasting states of ``protected`` prompts, and of their answers, are evicted after others of their tenants. The
        prompts are named by their last granules.
        """
        num_over = len(self) + self._num_coming - self._most
        if num_over <= 0:
            return ()
        taken = [*self._spare.take(num_over)]
        if (num_lasting := num_over - len(taken)) > 0:
            if protected:
                lasting, prompts = self._lasting.line_by_granule, self._prompts
                found = {each: (each,) for each in lasting if prompts.get(each, each) in protected}
                self._lasting.spare(found, num_lasting)
            taken += self._lasting.take(num_lasting)
        self._forget(taken)
        return tuple(taken)

    def discard(self, granules: Iterable[PrefixHash]) -> None:
        """Remove the states of granules that leave the cache. No request uses them."""
        gone = [granule for granule in granules if granule in self]
        for granule in gone:
            self._remove(granule)
        self._forget(gone)

    def _forget(self, granules: Sequence[PrefixHash]) -> None:
        self._where.discard_all(granules, self._bit)
        for granule in granules:
            self._num_uses.pop(granule, None)
            self._prompts.pop(granule, None)

    def replace(self, states: Iterable[PrefixHash]) -> None:
        """Replace the states by the instance's report."""
        before = {**dict.fromkeys(self._spare.line_by_granule, False), **self._in_use}
        self.clear()
        for granule in states:
            self._where.add(granule, self._bit)
            is_lasting = before.get(granule, True)
            if granule in self._users:
                self._in_use[granule] = is_lasting
            else:
                self._add(granule, is_lasting, self._lasting, self._lasting.unknown)

    def clear(self) -> None:
        """Remove all states. Live requests still use them."""
        self._where.discard_all(self.granules, self._bit)
        self._in_use.clear()
        self._spare.clear()
        self._lasting.clear()
        self._num_uses.clear()
        self._prompts.clear()

    def check_integrity(self, name: str, uses: Iterable[tuple[Sequence[PrefixHash], StateUse]]) -> None:
        """Check users and index against the live requests; AssertionError names the difference."""
        users: dict[PrefixHash, int] = {}
        for chain, use in uses:
            for number in (use.num_reused, *use.asked):
                if number:
                    users[chain[number - 1]] = users.get(chain[number - 1], 0) + 1
        assert users == self._users, f"{name}: states have other users than recorded"
        assert self._in_use.keys() <= users.keys(), f"{name}: states without a user are in use"
        idle = self._spare.line_by_granule.keys() | self._lasting.line_by_granule.keys()
        assert len(self) == len(self.granules), f"{name}: a state is recorded twice"
        assert not idle & users.keys(), f"{name}: idle states have users"
        assert self._where.of(self._bit) == self.granules, f"{name}: the index has other states"


def _spaced(start: int, end: int, most: int) -> list[int]:
    """Return at most ``most`` numbers between ``start`` and ``end``: multiples of the least power of two that fits."""
    if most <= 0:
        return []
    step = 1
    while (end - 1) // step - start // step > most:
        step *= 2
    return list(range((start // step + 1) * step, end, step))
