"""Laws of what is kept: the core's state and an instance's store, told the same in the same order, are the same."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

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
        tenant = f"tenant {self._num_begun % 3}" if self._num_begun % 4 else None  # they share, here
        num_reused = self.core.depth(chain, len(chain))
        assert num_reused == sum(granule in self.core for granule in chain)
        held = Held((RequestId(f"r{self._num_begun}"), Epoch(0)), 4 * (len(chain) + 2), None, chain=chain)
        self.store.share(held, num_reused)
        self.live[self._num_begun] = self.core.begin(chain, num_reused, tenant), held

    def computed(self, number: int, num_granules: int) -> None:
        granules, held = self.live[number]
        self.core.computed(granules, num_granules)
        self.store.computed(held, num_granules)

    def end(self, number: int, drawn: tuple[PrefixHash, ...]) -> None:
        granules, held = self.live.pop(number)
        staying, num_known = self.store.drawn(drawn)
        self.core.drew(staying, num_known)
        self.core.end(granules)
        self.store.end(held, staying)

    def drop(self, number: int) -> None:
        self.store.drop(self.core.take_orphans() + self.core.drop(number))

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
                both.end(number, a_drawn_end(both, number, rng) if rng.random() < 0.5 else ())
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


class Apart(Both):
    """The same, with commands and reports that cross on their way."""

    def __init__(self) -> None:
        super().__init__(1, KeptWhere())
        self.commands, self.reports = deque[Callable[[], object]](), deque[Callable[[], object]]()
        self.here: set[int] = set()  # requests that the store has heard of, and not ended

    def begin(self, chain: tuple[PrefixHash, ...]) -> None:
        self._num_begun += 1
        number, num_reused = self._num_begun, self.core.depth(chain, len(chain))
        held = Held((RequestId(f"r{number}"), Epoch(0)), 4 * (len(chain) + 2), None, chain=chain)
        self.live[number] = self.core.begin(chain, num_reused, f"tenant {number % 3}"), held

        def obey() -> None:
            self.store.share(held, num_reused)
            self.here.add(number)

        self._command(obey)

    def drop(self, number: int) -> None:
        dropped = self.core.drop(number)
        self._command(lambda: self.store.drop(dropped))

    def _command(self, act: Callable[[], object]) -> None:
        orphans = self.core.take_orphans()
        self.commands.append(lambda: self.store.drop(orphans))
        self.commands.append(act)

    def computed(self, number: int, num_granules: int) -> None:
        granules, held = self.live[number]
        self.store.computed(held, num_granules)
        self.reports.append(lambda: self.core.computed(granules, num_granules))

    def end(self, number: int, drawn: tuple[PrefixHash, ...]) -> None:
        granules, held = self.live[number]
        staying, num_known = self.store.drawn(drawn)
        self.store.end(held, staying)
        self.here.remove(number)

        def hear() -> None:
            self.core.drew(staying, num_known, f"tenant {number % 3}")
            self.core.end(granules)
            del self.live[number]

        self.reports.append(hear)


def a_drawn_end(both: Both, number: int, rng: random.Random) -> tuple[PrefixHash, ...]:
    """Let a request decode, for which all of its prompt is computed; return what it draws."""
    chain = both.live[number][1].chain
    both.computed(number, len(chain))
    numbers = [*(chain[-1].rstrip(b"\xff") if chain else b""), *(rng.randrange(2) for _ in range(2))]
    return a_chain(numbers)[len(chain) :]


@pytest.mark.parametrize("seed", range(80))
def test_commands_and_reports_may_cross(seed: int) -> None:
    """What is dropped is there, and nobody's; what is shared is there; and when all is heard both sides are the same.

    A request may draw what another one's prompt has; it is dropped, and the news of the first come only then.
    """
    rng, both = random.Random(seed), Apart()
    for _ in range(200):
        match rng.randrange(7):
            case 0 | 1:
                both.begin(a_chain([rng.randrange(2) for _ in range(rng.randrange(7))]))
            case 2 if both.here:
                number = rng.choice([*both.here])
                both.computed(number, rng.randint(0, len(both.live[number][1].chain)))
            case 3 if both.here:
                number = rng.choice([*both.here])
                both.end(number, a_drawn_end(both, number, rng) if rng.random() < 0.7 else ())
            case 4:
                both.drop(rng.randrange(4))
            case 5 if both.commands:
                both.commands.popleft()()
            case 6 if both.reports:
                both.reports.popleft()()
            case _:
                pass
        both.core.check_integrity("here", [granules for granules, _ in both.live.values()])
    while both.commands or both.reports:
        (both.commands or both.reports).popleft()()
    both.drop(0)
    while both.commands:
        both.commands.popleft()()
    both.check()


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


def keep(here: KeptHere, tenant: str, numbers: Sequence[int], share: int = 1) -> tuple[PrefixHash, ...]:
    """A request of a tenant computes a chain there, and ends."""
    chain = a_chain(numbers)
    held = here.begin(chain, here.depth(chain, len(chain)), tenant, share)
    here.computed(held, len(chain))
    here.end(held)
    return chain


@pytest.mark.parametrize("seed", range(60))
def test_a_tenant_is_left_its_share_of_what_stays(seed: int) -> None:
    """Whatever is dropped, and whoever sends how much: nobody is below its share who was not before."""
    rng, here = random.Random(seed), KeptHere(KeptWhere(), 1, BLOCK_SIZE)
    shares = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
    of: dict[PrefixHash, int] = {}
    for _ in range(60):
        tenant = min(rng.randrange(2 * len(shares)), len(shares) - 1)  # one sends half of all
        numbers = [tenant, *(rng.randrange(4) for _ in range(rng.randint(1, 5)))]
        of |= dict.fromkeys(keep(here, f"t{tenant}", numbers, shares[tenant]), tenant)
        before = Counter(of[granule] for granule in of)
        number = min(rng.choice((0, 0, 1, 9)), len(of))
        dropped = here.drop(number)
        assert len(set(dropped)) == number
        for granule in dropped:
            del of[granule]
        after, total = Counter(of.values()), len(of)
        present = sum(share for tenant, share in enumerate(shares) if before[tenant])
        for tenant, share in enumerate(shares):
            assert after[tenant] >= min(before[tenant], total * share // present)
        here.check_integrity("here", [])


def test_who_floods_flushes_itself() -> None:
    """A stranger's prompts without end leave another tenant half of the room, and its youngest half."""
    here = KeptHere(KeptWhere(), 1, BLOCK_SIZE)
    chains = [keep(here, "victim", [1, number]) for number in range(50)]
    for number in range(1000):
        keep(here, "flood", [2, number % 250, number // 250])
        here.drop(max(0, len(here._idle) - 60))
    assert sum(granule in here for chain in chains for granule in set(chain)) >= 30
    assert all(granule in here for granule in chains[-1])
    assert not all(granule in here for granule in chains[0])


def test_what_several_tenants_use_goes_after_what_follows_it() -> None:
    """Where tenants share, a chain's end is one's alone, below its share, and its beginning another's, above it."""
    here = KeptHere(KeptWhere(), 1, BLOCK_SIZE)
    keep(here, "a", [0, 1])
    keep(here, "b", [0])
    for number in range(20):
        keep(here, "b", [3, number])
    dropped = here.drop(20)
    kept = [granule for granule in a_chain([0, 1]) if granule in here]
    assert kept == list(a_chain([0, 1]))
    assert a_chain([0])[0] not in dropped


def test_what_nobody_is_known_to_have_used_goes_first_and_is_whose_uses_it() -> None:
    """As an instance registers it says what it keeps, and not whose that is."""
    here = KeptHere(KeptWhere(), 1, BLOCK_SIZE)
    old, used = a_chain([0, 1]), a_chain([2, 1])
    here.replace([*reversed(old), *reversed(used)], [])
    keep(here, "a", [2, 1])
    mine = keep(here, "b", [5])
    assert here.drop(2) == (old[1], old[0])
    assert set(here.drop(3)) == {*used, *mine}
