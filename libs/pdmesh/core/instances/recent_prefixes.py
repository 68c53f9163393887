"""Chains of requests that ended on an instance, or whose KV the instance had cached before it registered.

A prefix cache knows single granules. These chains say which of them belong together, so that a whole prefix can move
to another instance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdmesh.core.instances.kept_chains import KeptChains
from pdmesh.model import PrefixHash

#: Upper limit of the remembered granules, as a multiple of the granules that the cache can hold. Chains share granules.
_MOST_PER_CACHED = 8


class RecentPrefixes:
    """Chains of ended requests, the longest unused first. Each chain has another last granule."""

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, num_cached: int) -> None:
        """``num_cached`` is the number of granules that the cache can hold."""
        self._most = _MOST_PER_CACHED * num_cached
        self._by_last: dict[PrefixHash, Sequence[PrefixHash]] = {}
        self._num_granules = 0

    @property
    def oldest_first(self) -> Collection[Sequence[PrefixHash]]:
        """The chains, the longest unused first."""
        return self._by_last.values()

    def add(self, chain: Sequence[PrefixHash]) -> None:
        """Add the chain of a request that ended just now, and forget old chains beyond the limit."""
        if not chain:
            return
        self.forget(chain[-1])
        self._by_last[chain[-1]] = chain
        self._num_granules += len(chain)
        while self._num_granules > self._most:
            self.forget(next(iter(self._by_last)))

    def learn(self, chains: KeptChains) -> None:
        """Add the chains of cached granules that the instance reports, as if requests had ended with them."""
        for chain in chains.longest(self._most):
            self.add(chain)

    def forget(self, last: PrefixHash) -> None:
        """Forget the chain with this last granule, if there is one."""
        chain = self._by_last.pop(last, None)
        if chain is not None:
            self._num_granules -= len(chain)
