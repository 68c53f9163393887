"""Index of cached granules: one bit for each instance and granule, so one walk down a chain finds all holders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdmesh.core.instances.idle import UseCounter
from pdmesh.model import PrefixHash


class GranuleIndex:
    """The instances that have each granule, as a mask: bit n stands for the instance with number n."""

    def __init__(self) -> None:
        self._masks: dict[PrefixHash, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, granule: PrefixHash, bit: int) -> None:
        self._masks[granule] = self._masks.get(granule, 0) | bit

    def add_all(self, granules: Sequence[PrefixHash], bit: int) -> None:
        """Add granules to an instance, given by its bit."""
        masks = self._masks
        for granule in granules:
            masks[granule] = masks.get(granule, 0) | bit

    def discard(self, granule: PrefixHash, bit: int) -> None:
        self.discard_all((granule,), bit)

    def discard_all(self, granules: Iterable[PrefixHash], bit: int) -> None:
        """Remove granules of an instance, given by its bit. Each granule must be in the index."""
        masks = self._masks
        for granule in granules:
            mask = masks.pop(granule) & ~bit
            if mask:
                masks[granule] = mask

    def depths(self, chain: Sequence[PrefixHash], most: int) -> dict[int, int]:
        """Return how many of the first ``most`` granules each instance has, by number; only instances with some."""
        found: dict[int, int] = {}
        masks = self._masks
        left = masks.get(chain[0], 0) if most > 0 else 0
        depth = 1
        while left and depth < most:
            mask = left & masks.get(chain[depth], 0)
            if mask != left:
                _note(found, left & ~mask, depth)
                left = mask
            depth += 1
        _note(found, left, depth)
        return found

    def mask_of(self, granule: PrefixHash) -> int:
        """Return the instances that have a granule, as a mask."""
        return self._masks.get(granule, 0)

    def of(self, bit: int) -> set[PrefixHash]:
        """Return the granules of one instance. Slow, for checks: looks at the whole index."""
        return {granule for granule, mask in self._masks.items() if mask & bit}


class CacheIndex(GranuleIndex):
    """The instances with each granule in their caches, and in ``offloaded`` the instances with it in their tiers.

    ``uses`` counts the uses of cached granules on all instances. Chains in ``protected``, by their last granules, are
    evicted after others, and ``leased`` granules after their tenants' others: for each the number of its leases.
    ``with_states`` is a mask of the instances on which requests continue from states alone, and ``states`` has the
    granules with a state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offloaded = GranuleIndex()
        self.states = GranuleIndex()
        self.with_states = 0
        self.uses = UseCounter()
        self.protected: dict[PrefixHash, Sequence[PrefixHash]] = {}
        self.leased: dict[PrefixHash, int] = {}
        self._num_requests = 0

    def number_request(self) -> int:
        """Return the next number, from 1 on, for a request with a chain that begins on an instance."""
        self._num_requests += 1
        return self._num_requests

    def protect(self, chains: Mapping[PrefixHash, Sequence[PrefixHash]]) -> None:
        """Protect these chains, named by their last granules, instead of the ones before."""
        self.protected.clear()
        self.protected.update(chains)

    def reusable_depths(self, chain: Sequence[PrefixHash], most: int) -> dict[int, int]:
        """Return how many of the first ``most`` granules a request can reuse on each instance, by number.

        The granules are cached, and have a state behind them where the model has states.
        """
        found = self.depths(chain, most)
        for number in list(found) if self.with_states else ():
            bit = 1 << number
            if self.with_states & bit:
                depth = found.pop(number)
                while depth and not self.states.mask_of(chain[depth - 1]) & bit:
                    depth -= 1
                if depth:
                    found[number] = depth
        return found

    def depths_with_tiers(self, chain: Sequence[PrefixHash], most: int) -> dict[int, int]:
        """Return how many of the first ``most`` granules each instance has in its cache or its tier, by number."""
        found: dict[int, int] = {}
        masks, others = self._masks, self.offloaded._masks
        left = masks.get(chain[0], 0) | others.get(chain[0], 0) if most > 0 else 0
        depth = 1
        while left and depth < most:
            mask = left & (masks.get(chain[depth], 0) | others.get(chain[depth], 0))
            if mask != left:
                _note(found, left & ~mask, depth)
                left = mask
            depth += 1
        _note(found, left, depth)
        return found


def _note(found: dict[int, int], mask: int, depth: int) -> None:
    while mask:
        found[mask.bit_length() - 1] = depth
        mask &= ~(1 << (mask.bit_length() - 1))
