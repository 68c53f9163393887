"""KV of a request from one instance to another: what lands, is refused or fails, and that blocks are counted right."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from math import ceil

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from pdmesh.config import TransferConfig
from pdmesh.errors import ConfigError
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, PausedTransfer, SentTransfer
from pdmesh.kv.piece import FirstToken, PieceHeader, PieceKind, pack_header, request_key, unpack_header, weights_word
from pdmesh.kv.repair import FREE_PIECES
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.buffers import MAX_PIECES, MESSAGE_BYTES, PieceBuffer
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, UNEQUAL_LAYOUT, ByteStore, TransportMaker
from pdmesh_testing.memory_transport import MemoryFaults
from pdmesh_testing.transfers import (
    CAPABILITY,
    EPOCH,
    NUM_BLOCKS,
    REQUEST,
    DataSide,
    Pair,
    everything_to,
    open_pair,
    open_side,
)

pytestmark = pytest.mark.anyio

KEY = MeshKey("")
A_PAGE = KvPart(IndexRange(0, 1), IndexRange(0, 1), IndexRange(0, 2))
#: Blocks of 128 KiB: copied on a thread.
LARGE_LAYOUT = KvLayout(num_layers=2, num_kv_heads=8, head_dim=64, block_size=32, dtype="float32")
LARGE_TRANSFER = replace(SMALL_TRANSFER, max_payload_bytes=3 * LARGE_LAYOUT.max_page_bytes)
assert LARGE_LAYOUT.max_page_bytes > ByteStore(LARGE_LAYOUT, 1).inline_copy_bytes


@pytest.fixture(params=["in pieces", "peer reads"])
def peer_reads(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "peer reads")


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def maker(request: pytest.FixtureRequest, peer_reads: bool) -> TransportMaker:
    return TransportMaker(request.param, peer_reads=peer_reads)


@pytest.fixture
def memory() -> TransportMaker:
    return TransportMaker("memory")


def hand_over(pair: Pair) -> None:
    """Begin and compute all of it at once."""
    pair.expect()
    sender = pair.offer()
    pair.grant()
    pair.compute(sender)
    sender.commit(FirstToken(7, 2))


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, LARGE_LAYOUT, UNEQUAL_LAYOUT], ids=["small", "large", "unequal"])
@pytest.mark.parametrize("granted_first", [True, False])
async def test_a_request_moves(maker: TransportMaker, layout: KvLayout, granted_first: bool) -> None:
    config = LARGE_TRANSFER if layout is LARGE_LAYOUT else SMALL_TRANSFER
    async with open_pair(maker, layout, config) as pair:
        pair.expect()
        sender = pair.offer()
        if granted_first:
            pair.grant()
        await anyio.to_thread.run_sync(lambda: pair.compute(sender))  # as an engine would
        sender.commit(FirstToken(7, 2))
        if not granted_first:
            pair.grant()
        landed = await pair.b.outcome()
        assert isinstance(landed, LandedTransfer)
        assert (landed.request_id, landed.epoch, landed.token_id, landed.token_index) == (REQUEST, EPOCH, 7, 2)
        assert landed.num_bytes == pair.total_bytes
        pair.check_moved()
        sent = await pair.a.outcome()
        assert isinstance(sent, SentTransfer)
        assert sent.num_bytes == pair.total_bytes
        assert sent.exposed_s >= 0
        assert sent.duration_s >= 0
        assert pair.b.mover.counters().num_bytes_received == pair.a.mover.counters().num_bytes_sent == pair.total_bytes
        assert pair.b.mover.counters().dropped == {}
        assert pair.b.mover.counters().num_bytes_peer_read == (pair.total_bytes if maker.peer_reads else 0)
        pair.free_all()


@pytest.mark.parametrize("is_freed", [False, True])
async def test_the_sender_is_told_before_decode_begins(
    memory: TransportMaker, monkeypatch: pytest.MonkeyPatch, *, is_freed: bool
) -> None:
    """The decode step holds the interpreter up. Freed in between, the request has no outcome at its receiver."""
    async with open_pair(memory) as pair:
        send = pair.b.transport.send

        async def tell(address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
            assert unpack_header(buffer.header, KEY).kind is PieceKind.LANDED
            assert is_notice
            assert pair.b.outcomes == []
            if is_freed:
                pair.b.mover.cancel(REQUEST, EPOCH)
            await send(address, buffer, payload_bytes, is_notice=is_notice)

        monkeypatch.setattr(pair.b.transport, "send", tell)
        hand_over(pair)
        assert isinstance(await pair.a.outcome(), SentTransfer)
        if not is_freed:
            assert isinstance(await pair.b.outcome(), LandedTransfer)
        pair.free_all()


async def test_what_has_landed_does_not_fail_any_more(memory: TransportMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender gives up between the acknowledgement and the outcome."""
    async with open_pair(memory) as pair:
        send = pair.b.transport.send

        async def tell(address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
            assert pair.b.mover.arrivals.take_abort(unpack_header(buffer.header, KEY))
            await send(address, buffer, payload_bytes, is_notice=is_notice)

        monkeypatch.setattr(pair.b.transport, "send", tell)
        hand_over(pair)
        await pair.lands()
        pair.free_all()


async def test_the_last_layers_are_pushed_in_small_pieces_and_read_as_a_whole(maker: TransportMaker) -> None:
    """Blocks of a MiB: the second chunk's are 5 in each of 3 layers, of which the last two go 2 by 2."""
    layout = KvLayout(num_layers=3, num_kv_heads=8, head_dim=512, block_size=32, dtype="float32")
    async with open_pair(maker, layout, replace(SMALL_TRANSFER, max_payload_bytes=8 << 20)) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        await anyio.to_thread.run_sync(lambda: pair.compute(sender))
        sender.commit(FirstToken(7, 2))
        await pair.lands()
        pair.check_moved()
        assert pair.a.mover.counters().num_pieces_sent == (6 if maker.peer_reads else 3 + 1 + 3 + 3)
        pair.free_all()


async def hand_over_between(
    maker: TransportMaker, layout: KvLayout, source: TransferConfig, destination: TransferConfig
) -> None:
    """A request moves between sides that are configured unlike each other."""
    async with (
        open_side(maker, layout, source, ByteStore(layout, NUM_BLOCKS, seed=1)) as a,
        open_side(maker, layout, destination, ByteStore(layout, NUM_BLOCKS)) as b,
    ):
        with anyio.fail_after(30):
            pair = Pair(a, b)
            pair.expect()
            sender = pair.offer()
            pair.grant()
            await anyio.to_thread.run_sync(lambda: pair.compute(sender))
            sender.commit(FirstToken(7, 2))
            landed = await b.outcome()
            assert isinstance(landed, LandedTransfer)
            assert (landed.token_id, landed.token_index) == (7, 2)
            assert isinstance(await a.outcome(), SentTransfer)
            assert b.mover.counters().dropped == {}
            pair.check_moved()
            pair.free_all()


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, LARGE_LAYOUT], ids=["small", "large"])
@pytest.mark.parametrize("encrypts", [(True, True), (True, False), (False, True)], ids=["both", "source", "receiver"])
async def test_encrypted_kv_moves_to_whoever_has_the_token(
    maker: TransportMaker, layout: KvLayout, encrypts: tuple[bool, bool]
) -> None:
    """So the setting may be changed one instance after the other."""
    config = SMALL_TRANSFER if layout is SMALL_LAYOUT else LARGE_TRANSFER
    await hand_over_between(maker, layout, *[replace(config, encrypt=each) for each in encrypts])


async def test_layers_are_pushed_while_later_ones_are_computed(maker: TransportMaker) -> None:
    """What is ready arrives though the rest is not there yet."""
    async with open_pair(maker) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        sender.blocks_ready(chunk=0, layer=0, first_block=0, num_blocks=4)
        while pair.b.mover.counters().num_bytes_received < 4 * SMALL_LAYOUT.max_page_bytes:
            await anyio.lowlevel.checkpoint()
        assert pair.b.store.block(0, pair.b_blocks[3]) == pair.a.store.block(0, pair.a_blocks[3])
        pair.free_all()


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, UNEQUAL_LAYOUT], ids=["small", "unequal"])
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8), (1, 1)])
async def test_pieces_are_what_both_sides_hold(maker: TransportMaker, layout: KvLayout, sizes: tuple[int, int]) -> None:
    """Instances with KV on devices have larger buffers than those without."""
    configs = [replace(SMALL_TRANSFER, max_payload_bytes=size * layout.max_page_bytes) for size in sizes]
    await hand_over_between(maker, layout, *configs)


async def test_no_bytes_move_before_the_grant(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect()
        sender = pair.offer()
        pair.compute(sender)
        sender.commit(FirstToken(1, 0))
        await anyio.wait_all_tasks_blocked()
        assert pair.b.mover.counters().num_pieces_received == 0
        pair.a.mover.departures.grant(REQUEST, Epoch(2), destinations=[everything_to(pair.b)], capability=CAPABILITY)
        await anyio.wait_all_tasks_blocked()
        assert pair.b.mover.counters().num_pieces_received == 0
        pair.free_all()


async def test_a_paused_transfer_moves_nothing_until_it_is_granted_again(maker: TransportMaker) -> None:
    """Paused after any number of turns: what was under way is taken, and all of it lands in the end."""
    for num_checkpoints in (0, 1, 2, 3, 5, 9, 20, 50):
        async with open_pair(maker, LARGE_LAYOUT, LARGE_TRANSFER) as pair:
            pair.expect()
            sender = pair.offer()
            pair.grant()
            pair.compute(sender)
            for _ in range(num_checkpoints):
                await anyio.lowlevel.checkpoint()
            pair.a.mover.departures.pause(REQUEST, EPOCH)
            with anyio.fail_after(30):
                assert await pair.a.outcome() == PausedTransfer(request_id=REQUEST, epoch=EPOCH)
            sender.commit(FirstToken(7, 0))
            num_sent = pair.a.mover.counters().num_pieces_sent
            await anyio.wait_all_tasks_blocked()
            assert pair.a.mover.counters().num_pieces_sent == num_sent
            assert pair.b.outcomes == []
            pair.grant()
            await pair.lands()
            pair.check_moved()
            pair.free_all()


async def test_only_what_was_granted_and_is_not_whole_can_be_paused(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect()
        pair.a.mover.departures.pause(REQUEST, EPOCH)
        sender = pair.offer()
        pair.a.mover.departures.pause(REQUEST, EPOCH)
        pair.grant()
        pair.compute(sender)
        pair.a.mover.departures.pause(REQUEST, Epoch(EPOCH + 1))
        sender.commit(FirstToken(7, 0))
        pair.a.mover.departures.pause(REQUEST, EPOCH)
        await pair.lands()
        pair.free_all()


async def test_cancel_at_any_moment_frees_everything(maker: TransportMaker) -> None:
    for num_checkpoints in range(0, 60, 3):
        async with open_pair(maker, LARGE_LAYOUT, LARGE_TRANSFER) as pair:
            pair.expect()
            sender = pair.offer()
            pair.compute(sender)
            pair.grant()
            sender.commit(FirstToken(1, 0))
            for _ in range(num_checkpoints):
                await anyio.lowlevel.checkpoint()
            released = anyio.Event()
            pair.a.mover.cancel(REQUEST, EPOCH)
            pair.a.pool.free(pair.a_blocks)
            pair.b.mover.cancel(REQUEST, EPOCH)
            pair.b.pool.free(pair.b_blocks, on_released=released.set)
            pair.b.mover.check_integrity()
            await released.wait()
            pair.b.mover.check_integrity()
            pair.a.outcomes.clear()
            pair.b.outcomes.clear()


async def test_a_transfer_that_is_cancelled_has_no_outcome_at_any_moment(memory: TransportMaker) -> None:
    """As it ended, a home took its outcome for that of a whole hand-over, and let the request go."""
    has_ended = False
    for num_checkpoints in range(1000):
        async with open_pair(memory) as pair:
            hand_over(pair)
            for _ in range(num_checkpoints):
                await anyio.lowlevel.checkpoint()
            has_ended = bool(pair.a.outcomes)
            if not has_ended:
                pair.a.mover.departures.cancel(REQUEST, EPOCH)
                pair.b.mover.cancel(REQUEST, EPOCH)
            await anyio.wait_all_tasks_blocked()
            assert bool(pair.a.outcomes) == has_ended, f"after {num_checkpoints} checkpoints"
            assert len(pair.a.mover.departures) == 0
            pair.a.outcomes.clear()
            pair.b.outcomes.clear()
            pair.free_all()
        if has_ended:
            break
    assert has_ended


async def test_blocks_freed_during_a_copy_stay_quarantined_until_it_ends(memory: TransportMaker) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class SlowStore(ByteStore):
        def scatter(self, layer: int, block_ids: object, data: memoryview) -> None:
            entered.set()
            assert go_on.wait(20)

    async with open_pair(memory, LARGE_LAYOUT, LARGE_TRANSFER, make_store=SlowStore) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        sender.blocks_ready(chunk=0, layer=0, first_block=0, num_blocks=2)
        await anyio.to_thread.run_sync(entered.wait)
        released = anyio.Event()
        pair.b.mover.cancel(REQUEST, EPOCH)
        pair.b.pool.free(pair.b_blocks, on_released=released.set)
        assert pair.b.pool.num_quarantined == 2
        assert not set(pair.b.pool.allocate(30)) & set(pair.b_blocks[:2])
        pair.b.pool.free(sorted(set(range(NUM_BLOCKS)) - set(pair.b_blocks[:2])))
        assert not released.is_set()
        go_on.set()
        await released.wait()
        pair.a.mover.cancel(REQUEST, EPOCH)
        pair.a.pool.free(pair.a_blocks)


@pytest.mark.parametrize("name", ["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
async def test_small_pieces_that_wait_travel_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each still counts, and is checked, as if it had come alone."""
    config = replace(SMALL_TRANSFER, max_payload_bytes=SMALL_LAYOUT.max_page_bytes, peer_reads=False)
    async with open_pair(TransportMaker(name), config=config) as pair:
        sent, num_sends = pair.a.transport.send, 0

        async def send(address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
            nonlocal num_sends
            num_sends += 1
            await sent(address, buffer, payload_bytes, is_notice=is_notice)

        monkeypatch.setattr(pair.a.transport, "send", send)
        hand_over(pair)
        await pair.lands()
        pair.check_moved()
        num_pieces = pair.total_bytes // SMALL_LAYOUT.max_page_bytes
        assert pair.a.mover.counters().num_pieces_sent == pair.b.mover.counters().num_pieces_received == num_pieces
        assert num_sends == 1 + ceil(num_pieces / min(MAX_PIECES, MESSAGE_BYTES // SMALL_LAYOUT.max_page_bytes))
        pair.free_all()


def damaged_at_first() -> MemoryFaults:
    """All KV is, when it comes to a destination for the first time."""
    seen: set[tuple[int, KvPart]] = set()

    def is_new(data: bytes) -> bool:
        header = unpack_header(data, KEY)
        what = header.destination, header.part
        is_new = header.kind in (PieceKind.KV, PieceKind.PEER_READ) and what not in seen
        seen.add(what)
        return is_new

    return MemoryFaults(corrupt=is_new)


@pytest.mark.parametrize("committed_first", [True, False])
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (SMALL_LAYOUT, SMALL_TRANSFER),
        (LARGE_LAYOUT, LARGE_TRANSFER),
        (SMALL_LAYOUT, replace(SMALL_TRANSFER, encrypt=True)),
    ],
    ids=["small", "large", "encrypted"],
)
async def test_damaged_pieces_are_asked_for_again(
    memory: TransportMaker, layout: KvLayout, config: TransferConfig, committed_first: bool
) -> None:
    """Some are found damaged after the commit: large pieces are checked on threads."""
    memory.fabric.faults = damaged_at_first()
    async with open_pair(memory, layout, config) as pair:
        pair.expect()
        sender = pair.offer()
        if committed_first:
            sender.commit(FirstToken(7, 0))
        pair.grant()
        pair.compute(sender)
        if not committed_first:
            await anyio.wait_all_tasks_blocked()
            sender.commit(FirstToken(7, 0))
        landed = await pair.b.outcome()
        assert isinstance(landed, LandedTransfer)
        assert landed.num_bytes == pair.total_bytes
        assert isinstance(await pair.a.outcome(), SentTransfer)
        counters = pair.b.mover.counters()
        assert counters.dropped == {"checksum": counters.num_asked_again}
        assert pair.a.mover.counters().num_pieces_sent == 2 * counters.num_asked_again > 0
        pair.check_moved()
        pair.free_all()


async def test_what_is_asked_for_again_waits_for_the_grant_of_a_paused_transfer(memory: TransportMaker) -> None:
    for num_checkpoints in (0, 3, 6, 9, 12, 15, 20, 25, 30, 40, 50):
        memory.fabric.faults = damaged_at_first()
        async with open_pair(memory, LARGE_LAYOUT, LARGE_TRANSFER) as pair:
            pair.expect()
            sender = pair.offer()
            pair.grant()
            pair.compute(sender)
            for _ in range(num_checkpoints):
                await anyio.lowlevel.checkpoint()
            pair.a.mover.departures.pause(REQUEST, EPOCH)
            assert await pair.a.outcome() == PausedTransfer(request_id=REQUEST, epoch=EPOCH)
            num_sent = pair.a.mover.counters().num_pieces_sent
            sender.commit(FirstToken(7, 0))
            await anyio.wait_all_tasks_blocked()
            assert pair.a.mover.counters().num_pieces_sent == num_sent
            assert pair.b.outcomes == []
            pair.grant()
            await pair.lands()
            pair.check_moved()
            pair.free_all()


AGAIN = PieceHeader(
    kind=PieceKind.AGAIN, request_key=request_key(REQUEST), epoch=EPOCH, capability=CAPABILITY, part=A_PAGE
)
REFUSED_AGAIN = [
    ("unknown", AGAIN._replace(request_key=bytes(16))),
    ("epoch", AGAIN._replace(epoch=Epoch(2))),
    ("capability", AGAIN._replace(capability=1)),
    ("range", AGAIN._replace(destination=1)),
    ("range", AGAIN._replace(part=A_PAGE._replace(blocks=IndexRange(4, 5)))),  # not computed
    ("range", AGAIN._replace(part=A_PAGE._replace(blocks=IndexRange(0, 5)))),
    ("range", AGAIN._replace(part=A_PAGE._replace(blocks=IndexRange(8, 10)))),
    ("range", AGAIN._replace(part=A_PAGE._replace(blocks=IndexRange(2, 1)))),
    ("range", AGAIN._replace(part=A_PAGE._replace(layers=IndexRange(2, 4)))),
    ("range", AGAIN._replace(part=A_PAGE._replace(layers=IndexRange(2**16 - 2, 2**16 - 1)))),
    ("range", AGAIN._replace(part=A_PAGE._replace(heads=IndexRange(0, 1)))),
]


@pytest.mark.parametrize(("reason", "header"), REFUSED_AGAIN)
async def test_only_what_was_sent_is_sent_again(maker: TransportMaker, reason: str, header: PieceHeader) -> None:
    async with open_pair(maker) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender, chunks=((0, 4),))
        while pair.b.mover.counters().num_bytes_received < 4 * SMALL_LAYOUT.bytes_per_block:
            await anyio.lowlevel.checkpoint()
        await send_raw(pair, header, b"", backwards=True)
        while pair.a.mover.counters().dropped != {reason: 1}:
            await anyio.lowlevel.checkpoint()
        pair.compute(sender, chunks=((4, 5),))
        sender.commit(FirstToken(1, 0))
        await pair.lands()
        assert pair.b.mover.counters().dropped == {}
        pair.free_all()


async def test_whoever_asks_for_ever_is_not_answered_for_ever(maker: TransportMaker) -> None:
    async with open_pair(maker) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender, chunks=((0, 4),))
        while pair.b.mover.counters().num_bytes_received < 4 * SMALL_LAYOUT.bytes_per_block:
            await anyio.lowlevel.checkpoint()
        for _ in range(200):
            await send_raw(pair, AGAIN, b"", backwards=True)
        while pair.a.mover.counters().dropped.get("limit", 0) < 200 - 3 * FREE_PIECES:
            await anyio.lowlevel.checkpoint()
        pair.compute(sender, chunks=((4, 5),))
        sender.commit(FirstToken(1, 0))
        await pair.lands()
        assert set(pair.b.mover.counters().dropped) <= {"duplicate", "unknown"}
        pair.check_moved()
        pair.free_all()


async def test_what_has_landed_is_sent_whatever_becomes_of_what_was_asked_for_again(
    memory: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver stops as it is answered, and the deadline passes."""
    async with open_pair(memory, config=replace(SMALL_TRANSFER, deadline_s=0.05)) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender)
        await anyio.wait_all_tasks_blocked()
        send = pair.a.transport.send

        async def send_but_no_kv(
            address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False
        ) -> None:
            if payload_bytes:
                await anyio.sleep_forever()
            await send(address, buffer, payload_bytes, is_notice=is_notice)

        monkeypatch.setattr(pair.a.transport, "send", send_but_no_kv)
        await send_raw(pair, AGAIN, b"", backwards=True)
        await anyio.wait_all_tasks_blocked()
        sender.commit(FirstToken(1, 0))
        await pair.lands()
        pair.check_moved()
        pair.free_all()


async def test_what_is_always_damaged_fails_both_sides(memory: TransportMaker) -> None:
    memory.fabric.faults = MemoryFaults(corrupt=lambda header: unpack_header(header, KEY).part.layers.start == 2)
    async with open_pair(memory) as pair:
        pair.expect()
        sender = pair.offer()
        pair.compute(sender)
        pair.grant()
        failed = await pair.b.outcome()
        assert isinstance(failed, FailedTransfer)
        assert not failed.sending
        num_asked = pair.b.mover.counters().num_asked_again
        assert FREE_PIECES <= num_asked < 2 * FREE_PIECES
        assert failed.reason == f"source 0: {num_asked + 1} pieces arrived damaged, the last one of layer 2"
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert failed.sending
        assert not any(pair.b.store.block(2, pair.b_blocks[0]))
        pair.free_all()


async def test_a_lost_piece_is_noticed_at_the_commit(memory: TransportMaker) -> None:
    memory.fabric.faults = MemoryFaults(drop=lambda header: unpack_header(header, KEY).part.layers.start == 1)
    async with open_pair(memory) as pair:
        pair.expect()
        pair.send()
        failed = await pair.b.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "missing" in failed.reason
        assert isinstance(await pair.a.outcome(), FailedTransfer)
        pair.free_all()


@pytest.mark.parametrize("lost", [PieceKind.COMMIT, PieceKind.LANDED])
async def test_a_lost_end_is_noticed_by_the_deadline(memory: TransportMaker, lost: PieceKind) -> None:
    memory.fabric.faults = MemoryFaults(drop=lambda header: unpack_header(header, KEY).kind is lost)
    async with open_pair(memory, config=replace(SMALL_TRANSFER, deadline_s=0.05)) as pair:
        pair.expect()
        pair.send()
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert failed.sending
        assert "0.05 s" in failed.reason
        assert isinstance(await pair.b.outcome(), FailedTransfer if lost is PieceKind.COMMIT else LandedTransfer)
        pair.free_all()


async def test_the_deadline_does_not_run_while_the_engine_computes(memory: TransportMaker) -> None:
    async with open_pair(memory, config=replace(SMALL_TRANSFER, deadline_s=0.0)) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        sender.blocks_ready(chunk=0, layer=0, first_block=0, num_blocks=4)
        await anyio.wait_all_tasks_blocked()
        assert pair.a.outcomes == []
        pair.free_all()


async def test_an_unreachable_receiver_fails_the_sender(memory: TransportMaker) -> None:
    memory.fabric.faults = MemoryFaults(refuse=True)
    async with open_pair(memory) as pair:
        sender = pair.offer()
        pair.compute(sender)
        pair.grant()
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "cannot be reached" in failed.reason
        pair.free_all()


async def test_a_receiver_that_is_gone_before_the_commit_fails_the_sender(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender)
        await anyio.wait_all_tasks_blocked()
        memory.fabric.faults = MemoryFaults(refuse=True)
        sender.commit(FirstToken(1, 0))
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "cannot be reached" in failed.reason
        pair.free_all()


async def test_a_stalled_receiver_fails_the_sender(memory: TransportMaker) -> None:
    memory.fabric.faults = MemoryFaults(gate=anyio.Event())
    async with open_pair(memory, config=replace(SMALL_TRANSFER, no_progress_s=0.02)) as pair:
        sender = pair.offer()
        pair.compute(sender)
        pair.grant()
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "received nothing" in failed.reason
        memory.fabric.faults = MemoryFaults()
        pair.free_all()


@dataclass(frozen=True)
class Forgery:
    """A piece that must not land, and why."""

    reason: str
    header: PieceHeader
    payload_bytes: int


def _forgeries() -> list[Forgery]:
    size = SMALL_LAYOUT.max_page_bytes
    good = PieceHeader(
        kind=PieceKind.KV,
        request_key=request_key(REQUEST),
        epoch=EPOCH,
        capability=CAPABILITY,
        part=A_PAGE,
        payload_bytes=size,
        check=KEY.close_payload(memoryview(bytes(size))),
    )
    return [
        Forgery("unknown", good._replace(request_key=request_key(RequestId("another"))), size),
        Forgery("unknown", good._replace(kind=PieceKind.LANDED, request_key=bytes(16)), 0),
        Forgery("unknown", good._replace(kind=PieceKind.ABORT, capability=1), 0),
        Forgery("epoch", good._replace(epoch=Epoch(2)), size),
        Forgery("epoch", good._replace(epoch=Epoch(4)), size),
        Forgery("capability", good._replace(capability=CAPABILITY ^ 1), size),
        Forgery("capability", good._replace(kind=PieceKind.COMMIT, capability=0), 0),
        Forgery("range", good._replace(kind=PieceKind.PEER_READ), size),
        Forgery("kind", good._replace(kind=PieceKind.HELLO), size),
        Forgery("range", good._replace(source=1), size),
        Forgery("range", good._replace(destination=1), size),
        Forgery("range", good._replace(part=A_PAGE._replace(layers=IndexRange(3, 4))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(layers=IndexRange(2**16 - 2, 2**16 - 1))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(layers=IndexRange(0, 2)), payload_bytes=2 * size), size),
        Forgery("range", good._replace(part=A_PAGE._replace(layers=IndexRange(1, 0))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(9, 10))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(2**32 - 2, 2**32 - 1))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(0, 0))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(2, 1))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(0, 2))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(blocks=IndexRange(0, 2)), payload_bytes=2 * size), size),
        Forgery("range", good._replace(payload_bytes=size + 1), size),
        Forgery("range", good._replace(part=A_PAGE._replace(heads=IndexRange(1, 3))), size),
        Forgery("range", good._replace(part=A_PAGE._replace(heads=IndexRange(0, 1))), size),
    ]


@pytest.mark.parametrize("forgery", [pytest.param(f, id=f"{f.reason}-{i}") for i, f in enumerate(_forgeries())])
async def test_a_forged_piece_is_dropped_and_the_transfer_goes_on(maker: TransportMaker, forgery: Forgery) -> None:
    async with open_pair(maker) as pair:
        pair.expect()
        await send_raw(pair, forgery.header, bytes(forgery.payload_bytes))
        pair.send()
        await pair.lands()
        assert pair.b.mover.counters().dropped == {forgery.reason: 1}
        pair.check_moved()
        pair.free_all()


async def test_a_repeated_piece_is_dropped(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect()
        header = _forgeries()[0].header._replace(request_key=request_key(REQUEST))
        await send_raw(pair, header, bytes(header.payload_bytes))
        await send_raw(pair, header, bytes(header.payload_bytes))
        await anyio.wait_all_tasks_blocked()
        assert pair.b.mover.counters().num_pieces_received == 1
        assert pair.b.mover.counters().dropped == {"duplicate": 1}
        pair.free_all()


async def test_pieces_that_were_recorded_and_are_sent_again_change_nothing(
    maker: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever reads along, to a receiver that still has the request, and to one whose blocks are another's."""
    async with open_pair(maker) as pair:
        recorded: list[tuple[bytes, bytes]] = []
        send = pair.a.transport.send

        async def record(address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
            recorded.append((bytes(buffer.header), bytes(buffer.payload[:payload_bytes])))
            await send(address, buffer, payload_bytes, is_notice=is_notice)

        async def replay() -> int:
            """Send all that was recorded; how much was dropped."""
            before = sum(pair.b.mover.counters().dropped.values())
            for header, payload in recorded:
                async with pair.a.transport.lend() as buffer:
                    buffer.header[:] = header
                    buffer.payload[: len(payload)] = payload
                    await send(pair.b.transport.address, buffer, len(payload))
            while sum(pair.b.mover.counters().dropped.values()) < before + len(recorded):
                await anyio.lowlevel.checkpoint()
            return sum(pair.b.mover.counters().dropped.values()) - before

        monkeypatch.setattr(pair.a.transport, "send", record)
        pair.expect()
        pair.send()
        await pair.lands()
        monkeypatch.setattr(pair.a.transport, "send", send)
        assert await replay() == len(recorded) > 0
        pair.check_moved()
        pair.free_all()
        others = [bytes([layer + 1]) * SMALL_LAYOUT.max_page_bytes for layer in range(SMALL_LAYOUT.num_layers)]
        for layer, content in enumerate(others):
            pair.b.store.scatter(layer, pair.b_blocks, memoryview(content * len(pair.b_blocks)))
        assert await replay() == len(recorded)
        for layer, content in enumerate(others):
            assert {bytes(pair.b.store.block(layer, block_id)) for block_id in pair.b_blocks} == {content}


async def test_garbage_headers_are_counted(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        async with pair.a.transport.lend() as buffer:
            buffer.header[:] = bytes(len(buffer.header))
            await pair.a.transport.send(pair.b.transport.address, buffer, 100)
        await anyio.wait_all_tasks_blocked()
        assert pair.b.mover.counters().dropped == {"malformed": 1}
        pair.free_all()


@pytest.mark.parametrize("kind", list(PieceKind))
async def test_who_does_not_know_the_mesh_token_forges_nothing(maker: TransportMaker, kind: PieceKind) -> None:
    """All that a stranger can have guessed is right; what it has sealed is not believed, and nothing is lost."""
    good = _forgeries()[0].header
    header = good._replace(kind=kind, request_key=request_key(REQUEST), num_context_tokens=37)
    async with open_pair(maker) as pair:
        pair.expect()
        await send_raw(pair, header, bytes(good.payload_bytes), MeshKey("another mesh's"))
        pair.send()
        await pair.lands()
        assert pair.b.mover.counters().dropped == {"malformed": 1}
        pair.check_moved()
        pair.free_all()


@pytest.mark.parametrize("kind", [kind for kind in PieceKind if kind is not PieceKind.PROBE])
async def test_pieces_of_other_weights_are_dropped_and_counted(maker: TransportMaker, kind: PieceKind) -> None:
    """With the right key, request, epoch and capability."""
    good = _forgeries()[0].header
    header = good._replace(
        kind=kind,
        request_key=request_key(REQUEST),
        capability=CAPABILITY,
        weights=weights_word("others"),
        num_context_tokens=37,
    )
    async with open_pair(maker) as pair:
        pair.expect()
        await send_raw(pair, header, bytes(good.payload_bytes))
        pair.send()
        await pair.lands()
        assert pair.b.mover.counters().dropped == {"weights": 1}
        pair.check_moved()
        pair.free_all()


async def send_raw(
    pair: Pair, header: PieceHeader, payload: bytes, key: MeshKey = KEY, *, backwards: bool = False
) -> None:
    one, other = (pair.b.transport, pair.a.transport) if backwards else (pair.a.transport, pair.b.transport)
    async with one.lend() as buffer:
        pack_header(header, buffer.header, key)
        buffer.payload[: len(payload)] = payload
        await one.send(other.address, buffer, len(payload))


async def test_a_commit_for_another_length_fails(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect(num_context_tokens=pair.num_context_tokens + 1)
        pair.send()
        failed = await pair.b.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "instead of 34" in failed.reason
        assert isinstance(await pair.a.outcome(), FailedTransfer)
        pair.free_all()


async def test_a_newer_epoch_takes_the_place_of_an_older_one(memory: TransportMaker) -> None:
    async with open_pair(memory) as pair:
        pair.expect(Epoch(2))
        pair.offer(Epoch(2))
        pair.expect()
        sender = pair.offer()
        pair.a.mover.cancel(REQUEST, Epoch(2))  # late: touches nothing
        pair.b.mover.cancel(REQUEST, Epoch(2))
        pair.compute(sender)
        sender.commit(FirstToken(1, 0))
        pair.grant()
        await pair.lands()
        pair.free_all()


async def test_many_requests_at_once(maker: TransportMaker) -> None:
    layout, config = LARGE_LAYOUT, LARGE_TRANSFER
    async with open_pair(maker, layout, config) as pair:
        pair.free_all()
        blocks = {RequestId(f"request {i}"): (pair.a.pool.allocate(3), pair.b.pool.allocate(4)) for i in range(8)}
        for request_id, (source, destination) in blocks.items():
            pair.b.mover.arrivals.expect(
                request_id,
                EPOCH,
                capability=CAPABILITY,
                block_ids=destination,
                num_context_tokens=3 * layout.block_size,
                source_addresses=(pair.a.transport.address,),
            )
            sender = pair.a.mover.departures.offer(
                request_id, EPOCH, block_ids=source, num_context_tokens=3 * layout.block_size
            )
            pair.a.mover.departures.grant(
                request_id,
                EPOCH,
                destinations=[everything_to(pair.b)],
                capability=CAPABILITY,
            )
            pair.compute(sender, chunks=((0, 2), (2, 1)))
            sender.commit(FirstToken(1, 0))
        for side, kind in ((pair.b, LandedTransfer), (pair.a, SentTransfer)):
            outcomes = [await side.outcome() for _ in blocks]
            assert all(isinstance(outcome, kind) for outcome in outcomes)
            assert {outcome.request_id for outcome in outcomes} == set(blocks)
        for source, destination in blocks.values():
            for layer in range(layout.num_layers):
                for a, b in zip(source, destination, strict=False):
                    assert pair.a.store.block(layer, a) == pair.b.store.block(layer, b)
            pair.a.pool.free(source)
            pair.b.pool.free(destination)


async def test_leaving_the_mover_ends_what_is_under_way(memory: TransportMaker) -> None:
    async with open_side(memory, SMALL_LAYOUT, SMALL_TRANSFER, ByteStore(SMALL_LAYOUT, NUM_BLOCKS)) as side:
        block_ids = side.pool.allocate(2)
        side.mover.departures.offer(REQUEST, EPOCH, block_ids=block_ids, num_context_tokens=5)
        side.mover.departures.grant(REQUEST, EPOCH, destinations=[], capability=1)
        await anyio.wait_all_tasks_blocked()
        assert side.mover.counters().num_sending == 1
    assert side.mover.counters().num_sending == 0
    assert not side.outcomes  # nobody is there to be told
    side.pool.free(block_ids)
    assert side.pool.num_free == NUM_BLOCKS


async def test_a_piece_must_hold_a_block(memory: TransportMaker) -> None:
    config = replace(SMALL_TRANSFER, max_payload_bytes=SMALL_LAYOUT.max_page_bytes - 1)
    async with memory.open(config) as transport:
        store = ByteStore(SMALL_LAYOUT, 1)
        with pytest.raises(ConfigError, match="max_payload_bytes"):
            KvMover(transport=transport, store=store, pool=BlockPool(1), config=config, on_outcome=print)


# --- several sources and destinations ---


class Mesh:
    """Two sources, which hold nine blocks of a request between them, and two destinations for all of them."""

    def __init__(self, sides: list[DataSide]) -> None:
        self.sources, self.destinations = sides[:2], sides[2:]
        self.tables = [side.pool.allocate(9) for side in sides]
        self.shares = (IndexRange(0, 5), IndexRange(5, 9))

    def expect(self) -> None:
        addresses = tuple(source.transport.address for source in self.sources)
        for index, side in enumerate(self.destinations):
            side.mover.arrivals.expect(
                REQUEST,
                EPOCH,
                capability=CAPABILITY,
                block_ids=self.tables[2 + index],
                num_context_tokens=33,
                source_addresses=addresses,
                destination=index,
            )

    def offer(self, shares: tuple[IndexRange, IndexRange] | None = None) -> list[KvSource]:
        senders: list[KvSource] = []
        for index, (side, blocks) in enumerate(zip(self.sources, shares or self.shares, strict=True)):
            table = self.tables[index]
            sender = side.mover.departures.offer(
                REQUEST, EPOCH, block_ids=table, num_context_tokens=33, source=index, blocks=blocks
            )
            destinations = [everything_to(destination) for destination in self.destinations]
            side.mover.departures.grant(REQUEST, EPOCH, destinations=destinations, capability=CAPABILITY)
            for layer in range(SMALL_LAYOUT.num_layers):
                sender.blocks_ready(chunk=0, layer=layer, first_block=blocks.start, num_blocks=blocks.size)
            senders.append(sender)
        return senders

    def free_all(self) -> None:
        for side, table in zip((*self.sources, *self.destinations), self.tables, strict=True):
            side.mover.cancel(REQUEST, EPOCH)
            side.pool.free(table)


@asynccontextmanager
async def open_mesh(memory: TransportMaker, peer_reads: Sequence[bool] = (False,) * 4) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        stores = [ByteStore(SMALL_LAYOUT, NUM_BLOCKS, seed=seed) for seed in (1, 2, 3, 4)]
        sides = [
            await stack.enter_async_context(
                open_side(memory, SMALL_LAYOUT, SMALL_TRANSFER, store, peer_reads=one_reads)
            )
            for store, one_reads in zip(stores, peer_reads, strict=True)
        ]
        with anyio.fail_after(30):
            yield Mesh(sides)
        for side in sides:
            assert (side.outcomes, side.pool.num_free) == ([], NUM_BLOCKS)
            assert side.mover.counters()[-2:] == (0, 0)


@pytest.mark.parametrize("peer_reads", ["0000", "1111", "1110", "1011"])
@pytest.mark.parametrize("faults", [MemoryFaults, damaged_at_first])
async def test_each_source_sends_its_blocks_to_all_and_the_sampler_the_token(
    memory: TransportMaker, faults: Callable[[], MemoryFaults], peer_reads: str
) -> None:
    """Whoever of them reads; one may be read by one of two, and one of two may be read."""
    memory.fabric.faults = faults()
    async with open_mesh(memory, [letter == "1" for letter in peer_reads]) as mesh:
        mesh.expect()
        first, second = mesh.offer()
        second.commit(FirstToken(7, 2))
        await anyio.wait_all_tasks_blocked()
        assert all(not side.outcomes for side in (*mesh.sources, *mesh.destinations))  # half of it is there
        first.commit(None)
        for side in mesh.destinations:
            landed = await side.outcome()
            assert isinstance(landed, LandedTransfer)
            assert (landed.token_id, landed.token_index) == (7, 2)
            assert landed.num_bytes == 9 * SMALL_LAYOUT.bytes_per_block
        for side, share in zip(mesh.sources, mesh.shares, strict=True):
            sent = await side.outcome()
            assert isinstance(sent, SentTransfer)
            num_bytes = 2 * share.size * SMALL_LAYOUT.bytes_per_block
            if faults is damaged_at_first and peer_reads == "1110":  # by the one that refuses
                assert 2 * num_bytes <= sent.num_bytes <= 5 * num_bytes / 2
            else:
                assert sent.num_bytes == (2 if faults is damaged_at_first else 1) * num_bytes
        for layer in range(SMALL_LAYOUT.num_layers):
            for block in range(9):
                owner = 0 if block < 5 else 1
                source = mesh.sources[owner].store.block(layer, mesh.tables[owner][block])
                for index, side in enumerate(mesh.destinations):
                    assert side.store.block(layer, mesh.tables[2 + index][block]) == source
        mesh.free_all()


@pytest.mark.parametrize(
    ("shares", "token", "reason"),
    [
        ((IndexRange(0, 5), IndexRange(6, 9)), FirstToken(1, 0), "3 blocks are missing"),
        ((IndexRange(0, 5), IndexRange(5, 9)), None, "no source drew the first token"),
    ],
)
async def test_sources_that_are_not_all_of_it_do_not_land(
    memory: TransportMaker, shares: tuple[IndexRange, IndexRange], token: FirstToken | None, reason: str
) -> None:
    async with open_mesh(memory) as mesh:
        mesh.expect()
        first, second = mesh.offer(shares)
        first.commit(token)
        second.commit(None)
        for side in (*mesh.destinations, *mesh.sources):
            failed = await side.outcome()
            assert isinstance(failed, FailedTransfer)
            assert failed.reason in (reason, "the receiver cancelled the transfer")
        mesh.free_all()
