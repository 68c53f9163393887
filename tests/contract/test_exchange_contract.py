"""What members of a prefill group keep towards each other, over every transport, and what no peer can do to them."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from pdmesh.errors import KvTransferError
from pdmesh.kv.intake import PageIntake
from pdmesh.kv.outcome import FailedExchange
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.repair import FREE_PIECES, SOUND_PIECES_EACH
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch
from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.kv_transport import ReceivedPiece
from pdmesh_testing.exchanges import (
    EPOCH,
    HEADS,
    NUM_BLOCKS,
    NUM_LAYERS,
    REQUEST,
    Member,
    a_piece,
    open_members,
)
from pdmesh_testing.kv import SMALL_LAYOUT, TransportMaker

pytestmark = pytest.mark.anyio


def damage(monkeypatch: pytest.MonkeyPatch, choose: Callable[[PieceHeader], bool]) -> None:
    """One bit of the pieces that are chosen is turned before they are checked."""
    copy = PageIntake._copy

    def copy_damaged(
        self: PageIntake, header: PieceHeader, piece: ReceivedPiece, fetch: Callable[[], str | None]
    ) -> str | None:
        if choose(header):
            assert piece.load()
            piece.payload[0] ^= 1
        return copy(self, header, piece, fetch)

    monkeypatch.setattr(PageIntake, "_copy", copy_damaged)


def for_the_first_time() -> Callable[[PieceHeader], bool]:
    """Pieces that were not seen before, by who sends what to whom."""
    seen: set[tuple[int, int, KvPart]] = set()

    def is_new(header: PieceHeader) -> bool:
        what = header.source, header.destination, header.part
        is_new = what not in seen
        seen.add(what)
        return is_new

    return is_new


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def in_pieces(kind: str) -> TransportMaker:
    return TransportMaker(kind)


@pytest.fixture(params=["in pieces", "peer reads"])
def maker(request: pytest.FixtureRequest, kind: str) -> TransportMaker:
    return TransportMaker(kind, peer_reads=request.param == "peer reads")


async def test_a_member_that_stopped_keeps_nobody_else_from_being_welcomed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said HELLO, and takes no answer."""
    async with open_members(TransportMaker("memory"), 3) as members:
        first, late, stopped = members
        send = first.transport.send

        async def send_to_the_living(
            address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False
        ) -> None:
            if address == stopped.transport.address:
                await anyio.sleep_forever()
            await send(address, buffer, payload_bytes, is_notice=is_notice)

        monkeypatch.setattr(first.transport, "send", send_to_the_living)
        for member in (first, stopped, late):
            member.join(members)
            await anyio.wait_all_tasks_blocked()
        late.compute(0, 5)
        await anyio.wait_all_tasks_blocked()
        assert all(first.exchange.ledger.has_first(layer, 5) for layer in range(NUM_LAYERS))
        for member in members:
            member.free()


async def test_every_page_comes_to_every_member_once(maker: TransportMaker) -> None:
    async with open_members(maker, 3) as members:
        for member in members:
            member.join(members)
        members[1].compute(0, 5)
        members[0].compute(5, 3)
        members[2].compute(8, 8)
        for member in members:
            await member.until_here(NUM_BLOCKS)
            assert member.content(0, 5) == members[1].content(0, 5)
            assert member.content(5, 3) == members[0].content(5, 3)
            assert member.content(8, 8) == members[2].content(8, 8)
            assert member.mover.counters().dropped == {}
            assert member.outcomes == []
        new = sorted(
            (layer, block)
            for blocks in members[0].new
            for layer in range(blocks.layer, blocks.end_layer)
            for block in range(blocks.first_block, blocks.end)
        )
        assert new == [(layer, block) for layer in range(NUM_LAYERS) for block in range(16)]
        for member in members:
            member.free()


@pytest.mark.parametrize("helper_first", [False, True])
@pytest.mark.parametrize("newcomer_first", [False, True])
async def test_a_member_that_joins_late_gets_what_there_is(
    maker: TransportMaker, helper_first: bool, newcomer_first: bool
) -> None:
    """Whoever hears of it first, and though a helper that has computed some of it never does."""
    async with open_members(maker, 3) as members:
        leader, helper, newcomer = members
        for member in (leader, helper):
            member.join(members[:2])
        helper.compute(0, 4)
        leader.compute(4, 4)
        await leader.until_here(8)
        await helper.until_here(8)
        if newcomer_first:
            newcomer.join(members)
            await anyio.wait_all_tasks_blocked()
        if helper_first:
            helper.tell(members)
            helper.compute(8, 4)
        leader.tell(members)
        if not newcomer_first:
            await anyio.wait_all_tasks_blocked()
            newcomer.join(members)
        if not helper_first:
            helper.compute(8, 4)  # it does not know yet
        await newcomer.until_here(12)
        newcomer.compute(12, 4)
        helper.tell(members)
        for member in members:
            await member.until_here(NUM_BLOCKS)
            assert member.content(0, 12) == newcomer.content(0, 12)
            assert member.mover.counters().dropped.keys() <= {"unknown", "range", "refused"}  # greetings too early
            member.free()


def a_page(**changes: object) -> PieceHeader:
    return a_piece(PieceKind.KV, SMALL_LAYOUT.max_page_bytes)._replace(**changes)  # type: ignore[arg-type]


#: A page that the leader has computed.
HERE = KvPart(IndexRange(8, 9), IndexRange(0, 1), HEADS)
GARBAGE = b"\xff" * SMALL_LAYOUT.max_page_bytes
REFUSED = {
    "epoch": a_page(epoch=Epoch(2)),
    "capability": a_page(capability=1),
    "kind": a_page(kind=PieceKind.COMMIT),
    "range: no such member": a_page(source=2),
    "range: from itself": a_page(source=0),
    "range: for another": a_page(destination=1),
    "range: for nobody": a_page(num_members=0),
    "range: too many members": a_page(num_members=65),
    "range: two layers, one of them there": a_page(part=KvPart(IndexRange(0, 1), IndexRange(0, 2), HEADS)),
    "range: no layer": a_page(part=KvPart(IndexRange(0, 1), IndexRange(0, 0), HEADS), payload_bytes=0),
    "range: no such layer": a_page(part=KvPart(IndexRange(0, 1), IndexRange(9, 10), HEADS)),
    "range: no such block": a_page(part=KvPart(IndexRange(NUM_BLOCKS, NUM_BLOCKS + 1), IndexRange(0, 1), HEADS)),
    "range: one head": a_page(part=KvPart(IndexRange(0, 1), IndexRange(0, 1), IndexRange(0, 1))),
    "range: another length": a_page(payload_bytes=1),
    "range: greeted by nobody": a_page(kind=PieceKind.HELLO, source=9),
    "duplicate": a_page(part=KvPart(IndexRange(8, 9), IndexRange(0, 1), HEADS)),
    "unknown": a_page(request_key=request_key(REQUEST)),
    "epoch: again": a_page(kind=PieceKind.AGAIN, epoch=Epoch(2)),
    "capability: again": a_page(kind=PieceKind.AGAIN, capability=1),
    "unknown: again": a_page(kind=PieceKind.AGAIN, request_key=request_key(REQUEST)),
    "range: again, who is no member": a_page(kind=PieceKind.AGAIN, source=2, part=HERE),
    "range: again, for another": a_page(kind=PieceKind.AGAIN, destination=1, part=HERE),
    "range: again, for too many members": a_page(kind=PieceKind.AGAIN, num_members=65, part=HERE),
    "range: again, of one head": a_page(kind=PieceKind.AGAIN, part=HERE._replace(heads=IndexRange(0, 1))),
    "range: again, what is not here": a_page(kind=PieceKind.AGAIN),
    "range: again, what is half here": a_page(kind=PieceKind.AGAIN, part=HERE._replace(blocks=IndexRange(7, 9))),
    "range: again, nothing": a_page(kind=PieceKind.AGAIN, part=HERE._replace(blocks=IndexRange(9, 9))),
    "range: again, no such layer": a_page(kind=PieceKind.AGAIN, part=HERE._replace(layers=IndexRange(2, 9))),
    "range: again, more than a piece holds": a_page(
        kind=PieceKind.AGAIN, part=HERE._replace(blocks=IndexRange(8, 16), layers=IndexRange(0, NUM_LAYERS))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_does_not_belong_is_dropped(maker: TransportMaker, name: str) -> None:
    """One has the key of the request's transfer, which a group's pieces do not touch; peer reads may be larger."""
    maker = TransportMaker(maker.kind) if "more than a piece" in name else maker
    async with open_members(maker, 2) as members:
        leader, helper = members
        for member in members:
            member.join(members)
        leader.compute(8, 8)
        await anyio.wait_all_tasks_blocked()
        before = bytes(leader.store.data)
        await helper.say(leader, REFUSED[name], GARBAGE)
        await leader.until_dropped(name.partition(":")[0])
        assert bytes(leader.store.data) == before
        helper.compute(0, 8)
        await leader.until_here(NUM_BLOCKS)
        assert leader.outcomes == []
        assert helper.mover.counters().dropped == {}  # nothing was sent twice
        for member in members:
            member.free()


@pytest.mark.parametrize("helper_first", [False, True])
async def test_a_damaged_piece_is_asked_for_again(
    in_pieces: TransportMaker, monkeypatch: pytest.MonkeyPatch, helper_first: bool
) -> None:
    """Every piece is, also of those that the leader passes on to whom their makers did not know."""
    damage(monkeypatch, for_the_first_time())
    async with open_members(in_pieces, 3) as members:
        leader, helper, newcomer = members
        for member in (leader, helper):
            member.join(members[:2])
        helper.compute(0, 4)
        leader.compute(4, 4)
        if helper_first:
            helper.tell(members)
        helper.compute(8, 4)
        leader.tell(members)
        newcomer.join(members)
        newcomer.compute(12, 4)
        helper.tell(members)
        for member in members:
            await member.until_here(NUM_BLOCKS)
        for member in members:
            assert member.content(0, 4) == helper.content(0, 4)
            assert member.content(4, 4) == leader.content(4, 4)
            assert member.content(8, 4) == helper.content(8, 4)
            assert member.content(12, 4) == newcomer.content(12, 4)
            assert member.outcomes == []
            counters = member.mover.counters()
            assert counters.num_asked_again == counters.dropped["checksum"] > 0
            assert counters.dropped.keys() <= {"checksum", "unknown", "range"}  # greetings that came too early
        new = [
            (layer, block)
            for blocks in leader.new
            for layer in range(blocks.layer, blocks.end_layer)
            for block in range(blocks.first_block, blocks.end)
        ]
        assert len(new) == len(set(new)) == NUM_LAYERS * 16
        for member in members:
            member.free()


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_damaged_all_pages_come_to_all(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    damage(monkeypatch, lambda _: rng.random() < 0.15)
    async with open_members(TransportMaker("memory"), rng.randint(2, 4)) as members:
        joined = members[: rng.randint(1, len(members))]
        for member in joined:
            member.join(joined)
        owners: list[Member] = []
        while len(owners) < NUM_BLOCKS:
            if joined != members and rng.random() < 0.3:
                joined = members[: len(joined) + 1]
                for member in rng.sample(joined, len(joined)):
                    (member.join if member is joined[-1] else member.tell)(joined)
            owner, size = rng.choice(joined), rng.randint(1, min(4, NUM_BLOCKS - len(owners)))
            owner.compute(len(owners), size)
            owners += [owner] * size
            for _ in range(rng.randint(0, 10)):
                await anyio.lowlevel.checkpoint()
        for member in joined:
            await member.until_here(NUM_BLOCKS)
            member.mover.check_integrity()
            assert member.outcomes == []
        for member in joined:
            for block, owner in enumerate(owners):
                assert member.content(block, 1) == owner.content(block, 1)
        for member in joined:
            member.free()


async def test_a_request_for_a_page_that_is_repeated_for_ever_costs_little_and_nobody_else(
    maker: TransportMaker,
) -> None:
    """It goes where the scheduler said that this member is, so that one has to take it."""
    async with open_members(maker, 3) as members:
        leader, hostile, helper = members
        for member in members:
            member.join(members)
        leader.compute(8, 8)
        await hostile.until_received(8)
        for _ in range(300):
            await hostile.say(leader, a_page(kind=PieceKind.AGAIN, part=HERE))
        helper.compute(0, 8)
        await leader.until_here(NUM_BLOCKS)
        for member in (leader, helper):
            await member.until_here(NUM_BLOCKS)
        with anyio.fail_after(20):
            while hostile.mover.counters().dropped["duplicate"] + leader.mover.counters().dropped["limit"] < 300:
                await anyio.lowlevel.checkpoint()
        sent_again = hostile.mover.counters().dropped["duplicate"]
        assert (
            2 * FREE_PIECES
            <= sent_again
            <= (2 * FREE_PIECES + NUM_LAYERS) * SOUND_PIECES_EACH // (SOUND_PIECES_EACH - 1)
        )
        assert helper.mover.counters().dropped == {}
        assert all(member.outcomes == [] for member in members)
        for member in members:
            member.free()


async def test_what_was_freed_is_not_sent_again(maker: TransportMaker) -> None:
    async with open_members(maker, 2) as members:
        leader, helper = members
        for member in members:
            member.join(members)
        leader.compute(8, 8)
        await helper.until_received(8)
        leader.free()
        await helper.say(leader, a_page(kind=PieceKind.AGAIN, part=HERE))
        with anyio.fail_after(20):
            while leader.mover.counters().dropped.get("unknown") != 1:
                await anyio.lowlevel.checkpoint()
        assert helper.mover.counters().dropped == {}
        helper.free()


async def test_a_damaged_piece_of_a_member_that_was_lost_meanwhile_is_computed_again(
    in_pieces: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_members(in_pieces, 3) as members:
        leader, helper, lost = members
        addresses = [leader.transport.address, helper.transport.address, b""]

        def loses(header: PieceHeader) -> bool:
            if (header.source, header.destination) != (2, 0) or leader.exchange.num_lost:
                return False
            for member in (leader, helper):
                member.mover.groups.set_members(REQUEST, EPOCH, members.index(member), addresses)
            return True

        damage(monkeypatch, loses)
        for member in members:
            member.join(members)
        lost.compute(0, 4)
        with anyio.fail_after(20):
            while not leader.exchange.num_lost:
                await anyio.lowlevel.checkpoint()
        helper.compute(0, NUM_BLOCKS)
        await leader.until_here(NUM_BLOCKS)
        assert leader.content(8, 8) == helper.content(8, 8)
        assert leader.mover.counters().num_asked_again == 0
        assert leader.outcomes == helper.outcomes == []
        for member in members:
            member.free()


async def test_a_member_whose_pieces_are_all_damaged_ends_the_exchange_and_touches_nothing(
    in_pieces: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked for again, up to a limit."""
    damage(monkeypatch, lambda header: header.destination == 0)
    async with open_members(in_pieces, 2) as members:
        leader, helper = members
        for member in members:
            member.join(members)
        before = bytes(leader.store.data)
        helper.compute(0, 8)
        with anyio.fail_after(20):
            while not leader.outcomes:
                await anyio.lowlevel.checkpoint()
        reason = leader.exchange.gate.aborted
        assert reason is not None
        assert f"source 1: {FREE_PIECES + 1} pieces arrived damaged" in reason
        assert leader.outcomes == [FailedExchange(request_id=REQUEST, epoch=EPOCH, reason=reason)]
        assert bytes(leader.store.data) == before
        assert leader.mover.counters().num_asked_again == FREE_PIECES
        assert helper.outcomes == []
        for member in members:
            member.free()


@pytest.mark.ucx
async def test_an_address_that_the_scheduler_did_not_name_is_not_heard() -> None:
    """With the right key and capability, and a true page."""
    maker = TransportMaker("ucx")
    async with open_members(maker, 3) as members:
        leader, helper, stranger = members
        for member in (leader, helper):
            member.join(members[:2])
        before = bytes(leader.store.data)
        stranger.transport.admit(leader.transport.address)
        with pytest.raises(KvTransferError):
            await stranger.say(leader, a_page(), GARBAGE)
        assert bytes(leader.store.data) == before
        helper.compute(0, NUM_BLOCKS)
        await leader.until_here(NUM_BLOCKS)
        for member in (leader, helper):
            member.free()


async def test_whatever_a_member_says_is_no_error(maker: TransportMaker) -> None:
    """It may spoil its own request; the next one finds everything in order."""
    rng = random.Random(0)
    numbers = [0, 1, 2, 3, 15, 16, 63, 64, 65, 2**16 - 1]
    async with open_members(maker, 2) as members:
        leader, helper = members
        for epoch in range(40):
            leader.join(members, epoch=Epoch(epoch))
            for _ in range(5):
                spans = [IndexRange(rng.choice(numbers[:7]), rng.choice(numbers[:7])) for _ in range(2)]
                header = a_page(
                    kind=rng.choice(list(PieceKind)),
                    epoch=Epoch(epoch),
                    source=rng.choice(numbers[:3]),
                    destination=rng.choice(numbers[:2]),
                    num_members=rng.choice(numbers),
                    chunk=rng.choice(numbers),
                    part=KvPart(spans[0], spans[1], rng.choice([HEADS, spans[0]])),
                    payload_bytes=rng.choice([0, len(GARBAGE), 2 * len(GARBAGE)]),
                )
                helper.transport.admit(leader.transport.address)
                await helper.say(leader, header, GARBAGE * rng.randint(0, 2))
        leader.mover.cancel(REQUEST, Epoch(99))
        for member in members:
            member.join(members, epoch=Epoch(100))
        helper.compute(0, NUM_BLOCKS)
        await leader.until_here(NUM_BLOCKS)
        for member in members:
            member.mover.cancel(REQUEST, Epoch(100))
            member.free()


async def test_a_member_that_cannot_be_reached_is_left_out(maker: TransportMaker) -> None:
    """It is for the scheduler to say what that means: nothing ends, and the others go on."""
    async with open_members(maker, 3) as members:
        leader, helper, gone = members
        for member in members:
            member.join(members)
        await anyio.wait_all_tasks_blocked()
        gone.free()
        for member in (leader, helper):
            member.mover.forget(gone.transport.address)
        leader.compute(0, 8)
        helper.compute(8, 8)
        for member in (leader, helper):
            await member.until_here(NUM_BLOCKS)
            assert member.exchange.gate.aborted is None
            assert member.outcomes == []
            member.free()


async def test_what_came_from_a_lost_member_is_sent_on_by_the_leader(maker: TransportMaker) -> None:
    """It died before it told everyone. What the leader misses is computed again, here or there, where it is or not."""
    async with open_members(maker, 3) as members:
        leader, helper, lost = members
        for member in (leader, lost):
            member.join(members)
        await anyio.wait_all_tasks_blocked()
        lost.compute(0, 5)
        await anyio.wait_all_tasks_blocked()
        lost.mover.cancel(REQUEST, EPOCH)
        helper.join(members)
        leader.compute(5, 3)
        await leader.until_here(8)
        await anyio.wait_all_tasks_blocked()
        assert not helper.exchange.ledger.has_first(0, 1)
        for member in (leader, helper):
            addresses = [leader.transport.address, helper.transport.address, b""]
            member.mover.groups.set_members(REQUEST, EPOCH, members.index(member), addresses)
        await helper.until_here(8)
        assert leader.exchange.num_lost == helper.exchange.num_lost == 1
        helper.compute(4, 6)
        leader.compute(3, 13)
        for member in (leader, helper):
            await member.until_here(NUM_BLOCKS)
            assert member.outcomes == []
        assert leader.content(0, 3) == helper.content(0, 3) == lost.content(0, 3)
        assert leader.content(10, 6) == helper.content(10, 6)
        for member in members:
            member.free()


async def test_no_member_changes_its_address_or_place(maker: TransportMaker) -> None:
    async with open_members(maker, 3) as members:
        leader, helper, third = members
        for member in members:
            member.join(members)
        helper.tell([leader, helper, helper])
        leader.mover.groups.set_members(REQUEST, EPOCH, 0, [b"", helper.transport.address, third.transport.address])
        third.mover.groups.set_members(REQUEST, EPOCH, 1, [member.transport.address for member in members])
        for member in members:
            assert [type(outcome) for outcome in member.outcomes] == [FailedExchange]
            member.free()
