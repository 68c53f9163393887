"""A running decode's copy between two data planes, and the commit that its source sends again."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, SentTransfer
from pdmesh.kv.piece import FirstToken, PieceHeader, PieceKind, unpack_header
from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.kv import SMALL_LAYOUT, TransportMaker
from pdmesh_testing.memory_transport import MemoryFaults
from pdmesh_testing.transfers import CAPABILITY, EPOCH, REQUEST, Pair, open_pair

pytestmark = pytest.mark.anyio

KEY = MeshKey("")
#: Tokens with KV when the copy begins: eight blocks. One more token is drawn before the decode pauses.
NUM_TOKENS = 8 * SMALL_LAYOUT.block_size


@pytest.fixture
def memory() -> TransportMaker:
    return TransportMaker("memory")


def header_of(data: bytes | memoryview) -> PieceHeader:
    return unpack_header(data, KEY)


async def move(pair: Pair) -> KvSource:
    """Copy a decode up to its commit, and return its source."""
    caught_up = anyio.Event()
    pair.b.mover.arrivals.expect(
        REQUEST,
        EPOCH,
        capability=CAPABILITY,
        block_ids=pair.b_blocks,
        num_context_tokens=None,
        source_addresses=(pair.a.transport.address,),
    )
    source = pair.a.mover.departures.offer(
        REQUEST,
        EPOCH,
        block_ids=pair.a_blocks,
        num_context_tokens=None,
        transcript=bytes(4 + 4 * NUM_TOKENS),
        on_caught_up=caught_up.set,
    )
    pair.grant()
    source.advance(NUM_TOKENS)
    await caught_up.wait()
    source.freeze(num_kv_tokens=NUM_TOKENS + 1, tail=bytes(4), next_token=FirstToken(7, 3))
    return source


def on_send(
    monkeypatch: pytest.MonkeyPatch, transport: KvTransport, kind: PieceKind, wait: Callable[[int], anyio.Event | None]
) -> None:
    """Hold the pieces of a kind, counted from 0, until the event that ``wait`` returns for each."""
    send, num_sent = transport.send, 0

    async def held(address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
        nonlocal num_sent
        if header_of(buffer.header).kind is kind:
            num_sent += 1
            if (event := wait(num_sent - 1)) is not None:
                await event.wait()
        await send(address, buffer, payload_bytes, is_notice=is_notice)

    monkeypatch.setattr(transport, "send", held)


async def test_a_commit_that_comes_again_after_the_kv_has_landed_is_dropped(
    memory: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.kv.copy_out.COMMIT_AGAIN_S", 0.0)
    has_landed, came_again = anyio.Event(), anyio.Event()
    async with open_pair(memory) as pair:
        on_send(monkeypatch, pair.a.transport, PieceKind.COMMIT, lambda number: has_landed if number else None)
        on_send(monkeypatch, pair.b.transport, PieceKind.LANDED, lambda number: came_again)
        await move(pair)
        landed = await pair.b.outcome()
        assert isinstance(landed, LandedTransfer)
        assert (landed.token_id, landed.token_index) == (7, 3)
        has_landed.set()
        while not pair.b.mover.counters().dropped:
            await anyio.lowlevel.checkpoint()
        assert pair.b.mover.counters().dropped == {"unknown": 1}
        came_again.set()
        assert isinstance(await pair.a.outcome(), SentTransfer)
        pair.check_moved()
        pair.free_all()


async def test_a_lost_piece_is_noticed_at_the_commit_that_comes_again(
    memory: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the source's time limit for the acknowledgement."""
    monkeypatch.setattr("pdmesh.kv.copy_out.COMMIT_AGAIN_S", 0.0)
    monkeypatch.setattr("pdmesh.kv.copy_out.LANDED_LIMIT_S", 30.0)
    memory.fabric.faults = MemoryFaults(
        drop=lambda data: header_of(data).kind is PieceKind.KV and header_of(data).part.blocks.stop == 9
    )
    async with open_pair(memory) as pair:
        source = await move(pair)
        failed = await pair.b.outcome()
        assert isinstance(failed, FailedTransfer)
        assert failed.reason == f"{SMALL_LAYOUT.num_layers} blocks of source 0 are missing"
        failed = await pair.a.outcome()
        assert isinstance(failed, FailedTransfer)
        assert failed.reason == "the receiver cancelled the transfer"
        assert source.committed
        pair.free_all()


async def test_what_has_landed_is_sent_while_its_second_commit_waits(
    memory: TransportMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target may have stopped reading behind its acknowledgement."""
    monkeypatch.setattr("pdmesh.kv.copy_out.COMMIT_AGAIN_S", 0.0)
    monkeypatch.setattr("pdmesh.kv.copy_out.LANDED_LIMIT_S", 0.3)
    commits_again, never = anyio.Event(), anyio.Event()

    def waits(number: int) -> anyio.Event | None:
        if number:
            commits_again.set()
        return never if number else None

    async with open_pair(memory) as pair:
        on_send(monkeypatch, pair.a.transport, PieceKind.COMMIT, waits)
        on_send(monkeypatch, pair.b.transport, PieceKind.LANDED, lambda number: commits_again)
        await move(pair)
        assert isinstance(await pair.b.outcome(), LandedTransfer)
        assert isinstance(await pair.a.outcome(), SentTransfer)
        pair.check_moved()
        pair.free_all()
