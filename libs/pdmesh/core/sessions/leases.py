"""Leases of sessions' cached KV: until a lease ends, its granules are evicted after their tenant's others.

A client asks for a lease with a turn. It covers the turn's whole prompt, and replaces the session's lease before. A
lease grants no memory and blocks no request: if only leased granules are left, they are evicted, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from pdmesh.model import PrefixHash, PrefixHashes, SessionKey

#: Most granules of all leases; a granule counts for each lease. Beyond, the tenant with the most loses its oldest one.
MAX_LEASED: Final = 1 << 18


class _Lease(NamedTuple):
    tenant: str
    chain: PrefixHashes
    until_s: float


class Leases:
    """The leases in force, by session. ``leased`` counts the leases of each granule, for the caches."""

    def __init__(self, leased: dict[PrefixHash, int]) -> None:
        self._leased = leased
        self._by_session: dict[SessionKey, _Lease] = {}
        #: Keys of a tenant's leases, the oldest first.
        self._tenants: dict[str, dict[SessionKey, None]] = {}
        self._num_of = Counter[str]()
        #: Ends of leases, in a heap; also of leases that were replaced or ended before.
        self._ends: list[tuple[float, SessionKey]] = []
        #: Granules without a lease since the last call of `expire`.
        self._ended: list[PrefixHash] = []

    def __len__(self) -> int:
        return len(self._by_session)

    def grant(self, key: SessionKey, tenant: str, chain: PrefixHashes, until_s: float) -> None:
        """Lease the granules of a session's prompt until ``until_s``, instead of the ones leased before."""
        for granule in chain:
            self._leased[granule] = self._leased.get(granule, 0) + 1
        self.end(key)
        if not chain:
            return
        self._by_session[key] = _Lease(tenant, chain, until_s)
        self._tenants.setdefault(tenant, {})[key] = None
        self._num_of[tenant] += len(chain)
        heappush(self._ends, (until_s, key))
        while self._num_of.total() > MAX_LEASED:
            most, _ = self._num_of.most_common(1)[0]
            self.end(next(iter(self._tenants[most])))
        if len(self._ends) > 2 * len(self._by_session) + 64:
            self._ends = [(lease.until_s, key) for key, lease in self._by_session.items()]
            heapify(self._ends)

    def end(self, key: SessionKey) -> None:
        """End a session's lease; without effect if it has none."""
        lease = self._by_session.pop(key, None)
        if lease is None:
            return
        own = self._tenants[lease.tenant]
        del own[key]
        self._num_of[lease.tenant] -= len(lease.chain)
        if not own:
            del self._tenants[lease.tenant], self._num_of[lease.tenant]
        for granule in lease.chain:
            number = self._leased.pop(granule) - 1
            if number:
                self._leased[granule] = number
            else:
                self._ended.append(granule)

    def num_granules(self, key: SessionKey) -> int:
        """Return how many granules a session's lease covers; 0 if it has none."""
        lease = self._by_session.get(key)
        return 0 if lease is None else len(lease.chain)

    def left_s(self, key: SessionKey, now_s: float) -> float:
        """Return how long a session's lease lasts yet; 0 if it has none."""
        lease = self._by_session.get(key)
        return 0.0 if lease is None else max(0.0, lease.until_s - now_s)

    def expire(self, now_s: float) -> Sequence[PrefixHash]:
        """End the leases that are over. Return the granules that lost their last lease since the last call.

        Granules of one chain are in its order.
        """
        if not (self._ends or self._ended):
            return ()
        while self._ends and self._ends[0][0] <= now_s:
            _, key = heappop(self._ends)
            lease = self._by_session.get(key)
            if lease is not None and lease.until_s <= now_s:
                self.end(key)
        ended, self._ended = self._ended, []
        return [granule for granule in ended if granule not in self._leased]

    def check_integrity(self) -> None:
        """Raise AssertionError if sums and leases differ."""
        number, leased = Counter[str](), Counter[PrefixHash]()
        for lease in self._by_session.values():
            number[lease.tenant] += len(lease.chain)
            leased.update(lease.chain)
        assert number == self._num_of, "leased granules miscounted"
        assert leased == Counter(self._leased), "granules have other leases than recorded"
        assert sum(map(len, self._tenants.values())) == len(self), "leases of tenants miscounted"
