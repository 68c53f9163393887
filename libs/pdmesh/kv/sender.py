"""One request's KV on its way out: layers are pushed as they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio

from pdmesh.config import TransferConfig
from pdmesh.errors import KvTransferError
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import Blocks, PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch, IndexRange, KvPart, RequestId, num_blocks_for
from pdmesh.transport.base import KvTransport
from pdmesh.transport.seal import MeshKey

#: Pieces of one transfer under way at once: one is copied and checked while others travel.
PIECES_IN_FLIGHT = 4

#: Runs a callback on the event loop soon, from any thread, without waiting for it.
CallSoon = Callable[[Callable[[], object]], object]


class KvDestination(NamedTuple):
    """Where a transfer goes: a data address, and what of the request's KV is to be there."""

    address: bytes
    part: KvPart


class KvSender:
    """A source's side of a transfer; made by `pdmesh.kv.mover.KvMover.offer`, which also runs it.

    Each destination gets what it and this source have in common.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        num_context_tokens: int,
        source: int,
        blocks: IndexRange | None,
        store: KvStore,
        transport: KvTransport,
        config: TransferConfig,
        key: MeshKey,
        copies: anyio.CapacityLimiter,
        call_soon: CallSoon,
        clock: Callable[[], float],
        on_paused: Callable[[KvSender], None],
    ) -> None:
        layout = store.layout
        num_blocks = num_blocks_for(num_context_tokens, layout.block_size)
        assert 0 < num_blocks <= len(block_ids), f"{num_context_tokens} tokens in {len(block_ids)} blocks"
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.source = source
        self.destinations: tuple[KvDestination, ...] = ()  # once granted
        self.capability = 0
        self._num_context_tokens = num_context_tokens
        self._store = store
        self._writer = PieceWriter(block_ids[:num_blocks], store=store, transport=transport, key=key, copies=copies)
        self._config = config
        self._call_soon = call_soon
        self._clock = clock
        self._on_paused = on_paused
        self._blocks_per_piece = transport.max_payload_bytes // layout.block_bytes
        own = IndexRange(0, num_blocks) if blocks is None else blocks.common(IndexRange(0, num_blocks))
        self._part = KvPart(own, IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads))
        self._num_awaited = self._part.num_pages  # not yet computed
        self._computed_s = 0.0
        # A piece has one block at least, so that this bound is never reached.
        self._ready_in, self._ready_out = anyio.create_memory_object_stream[Blocks](self._num_awaited)
        self._first_token: FirstToken | None = None
        self._failure: str | None = None
        self._granted = anyio.Event()
        self._pausing = False  # asked to stop, with pieces under way
        self._num_under_way = 0
        self._committed = anyio.Event()
        self._unlanded: set[int] = set()  # destinations that have not acknowledged, once granted
        self._landed = anyio.Event()
        self._work = anyio.CancelScope()

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._writer.num_pieces

    # --- called by the worker runtime ---------------------------------------------------------------------------------

    def blocks_ready(self, *, chunk: int, layer: int, first_block: int, num_blocks: int) -> None:
        """Blocks ``first_block`` … of the request's block table are complete in this layer. The engine's thread; cheap.

        Each (layer, block) of this source's is named once; the context's last block when its last token was computed.
        """
        if num_blocks > 0:
            blocks = Blocks(chunk, layer, first_block, num_blocks)
            self._store.when_written(lambda: self._call_soon(lambda: self._add_ready(blocks)))

    def blocks_landed(self, blocks: Blocks) -> None:
        """The same of blocks that another instance computed, and that are in place here now. Event loop only."""
        self._add_ready(blocks)

    def commit(self, first_token: FirstToken | None) -> None:
        """All that this source computes is computed; ``first_token`` if it drew it. Event loop only.

        From here on, the transfer is what decode waits for: its exposed seconds begin.
        """
        self._computed_s = self._clock()
        self._first_token = first_token
        self._committed.set()

    # --- called by the mover ------------------------------------------------------------------------------------------

    def grant(self, destinations: Sequence[KvDestination], capability: int) -> None:
        self.destinations = tuple(destinations)
        self.capability = capability
        self._unlanded = set(range(len(self.destinations)))
        self._granted.set()

    def pause(self) -> None:
        """Begin no piece until granted again. Ignored if it was not granted, or has all it waits for."""
        if self._granted.is_set() and not self._committed.is_set():
            self._granted = anyio.Event()
            self._pausing = True
            self._check_paused()

    def _check_paused(self) -> None:
        if self._pausing and self._num_under_way == 0:
            self._pausing = False
            self._on_paused(self)

    def landed(self, destination: int) -> None:
        """A destination has all that goes there."""
        self._unlanded.discard(destination)
        if self.destinations and not self._unlanded:
            self._landed.set()

    def fail(self, reason: str) -> None:
        """End `run` with a KvTransferError."""
        if self._failure is None:
            self._failure = reason
            self._work.cancel()

    def close(self) -> None:
        self._ready_in.close()
        self._ready_out.close()

    async def run(self) -> SentTransfer:
        """Send everything and wait for the acknowledgement. Raises KvTransferError.

        The deadline runs once the transfer is granted and the whole KV is there: until then it waits for the
        computation, which may be long or preempted. A piece under way has the transport's no-progress limit.
        """
        limit_s = self._config.deadline_s
        with self._work:
            await self._wait_for_grant()
            granted_s = self._clock()
            async with anyio.create_task_group() as lanes:
                for _ in range(PIECES_IN_FLIGHT):
                    lanes.start_soon(self._send_ready)
                await self._committed.wait()
                await self._wait_for_grant()
                self._work.deadline = anyio.current_time() + limit_s
            for index, destination in enumerate(self.destinations):
                await self._send_commit(index, destination)
            await self._landed.wait()
            landed_s = self._clock()
            return SentTransfer(
                request_id=self.request_id,
                epoch=self.epoch,
                num_bytes=self.num_bytes,
                duration_s=landed_s - granted_s,
                exposed_s=landed_s - self._computed_s,
            )
        raise KvTransferError(self._failure or f"the KV did not land within {limit_s:g} s")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add_ready(self, blocks: Blocks) -> None:
        assert blocks.layer < self._store.layout.num_layers, f"layer {blocks.layer}"
        own = self._part.blocks
        assert own.holds(IndexRange(blocks.first_block, blocks.end)), f"{blocks} of {own}"
        self._num_awaited -= blocks.num_blocks
        assert self._num_awaited >= 0, "a block was named twice"
        try:
            for piece in blocks.cut(self._blocks_per_piece):
                self._ready_in.send_nowait(piece)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return  # the transfer has ended; the engine does not know yet
        if self._num_awaited == 0:
            self._ready_in.close()

    async def _wait_for_grant(self) -> None:
        while not self._granted.is_set():  # a pause takes it back, perhaps before this task has its turn
            await self._granted.wait()

    async def _send_ready(self) -> None:
        try:
            async for blocks in self._ready_out:
                await self._wait_for_grant()
                self._num_under_way += 1
                for index, destination in enumerate(self.destinations):
                    await self._send_to(index, destination, blocks)
                self._num_under_way -= 1
                self._check_paused()
        except KvTransferError as error:
            self.fail(str(error))

    async def _send_to(self, index: int, destination: KvDestination, blocks: Blocks) -> None:
        """What of ``blocks`` goes to a destination."""
        wanted = destination.part.blocks.common(IndexRange(blocks.first_block, blocks.end))
        if wanted.size == 0 or not destination.part.layers.holds(IndexRange(blocks.layer, blocks.layer + 1)):
            return
        wanted_blocks = blocks._replace(first_block=wanted.start, num_blocks=wanted.size)
        about = PieceHeader(
            kind=PieceKind.KV,
            request_key=self.key,
            epoch=self.epoch,
            capability=self.capability,
            source=self.source,
            destination=index,
        )
        await self._writer.send(destination.address, wanted_blocks, about)

    async def _send_commit(self, index: int, destination: KvDestination) -> None:
        token = self._first_token
        header = PieceHeader(
            kind=PieceKind.COMMIT,
            request_key=self.key,
            epoch=self.epoch,
            capability=self.capability,
            source=self.source,
            destination=index,
            part=self._part.common(destination.part),
            num_context_tokens=self._num_context_tokens,
            has_token=token is not None,
            token_id=0 if token is None else token.token_id,
            token_index=0 if token is None else token.token_index,
        )
        await self._writer.tell(destination.address, header)
