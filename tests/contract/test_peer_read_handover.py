"""KV that a receiver copies from its sender's cache: the right pages or none, whoever frees, dies or lies meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from pdmesh.errors import KvTransferError
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, SentTransfer
from pdmesh.kv.peer_reads import CacheOwner, PeerReadWriter, ReadNote, note_bytes
from pdmesh.kv.piece import NO_CHECK, FirstToken, PieceHeader, PieceKind, pack_header, request_key, unpack_header
from pdmesh.kv.repair import FREE_PIECES
from pdmesh.kv.sharing import HostCache
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.hooked import HookedStore
from pdmesh_testing.kv import SMALL_LAYOUT, TransportMaker
from pdmesh_testing.memory_transport import MemoryFaults
from pdmesh_testing.transfers import CAPABILITY, EPOCH, NUM_BLOCKS, REQUEST, Pair, open_pair

pytestmark = pytest.mark.anyio

KEY = MeshKey("")
PAGE_BYTES = SMALL_LAYOUT.max_page_bytes
HEADS = IndexRange(0, SMALL_LAYOUT.num_kv_heads)
A_READ = PieceHeader(
    kind=PieceKind.PEER_READ,
    request_key=request_key(REQUEST),
    epoch=EPOCH,
    capability=CAPABILITY,
    part=KvPart(IndexRange(0, 1), IndexRange(0, 1), HEADS),
)


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def maker(request: pytest.FixtureRequest) -> TransportMaker:
    return TransportMaker(request.param, peer_reads=True)


@pytest.fixture
def memory() -> TransportMaker:
    return TransportMaker("memory", peer_reads=True)


def store_of(pair: Pair) -> HookedStore:
    assert isinstance(pair.b.store, HookedStore)
    return pair.b.store


def a_note(pair: Pair, block_ids: Sequence[int]) -> ReadNote:
    """What the sender says of these blocks, in the transfer that it has granted."""
    transfer = pair.a.mover.departures._granted[request_key(REQUEST)]
    writer, peer_reads = transfer._writer, pair.a.mover._context.peer_reads
    assert isinstance(writer, PeerReadWriter)
    assert peer_reads is not None
    return peer_reads.note(writer._window, block_ids)


async def say(pair: Pair, header: PieceHeader, payload: bytes = b"", *, backwards: bool = False) -> None:
    """Send a piece as it is; its length and check are right unless it has others."""
    source, destination = (pair.b, pair.a) if backwards else (pair.a, pair.b)
    async with source.transport.lend() as buffer:
        buffer.payload[: len(payload)] = payload
        check = KEY.close_payload(buffer.payload[: len(payload)]) if header.check == NO_CHECK else header.check
        payload_bytes = header.payload_bytes or len(payload)
        pack_header(header._replace(check=check, payload_bytes=payload_bytes), buffer.header, KEY)
        await source.transport.send(destination.transport.address, buffer, len(payload))


async def until_dropped(pair: Pair, reason: str, number: int = 1, *, backwards: bool = False) -> None:
    mover = (pair.a if backwards else pair.b).mover
    with anyio.fail_after(20):
        while mover.counters().dropped.get(reason, 0) < number:
            await anyio.lowlevel.checkpoint()


async def finish(pair: Pair) -> None:
    """It lands, with the right pages."""
    landed = await pair.b.outcome()
    assert isinstance(landed, LandedTransfer), landed
    assert isinstance(await pair.a.outcome(), SentTransfer)
    assert landed.num_bytes == pair.total_bytes
    pair.check_moved()


def overwrite(pair: Pair) -> None:
    """Another request of the sender uses its blocks."""
    for layer in range(SMALL_LAYOUT.num_layers):
        for block_id in pair.a_blocks:
            pair.a.store.block(layer, block_id)[:] = b"\xff" * PAGE_BYTES


async def test_nothing_is_staged(maker: TransportMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair(maker, make_store=HookedStore) as pair:
        monkeypatch.setattr(pair.a.store, "gather", None)
        for granted_first in (True, False):
            pair.expect()
            sender = pair.offer()
            if granted_first:
                pair.grant()
            pair.compute(sender)
            sender.commit(FirstToken(7, 0))
            if not granted_first:
                pair.grant()
            await finish(pair)
        counters = pair.b.mover.counters()
        assert store_of(pair).num_staged == 0
        assert counters.num_bytes_peer_read == counters.num_bytes_received == 2 * pair.total_bytes
        assert pair.a.mover.counters().num_bytes_sent == 2 * pair.total_bytes
        assert counters.dropped == {}
        pair.free_all()


@pytest.mark.parametrize("reason", ["its setting is off", "its cache is of another kind", "it may not open it"])
async def test_who_cannot_read_is_sent_bytes(
    maker: TransportMaker, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """However much it was offered before it said so; and nothing is offered to it from then on."""
    reads = reason != "its setting is off"
    if reason == "it may not open it":
        monkeypatch.setattr(HostCache, "open", refuse)
    async with open_pair(maker, make_store=HookedStore, receiver_reads=reads) as pair:
        if reason == "its cache is of another kind":
            peer_reads = pair.b.mover._context.peer_reads
            assert peer_reads is not None
            peer_reads._head = b"gpu0" + peer_reads._head[4:]
        peer_reads = pair.a.mover._context.peer_reads
        assert peer_reads is not None
        peer_reads.max_pages = 1
        num_refused = None
        for committed_first in (True, False):
            pair.expect()
            sender = pair.offer()
            pair.grant()
            pair.compute(sender)
            if not committed_first:
                await anyio.wait_all_tasks_blocked()
            sender.commit(FirstToken(7, 0))
            await finish(pair)
            counters = pair.b.mover.counters()
            assert counters.num_bytes_peer_read == 0
            assert counters.dropped == {"unreadable": counters.num_asked_again}
            assert num_refused in (None, counters.num_asked_again)
            num_refused = counters.num_asked_again
        assert pair.a.mover.counters().dropped == {}
        assert not peer_reads.may_read(pair.b.transport.address)
        pair.free_all()


def refuse(*_: object) -> None:
    raise KvTransferError("not here")


async def test_more_peer_reads_may_be_refused_than_pieces_may_be_damaged(memory: TransportMaker) -> None:
    """All of them are under way before it can say so."""
    async with open_pair(memory, make_store=HookedStore, receiver_reads=False) as pair:
        memory.fabric.faults = MemoryFaults(
            drop=lambda header: unpack_header(header, KEY).kind is PieceKind.NO_PEER_READS
        )
        peer_reads = pair.a.mover._context.peer_reads
        assert peer_reads is not None
        peer_reads.max_pages = 1
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender)
        num_pages = 9 * SMALL_LAYOUT.num_layers
        await until_dropped(pair, "unreadable", num_pages)
        await anyio.wait_all_tasks_blocked()
        assert num_pages > FREE_PIECES
        memory.fabric.faults = MemoryFaults()
        for layer in range(SMALL_LAYOUT.num_layers):
            part = KvPart(IndexRange(0, 9), IndexRange(layer, layer + 1), HEADS)
            peer_reads.max_pages = 9
            await say(pair, A_READ._replace(kind=PieceKind.NO_PEER_READS, part=part), backwards=True)
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        pair.free_all()


@pytest.mark.parametrize("on_thread", [False, True])
async def test_what_was_given_back_while_it_was_copied_does_not_land(maker: TransportMaker, on_thread: bool) -> None:
    """The sender frees the request, and another one writes into its blocks: not a byte of that is counted."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        store, is_freed = store_of(pair), threading.Event()
        store.inline_bytes = 0 if on_thread else store.inline_bytes

        def give_back() -> None:
            if not is_freed.is_set():
                pair.a.mover.cancel(REQUEST, EPOCH)
                pair.a.pool.free(pair.a_blocks)
                overwrite(pair)
                is_freed.set()

        loop = anyio.lowlevel.current_token()
        store.before = (lambda: anyio.from_thread.run_sync(give_back, token=loop)) if on_thread else give_back
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender)
        sender.commit(FirstToken(7, 0))
        await until_dropped(pair, "window closed")
        await anyio.wait_all_tasks_blocked()
        assert pair.b.outcomes == pair.a.outcomes == []
        assert pair.b.mover.counters().num_bytes_received == 0
        pair.b.mover.check_integrity()
        pair.b.mover.cancel(REQUEST, EPOCH)
        released = anyio.Event()
        pair.b.pool.free(pair.b_blocks, on_released=released.set)
        await released.wait()


async def test_what_was_committed_and_given_back_before_it_was_copied_does_not_land(maker: TransportMaker) -> None:
    """Its commit has come, and all pages are claimed; then it lands from another epoch."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        store, content = store_of(pair), bytes(pair.a.store.data)
        pair.expect()
        sender = pair.offer()
        pair.grant()
        store.hold()
        pair.compute(sender)
        sender.commit(FirstToken(7, 0))
        await store.until_held()
        await anyio.wait_all_tasks_blocked()
        pair.a.mover.cancel(REQUEST, EPOCH)
        overwrite(pair)
        store.go_on()
        await until_dropped(pair, "window closed")
        await anyio.wait_all_tasks_blocked()
        assert pair.b.outcomes == []
        assert pair.b.mover.counters().num_bytes_received == 0
        pair.a.store.data[:] = content
        pair.b.mover.cancel(REQUEST, EPOCH)
        epoch = Epoch(EPOCH + 1)
        pair.expect(epoch)
        sender = pair.offer(epoch)
        pair.grant(epoch=epoch)
        pair.compute(sender)
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        pair.free_all()


@pytest.mark.parametrize("how", ["withdrawn", "failed"])
async def test_nothing_is_read_of_a_transfer_that_ended_and_of_the_next_one_is(
    maker: TransportMaker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The sender keeps the request; what was copied of the first transfer counts for none."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        store = store_of(pair)
        pair.expect()
        sender = pair.offer()
        pair.grant()
        store.hold()
        pair.compute(sender, chunks=((0, 4),))
        await store.until_held()
        if how == "withdrawn":
            pair.a.mover.departures.withdraw(REQUEST, EPOCH)
        else:
            await say(pair, A_READ._replace(kind=PieceKind.ABORT), backwards=True)
            assert isinstance(await pair.a.outcome(), FailedTransfer)
            assert isinstance(await pair.b.outcome(), FailedTransfer)
        pair.b.mover.cancel(REQUEST, EPOCH)
        store.go_on()
        await until_dropped(pair, "window closed")
        assert pair.b.mover.counters().num_bytes_received == 0
        pair.expect(capability=CAPABILITY + 1)
        pair.grant(CAPABILITY + 1)
        pair.compute(sender, chunks=((4, 5),))
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        pair.free_all()


async def test_of_a_sender_that_died_nothing_is_taken(maker: TransportMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is not there any more; nothing more is asked of it."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        peer_reads = pair.b.mover._context.peer_reads
        assert peer_reads is not None
        monkeypatch.setattr(peer_reads, "owner", lambda address: CacheOwner(address, 1 << 30))
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender)
        sender.commit(FirstToken(7, 0))
        await until_dropped(pair, "window closed")
        await anyio.wait_all_tasks_blocked()
        counters = pair.b.mover.counters()
        assert (counters.num_bytes_received, counters.num_asked_again) == (0, 0)
        assert pair.b.outcomes == []
        pair.free_all()


async def test_blocks_stay_quarantined_while_a_thread_copies_to_them(maker: TransportMaker) -> None:
    async with open_pair(maker, make_store=HookedStore) as pair:
        store = store_of(pair)
        pair.expect()
        sender = pair.offer()
        pair.grant()
        store.hold()
        sender.blocks_ready(chunk=0, layer=0, first_block=0, num_blocks=4)
        await store.until_held()
        released = anyio.Event()
        pair.b.mover.cancel(REQUEST, EPOCH)
        pair.b.pool.free(pair.b_blocks, on_released=released.set)
        pool = pair.b.pool
        assert (pool.num_quarantined, pool.num_held, pool.num_free) == (4, 0, NUM_BLOCKS - 4)
        pair.b.mover.check_integrity()
        assert not released.is_set()
        store.go_on()
        await released.wait()
        pair.b.mover.check_integrity()
        assert pool.num_free == NUM_BLOCKS
        pair.a.mover.cancel(REQUEST, EPOCH)
        pair.a.pool.free(pair.a_blocks)


@pytest.mark.parametrize("committed_first", [False, True])
async def test_a_note_that_comes_damaged_is_sent_again(memory: TransportMaker, committed_first: bool) -> None:
    async with open_pair(memory, make_store=HookedStore) as pair:
        seen: set[KvPart] = set()

        def is_new(data: bytes) -> bool:
            header = unpack_header(data, KEY)
            is_new = header.kind is PieceKind.PEER_READ and header.part not in seen
            seen.add(header.part)
            return is_new

        memory.fabric.faults = MemoryFaults(corrupt=is_new)
        pair.expect()
        sender = pair.offer()
        if committed_first:
            sender.commit(FirstToken(7, 0))
        pair.grant()
        pair.compute(sender)
        await anyio.wait_all_tasks_blocked()
        if not committed_first:
            sender.commit(FirstToken(7, 0))
        await finish(pair)
        counters = pair.b.mover.counters()
        assert counters.dropped == {"checksum": counters.num_asked_again}
        assert counters.num_asked_again > 0
        assert store_of(pair).num_staged == 0
        pair.free_all()


#: What is dropped, by the reason; changes of a good note, and of its header.
REFUSED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "unreadable: no cache there": ({"card_address": 0}, {}),
    "unreadable: nor there": ({"card_address": (1 << 64) - 8}, {}),
    "unreadable: not its cache": ({"card_address": "word"}, {}),
    "unreadable: no such block": ({"pages": [NUM_BLOCKS]}, {}),
    "unreadable: far away": ({"pages": [(1 << 32) - 1]}, {}),
    "window closed: another word": ({"word": 1}, {}),
    "window closed: no word": ({"word_address": 8}, {}),
    "range: too short": ({"pages": []}, {}),
    "range: too long": ({"pages": [0, 1]}, {}),
    "range: as many bytes as the page": ({}, {"payload_bytes": PAGE_BYTES}),
    "range: of two layers, and one beyond": ({}, {"part": A_READ.part._replace(layers=IndexRange(2, 4))}),
    "range: beyond the request": ({}, {"part": A_READ.part._replace(blocks=IndexRange(9, 10))}),
    "range: of another source": ({}, {"source": 1}),
    "checksum": ({}, {"check": b"wrong"}),
    "capability": ({}, {"capability": 1}),
    "epoch": ({}, {"epoch": Epoch(2)}),
    "unknown": ({}, {"request_key": bytes(16)}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_peer_read_that_is_none_is_dropped(maker: TransportMaker, name: str) -> None:
    """Nothing is taken of it, and the honest rest of the transfer lands."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        await anyio.wait_all_tasks_blocked()
        good = a_note(pair, [pair.a_blocks[0]])
        changes, header = REFUSED[name]
        if changes.get("card_address") == "word":
            changes = {"card_address": good.word_address}
        note = good._replace(**changes).pack()  # type: ignore[arg-type]
        await say(pair, A_READ._replace(**header), note)  # type: ignore[arg-type]
        await until_dropped(pair, name.partition(":")[0])
        assert not any(pair.b.store.data) or name.startswith("window closed")
        assert pair.b.mover.counters().num_bytes_received == 0
        pair.compute(sender)
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        pair.free_all()


async def test_a_peer_read_that_comes_twice_is_copied_once(maker: TransportMaker) -> None:
    async with open_pair(maker, make_store=HookedStore) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        await anyio.wait_all_tasks_blocked()
        note = a_note(pair, [pair.a_blocks[0]]).pack()
        for _ in range(2):
            await say(pair, A_READ, note)
        await until_dropped(pair, "duplicate")
        assert pair.b.mover.counters().num_bytes_peer_read == PAGE_BYTES
        pair.compute(sender, chunks=((0, 1), (1, 8)))
        await until_dropped(pair, "duplicate", 2)
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        pair.free_all()


async def test_nobody_offers_for_ever_what_cannot_be_read(maker: TransportMaker) -> None:
    """A hostile sender, which asks for nothing but to be refused."""
    async with open_pair(maker, make_store=HookedStore, receiver_reads=False) as pair:
        pair.expect()
        pair.offer()
        pair.grant()
        await anyio.wait_all_tasks_blocked()
        note = a_note(pair, [pair.a_blocks[0]]).pack()
        num_pages = 9 * SMALL_LAYOUT.num_layers
        for _ in range(2 * num_pages + 1):
            await say(pair, A_READ, note)
        failed = await pair.b.outcome()
        assert isinstance(failed, FailedTransfer)
        assert "keeps offering" in failed.reason
        assert isinstance(await pair.a.outcome(), FailedTransfer)
        assert pair.b.mover.counters().num_asked_again == 2 * num_pages
        pair.free_all()


async def test_nobody_refuses_for_ever_what_was_offered_once(maker: TransportMaker) -> None:
    """A hostile receiver: it is sent once as bytes what it was offered, and what it was not offered not at all."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        pair.expect()
        sender = pair.offer()
        pair.grant()
        pair.compute(sender, chunks=((0, 4),))
        while pair.b.mover.counters().num_bytes_received < 4 * SMALL_LAYOUT.num_layers * PAGE_BYTES:
            await anyio.lowlevel.checkpoint()
        part = KvPart(IndexRange(0, 4), IndexRange(0, SMALL_LAYOUT.num_layers), HEADS)
        for reason, other in (("range", part._replace(blocks=IndexRange(3, 5))), ("limit", part)):
            for _ in range(10):
                await say(pair, A_READ._replace(kind=PieceKind.NO_PEER_READS, part=other), backwards=True)
            await until_dropped(pair, reason, 9, backwards=True)
        assert pair.a.mover.counters().dropped == {"range": 10, "limit": 9}
        pair.compute(sender, chunks=((4, 5),))
        sender.commit(FirstToken(7, 0))
        await finish(pair)
        counters = pair.a.mover.counters()
        assert counters.num_bytes_sent == pair.total_bytes  # refused, and sent as bytes
        assert counters.num_pieces_sent > 6
        pair.free_all()


async def test_a_small_note_says_less_of_a_context(maker: TransportMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message holds fewer blocks than a chunk has: of four and five blocks, in each of three layers."""
    async with open_pair(maker, make_store=HookedStore) as pair:
        monkeypatch.setattr(pair.a.transport, "payload_limit", lambda address: note_bytes(2))
        pair.expect()
        pair.send()
        await finish(pair)
        assert pair.a.mover.counters().num_pieces_sent == 3 * (2 + 3)
        assert pair.b.mover.counters().num_bytes_peer_read == pair.total_bytes
        pair.free_all()
