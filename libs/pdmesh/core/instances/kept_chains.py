"""Chains of the cached granules that an instance reports: which granule follows which.

A report lists granules in the order of their use, and a chain from its end to its beginning. So the granule before
another one mostly comes next. Only the other ones are reported: the *jumps*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdmesh.model import Jumps, PrefixHash

#: Index that stands for no granule: the beginning of a chain.
NO_GRANULE = -1


def jumps_of(before: Mapping[PrefixHash, PrefixHash | None], kept: Sequence[PrefixHash]) -> Jumps:
    """Return the jumps of ``kept``: pairs of indexes of a granule and of the one before it.

    ``before`` has the predecessor of each granule, None for the first one of a chain. A granule without its predecessor
    jumps to itself. There are as many jumps as chains, branches and uses of a part of a chain, and never more than
    granules.
    """
    index_of = {granule: index for index, granule in enumerate(kept)}
    found: list[tuple[int, int]] = []
    for index, granule in enumerate(kept):
        predecessor = before[granule]
        previous = NO_GRANULE if predecessor is None else index_of.get(predecessor, index)
        if previous != index + 1:
            found.append((index, previous))
    return tuple(found)


class KeptChains:
    """The chains of cached granules in a report.

    A granule before a used one was used at the same time or later. A chain with another order counts as unknown.
    ``depths`` has the number of granules of the chain that ends with each granule; 0 if the chain is unknown.
    ``previous`` has the index of the granule before each one.
    """

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, kept: Sequence[PrefixHash], jumps: Iterable[tuple[int, int]]) -> None:
        number = len(kept)
        self.kept = kept
        self.previous = list(range(1, number + 1))
        for index, to in jumps:
            if 0 <= index < number:
                self.previous[index] = to
        self.depths = [0] * number
        self._is_last = [True] * number
        for index in reversed(range(number)):
            to = self.previous[index]
            if to == NO_GRANULE:
                self.depths[index] = 1
            elif index < to < number and self.depths[to]:
                self.depths[index] = self.depths[to] + 1
                self._is_last[to] = False

    def chain(self, index: int) -> tuple[PrefixHash, ...]:
        """Return the chain that ends with a granule; empty if it is unknown."""
        found: list[PrefixHash] = []
        while index != NO_GRANULE and self.depths[index]:
            found.append(self.kept[index])
            index = self.previous[index]
        return tuple(reversed(found))

    def longest(self, most: int) -> list[tuple[PrefixHash, ...]]:
        """Return the longest chains, the least recently used first.

        Chains share granules. They have ``most`` granules together at most; beyond, the least recently used are left
        out.
        """
        chains: list[tuple[PrefixHash, ...]] = []
        for index in reversed(range(len(self.kept))):
            if not self._is_last[index] or not self.depths[index]:
                continue
            most -= self.depths[index]
            if most < 0:
                break
            chains.append(self.chain(index))
        chains.reverse()
        return chains
