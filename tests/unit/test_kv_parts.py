"""A home asks members what they make of its query rows: what is answered, waits, is dropped, or ends a step."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
import anyio.to_thread
import pytest

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import TransferOutcome
from pdmesh.kv.parts import AttendPart
from pdmesh.kv.piece import NO_PART, PieceHeader, PieceKind
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKvLost
from pdmesh.kv.spread import JoinedPieces, PartHolder, SpreadKv
from pdmesh.kv_layout import IndexRange
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import KvTransport
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, ByteStore, TransportMaker

pytestmark = pytest.mark.anyio

REQUEST, EPOCH, CAPABILITY = RequestId("request"), Epoch(3), 0x1234
NUM_MEMBERS = 2
ROW_BYTES = 8
START = 1 << 31  # a position
LIMIT_S = 0.5


def attend(number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
    """Rows of 8 bytes, answered by what was asked and where it was looked for."""
    layer, start, query, _ = question
    if not query or len(query) % ROW_BYTES:
        raise ValueError("no rows")
    return repr((number, list(block_ids), layer, start, query)).encode()


@dataclass
class Side:
    transport: KvTransport
    pool: BlockPool
    mover: KvMover
    outcomes: list[TransferOutcome] = field(default_factory=list[TransferOutcome])


@dataclass
class Spread:
    """A home and members, all of which know of the context and hold their parts."""

    home: Side
    members: list[Side]
    kv: SpreadKv
    blocks: list[list[int]]

    async def ask(self, layer: int, query: bytes, first_range: int = 0) -> Sequence[bytes]:
        """As an engine does, on a thread."""

        def asked() -> Sequence[bytes]:
            self.kv.ask(RangeQuestion(layer, START, query, first_range))
            return self.kv.answers()

        return await anyio.to_thread.run_sync(asked, abandon_on_cancel=True)

    def land(self, number: int) -> None:
        self.members[number].mover.parts.landed(REQUEST, EPOCH)


async def open_side(stack: AsyncExitStack, maker: TransportMaker) -> Side:
    config = replace(maker.config(SMALL_TRANSFER), group_no_progress_s=LIMIT_S)
    transport = await stack.enter_async_context(maker.open(config))
    pool, outcomes = BlockPool(8), list[TransferOutcome]()
    mover = KvMover(
        transport=transport,
        store=ByteStore(SMALL_LAYOUT, 8),
        pool=pool,
        config=config,
        on_outcome=outcomes.append,
        attend_part=attend,
    )
    return Side(transport, pool, await stack.enter_async_context(mover), outcomes)


@asynccontextmanager
async def opened(maker: TransportMaker) -> AsyncIterator[Spread]:
    async with AsyncExitStack() as stack:
        home, *members = [await open_side(stack, maker) for _ in range(1 + NUM_MEMBERS)]
        blocks = [member.pool.allocate(2) for member in members]
        yield Spread(home, members, spread_over(REQUEST, home, members, blocks), blocks)


def spread_over(request_id: RequestId, home: Side, members: Sequence[Side], blocks: Sequence[list[int]]) -> SpreadKv:
    """Let members hold a context's ranges, and a home ask them."""
    for number, member in enumerate(members):
        member.mover.parts.hold(
            request_id,
            EPOCH,
            capability=CAPABILITY,
            block_ids=blocks[number],
            home_address=home.transport.address,
            member=number,
        )
    return home.mover.parts.open(
        request_id,
        EPOCH,
        members=[PartHolder(member.transport.address, CAPABILITY) for member in members],
        num_tokens=16,
    )


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
async def spread(request: pytest.FixtureRequest) -> AsyncIterator[Spread]:
    async with opened(TransportMaker(request.param)) as spread:
        yield spread


@pytest.fixture
async def on_one_host() -> AsyncIterator[Spread]:
    """A context whose ranges have landed, with lines to both members."""
    async with opened(TransportMaker("ucx")) as spread:
        for number in range(NUM_MEMBERS):
            spread.land(number)
        yield spread


def expected(spread: Spread, layer: int, query: bytes) -> list[bytes]:
    question = RangeQuestion(layer, START, query)
    return [attend(number, blocks, question) for number, blocks in enumerate(spread.blocks)]


async def test_members_answer_in_their_order_once_their_parts_have_landed(spread: Spread) -> None:
    spread.land(1)
    answers: list[bytes] = []

    async def ask() -> None:
        answers.extend(await spread.ask(2, b"12345678"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with anyio.fail_after(20):
            while not spread.members[1].mover.parts.num_answers:  # noqa: ASYNC110  # of another task
                await anyio.sleep(0.001)
        assert not spread.members[0].mover.parts.num_answers
        spread.land(0)
    assert answers == expected(spread, 2, b"12345678")
    assert await spread.ask(0, b"12345678" * 100) == expected(spread, 0, b"12345678" * 100)


async def test_a_question_and_its_answers_may_take_several_pieces(spread: Spread) -> None:
    """As those of a chunk of a large model do. Each is divided into as many as its own length takes."""
    for number in range(NUM_MEMBERS):
        spread.land(number)
    limit = SMALL_TRANSFER.max_payload_bytes
    for num_rows in (limit // ROW_BYTES, 5 * limit // ROW_BYTES + 3, 1):
        query = bytes(range(ROW_BYTES)) * num_rows
        assert await spread.ask(1, query) == expected(spread, 1, query)


async def test_who_holds_a_range_that_is_not_seen_is_not_asked(spread: Spread) -> None:
    spread.land(1)
    for _ in range(3):
        assert await spread.ask(1, b"12345678", 1) == expected(spread, 1, b"12345678")[1:]
    assert spread.members[0].mover.parts.num_answers == 0
    with pytest.raises(RemoteKvLost, match=r"no answer within 0\.5 s from shard holders 0 of 2"):
        await spread.ask(1, b"12345678")
    assert spread.kv.lost_members == (0,)


def test_an_answer_that_was_not_asked_for_is_none() -> None:
    asked: list[RangeQuestion] = []
    kv = SpreadKv(
        REQUEST,
        EPOCH,
        members=[PartHolder(b"", CAPABILITY)] * 2,
        num_tokens=16,
        limit_s=LIMIT_S,
        wakeup=Wakeup(),
        send=lambda _spread, _number, question, _members: asked.append(question),
    )
    kv.ask(RangeQuestion(0, START, b"12345678", first_range=1))
    whole = NO_PART._replace(blocks=IndexRange(0, 1))
    for member in (0, 1):
        header = PieceHeader(
            kind=PieceKind.ANSWER,
            request_key=kv.key,
            epoch=EPOCH,
            capability=CAPABILITY,
            source=member,
            chunk=kv.question,
            part=whole,
            num_context_tokens=1,
        )
        assert kv.take(header, bytes([member])) == (member == 1)
    assert kv.answers() == [b"\1"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_that_are_lost_or_of_another_question_join_nothing(seed: int) -> None:
    """Whatever is dropped of three questions, of which each gives up the one before, what is joined is one of them."""
    rng = random.Random(seed)
    joined, found = JoinedPieces(), list[bytes]()
    questions = [rng.randbytes(rng.randint(1, 12)) for _ in range(3)]
    for number, question in enumerate(questions):
        for begin in range(0, len(question), 3):
            piece = question[begin : begin + 3]
            header = PieceHeader(
                kind=PieceKind.QUERY,
                request_key=b"",
                epoch=EPOCH,
                capability=CAPABILITY,
                chunk=number,
                part=NO_PART._replace(blocks=IndexRange(begin, begin + len(piece))),
                num_context_tokens=len(question),
            )
            if rng.random() < 0.8 and (whole := joined.take(header, piece, len(question))) is not None:
                found.append(whole)
    assert set(found) <= set(questions)


@pytest.mark.parametrize(("layer", "query"), [(1, b"1234567"), (1, b""), (SMALL_LAYOUT.num_layers, b"12345678")])
async def test_what_is_no_question_is_dropped_and_ends_nothing_but_its_step(
    spread: Spread, layer: int, query: bytes
) -> None:
    for number in range(NUM_MEMBERS):
        spread.land(number)
    with pytest.raises(RemoteKvLost, match=r"no answer within 0\.5 s from shard holders 0, 1 of 2"):
        await spread.ask(layer, query)
    with pytest.raises(RemoteKvLost):  # nothing more is computed of it
        await spread.ask(1, b"12345678")
    for side in (spread.home, *spread.members):
        side.mover.cancel(REQUEST, EPOCH)
        assert len(side.mover.parts) == 0
        assert side.outcomes == []


async def test_what_is_too_short_for_a_question_is_dropped(spread: Spread) -> None:
    for number in range(NUM_MEMBERS):
        spread.land(number)
    about = PieceHeader(
        kind=PieceKind.QUERY,
        request_key=spread.kv.key,
        epoch=EPOCH,
        capability=CAPABILITY,
        part=NO_PART._replace(layers=IndexRange(0, 1), blocks=IndexRange(0, 3)),
        num_context_tokens=3,
    )
    member = spread.members[0]
    await spread.home.mover.parts._writer.send_payload(member.transport.address, b"123", about)
    assert await spread.ask(0, b"12345678") == expected(spread, 0, b"12345678")
    assert member.mover.counters().dropped == {"malformed question": 1}


async def test_a_member_that_is_gone_ends_the_step_at_once(spread: Spread) -> None:
    spread.land(0)

    async def leave() -> None:
        await anyio.sleep(0.01)
        spread.home.mover.forget(spread.members[1].transport.address)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        with pytest.raises(RemoteKvLost, match="shard holder 1 of its KV is gone"):
            await spread.ask(0, b"12345678")


async def test_a_question_of_an_older_epoch_or_another_capability_is_dropped(spread: Spread) -> None:
    for number in range(NUM_MEMBERS):
        spread.land(number)
    for epoch, capability in ((Epoch(EPOCH - 1), CAPABILITY), (EPOCH, CAPABILITY + 1)):
        home = spread.home.mover.parts
        home.cancel(REQUEST, EPOCH)
        members = [PartHolder(member.transport.address, capability) for member in spread.members]
        spread.kv = home.open(REQUEST, epoch, members=members, num_tokens=16)
        with pytest.raises(RemoteKvLost):
            await spread.ask(0, b"12345678")
    for member in spread.members:
        assert member.mover.parts.num_answers == 0
        assert sum(member.mover.counters().dropped.values()) == 2


@pytest.mark.ucx
async def test_inside_a_host_no_event_loop_is_part_of_an_exchange(on_one_host: Spread) -> None:
    """Home and members share this loop, which stands still until all answers are here."""
    other = spread_over(RequestId("other"), on_one_host.home, on_one_host.members, on_one_host.blocks)
    for member in on_one_host.members:
        member.mover.parts.landed(RequestId("other"), EPOCH)
    for layer in range(SMALL_LAYOUT.num_layers):
        question = RangeQuestion(layer, START, b"12345678")
        on_one_host.kv.ask(question, more=True)
        other.ask(question._replace(query=b"87654321"))
        assert on_one_host.kv.answers() == expected(on_one_host, layer, b"12345678")
        assert other.answers() == expected(on_one_host, layer, b"87654321")
    assert [member.mover.parts.num_answers for member in on_one_host.members] == [2 * SMALL_LAYOUT.num_layers] * 2


@pytest.mark.ucx
async def test_where_a_line_ends_the_same_question_goes_by_pieces(on_one_host: Spread) -> None:
    lines, address = on_one_host.home.mover.parts._lines, on_one_host.members[1].transport.address
    assert lines is not None
    line = lines.line_to(address)
    assert line is not None
    query = b"12345678" * 3
    line.close()
    assert await on_one_host.ask(0, query) == expected(on_one_host, 0, query)

    async def end_meanwhile() -> None:
        with anyio.fail_after(20):
            while not is_waiting.is_set():  # noqa: ASYNC110  # of a thread
                await anyio.sleep(0.001)
        lines.forget(address)
        goes_on.set()

    is_waiting, goes_on = threading.Event(), threading.Event()
    member = on_one_host.members[1].mover.parts
    member._attend = held_up(is_waiting, goes_on)
    members = [PartHolder(each.transport.address, CAPABILITY) for each in on_one_host.members]
    assert on_one_host.home.mover.parts.open(REQUEST, EPOCH, members=members, num_tokens=16) is on_one_host.kv
    assert lines.line_to(address) is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_meanwhile)
        assert await on_one_host.ask(1, query) == expected(on_one_host, 1, query)


@pytest.mark.ucx
async def test_blocks_that_a_line_reads_are_not_free_before_it_has_ended(on_one_host: Spread) -> None:
    is_waiting, goes_on = threading.Event(), threading.Event()
    member, released = on_one_host.members[0], list[int]()
    member.mover.parts._attend = held_up(is_waiting, goes_on)
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(RemoteKvLost):
                await on_one_host.ask(0, b"12345678")

        tasks.start_soon(ask)
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(is_waiting.wait, 20)
        member.mover.cancel(REQUEST, EPOCH)
        member.pool.free(on_one_host.blocks[0], on_released=lambda: released.append(0))
        assert member.pool.num_quarantined == len(on_one_host.blocks[0])
        assert not released
        on_one_host.home.mover.cancel(REQUEST, EPOCH)
        goes_on.set()
    with anyio.fail_after(20):
        while not released:  # noqa: ASYNC110  # by a thread
            await anyio.sleep(0.001)
    member.mover.check_integrity()


def held_up(is_waiting: threading.Event, goes_on: threading.Event) -> AttendPart:
    def held(number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        is_waiting.set()
        assert goes_on.wait(20)
        return attend(number, block_ids, question)

    return held
