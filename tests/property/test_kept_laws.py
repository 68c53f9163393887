"""Laws of what is kept: the core's books and an instance's store, told the same in the same order, are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pdmesh.core.instances.kept import HeldGranules, KeptHere, KeptWhere
from pdmesh.model import Epoch, PrefixHash, RequestId
from pdmesh.sim.held import Held
from pdmesh.sim.kept import SimulatedKept

BLOCK_SIZE = 32  # four blocks for each granule


def a_chain(numbers: Sequence[int]) -> tuple[PrefixHash, ...]:
    """Granules named by all the numbers up to each, as hashes are."""
    return tuple([PrefixHash(bytes(numbers[: index + 1]).ljust(16, b"\xff")) for index in range(len(numbers))])


class Both:
    """The same requests on both sides."""

    def __init__(self, number: int, where: KeptWhere) -> None:
        self.core = KeptHere(where, number, BLOCK_SIZE)
        self.store = SimulatedKept(BLOCK_SIZE)
        self.live: dict[int, tuple[HeldGranules, Held]] = {}
        self._num_begun = 0

    def begin(self, chain: tuple[PrefixHash, ...]) -> None:
        self._num_begun += 1
        num_reused = self.core.depth(chain, len(chain))
        assert num_reused == sum(granule in self.core for granule in chain)
        held = Held((RequestId(f"r{self._num_begun}"), Epoch(0)), 4 * (len(chain) + 2), None, chain=chain)
        self.store.share(held, num_reused)
        self.live[self._num_begun] = self.core.begin(chain, num_reused), held

    def computed(self, number: int, num_granules: int) -> None:
        granules, held = self.live[number]
        self.core.computed(granules, num_granules)
        self.store.computed(held, num_granules)

    def end(self, number: int, drawn: tuple[PrefixHash, ...]) -> None:
        granules, held = self.live.pop(number)
        self.core.end(granules, drawn)
        self.store.end(held, drawn)

    def drop(self, number: int) -> None:
        self.store.drop(self.core.drop(number))

    def report(self) -> None:
        self.core.replace(self.store.granules, [granules for granules, _ in self.live.values()])

    def check(self) -> None:
        self.core.check_integrity("here", [granules for granules, _ in self.live.values()])
        assert self.core.num_idle_blocks <= self.store.num_idle_blocks  # the core keeps more from being dropped
        own = sum(self.store.num_own_blocks(held) for _, held in self.live.values())
        whole = sum(held.num_blocks for _, held in self.live.values())
        taken = whole - self.core.num_saved_blocks
        assert own + self.store.num_blocks == taken + self.core.num_idle_blocks


@pytest.mark.parametrize("seed", range(40))
def test_the_core_knows_what_an_instance_keeps(seed: int) -> None:
    """Whatever begins, is computed, ends, is dropped or reported."""
    rng, where = random.Random(seed), KeptWhere()
    sides = [Both(number, where) for number in (1, 2)]
    for _ in range(120):
        both = rng.choice(sides)
        match rng.randrange(6):
            case 0 | 1:
                both.begin(a_chain([rng.randrange(2) for _ in range(rng.randrange(7))]))
            case 2 if both.live:
                number = rng.choice([*both.live])
                chain = both.live[number][1].chain
                both.computed(number, rng.randint(0, len(chain)))
            case 3 if both.live:
                number = rng.choice([*both.live])
                chain = both.live[number][1].chain
                drawn: tuple[PrefixHash, ...] = ()
                if rng.random() < 0.5:  # it decoded: all of its prompt was computed
                    both.computed(number, len(chain))
                    numbers = [*(chain[-1].rstrip(b"\xff") if chain else b""), *(rng.randrange(2) for _ in range(2))]
                    drawn = a_chain(numbers)[len(chain) :]
                both.end(number, drawn)
            case 4:
                both.drop(rng.randrange(3))
            case 5 if rng.random() < 0.2:
                both.report()
            case _:
                pass
        for each in sides:
            each.check()
    for both in sides:
        for number in [*both.live]:
            both.end(number, ())
        both.drop(1 << 30)
        both.check()
        assert not both.store.granules
    assert not len(where)


def test_depths_are_told_for_every_instance_that_keeps_a_beginning() -> None:
    """One walk finds how far each goes."""
    where = KeptWhere()
    chain = a_chain([0, 1, 2, 3, 4, 5])
    for number, depth in ((1, 6), (2, 2), (7, 3)):
        here = KeptHere(where, number, BLOCK_SIZE)
        here.computed(here.begin(chain, 0), depth)
    assert where.depths(chain, 6) == {1: 6, 2: 2, 7: 3}
    assert where.depths(chain, 2) == {1: 2, 2: 2, 7: 2}
    assert where.depths(a_chain([9]), 1) == {}
    assert where.depths((), 0) == {}


def test_leaves_go_before_what_they_follow_and_the_oldest_chain_first() -> None:
    """A chain that is used again is young, with all that is before it."""
    where = KeptWhere()
    here = KeptHere(where, 1, BLOCK_SIZE)
    old, young = a_chain([0, 1, 2]), a_chain([0, 5])
    for chain in (young, old):
        held = here.begin(chain, here.depth(chain, len(chain)))
        here.computed(held, len(chain))
        here.end(held)
    here.end(here.begin(young, 2))
    assert here.drop(9) == (old[2], old[1], young[1], young[0])


def test_what_somebody_uses_is_not_dropped() -> None:
    """Nor what a live request computes that another did before it."""
    here = KeptHere(KeptWhere(), 1, BLOCK_SIZE)
    chain = a_chain([0, 1])
    first, second = here.begin(chain, 0), here.begin(chain, 0)
    here.computed(first, 2)
    here.end(first)
    assert here.drop(9) == ()
    here.computed(second, 2)
    here.end(second)
    assert here.drop(9) == (chain[1], chain[0])
