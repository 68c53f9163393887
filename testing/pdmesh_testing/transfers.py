"""Data planes of two instances in a hand-over: movers on open transports, without engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import anyio
import anyio.abc
import anyio.lowlevel

from pdmesh.config import TransferConfig
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.context import KvContext
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.piece import FirstToken, KvDestination
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import KvLayout
from pdmesh.model import Epoch, RequestId
from pdmesh.threads import CallThreads
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.kv import EVERYTHING, SMALL_LAYOUT, SMALL_TRANSFER, ByteStore, TransportMaker
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport

REQUEST, EPOCH, CAPABILITY = RequestId("request"), Epoch(3), 0x1234_5678_9ABC_DEF0
NUM_BLOCKS = 32


class NoTasks:
    """Runs no lane: nothing is sent."""

    def start_soon(self, run: object) -> None:
        pass


def a_context(
    store: KvStore,
    tasks: anyio.abc.TaskGroup | None = None,
    copies: CallThreads | None = None,
    key: MeshKey | None = None,
) -> KvContext:
    """Return the context of one side of a copy, on a transport that is not open."""
    config = TransferConfig(max_payload_bytes=1 << 30)
    return KvContext(
        transport=MemoryTransport(config, MemoryFabric()),
        store=store,
        config=config,
        key=key or MeshKey(""),
        copies=cast(CallThreads, copies),
        tasks=tasks or cast(anyio.abc.TaskGroup, NoTasks()),
        call_soon=lambda callback: callback(),
        clock=lambda: 0.0,
        on_outcome=lambda outcome: None,
    )


@dataclass
class DataSide:
    """Data plane of an instance: store, pool and mover, with the reported outcomes."""

    transport: KvTransport
    store: ByteStore
    pool: BlockPool
    mover: KvMover
    outcomes: list[TransferOutcome] = field(default_factory=list[TransferOutcome])
    told: anyio.Event = field(default_factory=anyio.Event)

    async def copied(self) -> None:
        """Wait for copies on threads, which blocks that were freed stay quarantined for."""
        with anyio.fail_after(20):
            while self.pool.num_quarantined:
                await anyio.lowlevel.checkpoint()

    async def outcome(self) -> TransferOutcome:
        """Wait for the next outcome, and return it."""
        while not self.outcomes:
            self.told = anyio.Event()
            await self.told.wait()
        return self.outcomes.pop(0)


def everything_to(side: DataSide) -> KvDestination:
    return KvDestination(side.transport.address, EVERYTHING)


class Pair:
    def __init__(self, a: DataSide, b: DataSide) -> None:
        self.a, self.b = a, b
        self.a_blocks = a.pool.allocate(9)
        self.b_blocks = b.pool.allocate(11)

    @property
    def num_context_tokens(self) -> int:
        # Nine blocks, the last with one token.
        return 8 * self.a.store.layout.block_size + 1

    def offer(self, epoch: Epoch = EPOCH) -> KvSource:
        return self.a.mover.departures.offer(
            REQUEST, epoch, block_ids=self.a_blocks, num_context_tokens=self.num_context_tokens
        )

    def grant(self, capability: int = CAPABILITY, epoch: Epoch = EPOCH) -> None:
        self.a.mover.departures.grant(REQUEST, epoch, destinations=[everything_to(self.b)], capability=capability)

    def expect(self, epoch: Epoch = EPOCH, num_context_tokens: int | None = None, capability: int = CAPABILITY) -> None:
        self.b.mover.arrivals.expect(
            REQUEST,
            epoch,
            capability=capability,
            block_ids=self.b_blocks,
            num_context_tokens=num_context_tokens or self.num_context_tokens,
            source_addresses=(self.a.transport.address,),
        )

    def compute(self, sender: KvSource, *, chunks: tuple[tuple[int, int], ...] = ((0, 4), (4, 5))) -> None:
        """Say that every layer of each chunk, as (first block, blocks), is there."""
        for chunk, (first_block, num_blocks) in enumerate(chunks):
            for layer in range(self.a.store.layout.num_layers):
                sender.blocks_ready(chunk=chunk, layer=layer, first_block=first_block, num_blocks=num_blocks)

    def send(self) -> None:
        """Offer all KV, which is computed and committed already, and let it go."""
        sender = self.offer()
        self.compute(sender)
        sender.commit(FirstToken(1, 0))
        self.grant()

    async def lands(self) -> None:
        """Wait until both sides report that all KV has arrived."""
        with anyio.fail_after(30):
            assert isinstance(await self.b.outcome(), LandedTransfer)
            assert isinstance(await self.a.outcome(), SentTransfer)

    def check_moved(self) -> None:
        for layer in range(self.a.store.layout.num_layers):
            for source, destination in zip(self.a_blocks, self.b_blocks, strict=False):
                assert self.a.store.block(layer, source) == self.b.store.block(layer, destination)
            for untouched in set(range(NUM_BLOCKS)) - set(self.b_blocks[:9]):
                assert not any(self.b.store.block(layer, untouched))

    def free_all(self) -> None:
        for side, blocks in ((self.a, self.a_blocks), (self.b, self.b_blocks)):
            side.mover.cancel(REQUEST, Epoch(EPOCH + 1))
            side.pool.free(blocks)

    @property
    def total_bytes(self) -> int:
        layout = self.a.store.layout
        return 9 * layout.bytes_per_block


@asynccontextmanager
async def open_side(
    maker: TransportMaker, layout: KvLayout, config: TransferConfig, store: ByteStore, *, peer_reads: bool | None = None
) -> AsyncIterator[DataSide]:
    """Whether it peer_reads is as of all that the ``maker`` makes, if nothing is said."""

    def on_outcome(outcome: TransferOutcome) -> None:
        side.outcomes.append(outcome)
        side.told.set()

    pool, config = BlockPool(NUM_BLOCKS), maker.config(config)
    config = config if peer_reads is None else replace(config, peer_reads=peer_reads)
    async with maker.open(config) as transport:
        mover = KvMover(transport=transport, store=store, pool=pool, config=config, on_outcome=on_outcome)
        side = DataSide(transport, store, pool, mover)
        async with mover:
            yield side
            mover.check_integrity()


@asynccontextmanager
async def open_pair(
    maker: TransportMaker,
    layout: KvLayout = SMALL_LAYOUT,
    config: TransferConfig = SMALL_TRANSFER,
    *,
    make_store: Callable[[KvLayout, int], ByteStore] = ByteStore,
    receiver_reads: bool | None = None,
) -> AsyncIterator[Pair]:
    async with (
        open_side(maker, layout, config, ByteStore(layout, NUM_BLOCKS, seed=1)) as a,
        open_side(maker, layout, config, make_store(layout, NUM_BLOCKS), peer_reads=receiver_reads) as b,
    ):
        with anyio.fail_after(30):
            yield Pair(a, b)
        for side in (a, b):
            assert side.outcomes == []
            await side.copied()
            assert side.pool.num_free == NUM_BLOCKS, "blocks are left over"
            assert side.mover.counters()[-2:] == (0, 0)
