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


def chains_of(kept: Sequence[PrefixHash], jumps: Iterable[tuple[int, int]], most: int) -> list[tuple[PrefixHash, ...]]:
    """Return the longest chains of ``kept``, the least recently used first.

    Chains share granules. They have ``most`` granules together at most; beyond, the least recently used are left out.
    A granule before a used one was used at the same time or later. A chain with another order is left out, too.
    """
    number = len(kept)
    previous = list(range(1, number + 1))
    for index, to in jumps:
        if 0 <= index < number:
            previous[index] = to
    #: Number of granules of the chain that ends with each granule; 0 if its beginning is unknown.
    depths = [0] * number
    is_last = [True] * number
    for index in reversed(range(number)):
        to = previous[index]
        if to == NO_GRANULE:
            depths[index] = 1
        elif index < to < number and depths[to]:
            depths[index] = depths[to] + 1
            is_last[to] = False
    chains: list[tuple[PrefixHash, ...]] = []
    for index in reversed(range(number)):
        if not is_last[index] or not depths[index]:
            continue
        most -= depths[index]
        if most < 0:
            break
        chain: list[PrefixHash] = []
        at = index
        while at != NO_GRANULE:
            chain.append(kept[at])
            at = previous[at]
        chain.reverse()
        chains.append(tuple(chain))
    chains.reverse()
    return chains
