"""Granules are copied from one instance to another: the same bits are kept there, and neither side loses a block."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import FreeKv
from pdmesh.core.events import (
    CacheReported,
    KvExpected,
    KvReleased,
    RequestDropped,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.kv.copy_in import CopyIn
from pdmesh.kv.piece import PieceHeader
from pdmesh.model import Epoch, PrefixHashes, TransferId
from pdmesh_testing.fake_engine import FakeEngine, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.reuse import FETCH, GREEDY, a_generation, granules_of, random_tokens, run, tell_of_fetch
from pdmesh_testing.worker import RunningInstance, running_instance

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 512
EPOCH = Epoch(0)


@pytest.fixture(params=[False, True], ids=["in pieces", "peer reads"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return TransferConfig(
        max_payload_bytes=4096,
        num_send_buffers=4,
        num_receive_buffers=4,
        no_progress_s=5.0,
        peer_reads=request.param,
    )


@asynccontextmanager
async def pair(config: TransferConfig) -> AsyncGenerator[tuple[RunningInstance, RunningInstance]]:
    fabric = MemoryFabric()
    async with (
        MemoryTransport(config, fabric) as one,
        MemoryTransport(config, fabric) as other,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), one, config=config, instance_id="a") as source,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), other, config=config, instance_id="b") as destination,
    ):
        yield source, destination


def free(instance: RunningInstance) -> None:
    instance.instance.handle(
        FreeKv(instance_id=instance.instance.instance_id, request_id=FETCH, epoch=EPOCH, transfer_id=TransferId(7))
    )


def kv_of(instance: RunningInstance, chain: PrefixHashes) -> list[bytes]:
    """What lies in the blocks of some granules, by layer."""
    blocks = [block for granule in chain for block in instance.instance._tables.kept._blocks[granule]]
    store, layout = instance.engine.kv, instance.engine.kv.layout
    found = []
    for layer in range(layout.num_layers):
        out = bytearray(len(blocks) * layout.max_page_bytes)
        store.gather(layer, blocks, memoryview(out))
        found.append(bytes(out))
    return found


@pytest.mark.parametrize("num_there", [0, 1])
async def test_what_was_computed_is_kept_elsewhere_and_used_there(config: TransferConfig, num_there: int) -> None:
    prompt = random_tokens(400)
    second = prompt[:390] + random_tokens(70, seed=1)
    chain = granules_of(prompt)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        if num_there:
            await run(destination, a_generation("before", prompt[: 128 * num_there + 5]))
        tell_of_fetch(source, destination, chain, num_there=num_there)
        await destination.reported(KvExpected, FETCH)
        landed = await destination.reported(TransferLanded, FETCH)
        sent = await source.reported(TransferSent, FETCH)
        layout = source.engine.kv.layout
        assert landed.num_bytes == (3 - num_there) * 128 * layout.token_bytes
        assert (sent.destination_id, sent.transfer_id) == ("b", 7)
        assert sent.sent_s == sent.duration_s > 0.0
        for each in (source, destination):
            released = await each.reported(KvReleased, FETCH)
            assert released.transfer_id == 7
            each.assert_all_free(num_cached=3)
        assert kv_of(source, chain) == kv_of(destination, chain)
        assert await run(destination, a_generation("second", second), num_reused=3) == reference_output(second, GREEDY)


async def test_room_is_made_by_what_is_dropped(config: TransferConfig) -> None:
    """As for all that takes blocks; and nothing is drawn, told to a gateway or left behind."""
    old, prompt = random_tokens(300, seed=4), random_tokens(300)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        await run(destination, a_generation("old", old))
        num_tokens = len(destination.tokens)
        tell_of_fetch(source, destination, granules_of(prompt), drop=granules_of(old)[::-1])
        await destination.reported(KvReleased, FETCH)
        destination.assert_all_free(num_cached=2)
        assert destination.instance.kept == granules_of(prompt)[::-1]
        assert len(destination.tokens) == num_tokens


async def test_a_source_that_lacks_something_refuses_and_says_what_it_has(config: TransferConfig) -> None:
    prompt = random_tokens(300)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt[:200]))
        tell_of_fetch(source, destination, granules_of(prompt))
        await source.reported(RequestDropped, FETCH)
        await source.reported(KvReleased, FETCH)
        await source.until(lambda: any(isinstance(report, CacheReported) for report in source.reports))
        source.assert_all_free(num_cached=1)
        free(destination)
        await destination.reported(KvReleased, FETCH)
        destination.assert_all_free()


@pytest.mark.parametrize("first", ["source", "destination"])
async def test_a_fetch_that_is_taken_back_leaves_no_block_behind(config: TransferConfig, first: str) -> None:
    """Whichever side hears of it first, and whatever has come by then; both still serve."""
    prompt = random_tokens(1500)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        tell_of_fetch(source, destination, granules_of(prompt))
        for each in (source, destination) if first == "source" else (destination, source):
            free(each)
        for each in (source, destination):
            await each.reported(KvReleased, FETCH)
        source.assert_all_free(num_cached=11)
        destination.assert_all_free()
        assert await run(destination, a_generation("again", prompt)) == reference_output(prompt, GREEDY)


async def test_a_side_that_fails_says_so_and_the_other_hears_of_it(
    config: TransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyIn, "commit", lambda self, header: "damaged")
    prompt = random_tokens(300)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        tell_of_fetch(source, destination, granules_of(prompt))
        for each in (source, destination):
            await each.reported(TransferFailed, FETCH)
            await each.reported(KvReleased, FETCH)
        source.assert_all_free(num_cached=2)
        destination.assert_all_free()


async def test_a_commit_for_a_request_that_draws_needs_its_token(
    config: TransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch is the only transfer without one: nothing else lands like that."""
    seen: list[PieceHeader] = []
    commit = CopyIn.commit

    def note(self: CopyIn, header: PieceHeader) -> str | None:
        seen.append(header)
        self._draws = True
        return commit(self, header)

    monkeypatch.setattr(CopyIn, "commit", note)
    prompt = random_tokens(300)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        tell_of_fetch(source, destination, granules_of(prompt))
        failed = await destination.reported(TransferFailed, FETCH)
    assert "no source drew the first token" in failed.reason
    assert not seen[0].has_token


@pytest.mark.parametrize(
    ("num_granules", "num_there"), [(0, 0), (2, 2), (2, 5)], ids=["nothing", "all is there", "more is there"]
)
async def test_senseless_commands_are_refused(config: TransferConfig, num_granules: int, num_there: int) -> None:
    prompt = random_tokens(300)
    async with pair(config) as (source, destination):
        await run(source, a_generation("first", prompt))
        await run(destination, a_generation("first", prompt))
        tell_of_fetch(source, destination, granules_of(prompt)[:num_granules], num_there=num_there)
        await destination.reported(RequestDropped, FETCH)
        free(source)
        await source.reported(KvReleased, FETCH)
        for each in (source, destination):
            each.assert_all_free(num_cached=2)
