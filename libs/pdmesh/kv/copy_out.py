"""Outgoing KV of one request: the source of the KV, and a granted copy of a source.

A source holds a prompt that is computed, blocks that are all present, or a decode, whose context grows while it is
sent. A copy sends the pages in the source's ledger, layer by layer as they are computed. If its destinations fail, the
source still has all pages for the next copy.

A decode continues while its full blocks are sent, and pauses for the rest. The rest and the commit are sent at once,
without waiting for each other: the stream pauses for one network latency (`docs/architecture/moves.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict, Unpack

import anyio
import anyio.abc

from pdmesh.errors import KvTransferError
from pdmesh.kv.context import KvContext
from pdmesh.kv.lane import Lane, layers_a_step
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outcome import PausedTransfer, SentTransfer
from pdmesh.kv.pages import NO_BLOCK, Blocks
from pdmesh.kv.piece import FirstToken, KvDestination, PieceHeader, PieceKind, request_key
from pdmesh.kv_layout import IndexRange, KvPart, num_blocks_for
from pdmesh.model import Epoch, RequestId

#: Time after which a commit is sent again, so that the receiver notices lost pieces. A piece with a damaged header is
#: lost.
COMMIT_AGAIN_S = 0.25

#: Time limit for a paused decode to get a buffer for its commit. Then the decode continues here.
FREEZE_LIMIT_S = 0.25

#: Time limit for the acknowledgement of a decode's commit. Then the core asks the target whether the KV has landed.
LANDED_LIMIT_S = 2.0


class Offered(TypedDict):
    """KV of a request on this instance.

    ``block_ids`` is the request's block table, whose first blocks hold the context. ``num_context_tokens`` is None for
    a decode, whose table grows while it is sent. This instance is source number ``source`` of the copy, and sends
    ``blocks`` of the table; None sends all. The first ``num_present_blocks`` of the table hold their KV already.

    For a decode, blocks before ``first_held`` are absent in layers with a window, and all others stay until the copy
    has ended. ``on_caught_up`` is called whenever all blocks that were named have been sent.
    """

    block_ids: Sequence[int]
    num_context_tokens: int | None
    source: NotRequired[int]
    blocks: NotRequired[IndexRange | None]
    num_present_blocks: NotRequired[int]
    first_held: NotRequired[int]
    transcript: NotRequired[bytes]
    on_caught_up: NotRequired[Callable[[], object]]


class KvSource:
    """KV of a request that an instance can send; made by `pdmesh.kv.departures.KvDepartures.offer`.

    For a decode, call ``advance`` after each step to name the complete blocks. Once ``has_caught_up``, call ``freeze``
    to end the copy with the remaining KV. Until ``committed``, the decode may continue as if it were not sent.

    ``committed_s`` is the time of `commit`. ``first_token`` is None if another source drew it. ``streams_out``:
    only a part of the context is here at any time. ``copy`` is the copy under way. ``committed`` is set once the last
    copy's commit was sent, from when the request may decode at the destination.
    """

    def __init__(self, context: KvContext, request_id: RequestId, epoch: Epoch, **offered: Unpack[Offered]) -> None:
        block_ids, num_context_tokens = offered["block_ids"], offered["num_context_tokens"]
        layout = context.store.layout
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.source = offered.get("source", 0)
        self.layout = layout
        self.is_decode = num_context_tokens is None
        self.num_context_tokens = num_context_tokens or 0
        num_blocks = num_blocks_for(self.num_context_tokens, layout.block_size)
        numbers = f"{num_context_tokens} tokens in {len(block_ids)} blocks"
        assert self.is_decode or 0 < num_blocks <= len(block_ids), numbers
        self._own_ids = list(block_ids[:num_blocks])
        self.block_ids = block_ids if self.is_decode else self._own_ids
        own = (offered.get("blocks") or IndexRange(0, num_blocks)).common(IndexRange(0, num_blocks))
        self.part = KvPart(own, IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads))
        first_held = offered.get("first_held", layout.first_held_block(self.num_context_tokens))
        self.first_held = first_held if layout.windowed_layers else 0
        self.transcript = offered.get("transcript", b"")
        self.on_caught_up = offered.get("on_caught_up", lambda: None)
        self.ledger = PageLedger(layout.num_layers, num_blocks)
        present = self._in_all_layers(0, offered.get("num_present_blocks", 0)).within(self.part)
        if present.num_pages:
            self.ledger.place(present)
        self.committed_s: float | None = None
        self.first_token: FirstToken | None = None
        self.streams_out = bool(self._own_ids) and self._own_ids[-1] == NO_BLOCK
        self.copy: CopyOut | None = None
        self.committed = False
        self._context = context

    def blocks_ready(self, *, chunk: int, layer: int, first_block: int, num_blocks: int) -> None:
        """Send blocks of the request's table that are complete in this layer. The engine's thread; cheap.

        The context's last block is complete with its last token. A block that is named again is ignored, because its
        bits are the same: members of a group that lost one compute the missing blocks again, and possibly others.
        """
        if num_blocks > 0:
            blocks = Blocks(chunk, layer, first_block, num_blocks)
            context = self._context
            context.store.when_written(lambda: context.call_soon(lambda: self._computed(blocks)))

    def add_loaded(self, first_block: int, num_blocks: int) -> None:
        """Send blocks that were loaded from the offload tier, in all layers. Event loop only."""
        self._computed(self._in_all_layers(first_block, num_blocks).within(self.part))

    def add(self, blocks: Blocks) -> None:
        """Have the copy under way send blocks that are new in the ledger, from any instance. Event loop only."""
        assert self.part.blocks.holds(IndexRange(blocks.first_block, blocks.end)), f"{blocks} of {self.part.blocks}"
        if self.copy is not None:
            self.copy.add(blocks)

    def commit(self, first_token: FirstToken | None) -> None:
        """Note that this source has computed its part. ``first_token`` is given if it drew one. Event loop only.

        From now on decode waits for the copy: its exposed seconds begin.
        """
        self.committed_s = self._context.clock()
        self.first_token = first_token
        if self.copy is not None:
            self.copy.flush()

    def give_back(self, num_blocks: int) -> None:
        """Forget the ids of the first ``num_blocks`` blocks, which are freed: their destinations have acknowledged
        them.
        """
        self._own_ids[:num_blocks] = [NO_BLOCK] * num_blocks

    def hold(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Set the ids of the blocks from ``first_block`` on, for a context that is never here as a whole."""
        self._own_ids[first_block : first_block + len(block_ids)] = block_ids

    def has(self, part: KvPart) -> bool:
        """Whether all pages of a part are computed."""
        return self.ledger.has(self.ledger.everything.within(part))

    @property
    def has_all(self) -> bool:
        """Whether all pages that this source sends are computed."""
        if not self.first_held:
            return self.ledger.num_present == self.part.num_pages
        everything = self.ledger.everything.within(self.part)
        return all(map(self.ledger.has, everything.held(self.layout, self.first_held)))

    @property
    def may_have_landed(self) -> bool:
        """Whether a copy is under way and all KV is computed: the request may decode at the destination."""
        return self.copy is not None and self.committed_s is not None

    # --- of a decode --------------------------------------------------------------------------------------------------

    def advance(self, num_kv_tokens: int) -> None:
        """Note that a decode has ``num_kv_tokens`` computed tokens, and send the new complete blocks.

        Without a copy under way, the next copy sends these blocks. A copy whose destination has no room for the tokens
        fails, and `run` reports the failure.
        """
        if self.has_room_for(num_kv_tokens):
            self._grow(num_kv_tokens // self.layout.block_size)
        elif self.copy is not None:
            self.copy.fail(f"the destination has no room for {num_kv_tokens} tokens")

    def has_room_for(self, num_kv_tokens: int) -> bool:
        """Whether the destination has room for ``num_kv_tokens`` tokens; True without a copy."""
        return self.copy is None or num_kv_tokens <= self.copy.num_tokens_taken

    @property
    def has_caught_up(self) -> bool:
        """Whether the destination took the transcript and all blocks named so far."""
        return self.copy is not None and self.copy.has_caught_up

    def freeze(self, *, num_kv_tokens: int, tail: bytes, next_token: FirstToken) -> None:
        """Send the remaining KV and commit. The source computes nothing more of the request.

        ``tail`` holds the transcript's tokens since the copy began. ``next_token`` was sampled and has no KV yet. The
        event loop's next turn sends everything, if there are buffers.
        """
        copy = self.copy
        assert copy is not None, "no copy is under way"
        assert copy.has_caught_up, "a decode pauses before its copy has caught up"
        assert self.has_room_for(num_kv_tokens), f"{num_kv_tokens} tokens, there is room for {copy.num_tokens_taken}"
        self._grow(num_blocks_for(num_kv_tokens, self.layout.block_size))
        self.num_context_tokens = num_kv_tokens
        copy.tell(tail)
        self.commit(next_token)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _grow(self, num_blocks: int) -> None:
        """Extend the ledger, and send the new blocks: the first ``num_blocks`` blocks are complete in every layer."""
        end = self.part.blocks.stop
        if num_blocks > end:
            self.ledger.grow(num_blocks)
            self.part = self.part._replace(blocks=IndexRange(0, num_blocks))
            for held in self._in_all_layers(end, num_blocks - end).held(self.layout, self.first_held):
                self._computed(held)
            if self.copy is not None:
                self.copy.hold_nothing_back()

    def _computed(self, blocks: Blocks) -> None:
        for new in self.ledger.place(blocks):
            self.add(new)

    def _in_all_layers(self, first_block: int, num_blocks: int) -> Blocks:
        return Blocks(0, 0, first_block, num_blocks, self.layout.num_layers)


class CopyOut:
    """A granted copy, until it has landed or failed. If ``scope`` is cancelled, it ends without an outcome.

    Each destination gets the blocks of its part that the source has. If the source has only a part of the context at
    any time, each destination's range lands separately, as soon as it is computed.
    """

    def __init__(
        self, context: KvContext, source: KvSource, destinations: Sequence[KvDestination], capability: int
    ) -> None:
        self.source = source
        self.request_id, self.epoch, self.key = source.request_id, source.epoch, source.key
        self.capability = capability
        self.destinations = tuple(destinations)
        self.scope = anyio.CancelScope()
        self._about = PieceHeader(
            kind=PieceKind.KV, request_key=self.key, epoch=self.epoch, capability=capability, source=source.source
        )
        self._context = context
        self._writer = context.writer(source.block_ids)
        self._lanes = [
            Lane(
                destination.address,
                self._about._replace(destination=index),
                self._writer,
                layout=source.layout,
                on_taken=self._note,
                on_failed=self.fail,
            )
            for index, destination in enumerate(destinations)
        ]
        self._layout = source.layout
        self._deadline_s = context.config.deadline_s
        self._work = anyio.CancelScope()
        self._failure: str | None = None
        self._unlanded = set(range(len(destinations)))
        self._committed: set[int] = set()
        self._num_told = 0
        self._is_told = False
        self._is_paused = False
        self._is_pausing = False
        self._changed = anyio.Event()
        source.copy, source.committed = self, False
        for blocks in source.ledger.present():
            self.add(blocks)
        self.flush()

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._writer.num_pieces

    # --- called by the source -----------------------------------------------------------------------------------------

    def add(self, blocks: Blocks) -> None:
        """Send computed blocks to the destinations that want them, except pages outside every later token's window."""
        stop = self.source.part.blocks.stop
        for lane, destination in zip(self._lanes, self.destinations, strict=True):
            for wanted in blocks.within(destination.part).held(self._layout, self.source.first_held):
                num_layers = layers_a_step(self._layout, blocks, is_tail=blocks.end == stop)
                lane.put_in_steps(wanted, num_layers, is_tail=wanted.end == stop)
        if self.source.committed_s is not None:
            self.flush()

    def hold_nothing_back(self) -> None:
        """Send layers at once that wait to be joined by more layers of the same blocks."""
        for lane in self._lanes:
            lane.flush()

    def flush(self) -> None:
        """Send the layers that are held back now, and have `run` check its conditions again."""
        self.hold_nothing_back()
        self._note()

    def tell(self, tail: bytes) -> None:
        """Begin to send ``tail``, the last tokens of a decode's transcript. A failure ends the copy.

        Call while `run` is in progress.
        """
        self._tasks.start_soon(self._tell, tail)

    @property
    def num_tokens_taken(self) -> int:
        """Maximum number of tokens that a decode's destination has room for."""
        return self.destinations[0].part.blocks.stop * self._layout.block_size

    @property
    def has_caught_up(self) -> bool:
        return self._is_told and self._lanes[0].is_done and self._failure is None

    # --- called by the departures -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no further piece until `grant_again`. Ignored if paused, or once the source has computed everything.

        `PausedTransfer` is reported when no piece is under way.
        """
        if not self._is_paused and self.source.committed_s is None:
            self._is_paused = self._is_pausing = True
            for lane in self._lanes:
                lane.pause()
            self._note()

    def grant_again(self) -> None:
        self._is_paused = False
        for lane in self._lanes:
            lane.resume()
        self._note()

    def landed(self, destination: int) -> None:
        """Note that a destination has received its whole part. Ignored unless its commit was sent."""
        if destination in self._unlanded & self._committed:
            if self.source.streams_out:
                self._lanes[destination].close()  # the source may free the blocks now
            self._unlanded.discard(destination)
            self._note()

    def close(self) -> None:
        """Close the read window, so that the blocks may be used again, and detach from the source. Idempotent."""
        self._writer.close()
        if self.source.copy is self:
            self.source.copy = None

    def send_again(self, header: PieceHeader) -> str | None:
        """Send pages again that a destination could not use. Return the reason to drop its request, else None."""
        number = header.destination
        if number not in self._unlanded:
            return "range"
        return self._lanes[number].send_again(header, self.source.ledger, self.destinations[number].part)

    def fail(self, reason: str) -> None:
        """Make `run` raise KvTransferError with this reason, unless the copy has landed or failed before."""
        if self._failure is None and self._unlanded:
            self._failure = reason
            self._work.cancel()

    async def run(self) -> SentTransfer:
        """Send everything and wait for the acknowledgements. Raises KvTransferError if the copy fails or misses its
        deadline.
        """
        began_s, landed_s = self._context.clock(), None
        with self._work:
            async with anyio.create_task_group() as self._tasks:
                for lane in self._lanes:
                    self._tasks.start_soon(lane.run)
                self._tasks.start_soon(self._send)
                await self._until(lambda: not self._unlanded)
                landed_s = self._context.clock()
                for lane in self._lanes:
                    lane.close()
        if landed_s is None:
            raise KvTransferError(self._failure or self._why_late())
        assert self.source.committed_s is not None
        return SentTransfer(
            request_id=self.request_id,
            epoch=self.epoch,
            num_bytes=self.num_bytes,
            duration_s=landed_s - began_s,
            exposed_s=landed_s - self.source.committed_s,
            sent_s=self._sent_s,
            carrier=self._writer.carrier_to(self.destinations[0].address),
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _sent_s(self) -> float:
        """Seconds in which pieces were under way; 0 if peers read most of the KV from this cache."""
        was_read = self._writer.num_pushed_bytes < self._writer.num_bytes // 2
        return 0.0 if was_read else sum(lane.sent_s for lane in self._lanes)

    async def _send(self) -> None:
        """Send the transcript of a decode, then commit. Ranges that land separately are committed one by one."""
        if self.source.is_decode:
            await self._tell(self.source.transcript)
            self._is_told = True
            self._note()
        last = range(len(self.destinations))
        if self.source.streams_out:
            for index in last[1:]:
                self._tasks.start_soon(self._land_range, index)
            last = last[:1]
        await self._send_last(last)

    async def _land_range(self, index: int) -> None:
        """Commit a range once it is computed. Fail the copy if the range does not land within the deadline."""
        await self._until(lambda: self.source.has(self.destinations[index].part))
        self._lanes[index].flush()
        with anyio.move_on_after(self._deadline_s):
            await self._commit_until_landed((index,))
            await self._until(lambda: index not in self._unlanded)
            return
        self.fail(f"a range did not land within {self._deadline_s:g} s")

    async def _send_last(self, last: Sequence[int]) -> None:
        """Commit beside the last pieces, so that decode waits for one latency and not for an answer too.

        If no acknowledgement comes for a while although all pieces were taken, the commits are sent again: then the
        receiver knows which pages were lost. The deadline runs from when the whole KV is computed, because the
        computation may be long or preempted. The transport limits the time of each piece.
        """
        await self._until(lambda: self.source.committed_s is not None and not self._is_paused)
        self._work.deadline = anyio.current_time() + (FREEZE_LIMIT_S if self.source.is_decode else self._deadline_s)
        await self._until(lambda: self.source.has_all)
        await self._commit_until_landed(last)

    async def _commit_until_landed(self, indices: Sequence[int]) -> None:
        """Send these destinations their commits, and again to each without an acknowledgement in time."""
        await self._tell_commits(indices)
        await self._until(lambda: all(self._lanes[index].is_done for index in self._unlanded.intersection(indices)))
        with anyio.move_on_after(COMMIT_AGAIN_S):
            await self._until(lambda: self._unlanded.isdisjoint(indices))
            return
        await self._tell_commits([index for index in indices if index in self._unlanded])

    async def _tell_commits(self, indices: Sequence[int]) -> None:
        """Send each destination a commit, which names the part that the source sends to it. Failures end the copy."""
        source, token = self.source, self.source.first_token
        try:
            for index in indices:
                address, part = self.destinations[index]
                header = self._about._replace(
                    kind=PieceKind.COMMIT,
                    destination=index,
                    part=source.part.common(part),
                    chunk=source.first_held,
                    num_context_tokens=source.num_context_tokens,
                    has_token=token is not None,
                    token_id=0 if token is None else token.token_id,
                    token_index=0 if token is None else token.token_index,
                )

                def begins(index: int = index) -> None:
                    self._commits(index)

                await self._writer.tell(address, header, begins=begins, is_notice=True)
        except KvTransferError as error:
            self.fail(str(error))

    def _commits(self, index: int) -> None:
        """Note that a destination is being sent its commit: from now on the request may continue there.

        A decode's first commit sets the time limit for its acknowledgement.
        """
        if self.source.is_decode and not self.source.committed:
            self._work.deadline = anyio.current_time() + LANDED_LIMIT_S
        self._committed.add(index)
        self.source.committed |= index == 0  # only this destination may decode

    async def _tell(self, transcript: bytes) -> None:
        start, self._num_told = self._num_told, self._num_told + len(transcript)
        about = self._about._replace(kind=PieceKind.TRANSCRIPT)
        try:
            await self._writer.send_bytes(self.destinations[0].address, start, transcript, about)
        except KvTransferError as error:
            self.fail(str(error))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note(self) -> None:
        """Wake `_until`. Report a pause that is complete, and call the source's ``on_caught_up`` if due."""
        if self._is_pausing and not any(lane.num_under_way for lane in self._lanes):
            self._is_pausing = False
            self._context.on_outcome(PausedTransfer(request_id=self.request_id, epoch=self.epoch))
        self._changed.set()
        self._changed = anyio.Event()
        if self.has_caught_up and self.source.committed_s is None:
            self.source.on_caught_up()

    def _why_late(self) -> str:
        if not self.source.is_decode:
            return f"the KV did not land within {self._deadline_s:g} s"
        if self.source.committed:
            return f"not acknowledged within {LANDED_LIMIT_S:g} s of the commit"
        return f"its decode was paused for {FREEZE_LIMIT_S:g} s"
