"""KV that members of a group copy from each other's caches: nothing is staged, and what goes wrong is not used."""

from __future__ import annotations

import threading
from dataclasses import replace

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from pdmesh.config import TransferConfig
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import MAX_WINDOWS, PeerReadWriter, ReadWindow
from pdmesh.kv.piece import PieceKind
from pdmesh.kv.repair import FREE_PIECES
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.policy.pacing import ChunkPace
from pdmesh_testing.exchanges import HEADS, NUM_BLOCKS, NUM_LAYERS, Member, a_piece, open_members
from pdmesh_testing.hooked import HookedStore
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, TransportMaker

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def maker(request: pytest.FixtureRequest) -> TransportMaker:
    return TransportMaker(request.param, peer_reads=True)


def a_store(seed: int) -> HookedStore:
    return HookedStore(SMALL_LAYOUT, 2 * NUM_BLOCKS, seed=seed)


def window_of(member: Member) -> ReadWindow:
    writer = member.exchange._writer
    assert isinstance(writer, PeerReadWriter)
    return writer._window


def store_of(member: Member) -> HookedStore:
    assert isinstance(member.store, HookedStore)
    return member.store


async def test_nothing_is_staged(maker: TransportMaker) -> None:
    """And members that join late, or hear of a loss, get it in the same way."""
    async with open_members(maker, 3, store=a_store) as members:
        leader, helper, late = members
        for member in (leader, helper):
            member.join(members[:2])
        helper.compute(0, 5)
        leader.compute(5, 3)
        await leader.until_here(8)
        for member in (late, leader, helper):
            member.join(members) if member is late else member.tell(members)
        late.compute(8, 8)
        for member in members:
            await member.until_here(NUM_BLOCKS)
        for member in members:
            assert member.content(0, 5) == helper.content(0, 5)
            assert member.content(5, 3) == leader.content(5, 3)
            assert member.content(8, 8) == late.content(8, 8)
            assert store_of(member).num_staged == 0
            block_bytes = SMALL_LAYOUT.max_page_bytes * NUM_LAYERS
            computed = {leader: 3, helper: 5, late: 8}[member]
            counters = member.mover.counters()
            num_bytes = (NUM_BLOCKS - computed) * block_bytes
            assert counters.num_bytes_peer_read == counters.num_bytes_exchanged.received == num_bytes
        for member in members:
            member.free()


@pytest.mark.parametrize("reason", ["its setting is off", "its cache is of another kind"])
async def test_a_member_that_cannot_read_is_sent_bytes(maker: TransportMaker, reason: str) -> None:
    """And from then on nothing else, for whatever request; the others go on as they did."""

    def store(number: int) -> HookedStore:
        made = a_store(number)
        made.kind = b"gpu0" if number == 1 and reason != "its setting is off" else b"host"
        return made

    def config(number: int) -> TransferConfig:
        return replace(SMALL_TRANSFER, peer_reads=not (number == 1 and reason == "its setting is off"))

    async with open_members(maker, 3, store=store, config=config) as members:
        leader, other, third = members
        for _ in range(2):
            for member in members:
                member.join(members)
            leader.compute(0, 6)
            other.compute(6, 4)
            third.compute(10, 6)
            for member in members:
                await member.until_here(NUM_BLOCKS)
            for member in members:
                assert member.content(0, 6) == leader.content(0, 6)
                assert member.content(6, 4) == other.content(6, 4)
                assert member.content(10, 6) == third.content(10, 6)
            for member in members:
                member.free()
            assert set(other.mover.counters().dropped) == {"unreadable"}
        for member in (leader, third):
            peer_reads = member.mover._context.peer_reads
            assert peer_reads is not None
            assert [peer_reads.may_read(peer.transport.address) for peer in members] == [True, False, True]
        num_dropped = other.mover.counters().dropped["unreadable"]
        for member in members:
            member.join(members)
        leader.compute(0, NUM_BLOCKS)
        await other.until_here(NUM_BLOCKS)
        assert other.mover.counters().dropped["unreadable"] == num_dropped
        for member in members:
            member.free()


async def test_a_member_that_cannot_read_may_be_lent_much_before_it_says_so(
    maker: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a piece of each page, of all that there was before it came. It counts once, and what was counted stays."""
    refused = PeerReadWriter.refused

    def taking_back(writer: PeerReadWriter, address: bytes, num_pages: int) -> bool:
        num_bytes = leader.mover.counters().num_bytes_exchanged.sent
        is_allowed = refused(writer, address, num_pages)
        assert leader.mover.counters().num_bytes_exchanged.sent >= num_bytes
        return is_allowed

    monkeypatch.setattr(PeerReadWriter, "refused", taking_back)

    def config(number: int) -> TransferConfig:
        return replace(SMALL_TRANSFER, peer_reads=number == 0, max_payload_bytes=SMALL_LAYOUT.max_page_bytes)

    async with open_members(maker, 2, store=a_store, config=config) as members:
        leader, late = members
        leader.join([leader])
        leader.compute(0, NUM_BLOCKS)
        for member in members:
            member.join(members) if member is late else member.tell(members)
        await late.until_here(NUM_BLOCKS)
        assert late.content(0, NUM_BLOCKS) == leader.content(0, NUM_BLOCKS)
        assert 0 < late.mover.counters().dropped["unreadable"] <= FREE_PIECES
        num_pages = NUM_BLOCKS * SMALL_LAYOUT.num_layers
        assert leader.mover.counters().num_bytes_exchanged.sent == num_pages * SMALL_LAYOUT.max_page_bytes
        assert late.outcomes == []
        for member in members:
            member.free()


@pytest.mark.parametrize("on_thread", [False, True])
async def test_what_was_given_back_while_it_was_copied_is_not_taken(maker: TransportMaker, on_thread: bool) -> None:
    """The owner ends its request and writes another's into the same blocks: not a byte of that is used.

    The pages can be taken from somebody else.
    """
    async with open_members(maker, 3, store=a_store) as members:
        leader, helper, lost = members
        for member in members:
            member.join(members)
        await anyio.wait_all_tasks_blocked()
        reader, loop_called = store_of(helper), threading.Event()
        reader.inline_bytes = 0 if on_thread else reader.inline_bytes

        def give_back() -> None:
            if lost.table:
                table = lost.table
                lost.free()
                for layer in range(NUM_LAYERS):
                    for block_id in table:
                        lost.store.block(layer, block_id)[:] = b"\xff" * SMALL_LAYOUT.max_page_bytes
            loop_called.set()

        loop = anyio.lowlevel.current_token()

        def before() -> None:
            if on_thread:
                anyio.from_thread.run_sync(give_back, token=loop)
            else:
                give_back()

        reader.before = before
        assert lost.exchange.begin(0, 5)
        lost.exchange.publish(Blocks(0, 0, 0, 5, NUM_LAYERS), ChunkPace.AT_ONCE)
        await helper.until_dropped("window closed")
        assert loop_called.is_set()
        assert not any(helper.exchange.ledger.has_first(layer, 1) for layer in range(NUM_LAYERS))
        reader.before = lambda: None
        for member in (leader, helper):
            member.tell(members, lost=[lost])
        leader.compute(0, NUM_BLOCKS)
        await helper.until_here(NUM_BLOCKS)
        assert helper.content(0, NUM_BLOCKS) == leader.content(0, NUM_BLOCKS)
        for member in (leader, helper):
            member.free()


async def test_what_is_copied_in_vain_does_not_lie_where_good_pages_do(maker: TransportMaker) -> None:
    """Of a chunk that was abandoned in its second layer, as a member was lost, the first layer's are here."""
    async with open_members(maker, 3, store=a_store) as members:
        _, helper, owner = members
        for member in members:
            member.join(members)
        await anyio.wait_all_tasks_blocked()
        assert helper.exchange.begin(0, 5)
        helper.exchange.publish(Blocks(0, 0, 0, 5))
        await anyio.wait_all_tasks_blocked()
        helper.exchange.ledger.abandon(0, 5)
        computed = helper.content(0, 5)[:5]

        def end_read() -> None:
            window_of(owner).end()
            for block_id in owner.table:
                owner.store.block(0, block_id)[:] = b"\xff" * SMALL_LAYOUT.max_page_bytes

        store_of(helper).before = end_read
        owner.exchange.publish(Blocks(0, 0, 0, 5, NUM_LAYERS), ChunkPace.AT_ONCE)
        await helper.until_dropped("window closed")
        assert helper.exchange.ledger.has_first(0, 5)
        assert helper.content(0, 5)[:5] == computed
        for member in members:
            member.free()


async def test_a_peer_read_that_cannot_be_made_is_asked_for_once_whatever_of_it_is_here(maker: TransportMaker) -> None:
    def config(number: int) -> TransferConfig:
        return replace(SMALL_TRANSFER, peer_reads=number == 0)

    async with open_members(maker, 3, config=config) as members:
        leader, helper, lost = members
        for member in (leader, helper):
            member.join(members)
            member.tell(members, lost=[lost])
        helper.compute(2, 1)
        await anyio.wait_all_tasks_blocked()
        leader.exchange.publish(Blocks(0, 0, 0, 5, NUM_LAYERS), ChunkPace.AT_ONCE)
        await helper.until_here(5)
        assert helper.mover.counters().num_asked_again == helper.mover.counters().dropped["unreadable"] == 1
        assert helper.content(0, 2) == leader.content(0, 2)
        for member in (leader, helper):
            member.free()


async def test_pages_wait_for_a_peer_read_to_the_same_blocks(maker: TransportMaker) -> None:
    """If it is over, what was copied of it does not lie over theirs; nor does a chunk begin there meanwhile."""
    async with open_members(maker, 3, store=a_store) as members:
        leader, helper, lost = members
        for member in (helper, lost):  # the leader has nothing of the lost one's
            member.join(members)
        await anyio.wait_all_tasks_blocked()
        reader = store_of(helper)
        reader.hold()
        assert lost.exchange.begin(0, 5)
        lost.exchange.publish(Blocks(0, 0, 0, 5, NUM_LAYERS), ChunkPace.AT_ONCE)
        await reader.until_held()
        lost.free()
        for layer in range(NUM_LAYERS):
            for block_id in range(2 * NUM_BLOCKS):
                lost.store.block(layer, block_id)[:] = b"\xff" * SMALL_LAYOUT.max_page_bytes
        leader.join(members)
        for member in (leader, helper):
            member.tell(members, lost=[lost])
        assert not helper.exchange.begin(4, 2)
        leader.compute(3, 13)
        await anyio.wait_all_tasks_blocked()
        reader.go_on()
        await helper.until_dropped("window closed")
        assert helper.exchange.begin(0, 3)
        for layer in range(NUM_LAYERS):
            helper.exchange.publish(Blocks(0, layer, 0, 3))
        await helper.until_here(NUM_BLOCKS)
        assert helper.content(3, 13) == leader.content(3, 13)
        assert b"\xff" * SMALL_LAYOUT.max_page_bytes not in helper.content(3, 13)
        for member in (leader, helper):
            member.free()


async def test_a_peer_read_too_late_leaves_pages_as_they_are_that_are_here(maker: TransportMaker) -> None:
    """One of the two that it is of."""
    async with open_members(maker, 2, store=a_store) as members:
        leader, helper = members
        for member in members:
            member.join(members)
        leader.compute(8, 8)
        await anyio.wait_all_tasks_blocked()
        before = leader.content(8, 8)
        peer_reads, window = helper.mover._context.peer_reads, window_of(helper)
        assert peer_reads is not None
        note = peer_reads.note(window, [0, 1])._replace(word=1).pack()
        part = KvPart(IndexRange(7, 9), IndexRange(0, 1), HEADS)
        await helper.say(leader, a_piece(PieceKind.PEER_READ, len(note))._replace(part=part), note)
        await leader.until_dropped("window closed")
        assert leader.content(8, 8) == before
        helper.compute(0, 8)
        await leader.until_here(NUM_BLOCKS)
        for member in members:
            member.free()


async def test_an_instance_opens_so_many_windows_and_no_more() -> None:
    """What is beyond it travels in pieces."""
    async with open_members(TransportMaker("memory", peer_reads=True), 2, store=a_store) as members:
        peer_reads = members[0].mover._context.peer_reads
        assert peer_reads is not None
        windows = [peer_reads.begin() for _ in range(MAX_WINDOWS)]
        assert peer_reads.begin() is None
        for member in members:
            member.join(members)
        members[0].compute(0, NUM_BLOCKS)
        await members[1].until_here(NUM_BLOCKS)
        assert store_of(members[0]).num_staged > 0
        for window in windows:
            assert window is not None
            window.end()
            window.end()
        peer_reads.check_integrity()
        for member in members:
            member.free()
