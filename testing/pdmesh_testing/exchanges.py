"""Data planes of the members of a prefill group: movers on open transports, without engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from pdmesh.config import TransferConfig
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.exchange import KvExchange, exchange_key
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import TransferOutcome
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import NO_CHECK, PieceHeader, PieceKind, pack_header
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.kv import SMALL_LAYOUT, ByteStore, TransportMaker

REQUEST, EPOCH, CAPABILITY = RequestId("request"), Epoch(3), 0xA11CE
#: Blocks of the request; a member has room for two requests.
NUM_BLOCKS = 16
NUM_LAYERS = SMALL_LAYOUT.num_layers
HEADS = IndexRange(0, SMALL_LAYOUT.num_kv_heads)
KEY = MeshKey("")


@dataclass(eq=False)
class Member:
    """Data plane of an instance, with its side of the exchange after `join`."""

    transport: KvTransport
    store: ByteStore
    pool: BlockPool
    mover: KvMover
    outcomes: list[TransferOutcome]
    new: list[Blocks] = field(default_factory=list[Blocks])
    table: list[int] = field(default_factory=list[int])
    exchange: KvExchange = field(init=False)

    def join(self, members: Sequence[Member], *, epoch: Epoch = EPOCH, capability: int = CAPABILITY) -> None:
        self.table = self.table or self.pool.allocate(NUM_BLOCKS)
        self.exchange = self.mover.groups.open(
            REQUEST,
            epoch,
            capability=capability,
            block_ids=self.table,
            wakeup=Wakeup(),
            on_new=self.new.append,
        )
        self.tell(members, epoch=epoch)

    def tell(self, members: Sequence[Member], *, epoch: Epoch = EPOCH, lost: Sequence[Member] = ()) -> None:
        self.mover.groups.set_members(
            REQUEST,
            epoch,
            members.index(self),
            [b"" if member in lost else member.transport.address for member in members],
        )

    def compute(self, first_block: int, num_blocks: int) -> None:
        """Begin and publish all layers of the blocks, as an engine would."""
        assert self.exchange.begin(first_block, num_blocks)
        for layer in range(NUM_LAYERS):
            self.exchange.publish(Blocks(0, layer, first_block, num_blocks))

    async def until_here(self, num_blocks: int) -> None:
        """Wait until all layers of the first ``num_blocks`` blocks are here."""
        with anyio.fail_after(20):
            while not all(self.exchange.ledger.has_first(layer, num_blocks) for layer in range(NUM_LAYERS)):
                await anyio.lowlevel.checkpoint()

    async def until_received(self, num_blocks: int) -> None:
        """Wait until other members have sent all layers of ``num_blocks`` blocks."""
        with anyio.fail_after(20):
            while (
                self.mover.counters().num_bytes_exchanged.received
                < num_blocks * NUM_LAYERS * SMALL_LAYOUT.max_page_bytes
            ):
                await anyio.lowlevel.checkpoint()

    async def until_dropped(self, reason: str, number: int = 1) -> None:
        with anyio.fail_after(20):
            while self.mover.counters().dropped.get(reason, 0) < number:
                await anyio.lowlevel.checkpoint()

    def content(self, first_block: int, num_blocks: int) -> list[bytes]:
        return [
            bytes(self.store.block(layer, block_id))
            for layer in range(NUM_LAYERS)
            for block_id in self.table[first_block : first_block + num_blocks]
        ]

    async def say(self, to: Member, header: PieceHeader, payload: bytes = b"") -> None:
        """Send a piece as it is; what opens the payload is right unless there is something."""
        async with self.transport.lend() as buffer:
            buffer.payload[: len(payload)] = payload
            check = KEY.close_payload(buffer.payload[: len(payload)]) if header.check == NO_CHECK else header.check
            pack_header(header._replace(check=check), buffer.header, KEY)
            await self.transport.send(to.transport.address, buffer, len(payload))

    def free(self) -> None:
        self.mover.cancel(REQUEST, EPOCH)
        self.pool.free(self.table)
        self.table = []


def a_piece(kind: PieceKind, payload_bytes: int) -> PieceHeader:
    """Return a header about the first page, from the second member to the leader of two."""
    return PieceHeader(
        kind=kind,
        request_key=exchange_key(REQUEST),
        epoch=EPOCH,
        capability=CAPABILITY,
        source=1,
        destination=0,
        num_members=2,
        part=KvPart(IndexRange(0, 1), IndexRange(0, 1), HEADS),
        payload_bytes=payload_bytes,
    )


def _byte_store(seed: int) -> ByteStore:
    return ByteStore(SMALL_LAYOUT, 2 * NUM_BLOCKS, seed=seed)


@asynccontextmanager
async def open_members(
    maker: TransportMaker,
    number: int,
    *,
    store: Callable[[int], ByteStore] = _byte_store,
    config: Callable[[int], TransferConfig] | None = None,
) -> AsyncIterator[list[Member]]:
    """Open ``number`` members that do not know each other; check at the end that all blocks are free.

    ``store`` and ``config`` return a member's store and settings, by its index.
    """
    async with AsyncExitStack() as stack:
        members: list[Member] = []
        for index in range(number):
            settings = maker.config() if config is None else config(index)
            opened: AbstractAsyncContextManager[KvTransport] = maker.make(settings)
            transport = await stack.enter_async_context(opened)
            cache, pool = store(index), BlockPool(2 * NUM_BLOCKS)
            outcomes: list[TransferOutcome] = []
            mover = KvMover(transport=transport, store=cache, pool=pool, config=settings, on_outcome=outcomes.append)
            await stack.enter_async_context(mover)
            members.append(Member(transport, cache, pool, mover, outcomes))
        yield members
        for member in members:
            member.mover.check_integrity()
            assert member.mover.counters().num_exchanging == 0
            assert member.pool.num_free == 2 * NUM_BLOCKS
