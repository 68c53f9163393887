"""KV that goes to the offload tier and comes back: it is what was computed, whatever else happens meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import ExpectCopy
from pdmesh.core.events import (
    CacheReported,
    KvReleased,
    RequestDropped,
    StepDone,
    TransferFailed,
    TransferLanded,
)
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.offload.disk import DiskSlots
from pdmesh.kv.offload.tier import OffloadTier
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, PrefixHash, PrefixHashes, RequestId, Role, SamplingParams
from pdmesh.wire.messages import Generation, pack_token_ids
from pdmesh_testing.fake_engine import FakeEngine, reference_output
from pdmesh_testing.kv import UNEQUAL_LAYOUT, ByteStore
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.reuse import plan_of_fetch
from pdmesh_testing.worker import (
    HASHER,
    RunningInstance,
    TierOf,
    chunk_plans,
    make_generation,
    running_instance,
    with_prefix,
)

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4, no_progress_s=5.0)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
NUM_BLOCKS = 210

Kind = Callable[[int], TierOf]  # makes tiers of so many granules


def a_tier(
    store: KvStore,
    pool: BlockPool,
    wakeup: Wakeup,
    on_lost: Callable[[PrefixHashes], object],
    *,
    num_host: int = 0,
    num_disk: int = 0,
    directory: Path | None = None,
    no_progress_s: float = 5.0,
) -> OffloadTier:
    granule_bytes = GRANULE_TOKENS * store.layout.token_bytes
    return OffloadTier(
        store,
        pool,
        wakeup,
        host_bytes=num_host * granule_bytes,
        disk_bytes=num_disk * (granule_bytes + 16 * store.layout.num_layers),
        directory=directory,
        on_lost=on_lost,
        call_soon=asyncio.get_running_loop().call_soon_threadsafe,
        no_progress_s=no_progress_s,
    )


@pytest.fixture(params=["host", "disk", "both"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    def make(number: int) -> TierOf:
        match request.param:
            case "host":
                return partial(a_tier, num_host=number)
            case "disk":
                return partial(a_tier, num_disk=number, directory=tmp_path)
            case _:
                return partial(a_tier, num_host=1, num_disk=number - 1, directory=tmp_path)

    return make


@asynccontextmanager
async def one(tier: TierOf, num_blocks: int = NUM_BLOCKS) -> AsyncGenerator[RunningInstance]:
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(FakeEngine(num_blocks=num_blocks), transport, config=CONFIG, tier=tier) as instance,
    ):
        yield instance


def a_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(33, 90) for _ in range(num_tokens)]


def a_request(name: str, prompt: list[int]) -> Generation:
    return with_prefix(make_generation(name, prompt, GREEDY), b"")


def hashes(tokens: list[int]) -> PrefixHashes:
    return HASHER.granules(HASHER.root(b""), pack_token_ids(tokens))


async def run(
    instance: RunningInstance,
    name: str,
    prompt: list[int],
    *,
    num_reused: int = 0,
    num_loaded: int = 0,
    drop: PrefixHashes = (),
    offload: PrefixHashes = (),
    evict: PrefixHashes = (),
) -> None:
    """Compute and decode it there; what it draws is right, and checked by the engine to come of the right KV."""
    generation = a_request(name, prompt)
    instance.admit(
        generation,
        kv_moves=False,
        num_reused=num_reused,
        num_loaded=num_loaded,
        drop=drop,
        offload=offload,
        evict=evict,
    )
    for chunk in chunk_plans(generation, [100], num_reused * GRANULE_TOKENS):
        instance.run([chunk])
    await instance.reported(KvReleased, name)
    drawn = [token.token_id for token in instance.tokens_of(name) if token.token_id is not None]
    assert drawn == reference_output(prompt, GREEDY)


def tier_of(instance: RunningInstance) -> OffloadTier:
    assert instance.tier is not None
    return instance.tier


async def settled(instance: RunningInstance, num_disk: int) -> None:
    """Wait until so many granules are on the disk."""
    while tier_of(instance).counters().num_disk_granules < num_disk:  # noqa: ASYNC110  # it tells nobody
        await asyncio.sleep(0)


async def test_what_comes_back_is_what_went(kind: Kind) -> None:
    """The cache holds two and a half prompts: others take the blocks while they are copied."""
    prompts = [a_prompt(300, seed) for seed in range(4)]
    async with one(kind(8)) as instance:
        await run(instance, "a", prompts[0])
        await run(instance, "b", prompts[1])
        await run(instance, "c", prompts[2], offload=hashes(prompts[0])[::-1])
        assert set(tier_of(instance).hashes) == set(hashes(prompts[0]))
        await run(instance, "d", prompts[3], offload=hashes(prompts[1])[::-1])
        turn = prompts[0] + a_prompt(40, 9)
        await run(instance, "a2", turn, num_reused=2, num_loaded=2, offload=hashes(prompts[2])[::-1])
        assert isinstance(instance.engine, FakeEngine)
        first = next(part for batch in instance.engine.batches for part in batch if part[0] == "a2")
        assert first[1:] == (256, 84)
        await run(instance, "a3", turn, num_reused=2)  # it is kept in the cache again
        assert not [report for report in instance.reports if isinstance(report, CacheReported)]
        counters = tier_of(instance).counters()
        assert (counters.num_host_granules + counters.num_disk_granules, counters.num_lost_granules) == (6, 0)


def load(instance: RunningInstance, chain: PrefixHashes, *, num_cached: int = 0) -> str:
    """Tell an instance to load the granules of a chain behind the first ``num_cached``; return the load's name."""
    command = ExpectCopy(
        instance_id=instance.instance.instance_id,
        request_id=RequestId("load"),
        epoch=Epoch(0),
        transfer=plan_of_fetch(instance, instance, len(chain), num_cached),
        chain=chain,
        num_loaded_granules=len(chain) - num_cached,
    )
    instance.instance.handle(command)
    return "load"


@pytest.mark.parametrize("num_cached", [0, 1])
async def test_a_load_without_a_request_leaves_kv_in_the_cache(kind: Kind, num_cached: int) -> None:
    prompts = [a_prompt(300, seed) for seed in range(2)]
    async with one(kind(8)) as instance:
        await run(instance, "a", prompts[0])
        await run(instance, "b", prompts[1], offload=hashes(prompts[0])[num_cached:][::-1])
        name = load(instance, hashes(prompts[0]), num_cached=num_cached)
        await instance.reported(TransferLanded, name)
        assert (await instance.reported(KvReleased, name)).transfer_id == 7
        instance.assert_all_free(num_cached=4)
        await run(instance, "a2", prompts[0], num_reused=2)  # what it draws comes of the KV that was loaded
        assert not [report for report in instance.reports if isinstance(report, CacheReported)]


async def test_a_load_that_fails_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = a_prompt(300)
    async with one(partial(a_tier, num_disk=8, directory=tmp_path)) as instance:
        await run(instance, "a", prompt)
        await run(instance, "b", a_prompt(300, 1), offload=hashes(prompt)[::-1])
        await settled(instance, 2)
        monkeypatch.setattr(os, "preadv", broken)
        name = load(instance, hashes(prompt))
        assert "loading KV from the offload tier failed" in (await instance.reported(TransferFailed, name)).reason
        await instance.reported(KvReleased, name)
        instance.assert_all_free(num_cached=2)
        refused = load(instance, hashes(prompt))
        assert "lacks" in (await instance.reported(RequestDropped, refused)).reason


async def test_a_load_that_is_no_longer_wanted_frees_its_blocks(kind: Kind) -> None:
    prompt = a_prompt(300)
    async with one(kind(8)) as instance:
        await run(instance, "a", prompt)
        await run(instance, "b", a_prompt(300, 1), offload=hashes(prompt)[::-1])
        name = load(instance, hashes(prompt))
        instance.free(name)
        await instance.reported(KvReleased, name)
        assert not instance.reports_of(TransferLanded, name)
        await run(instance, "a2", prompt, num_reused=2, num_loaded=2)


def broken(file: int, buffers: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_nobody_writes_into_blocks_whose_copy_has_not_ended(kind: Kind) -> None:
    """The copy is held up: the step that would overwrite what it reads waits for it."""
    prompts = [a_prompt(300, seed) for seed in range(2)]
    may_go_on = threading.Event()
    async with one(kind(8), num_blocks=80) as instance:
        await run(instance, "a", prompts[0])
        gather = instance.engine.kv.gather

        def held_up(layer: int, block_ids: Sequence[int], out: memoryview) -> None:
            may_go_on.wait(20)
            gather(layer, block_ids, out)

        instance.engine.kv.gather = held_up  # type: ignore[method-assign]
        task = asyncio.create_task(run(instance, "b", prompts[1], offload=hashes(prompts[0])[::-1]))
        await asyncio.sleep(0.05)
        assert not instance.reports_of(StepDone, "")[3:]
        may_go_on.set()
        await task
        await run(instance, "a2", prompts[0], num_reused=2, num_loaded=2, offload=hashes(prompts[1])[::-1])
        await run(instance, "b2", prompts[1], num_reused=2, num_loaded=2, offload=())


async def test_what_the_tier_lacks_is_refused_and_told(kind: Kind) -> None:
    prompt = a_prompt(300)
    async with one(kind(8)) as instance:
        generation = a_request("a", prompt)
        instance.admit(generation, kv_moves=False, num_reused=2, num_loaded=2)
        dropped = await instance.reported(RequestDropped, "a")
        assert "lacks 2 of the 2" in dropped.reason
        assert [type(report) for report in instance.reports] == [CacheReported, RequestDropped, KvReleased]
        await run(instance, "b", prompt)
        instance.assert_all_free(num_cached=2)


async def test_a_full_tier_loses_what_was_used_longest_ago_and_says_so(kind: Kind) -> None:
    """A scheduler that hears late of a loss names that granule no more: it must not take a place for ever."""
    prompts = [a_prompt(300, seed) for seed in range(2)]
    async with one(kind(2)) as instance:
        await run(instance, "a", prompts[0])
        await run(instance, "b", prompts[1], offload=hashes(prompts[0])[::-1])
        await run(instance, "c", a_prompt(300, 5), offload=hashes(prompts[1])[::-1])
        lost = [granule for report in instance.reports if isinstance(report, CacheReported) for granule in report.lost]
        assert lost == list(hashes(prompts[0])[::-1])
        assert set(tier_of(instance).hashes) == set(hashes(prompts[1]))
        await run(instance, "d", a_prompt(300, 6), evict=hashes(prompts[1]))
        assert len(tier_of(instance)) == 0


async def test_a_damaged_granule_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose KV does not come back is dropped, nothing of it is kept, and the tier forgets the granule."""
    prompt = a_prompt(300)
    async with one(partial(a_tier, num_disk=8, directory=tmp_path)) as instance:
        await run(instance, "a", prompt)
        await run(instance, "b", a_prompt(300, 1), offload=hashes(prompt)[::-1])
        await settled(instance, 2)
        read = os.preadv

        def damaged(file: int, buffers: Sequence[memoryview], offset: int) -> int:
            number = read(file, buffers, offset)
            buffers[0][0] ^= 1
            return number

        monkeypatch.setattr(os, "preadv", damaged)
        generation = a_request("a2", prompt)
        instance.admit(generation, kv_moves=False, num_reused=2, num_loaded=2)
        instance.run([next(iter(chunk_plans(generation, [44], 2 * GRANULE_TOKENS)))])
        dropped = await instance.reported(RequestDropped, "a2")
        assert "damaged" in dropped.reason
        (lost,) = [report for report in instance.reports if isinstance(report, CacheReported)]
        assert lost.lost == hashes(prompt)[:1]
        assert not instance.tokens_of("a2")
        await instance.reported(KvReleased, "a2")
        await run(instance, "a3", prompt)


@pytest.mark.parametrize("is_planned", [False, True])
async def test_a_full_disk_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_planned: bool) -> None:
    prompt = a_prompt(300)

    def full(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    async with one(partial(a_tier, num_disk=8, directory=tmp_path)) as instance:
        await run(instance, "a", prompt)
        await run(instance, "b", a_prompt(300, 1), offload=hashes(prompt)[::-1])
        await instance.until(lambda: tier_of(instance).counters().num_lost_granules == 2)
        assert len(tier_of(instance)) == 0
        lost = [granule for report in instance.reports if isinstance(report, CacheReported) for granule in report.lost]
        assert set(lost) == set(hashes(prompt))
        await run(instance, "c", prompt)


async def test_a_disk_that_does_not_answer_holds_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it starts again, its blocks are others' at once, and the tier is of use again when it answers."""
    prompts = [a_prompt(300, seed) for seed in range(3)]
    answers, read = threading.Event(), os.preadv

    def hung(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        answers.wait(20)
        return read(file, buffers, offset)

    tier = partial(a_tier, num_disk=8, directory=tmp_path, no_progress_s=0.05)
    async with one(tier, num_blocks=80) as instance:
        await run(instance, "a", prompts[0])
        await run(instance, "b", prompts[1], offload=hashes(prompts[0])[::-1])
        await settled(instance, 2)
        monkeypatch.setattr(os, "preadv", hung)
        generation = a_request("a2", prompts[0])
        instance.admit(generation, kv_moves=False, num_reused=2, num_loaded=2, offload=hashes(prompts[1])[::-1])
        instance.run(chunk_plans(generation, [44], 2 * GRANULE_TOKENS)[:1])
        dropped = await instance.reported(RequestDropped, "a2")
        assert dropped.reason == "no KV came from the offload tier for 0.05 s"
        await instance.reported(KvReleased, "a2")
        await instance.until(lambda: any(isinstance(report, CacheReported) for report in instance.reports))
        lost = {each for report in instance.reports if isinstance(report, CacheReported) for each in report.lost}
        assert lost == {*hashes(prompts[0]), *hashes(prompts[1])}
        await run(instance, "c", prompts[2])  # in the blocks of the load
        await run(instance, "d", prompts[1], offload=hashes(prompts[2])[::-1])
        assert not tier_of(instance).hashes
        answers.set()
        while tier_of(instance).is_stuck:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0)
        await run(instance, "c2", prompts[2])
        instance.reports.clear()
        await run(instance, "a3", prompts[0], offload=hashes(prompts[2])[::-1])
        await run(instance, "c3", prompts[2], num_reused=2, num_loaded=2, offload=hashes(prompts[0])[::-1])
        assert not [report for report in instance.reports if isinstance(report, CacheReported)]


async def test_a_request_that_is_freed_while_its_kv_is_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its blocks are another's at once; the load that has not ended does not write over what that one computes."""
    prompts = [a_prompt(300, seed) for seed in range(2)]
    may_go_on = threading.Event()
    async with one(partial(a_tier, num_host=8), num_blocks=80) as instance:
        await run(instance, "a", prompts[0])
        await run(instance, "b", prompts[1], offload=hashes(prompts[0])[::-1])
        scatter = instance.engine.kv.scatter

        def held_up(layer: int, block_ids: Sequence[int], data: memoryview) -> None:
            may_go_on.wait(20)
            scatter(layer, block_ids, data)

        instance.engine.kv.scatter = held_up  # type: ignore[method-assign]
        instance.admit(
            a_request("a2", prompts[0]), kv_moves=False, num_reused=2, num_loaded=2, offload=hashes(prompts[1])[::-1]
        )
        instance.free("a2")
        await instance.reported(KvReleased, "a2")
        task = asyncio.create_task(run(instance, "c", a_prompt(300, 3)))
        await asyncio.sleep(0.02)
        may_go_on.set()
        await task
        await run(instance, "b2", prompts[1], num_reused=2, num_loaded=2, offload=hashes(a_prompt(300, 3))[::-1])


async def test_what_is_loaded_is_handed_over_once_it_is_here(kind: Kind) -> None:
    prompt = a_prompt(300)
    fabric = MemoryFabric()
    async with (
        MemoryTransport(CONFIG, fabric) as source,
        MemoryTransport(CONFIG, fabric) as target,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), source, config=CONFIG, tier=kind(8)) as prefill,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), target, role=Role.DECODE, config=CONFIG) as decode,
    ):
        await run(prefill, "a", prompt)
        await run(prefill, "b", a_prompt(300, 1), offload=hashes(prompt)[::-1])
        generation = a_request("a2", prompt)
        decode.expect(generation, prefill)
        prefill.admit(generation, kv_moves=True, num_reused=2, num_loaded=2)
        prefill.grant(generation, decode)
        for chunk in chunk_plans(generation, [100], 2 * GRANULE_TOKENS):
            prefill.run([chunk])
        await decode.reported(TransferLanded, "a2")
        await decode.reported(KvReleased, "a2")
        first = [token.token_id for token in prefill.tokens_of("a2")]
        rest = [token.token_id for token in decode.tokens_of("a2")]
        drawn = [token_id for token_id in (*first, *rest) if token_id is not None]
        assert drawn == reference_output(prompt, GREEDY)


async def test_granules_of_unequal_layers_come_back(kind: Kind) -> None:
    num_blocks = GRANULE_TOKENS // UNEQUAL_LAYOUT.block_size
    store, pool, wakeup = ByteStore(UNEQUAL_LAYOUT, 4 * num_blocks, seed=3), BlockPool(4 * num_blocks), Wakeup()
    granules = [PrefixHash(bytes([number]) * 16) for number in range(2)]
    places = [list(range(number * num_blocks, (number + 1) * num_blocks)) for number in range(4)]
    wanted = [bytes(store.block(layer, place)) for layer in range(4) for number in (0, 1) for place in places[number]]
    ended = asyncio.Event()
    async with kind(2)(store, pool, wakeup, lambda lost: None) as tier:
        for granule, block_ids in zip(granules, places[:2], strict=True):
            assert tier.offload(granule, block_ids)
        tier.load(granules, [*places[2], *places[3]], lambda load: ended.set())
        await asyncio.wait_for(ended.wait(), 20)
        counters = tier.counters()
    found = [bytes(store.block(layer, place)) for layer in range(4) for number in (2, 3) for place in places[number]]
    assert found == wanted
    assert counters.num_bytes_loaded == 2 * GRANULE_TOKENS * UNEQUAL_LAYOUT.token_bytes


async def test_the_file_has_no_name_and_is_of_no_use_without_the_key(tmp_path: Path) -> None:
    """Nothing is left to be found, and what is on the disk is not the KV."""
    disk = DiskSlots(tmp_path, 2, [4096])
    granule, other = PrefixHash(b"a" * 16), PrefixHash(b"b" * 16)
    data, out = memoryview(bytes(range(256)) * 16), memoryview(bytearray(4096))
    number = disk.number_write(1)
    disk.write(1, number, granule, [data])
    assert os.listdir(tmp_path) == []
    assert os.fstat(disk._file).st_mode & 0o777 == 0o600
    assert os.fstat(disk._file).st_nlink == 0
    stored = os.pread(disk._file, 1 << 20, 0)
    assert len(stored) == 2 * (4096 + 16)
    assert bytes(data[:32]) not in stored
    disk.read(1, number, granule, 0, out)
    assert out == data
    for wrong in ((1, number, other), (1, number + 1, granule), (0, number, granule)):
        with pytest.raises(Exception, match="damaged"):
            disk.read(*wrong, 0, out)
    os.ftruncate(disk._file, 4096)
    with pytest.raises(Exception, match="ended"):
        disk.read(1, number, granule, 0, out)
    disk.close()


@pytest.mark.parametrize("seed", range(6))
async def test_anything_may_go_and_come(kind: Kind, seed: int) -> None:
    """Conversations of several users in a cache that holds two of them, kept by rules like the core's."""
    rng = random.Random(seed)
    users = [a_prompt(150, number) for number in range(4)]
    kept, offloaded = dict[PrefixHash, None](), dict[PrefixHash, None]()
    async with one(kind(12), num_blocks=170) as instance:
        for turn in range(12):
            user = rng.randrange(len(users))
            prompt = users[user] = users[user][:500] + a_prompt(rng.randrange(20, 120), 100 + turn)
            chain = hashes(prompt)[: (len(prompt) - 1) // GRANULE_TOKENS]
            num_cached = next((i for i, granule in enumerate(chain) if granule not in kept), len(chain))
            rest = chain[num_cached:]
            num_loaded = next((i for i, granule in enumerate(rest) if granule not in offloaded), len(rest))
            given_up = tuple(granule for granule in kept if granule not in chain)
            fresh = [granule for granule in given_up if granule not in offloaded][:12]
            num_more = max(0, len(offloaded) + len(fresh) - 12)
            evict = tuple(granule for granule in offloaded if granule not in chain)[:num_more]
            for granule in evict:
                del offloaded[granule]
            offload = tuple(fresh[: 12 - len(offloaded)])
            drop = tuple(granule for granule in given_up if granule not in offload)
            await run(
                instance,
                f"r{turn}",
                prompt,
                num_reused=num_cached + num_loaded,
                num_loaded=num_loaded,
                drop=drop,
                offload=offload,
                evict=evict,
            )
            offloaded |= dict.fromkeys(offload)
            kept = dict.fromkeys(chain)
        assert not [report for report in instance.reports if isinstance(report, CacheReported | RequestDropped)]
        assert set(tier_of(instance).hashes) == set(offloaded)
