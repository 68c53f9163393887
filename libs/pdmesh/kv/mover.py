"""Outgoing and incoming KV of one instance, in one object.

How a worker runtime uses it::

    pool = BlockPool(num_blocks)                       # pdmesh.kv.blocks, owned by the runtime
    mover = KvMover(transport=transport, store=engine.kv, pool=pool, config=config.transfer, on_outcome=on_outcome)
    async with transport, mover:                       # tasks run inside; leaving cancels every transfer
        ...

**Sending**, by ``mover.departures``. Call ``source = offer(...)`` when the request is admitted; an offer holds no
resources until there are pages to send. From the engine's thread, call ``source.blocks_ready(...)`` for each layer of
each chunk (about a microsecond). Call ``grant(...)`` when the scheduler says so, before or after. Call
``source.commit(...)`` at the end, with the first token if it was drawn here.

Exactly one outcome follows each grant of another copy. After `SentTransfer` the blocks may be freed. After
`FailedTransfer` everything is kept for the next grant. ``withdraw(...)`` ends a copy without an outcome. ``pause(...)``
stops it until it is granted again, and `PausedTransfer` reports that no piece is under way. A running decode is offered
when it is granted, and then sent as `KvSource` says.

**Receiving.** Call ``mover.arrivals.expect(...)`` with the reserved blocks. Exactly one outcome follows:
`LandedTransfer` (the acknowledgement is on its way; decode may start) or `FailedTransfer`.

**Spread contexts** (`pdmesh.kv.parts`). Call ``mover.parts.open(...)`` at the owner and ``mover.parts.hold(...)`` at a
shard holder.

**Groups.** Call ``mover.groups.open(...)`` when a member of a prefill group is admitted, and
``mover.groups.set_members(...)`` when the members are named (`pdmesh.kv.exchange`). The only outcome is
`FailedExchange`: the member cannot continue.

**Freeing.** Call ``mover.cancel(request_id, epoch)`` first (idempotent, unknown requests are ignored, no outcome
follows), then ``pool.free(block_ids, on_released=...)``. Blocks that a running copy still touches stay quarantined
until the copy ends. ``on_released`` is called when the last one is free (at once if none is quarantined).

``on_outcome`` is called on the event loop and must not block. Everything but ``blocks_ready`` belongs to the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Self

import anyio

from pdmesh.config import TransferConfig
from pdmesh.errors import ConfigError, ProtocolError
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.context import KvContext
from pdmesh.kv.copy_in import KvArrivals
from pdmesh.kv.departures import KvDepartures
from pdmesh.kv.exchange import KvGroups
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.intake import PageIntake
from pdmesh.kv.outcome import OnOutcome
from pdmesh.kv.parts import AttendPart, KvParts
from pdmesh.kv.peer_reads import PeerReads
from pdmesh.kv.piece import PieceKind, unpack_header, weights_word
from pdmesh.kv.probes import KvProbes
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch, RequestId
from pdmesh.threads import CallThreads
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.seal import MeshKey


class ExchangedBytes(NamedTuple):
    """Bytes of KV exchanged between members of prefill groups."""

    sent: int
    received: int


class TransferCounters(NamedTuple):
    """Totals since the start, and numbers of running transfers.

    ``num_bytes_exchanged`` counts pages of prefill groups, which the other byte counts leave out.
    ``num_bytes_peer_read`` counts received bytes that were copied from peers' caches, in transfers and groups.
    ``dropped`` counts dropped pieces by reason; ``refused`` is the reason of pieces that the transport refused.
    ``num_asked_again`` counts dropped pieces that were requested again. ``num_part_answers`` counts answers to owners
    of spread contexts.
    """

    num_pieces_sent: int
    num_bytes_sent: int
    num_pieces_received: int
    num_bytes_received: int
    num_bytes_exchanged: ExchangedBytes
    num_bytes_peer_read: int
    dropped: Mapping[str, int]
    num_asked_again: int
    num_part_answers: int
    num_exchanging: int
    num_sending: int
    num_receiving: int


class KvMover:
    """Moves requests' KV out of and into one instance."""

    def __init__(
        self,
        *,
        transport: KvTransport,
        store: KvStore,
        pool: BlockPool,
        config: TransferConfig,
        on_outcome: OnOutcome,
        mesh_token: str = "",
        clock: Callable[[], float] = time.monotonic,
        memory: Sequence[memoryview] = (),
        attend_part: AttendPart | None = None,
        wakeup: Wakeup | None = None,
        weights: str = "",
    ) -> None:
        """``memory`` is memory that others copy pieces from and to, beside the transport's.

        Raise ConfigError if a message cannot hold a page.

        ``weights`` is the identity of the weights that compute the KV: pieces of other weights are dropped.
        ``attend_part`` answers questions about shards held here; ``wakeup`` wakes the thread that waits for answers.
        """
        if config.max_payload_bytes < store.layout.max_page_bytes:
            raise ConfigError(
                f"transfer.max_payload_bytes is {config.max_payload_bytes}, less than one KV block of this model "
                f"({store.layout.max_page_bytes} bytes): raise it, or lower worker.block_size"
            )
        self._transport = transport
        self._store = store
        self._pool = pool
        self._config = config
        self._key = MeshKey(mesh_token, encrypts=config.encrypt)
        self._on_outcome = on_outcome
        self._clock = clock
        self._memory = memory
        self._attend_part = attend_part
        self._wakeup = wakeup or Wakeup()
        self._weights = weights_word(weights)

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self._stack.enter_context(self._store.serving([*self._transport.memory, *self._memory]))
        shared = self._store.shared if self._config.peer_reads else None
        peer_reads = None if shared is None else PeerReads(shared, self._store.layout, self._transport)
        if peer_reads is not None:
            self._stack.callback(peer_reads.close)
        copies = await self._stack.enter_async_context(CallThreads("kv-copies", self._store.num_copy_threads))
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        context = self._context = KvContext(
            transport=self._transport,
            store=self._store,
            config=self._config,
            key=self._key,
            copies=copies,
            tasks=self._tasks,
            # anyio's call from a thread waits for its result.
            call_soon=asyncio.get_running_loop().call_soon_threadsafe,
            clock=self._clock,
            on_outcome=self._on_outcome,
            weights=self._weights,
            peer_reads=peer_reads,
        )
        pages = PageIntake(context, self._pool)
        self.departures = KvDepartures(context)
        self.arrivals = KvArrivals(context, pages)
        self.groups = KvGroups(context, PageIntake(context, self._pool, pages))
        self.probes = KvProbes(context)
        threads = None
        if self._attend_part is not None:
            threads = await self._stack.enter_async_context(CallThreads("kv-parts", 1))
        self.parts = KvParts(context, self._pool, threads, self._attend_part, self._wakeup)
        if self.parts.port is not None:
            await self._stack.enter_async_context(self.parts.port)
        self._tasks.start_soon(self.parts.run)
        self._tasks.start_soon(self._receive)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        self.departures.clear()
        self.groups.clear()
        self.parts.clear()
        await self._stack.__aexit__(kind, error, trace)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending, receiving and exchanging this epoch and older ones, without an outcome. Idempotent."""
        self.groups.end(request_id, epoch, "the request was freed")
        self.departures.cancel(request_id, epoch)
        self.arrivals.cancel(request_id, epoch)
        self.parts.cancel(request_id, epoch)

    def forget(self, address: bytes) -> None:
        """Fail sends to the peer at this data address, which is gone, and close its endpoint."""
        self.groups.forget(address)
        self.parts.forget(address)
        if self._context.peer_reads is not None:
            self._context.peer_reads.forget(address)
        self._tasks.start_soon(self._transport.forget, address)

    def counters(self) -> TransferCounters:
        return TransferCounters(
            num_pieces_sent=self.departures.num_pieces,
            num_bytes_sent=self.departures.num_bytes,
            num_pieces_received=self.arrivals.pages.num_pieces,
            num_bytes_received=self.arrivals.pages.num_bytes,
            num_bytes_exchanged=ExchangedBytes(self.groups.num_bytes_sent, self.groups.pages.num_bytes),
            num_bytes_peer_read=self.arrivals.pages.num_bytes_peer_read + self.groups.pages.num_bytes_peer_read,
            dropped=self._dropped(),
            num_asked_again=self._context.num_asked_again,
            num_part_answers=self.parts.num_answers,
            num_exchanging=len(self.groups),
            num_sending=len(self.departures),
            num_receiving=len(self.arrivals),
        )

    def _dropped(self) -> dict[str, int]:
        num_refused = self._transport.num_refused
        return {**self._context.dropped, **({"refused": num_refused} if num_refused else {})}

    def check_integrity(self) -> None:
        self._transport.check_integrity()
        self._pool.check_integrity()
        self.groups.check_integrity()
        self.arrivals.check_integrity()
        if self._context.peer_reads is not None:
            self._context.peer_reads.check_integrity()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for piece in self._transport.receive():
            try:
                header = unpack_header(piece.header, self._key)
            except ProtocolError:
                self._context.drop(piece, "malformed")
                continue
            if header.kind is PieceKind.PROBE:
                self.probes.take(header)
                piece.release()
            elif header.weights != self._weights:
                self._context.drop(piece, "weights")
            elif header.kind in (PieceKind.QUERY, PieceKind.ANSWER, PieceKind.TOKENS):
                self.parts.take(header, piece)
            elif header.request_key in self.groups:
                self.groups.take(header, piece)
            elif header.kind in (PieceKind.LANDED, PieceKind.AGAIN, PieceKind.NO_PEER_READS):
                self.departures.take(header, piece)
            elif header.kind is not PieceKind.ABORT:
                self.arrivals.take(header, piece)
            elif self.departures.take_abort(header) or self.arrivals.take_abort(header):
                piece.release()
            else:
                self._context.drop(piece, "unknown")
