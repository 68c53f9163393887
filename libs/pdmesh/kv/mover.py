"""The hand-over of requests' KV, both directions of one instance, in one object.

What a worker runtime needs to know::

    pool = BlockPool(num_blocks)                       # pdmesh.kv.blocks, owned by the runtime
    mover = KvMover(transport=transport, store=engine.kv, pool=pool, config=config.transfer, on_outcome=on_outcome)
    async with transport, mover:                       # tasks run inside; leaving cancels every transfer
        ...

**Sending** (prefill). ``sending = mover.offer(...)`` when the request is admitted; it holds no resources until there is
something to send. From the engine's thread, for each layer of each chunk, ``sending.blocks_ready(...)`` (about a
microsecond). ``mover.grant(...)`` when the scheduler says so, before or after. ``sending.commit(...)`` at the end, with
the first token if it was drawn here. Exactly one outcome follows each grant of another transfer: `SentTransfer`, and
the blocks may be freed; or `FailedTransfer`, and everything is kept for the next grant. ``mover.withdraw(...)`` ends
one without an outcome. Before, ``mover.pause(...)`` stops it until it is granted again, and `PausedTransfer` says that
no piece is under way.

**Moving** a running decode. ``sending = mover.move(...)`` when the scheduler grants it; then as `MoveSender` says.

**Receiving** (decode). ``mover.expect(...)`` with the reserved blocks. Exactly one outcome follows: `LandedTransfer`
(the acknowledgement is on its way; decode may start) or `FailedTransfer`.

**Groups.** ``mover.groups.open(...)`` when a member of a prefill group is admitted, ``mover.groups.set_members(...)``
when it is told who the members are (`pdmesh.kv.exchange`). The only outcome is `FailedExchange`: it cannot go on.

**Freeing.** ``mover.cancel(request_id, epoch)`` first (idempotent, unknown requests are fine, no outcome follows), then
``pool.free(block_ids, on_released=...)``: blocks that a running copy still touches stay quarantined until it ends,
and ``on_released`` is called when the last one is free (at once if none is).

``on_outcome`` is called on the event loop and must not block. Everything but ``blocks_ready`` belongs to the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import anyio.abc
import structlog

from pdmesh.config import TransferConfig
from pdmesh.errors import ConfigError, KvTransferError, ProtocolError
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.groups import KvGroups
from pdmesh.kv.incoming import PieceReader
from pdmesh.kv.moving import MoveSender
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, OnOutcome, PausedTransfer
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind, pack_header, request_key, unpack_header
from pdmesh.kv.push import KvDestination, KvPush
from pdmesh.kv.receiver import KvReceiver
from pdmesh.kv.sender import KvSender
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch, IndexRange, RequestId
from pdmesh.transport.base import KvTransport, ReceivedPiece
from pdmesh.transport.seal import MeshKey

log = structlog.get_logger()

#: Threads that copy and check pieces, for all transfers together.
COPY_THREADS = 2


class ExchangedBytes(NamedTuple):
    """Of KV between members of prefill groups."""

    sent: int
    received: int


class TransferCounters(NamedTuple):
    """Totals since the start, and what is under way. ``dropped`` counts pieces by the reason they were dropped for."""

    num_pieces_sent: int
    num_bytes_sent: int
    num_pieces_received: int
    num_bytes_received: int
    num_bytes_exchanged: ExchangedBytes  # beside the transfers'
    dropped: Mapping[str, int]
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
    ) -> None:
        if config.max_payload_bytes < store.layout.block_bytes:
            raise ConfigError(
                f"transfer.max_payload_bytes is {config.max_payload_bytes}, less than one KV block of this model "
                f"({store.layout.block_bytes} bytes): raise it, or lower worker.block_size"
            )
        self._transport = transport
        self._store = store
        self._pool = pool
        self._config = config
        self._key = MeshKey(mesh_token)
        self._on_outcome = on_outcome
        self._clock = clock
        self._senders: dict[bytes, KvSender] = {}
        self._pushes: dict[bytes, KvPush | MoveSender] = {}  # what is granted, of these and of what decodes
        self._receivers: dict[bytes, KvReceiver] = {}
        self._dropped: Counter[str] = Counter()
        self._num_pieces_sent = self._num_bytes_sent = 0
        self._num_pieces_received = self._num_bytes_received = 0

    async def __aenter__(self) -> Self:
        self._copies = anyio.CapacityLimiter(COPY_THREADS)
        # anyio has no call from a thread that does not wait for its result.
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        self._stack = AsyncExitStack()
        self._stack.enter_context(self._store.serving(self._transport.memory))
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._reader = PieceReader(
            store=self._store, pool=self._pool, key=self._key, copies=self._copies, tasks=self._tasks
        )
        #: What members of prefill groups exchange.
        self.groups = KvGroups(
            store=self._store,
            reader=self._reader,
            make_writer=partial(
                PieceWriter, store=self._store, transport=self._transport, key=self._key, copies=self._copies
            ),
            call_soon=self._call_soon,
            tasks=self._tasks,
            admit=self._admit,
            no_progress_s=self._config.group_no_progress_s,
            clock=self._clock,
            on_outcome=self._on_outcome,
            on_dropped=self._count_dropped,
        )
        self._tasks.start_soon(self._receive)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        self._senders.clear()
        await self._stack.__aexit__(kind, error, trace)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def offer(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        num_context_tokens: int,
        source: int = 0,
        blocks: IndexRange | None = None,
    ) -> KvSender:
        """Get ready to send. ``block_ids`` is the request's block table, whose first blocks hold the context.

        This is source number ``source`` of the transfer, which sends ``blocks`` of the table; None sends all.
        An older epoch of the request is cancelled.
        """
        sender = KvSender(
            request_id,
            epoch,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            source=source,
            blocks=blocks,
            store=self._store,
            pages_per_piece=self._transport.max_payload_bytes // self._store.layout.block_bytes,
            call_soon=self._call_soon,
            clock=self._clock,
        )
        self._cancel_sender(sender.key, epoch)
        self._senders[sender.key] = sender
        return sender

    def move(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        transcript: bytes,
        destination: KvDestination,
        capability: int,
        on_caught_up: Callable[[], None],
    ) -> MoveSender:
        """Begin to move a running decode away. ``block_ids`` is its block table itself, which grows as it goes on.

        Exactly one outcome follows: `SentTransfer` or `FailedTransfer`.
        """
        self._admit(destination.address)
        writer = PieceWriter(
            block_ids, store=self._store, transport=self._transport, key=self._key, copies=self._copies
        )
        sender = MoveSender(
            request_id,
            epoch,
            writer=writer,
            max_pages=writer.max_pages,
            destination=destination,
            capability=capability,
            transcript=transcript,
            layout=self._store.layout,
            clock=self._clock,
            on_caught_up=on_caught_up,
        )
        self._end_push(sender.key)
        self._pushes[sender.key] = sender
        self._tasks.start_soon(self._push, sender)
        return sender

    def grant(
        self, request_id: RequestId, epoch: Epoch, *, destinations: Sequence[KvDestination], capability: int
    ) -> None:
        """Let an offered transfer start, or go on. Ignored if it is not there (the request was freed meanwhile).

        Another ``capability`` than before is another transfer: it begins with all that is computed.
        """
        sender = self._sender(request_id, epoch)
        if sender is None:
            return
        for destination in destinations:
            self._admit(destination.address)
        push = self._pushes.get(sender.key)
        if isinstance(push, KvPush) and push.capability == capability:
            push.grant_again()
            return
        self._end_push(sender.key)
        push = self._pushes[sender.key] = KvPush(
            sender,
            destinations,
            capability,
            store=self._store,
            transport=self._transport,
            config=self._config,
            key=self._key,
            copies=self._copies,
            clock=self._clock,
            on_paused=self._paused,
        )
        self._tasks.start_soon(self._push, push)

    def pause(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending until the next grant; answered by `PausedTransfer`. Ignored if it is not there."""
        push = self._pushes.get(request_key(request_id))
        if isinstance(push, KvPush) and push.epoch == epoch:
            push.pause()

    def withdraw(self, request_id: RequestId, epoch: Epoch) -> None:
        """End what is granted, without an outcome; everything is kept for another grant. Idempotent."""
        if self._sender(request_id, epoch) is not None:
            self._end_push(request_key(request_id))

    def expect(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        num_context_tokens: int | None,
        source_addresses: tuple[bytes, ...],
        destination: int = 0,
    ) -> None:
        """Take the request's KV into the first blocks of ``block_ids`` (the rest is room for its output).

        None for ``num_context_tokens`` is a move, whose commit tells how many there are. This is the transfer's
        destination number ``destination``. An older epoch of the request is cancelled.
        """
        receiver = KvReceiver(
            request_id,
            epoch,
            capability=capability,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            source_addresses=source_addresses,
            destination=destination,
            layout=self._store.layout,
        )
        self._receivers[receiver.key] = receiver
        for address in source_addresses:
            self._admit(address)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop sending, receiving and exchanging this epoch and older, without an outcome. Idempotent."""
        self.groups.end(request_id, epoch, "the request was freed")
        key = request_key(request_id)
        self._cancel_sender(key, epoch)
        receiver = self._receivers.get(key)
        if receiver is not None and receiver.epoch <= epoch:
            del self._receivers[key]

    def forget(self, address: bytes) -> None:
        """The peer at this data address is gone: what is being sent there fails, and its endpoint is closed."""
        self.groups.forget(address)
        self._tasks.start_soon(self._transport.forget, address)

    def counters(self) -> TransferCounters:
        return TransferCounters(
            num_pieces_sent=self._num_pieces_sent + sum(push.num_pieces for push in self._pushes.values()),
            num_bytes_sent=self._num_bytes_sent + sum(push.num_bytes for push in self._pushes.values()),
            num_pieces_received=self._num_pieces_received,
            num_bytes_received=self._num_bytes_received,
            num_bytes_exchanged=ExchangedBytes(self.groups.num_bytes_sent, self.groups.num_bytes_received),
            dropped=dict(self._dropped),
            num_exchanging=len(self.groups),
            num_sending=len(self._senders.keys() | self._pushes.keys()),
            num_receiving=len(self._receivers),
        )

    def check_integrity(self) -> None:
        self._transport.check_integrity()
        self._pool.check_integrity()
        self.groups.check_integrity()
        for receiver in self._receivers.values():
            receiver.check_integrity()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _admit(self, address: bytes) -> None:
        try:
            self._transport.admit(address)
        except KvTransferError as error:  # then nothing comes from there, and sending there fails
            log.warning("the scheduler named a peer that cannot be", reason=str(error))

    def _sender(self, request_id: RequestId, epoch: Epoch) -> KvSender | None:
        sender = self._senders.get(request_key(request_id))
        return sender if sender is not None and sender.epoch == epoch else None

    def _cancel_sender(self, key: bytes, epoch: Epoch) -> None:
        push, sender = self._pushes.get(key), self._senders.get(key)
        if push is not None and push.epoch <= epoch:
            self._end_push(key)
        if sender is not None and sender.epoch <= epoch:
            del self._senders[key]

    def _end_push(self, key: bytes) -> None:
        push = self._pushes.get(key)
        if push is not None:
            push.scope.cancel()
            self._forget_push(push)

    def _forget_push(self, push: KvPush | MoveSender) -> None:
        """Take it out of the table; its task may still be ending."""
        if self._pushes.get(push.key) is push:
            del self._pushes[push.key]
            self._num_pieces_sent += push.num_pieces
            self._num_bytes_sent += push.num_bytes

    async def _push(self, push: KvPush | MoveSender) -> None:
        try:
            with push.scope:
                try:
                    outcome = await push.run()
                except KvTransferError as error:
                    self._forget_push(push)
                    self._fail(push.request_id, push.epoch, sending=True, reason=str(error))
                    for index, destination in enumerate(push.destinations):
                        await self._tell(PieceKind.ABORT, push, destination.address, destination=index)
                else:
                    self._forget_push(push)
                    if isinstance(push, KvPush) and self._senders.get(push.key) is push.sender:
                        del self._senders[push.key]
                    self._on_outcome(outcome)
        finally:
            self._forget_push(push)

    def _paused(self, push: KvPush) -> None:
        self._on_outcome(PausedTransfer(request_id=push.request_id, epoch=push.epoch))

    async def _tell_sources(self, kind: PieceKind, receiver: KvReceiver) -> None:
        for address in receiver.source_addresses:
            await self._tell(kind, receiver, address, destination=receiver.destination)

    async def _tell(
        self, kind: PieceKind, transfer: KvPush | MoveSender | KvReceiver, address: bytes, *, destination: int
    ) -> None:
        """Send a piece without payload about a transfer; if that fails the peer's own limits end its side."""
        header = PieceHeader(
            kind=kind,
            request_key=transfer.key,
            epoch=transfer.epoch,
            capability=transfer.capability,
            destination=destination,
        )
        try:
            async with self._transport.lend() as buffer:
                pack_header(header, buffer.header, self._key)
                await self._transport.send(address, buffer, 0)
        except KvTransferError as error:
            log.warning(
                "peer not told",
                request_id=transfer.request_id,
                epoch=transfer.epoch,
                kind=kind.name,
                reason=str(error),
            )

    def _fail(self, request_id: RequestId, epoch: Epoch, *, sending: bool, reason: str) -> None:
        log.warning("kv transfer failed", request_id=request_id, epoch=epoch, sending=sending, reason=reason)
        self._on_outcome(FailedTransfer(request_id=request_id, epoch=epoch, sending=sending, reason=reason))

    # --- receiving ----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for piece in self._transport.receive():
            try:
                header = unpack_header(piece.header, self._key)
            except ProtocolError:
                self._drop(piece, "malformed")
                continue
            if header.request_key in self.groups:
                self.groups.take(header, piece)
            elif header.kind is PieceKind.LANDED:
                self._take_landed(header, piece)
            elif header.kind is PieceKind.ABORT:
                self._take_abort(header, piece)
            else:
                self._take_kv_or_commit(header, piece)

    def _drop(self, piece: ReceivedPiece, reason: str) -> None:
        self._count_dropped(reason)
        piece.release()

    def _count_dropped(self, reason: str) -> None:
        self._dropped[reason] += 1

    def _take_landed(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        push = self._pushes.get(header.request_key)
        if push is None:
            self._drop(piece, "unknown")
        elif reason := _mismatch(push, header):
            self._drop(piece, reason)
        else:
            piece.release()
            push.landed(header.destination)

    def _take_abort(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        push = self._pushes.get(header.request_key)
        receiver = self._receivers.get(header.request_key)
        if push is not None and _mismatch(push, header) is None:
            push.fail("the receiver gave up")
        elif receiver is not None and _mismatch(receiver, header) is None:
            self._give_up(receiver, "the sender gave up", tell=False)
        else:
            self._dropped["unknown"] += 1
        piece.release()

    def _take_kv_or_commit(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        receiver = self._receivers.get(header.request_key)
        if receiver is None:
            self._drop(piece, "unknown")
            return
        if reason := _mismatch(receiver, header):
            self._drop(piece, reason)
            return
        if receiver.first_piece_s is None:
            receiver.first_piece_s = self._clock()
        if header.kind is PieceKind.COMMIT:
            piece.release()
            if reason := receiver.commit(header):
                self._give_up(receiver, reason)
            else:
                self._check_landed(receiver)
        elif header.kind is PieceKind.TRANSCRIPT:
            self._take_transcript(receiver, header, piece)
        elif reason := receiver.claim(header, len(piece.payload)):
            self._drop(piece, reason)
        else:
            self._reader.read(
                header,
                piece,
                receiver.block_ids_of(header),
                is_wanted=lambda: self._receivers.get(receiver.key) is receiver,
                on_read=partial(self._read, receiver, header),
            )

    def _take_transcript(self, receiver: KvReceiver, header: PieceHeader, piece: ReceivedPiece) -> None:
        if self._key.checksum(piece.payload) != header.checksum:
            self._drop(piece, "checksum")
            self._give_up(receiver, "a piece of its transcript was damaged on the way")
        elif reason := receiver.take_transcript(header, piece.payload):
            self._drop(piece, reason)
        else:
            piece.release()
            self._check_landed(receiver)

    def _read(self, receiver: KvReceiver, header: PieceHeader, fault: str | None) -> None:
        if fault is not None:
            self._count_dropped(fault)
            if fault == "checksum":
                self._give_up(receiver, f"a piece of layer {header.part.layers.start} was damaged on the way")
            return
        self._num_pieces_received += 1
        self._num_bytes_received += header.payload_bytes
        receiver.place(header)
        self._check_landed(receiver)

    def _check_landed(self, receiver: KvReceiver) -> None:
        if not receiver.complete or self._receivers.get(receiver.key) is not receiver:
            return
        assert receiver.first_token is not None
        assert receiver.first_piece_s is not None
        del self._receivers[receiver.key]
        self._tasks.start_soon(self._tell_sources, PieceKind.LANDED, receiver)
        self._on_outcome(
            LandedTransfer(
                request_id=receiver.request_id,
                epoch=receiver.epoch,
                token_id=receiver.first_token.token_id,
                token_index=receiver.first_token.token_index,
                num_bytes=receiver.num_bytes,
                duration_s=self._clock() - receiver.first_piece_s,
                transcript=bytes(receiver.transcript),
            )
        )

    def _give_up(self, receiver: KvReceiver, reason: str, *, tell: bool = True) -> None:
        if self._receivers.get(receiver.key) is not receiver:
            return  # cancelled, or failed before
        del self._receivers[receiver.key]
        if tell:
            self._tasks.start_soon(self._tell_sources, PieceKind.ABORT, receiver)
        self._fail(receiver.request_id, receiver.epoch, sending=False, reason=reason)


def _mismatch(transfer: KvPush | MoveSender | KvReceiver, header: PieceHeader) -> str | None:
    """Why a piece does not belong to a transfer of its request."""
    if header.epoch != transfer.epoch:
        return "epoch"
    if header.capability != transfer.capability:
        return "capability"
    return None
