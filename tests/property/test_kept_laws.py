"""Laws of what is kept: the core's state and an instance's store, told the same in the same order, are the same."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.kept_chains import NO_GRANULE, KeptChains
from pdmesh.core.instances.prefix_cache import HeldGranules, PrefixCache
from pdmesh.instance.cache import BlockCache, CachedPrefix
from pdmesh.model import CacheUser, LastUse, PrefixHash
from pdmesh.plans import Evictions

BLOCK_SIZE = 32  # four blocks for each granule


def a_chain(numbers: Sequence[int]) -> tuple[PrefixHash, ...]:
    """Granules named by all the numbers up to each, as hashes are."""
    return tuple([PrefixHash(bytes(numbers[: index + 1]).ljust(16, b"\xff")) for index in range(len(numbers))])


def share_all(store: BlockCache, prefix: CachedPrefix, num_reused: int) -> None:
    """Let a request reuse granules, all of which are there."""
    assert not store.missing(prefix, num_reused)
    store.share(prefix, num_reused)


class Both:
    """The same requests on both sides; the tier holds ``capacity`` granules."""

    def __init__(self, number: int, where: CacheIndex, capacity: int) -> None:
        self.core = PrefixCache(where, number, BLOCK_SIZE, capacity)
        self.store = BlockCache(BLOCK_SIZE, capacity)
        self.live: dict[int, tuple[HeldGranules, CachedPrefix]] = {}
        self._num_begun = 0

    def begin(self, chain: tuple[PrefixHash, ...]) -> None:
        self._num_begun += 1
        tenant = f"tenant {self._num_begun % 3}" if self._num_begun % 4 else None  # they share, here
        num_reused = self.core.depth(chain, len(chain))
        assert num_reused == sum(granule in self.core for granule in chain)
        num_loaded = self._num_loadable(chain, num_reused)
        held = CachedPrefix(chain, num_loaded)
        share_all(self.store, held, num_reused + num_loaded)
        self.live[self._num_begun] = self.core.begin(chain, num_reused, tenant), held

    def _num_loadable(self, chain: tuple[PrefixHash, ...], num_reused: int) -> int:
        """How many granules behind those that are kept the tier has, or fewer: loading may not pay."""
        num_loaded = self.core.num_loadable(chain, num_reused)
        return num_loaded if self._num_begun % 5 else num_loaded // 2

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
        self.store.make_room(self.core.make_room(number))

    def lose(self, rng: random.Random) -> None:
        """The tier loses a granule, and says so."""
        if self.store.offloaded:
            lost = [rng.choice(self.store.offloaded)]
            self.store.lose(lost)
            self.core.lose_offloaded(lost)

    def report(self) -> None:
        """The instance says what it keeps, as it does when it registers."""
        self.core.replace(self.store.granules, [granules for granules, _ in self.live.values()], self.store.offloaded)

    def check(self) -> None:
        self.core.check_integrity("here", [granules for granules, _ in self.live.values()])
        assert self.core.num_idle_blocks <= self.store.num_idle_blocks  # the core keeps more from being dropped
        whole = sum(4 * (len(held.chain) + 2) for _, held in self.live.values())
        own = whole - sum(self.store.num_cached_blocks(held) for _, held in self.live.values())
        taken = whole - self.core.num_saved_blocks
        assert own + self.store.num_blocks == taken + self.core.num_idle_blocks
        self.check_tier()

    def check_tier(self) -> None:
        """Both sides have the same in the tier."""
        offloaded = self.core.offloaded
        assert (0 if offloaded is None else len(offloaded)) == len(self.store.offloaded)
        assert offloaded is None or all(granule in offloaded for granule in self.store.offloaded)


@pytest.mark.parametrize("seed", range(40))
def test_the_core_knows_what_an_instance_keeps(seed: int) -> None:
    """Whatever begins, is computed, ends, is dropped, offloaded, loaded, lost or reported."""
    rng, where = random.Random(seed), CacheIndex()
    sides = [Both(number, where, rng.choice((0, 1, 3, 50))) for number in (1, 2)]
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
            case 5 if rng.random() < 0.2:
                both.lose(rng)
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
        both.core.clear()
    assert not len(where)
    assert not len(where.offloaded)


class Apart(Both):
    """The same, with commands and reports that cross on their way."""

    def __init__(self, capacity: int) -> None:
        super().__init__(1, CacheIndex(), capacity)
        self.commands, self.reports = deque[Callable[[], object]](), deque[Callable[[], object]]()
        self.here: set[int] = set()  # requests that the store has heard of, and not ended

    def begin(self, chain: tuple[PrefixHash, ...]) -> None:
        self._num_begun += 1
        number, num_reused = self._num_begun, self.core.depth(chain, len(chain))
        num_loaded = self._num_loadable(chain, num_reused)
        held = CachedPrefix(chain, num_loaded)
        self.live[number] = self.core.begin(chain, num_reused, f"tenant {number % 3}"), held

        def obey() -> None:
            share_all(self.store, held, num_reused + num_loaded)
            self.here.add(number)

        self._command(obey, number % 3)

    def drop(self, number: int) -> None:
        self._command(lambda: None, number)

    def _command(self, act: Callable[[], object], num_granules: int = 0) -> None:
        room = self.core.make_room(num_granules)
        self.commands.append(lambda: self.store.make_room(room))
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
    rng = random.Random(seed)
    both = Apart(rng.choice((0, 2, 5, 50)))
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
    where = CacheIndex()
    chain = a_chain([0, 1, 2, 3, 4, 5])
    for number, depth in ((1, 6), (2, 2), (7, 3)):
        here = PrefixCache(where, number, BLOCK_SIZE)
        here.computed(here.begin(chain, 0), depth)
    assert where.depths(chain, 6) == {1: 6, 2: 2, 7: 3}
    assert where.depths(chain, 2) == {1: 2, 2: 2, 7: 2}
    assert where.depths(a_chain([9]), 1) == {}
    assert where.depths((), 0) == {}


def test_leaves_go_before_what_they_follow_and_the_oldest_chain_first() -> None:
    """A chain that is used again is young, with all that is before it."""
    where = CacheIndex()
    here = PrefixCache(where, 1, BLOCK_SIZE)
    old, young = a_chain([0, 1, 2]), a_chain([0, 5])
    for chain in (young, old):
        held = here.begin(chain, here.depth(chain, len(chain)))
        here.computed(held, len(chain))
        here.end(held)
    here.end(here.begin(young, 2))
    assert here.make_room(9).drop == (old[2], old[1], young[1], young[0])


def test_what_somebody_uses_is_not_dropped() -> None:
    """Nor what a live request computes that another did before it."""
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    chain = a_chain([0, 1])
    first, second = here.begin(chain, 0), here.begin(chain, 0)
    here.computed(first, 2)
    here.end(first)
    assert here.make_room(9).drop == ()
    here.computed(second, 2)
    here.end(second)
    assert here.make_room(9).drop == (chain[1], chain[0])


def keep(here: PrefixCache, tenant: str, numbers: Sequence[int], share: int = 1) -> tuple[PrefixHash, ...]:
    """A request of a tenant computes a chain there, and ends."""
    chain = a_chain(numbers)
    held = here.begin(chain, here.depth(chain, len(chain)), tenant, share)
    here.computed(held, len(chain))
    here.end(held)
    return chain


@pytest.mark.parametrize("seed", range(60))
def test_a_tenant_is_left_its_share_of_what_stays(seed: int) -> None:
    """Whatever is dropped, and whoever sends how much: nobody is below its share who was not before."""
    rng, here = random.Random(seed), PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    shares = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
    of: dict[PrefixHash, int] = {}
    for _ in range(60):
        tenant = min(rng.randrange(2 * len(shares)), len(shares) - 1)  # one sends half of all
        numbers = [tenant, *(rng.randrange(4) for _ in range(rng.randint(1, 5)))]
        of |= dict.fromkeys(keep(here, f"t{tenant}", numbers, shares[tenant]), tenant)
        before = Counter(of[granule] for granule in of)
        number = min(rng.choice((0, 0, 1, 9)), len(of))
        dropped = here.make_room(number).drop
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
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    chains = [keep(here, "victim", [1, number]) for number in range(50)]
    for number in range(1000):
        keep(here, "flood", [2, number % 250, number // 250])
        here.make_room(max(0, len(here._idle) - 60))
    assert sum(granule in here for chain in chains for granule in set(chain)) >= 30
    assert all(granule in here for granule in chains[-1])
    assert not all(granule in here for granule in chains[0])


def test_what_several_tenants_use_goes_after_what_follows_it() -> None:
    """Where tenants share, a chain's end is one's alone, below its share, and its beginning another's, above it."""
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    keep(here, "a", [0, 1])
    keep(here, "b", [0])
    for number in range(20):
        keep(here, "b", [3, number])
    dropped = here.make_room(20).drop
    kept = [granule for granule in a_chain([0, 1]) if granule in here]
    assert kept == list(a_chain([0, 1]))
    assert a_chain([0])[0] not in dropped


def test_what_nobody_is_known_to_have_used_goes_first_and_is_whose_uses_it() -> None:
    """As an instance registers it says what it keeps, and not whose that is."""
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    old, used = a_chain([0, 1]), a_chain([2, 1])
    here.replace([*reversed(old), *reversed(used)], [])
    keep(here, "a", [2, 1])
    mine = keep(here, "b", [5])
    assert here.make_room(2).drop == (old[1], old[0])
    assert set(here.make_room(3).drop) == {*used, *mine}


def a_tiered(capacity: int) -> PrefixCache:
    return PrefixCache(CacheIndex(), 1, BLOCK_SIZE, capacity)


def test_what_the_cache_gives_up_goes_to_the_tier_and_stays_there_when_it_comes_back() -> None:
    """Giving it up again is no copy; room in the tier is made of what was used longest ago, leaves first."""
    here = a_tiered(3)
    old, young = keep(here, "a", [0, 1]), keep(here, "a", [2, 3])
    assert here.make_room(2) == Evictions(offload=(old[1], old[0]))
    assert here.depth(old, 2) == 0
    assert here.num_loadable(old, 0) == 2
    held = here.begin(old, 0, "a")
    here.computed(held, 2)
    here.end(held)
    assert here.make_room(3) == Evictions(
        drop=(old[1],),  # the tier has it
        offload=(young[1], young[0]),
        evict=(old[0],),
    )
    assert here.num_loadable(young, 0) == 2
    assert here.num_loadable(old, here.depth(old, 2)) == 1
    here.check_integrity("here", [])


def test_a_tier_that_is_too_small_takes_the_beginnings_of_chains() -> None:
    """The end of a chain without its beginning is of no use."""
    here = a_tiered(2)
    chain = keep(here, "a", [0, 1, 2, 3])
    assert here.make_room(4) == Evictions(drop=(chain[3], chain[2]), offload=(chain[1], chain[0]))
    assert here.num_loadable(chain, 0) == 2


def test_what_a_live_request_may_be_loading_is_not_evicted() -> None:
    here = a_tiered(2)
    chain = keep(here, "a", [0, 1])
    here.make_room(2)
    held = here.begin(chain, 0, "a")
    other = keep(here, "b", [5, 6])
    assert here.make_room(2) == Evictions(drop=(other[1], other[0]))
    here.end(held)
    here.check_integrity("here", [])


def test_who_floods_the_tier_flushes_itself() -> None:
    here = a_tiered(60)
    chains = [keep(here, "victim", [1, number]) for number in range(40)]
    here.make_room(50)
    for number in range(500):
        keep(here, "flood", [2, number % 250, number // 250])
        here.make_room(3)
    assert sum(here.num_loadable(chain, 0) == 2 for chain in chains) >= 25
    here.check_integrity("here", [])


def test_one_walk_finds_what_cache_and_tier_keep_together() -> None:
    where = CacheIndex()
    chain = a_chain([0, 1, 2, 3])
    for number, depth in ((1, 3), (2, 4)):
        here = PrefixCache(where, number, BLOCK_SIZE, 9)
        here.computed(held := here.begin(chain[:depth], 0), depth)
        here.end(held)
        here.make_room(number)
    assert where.depths(chain, 4) == {1: 2, 2: 2}
    assert where.depths_with_tiers(chain, 4) == {1: 3, 2: 4}
    assert where.depths_with_tiers(chain, 2) == {1: 2, 2: 2}
    assert where.depths_with_tiers((), 0) == {}


@pytest.mark.parametrize("num_tenants", [60, 66, 100, 300])
def test_a_report_with_granules_of_many_tenants_can_be_evicted(num_tenants: int) -> None:
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    kept = tuple([PrefixHash(number.to_bytes(16)) for number in range(num_tenants)])
    chains = KeptChains(kept, [(index, NO_GRANULE) for index in range(num_tenants)])
    uses = [LastUse(CacheUser(f"t{number}"), 200, 1.0) for number in range(num_tenants)]
    here.replace(kept, (), None, (), here.lines_of(chains, uses))
    here.check_integrity("here", [])
    assert here.make_room(num_tenants).drop == kept
    here.check_integrity("here", [])


def test_one_eviction_offloads_granules_of_many_tenants() -> None:
    here = a_tiered(100)
    for number in range(100):
        keep(here, f"t{number}", [number])
    assert len(here.make_room(100).offload) == 100
    here.check_integrity("here", [])
    for number in range(100):
        keep(here, "later", [100 + number])
    assert len(here.make_room(100).evict) == 100
    here.check_integrity("here", [])


def test_a_tenant_without_live_requests_is_not_forgotten_while_a_granule_of_its_line_is_in_use() -> None:
    """The request that uses the granule has no known tenant."""
    here = PrefixCache(CacheIndex(), 1, BLOCK_SIZE)
    chain = keep(here, "first", [0])
    held = here.begin(chain, 1)
    for number in range(200):
        keep(here, f"t{number}", [1 + number])
        here.make_room(1)
    here.end(held)
    here.check_integrity("here", [])
    assert here.make_room(1).drop == chain
    assert len(here._idle._tenants) < 100
