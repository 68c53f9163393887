"""Which cached granules follow which, in an instance's report: short, and harmless if it is wrong."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.instances.kept_chains import NO_GRANULE, KeptChains, jumps_of
from pdmesh.instance.cache import BlockCache, CachedPrefix
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import PrefixHash
from pdmesh_testing.reuse import hashes

MANY = 1 << 20


def path(*names: int) -> tuple[PrefixHash, ...]:
    """Return the granules of a path: two with a common beginning share it."""
    return tuple([PrefixHash(bytes(names[: number + 1]).ljust(16, b"-")) for number in range(len(names))])


def served(*chains: tuple[PrefixHash, ...]) -> BlockCache:
    """Return the cache of an instance that computed and ended these prompts, one after the other."""
    cache = BlockCache(GRANULE_TOKENS)
    for chain in chains:
        prefix = CachedPrefix(chain)
        num_reused = next((number for number, each in enumerate(chain) if each not in cache.granules), len(chain))
        cache.share(prefix, num_reused)
        cache.computed(prefix, len(chain))
        cache.end(prefix, ())
    return cache


def test_one_chain_is_one_jump() -> None:
    cache = served(hashes(200))
    assert cache.jumps == ((199, NO_GRANULE),)
    assert KeptChains(cache.granules, cache.jumps).longest(MANY) == [hashes(200)]


def test_branches_are_told_and_the_longest_unused_chain_is_first() -> None:
    stem = path(1, 1, 1)
    chains = [path(1, 1, 1, 2, 2), path(3, 3), path(1, 1, 1, 4)]
    cache = served(stem, *chains)
    assert KeptChains(cache.granules, cache.jumps).longest(MANY) == chains
    assert len(cache.jumps) == 3


@pytest.mark.parametrize("seed", range(20))
def test_all_chains_are_found_again(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [path(*[rng.randrange(3) for _ in range(rng.randint(1, 8))]) for _ in range(20)]
    cache = served(*prompts)
    found = KeptChains(cache.granules, cache.jumps).longest(MANY)
    assert {chain[-1] for chain in found} == {
        each[-1] for each in prompts if not any(other[: len(each)] == each != other for other in prompts)
    }
    assert set(found) <= set(prompts)
    assert len(cache.jumps) <= len(cache.granules)


def test_of_too_many_granules_the_least_recently_used_chains_are_left_out() -> None:
    chains = [hashes(4, name) for name in range(5)]
    cache = served(*chains)
    assert KeptChains(cache.granules, cache.jumps).longest(11) == chains[3:]


@pytest.mark.parametrize("seed", range(20))
def test_wrong_jumps_do_no_harm(seed: int) -> None:
    """Circles, indexes out of range, and granules whose beginning is unknown."""
    rng = random.Random(seed)
    kept = hashes(30)
    jumps = [(rng.randrange(-3, 40), rng.randrange(-3, 40)) for _ in range(20)]
    for chain in KeptChains(kept, jumps).longest(MANY):
        indexes = [kept.index(granule) for granule in chain]
        assert indexes == sorted(indexes, reverse=True)
    assert KeptChains(kept, ()).longest(MANY) == []


def test_a_granule_without_its_predecessor_begins_no_chain() -> None:
    one, two, three = hashes(3)
    assert jumps_of({two: one, three: two}, (three, two)) == ((1, 1),)
    assert KeptChains((three, two), ((1, 1),)).longest(MANY) == []
