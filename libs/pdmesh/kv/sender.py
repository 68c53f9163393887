"""One request's KV on its way out: a source's side of its hand-over.

What is here of it is in the ledger. A transfer pushes it, layer by layer as it is computed. If its receiver fails, all
of it is here for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.kv.lane import PIECES_IN_FLIGHT
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outbox import Outgoing
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import request_key
from pdmesh.kv.receiver import NO_BLOCK, FirstToken
from pdmesh.kv.store import KvStore
from pdmesh.kv.transfer import GrantedTransfer, KvDestination
from pdmesh.model import Epoch, IndexRange, KvPart, RequestId, num_blocks_for

#: What is computed of a chunk is sent in so many steps at least, as far as a piece holds more than a layer of it.
STEPS_A_CHUNK = 4

#: Decode waits for the last of a context, which is sent in smaller and smaller steps, as long as they are as large.
TAIL_BYTES = 4 << 20

#: The last layers are cut into as many pieces as are under way at once, so that they are copied and checked beside
#: each other, unless they became smaller than this.
NUM_LAST_LAYERS, LAST_PIECE_BYTES = 2, 2 << 20

#: A piece of which even the header was damaged is lost; its receiver is told so late that all has been taken.
COMMIT_AGAIN_S = 0.25

#: Runs a callback on the event loop soon, from any thread, without waiting for it.
CallSoon = Callable[[Callable[[], object]], object]


class KvSender:
    """What a source has of a request's KV to send; made by `pdmesh.kv.departures.KvDepartures.offer`."""

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        block_ids: Sequence[int],
        num_context_tokens: int,
        source: int,
        blocks: IndexRange | None,
        num_present_blocks: int = 0,
        store: KvStore,
        call_soon: CallSoon,
        clock: Callable[[], float],
    ) -> None:
        layout = store.layout
        num_blocks = num_blocks_for(num_context_tokens, layout.block_size)
        assert 0 < num_blocks <= len(block_ids), f"{num_context_tokens} tokens in {len(block_ids)} blocks"
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.source = source
        self.num_context_tokens = num_context_tokens
        self.block_ids = list(block_ids[:num_blocks])
        own = IndexRange(0, num_blocks) if blocks is None else blocks.common(IndexRange(0, num_blocks))
        self.part = KvPart(own, IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads))
        self.layout = layout
        self.first_held = layout.first_held_block(num_context_tokens)  # in layers with a window
        self.ledger = PageLedger(layout.num_layers, num_blocks)
        present = Blocks(0, 0, 0, num_present_blocks, layout.num_layers).within(self.part)
        if present.num_pages:
            self.ledger.place(present)
        self.committed_s: float | None = None  # when all was computed that this source computes
        self.first_token: FirstToken | None = None  # if it drew it
        self.gives_back = self.block_ids[-1] == NO_BLOCK  # there is room for a part of it at once
        self.push: KvPush | None = None  # under way
        self._store = store
        self._call_soon = call_soon
        self._clock = clock

    def blocks_ready(self, *, chunk: int, layer: int, first_block: int, num_blocks: int) -> None:
        """Blocks ``first_block`` … of the request's block table are complete in this layer. The engine's thread; cheap.

        The context's last block when its last token was computed. One that is named again has the same bits, and is
        ignored: members of a group that lost one compute what they miss, and perhaps more.
        """
        if num_blocks > 0:
            blocks = Blocks(chunk, layer, first_block, num_blocks)
            self._store.when_written(lambda: self._call_soon(lambda: self._computed(blocks)))

    def add_loaded(self, first_block: int, num_blocks: int) -> None:
        """Send blocks that came from the offload tier, in all layers. Event loop only."""
        self._computed(Blocks(0, 0, first_block, num_blocks, self.layout.num_layers).within(self.part))

    def add(self, blocks: Blocks) -> None:
        """Send blocks that are new in the ledger, whoever computed them. Event loop only."""
        assert self.part.blocks.holds(IndexRange(blocks.first_block, blocks.end)), f"{blocks} of {self.part.blocks}"
        if self.push is not None:
            self.push.add(blocks)

    def commit(self, first_token: FirstToken | None) -> None:
        """All that this source computes is computed; ``first_token`` if it drew it. Event loop only.

        From here on, the transfer is what decode waits for: its exposed seconds begin.
        """
        self.committed_s = self._clock()
        self.first_token = first_token
        if self.push is not None:
            self.push.flush()

    def give_back(self, num_blocks: int) -> None:
        """Note that the first blocks are here no more: their destinations have acknowledged them."""
        self.block_ids[:num_blocks] = [NO_BLOCK] * num_blocks

    def hold(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Note which blocks hold a context from ``first_block`` on, of which only a part is here at once."""
        self.block_ids[first_block : first_block + len(block_ids)] = block_ids

    def has(self, part: KvPart) -> bool:
        """Whether all of a part was computed."""
        return self.ledger.has(self.ledger.everything.within(part))

    @property
    def may_have_landed(self) -> bool:
        """Whether its receiver may have everything, and the request decode there."""
        return self.push is not None and self.committed_s is not None

    @property
    def has_all(self) -> bool:
        """Whether all was computed that this source sends."""
        if not self.first_held:
            return self.ledger.num_present == self.part.num_pages
        everything = self.ledger.everything.within(self.part)
        return all(map(self.ledger.has, everything.held(self.layout, self.first_held)))

    def _computed(self, blocks: Blocks) -> None:
        for new in self.ledger.place(blocks):
            self.add(new)


class KvPush(GrantedTransfer):
    """A granted transfer. Each destination gets what it and ``sender`` have in common.

    If only a part of the context is here at once, each range of it lands by itself, as soon as it is computed.
    """

    def __init__(
        self,
        sender: KvSender,
        destinations: Sequence[KvDestination],
        capability: int,
        *,
        writer: PieceWriter,
        deadline_s: float,
        clock: Callable[[], float],
        on_paused: Callable[[KvPush], None],
    ) -> None:
        super().__init__(
            sender.request_id,
            sender.epoch,
            capability=capability,
            destinations=destinations,
            ledger=sender.ledger,
            layout=sender.layout,
            writer=writer,
            clock=clock,
            source=sender.source,
        )
        self.sender = sender
        self._deadline_s = deadline_s
        self._on_paused = on_paused
        self._is_paused = False
        self._is_pausing = False  # asked to stop, with pieces under way
        sender.push = self
        for blocks in sender.ledger.present():
            self.add(blocks)
        self.flush()

    # --- called by the sender -----------------------------------------------------------------------------------------

    def add(self, blocks: Blocks) -> None:
        """Send blocks that are here now, but for those that nobody will see."""
        for lane, destination in zip(self._lanes, self.destinations, strict=True):
            for wanted in blocks.within(destination.part).held(self._layout, self.sender.first_held):
                for some in wanted.cut(self._pages_a_piece(wanted, destination.address)):
                    lane.put(Outgoing(some), self._layers_a_piece(blocks))
        if self.sender.committed_s is not None:
            self.flush()

    def flush(self) -> None:
        """Hold nothing back."""
        for lane in self._lanes:
            lane.flush()
        self._note()

    # --- called by the departures -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no piece until granted again. Ignored if it is paused, or has all it waits for."""
        if not self._is_paused and self.sender.committed_s is None:
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
        if self.sender.gives_back and destination in self._unlanded:
            self._lanes[destination].close()  # what went there may be here no longer
        super().landed(destination)

    def close(self) -> None:
        super().close()
        if self.sender.push is self:
            self.sender.push = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pages_a_piece(self, blocks: Blocks, address: bytes) -> int:
        """Return how many pages of these blocks go together at most, if so many fit into a piece."""
        is_last = (
            blocks.layer >= self._layout.num_layers - NUM_LAST_LAYERS and blocks.end == self.sender.part.blocks.stop
        )
        if not is_last or self._writer.may_read(address):
            return blocks.num_pages
        return max(ceil(blocks.num_pages / PIECES_IN_FLIGHT), LAST_PIECE_BYTES // self._layout.block_bytes, 1)

    def _layers_a_piece(self, blocks: Blocks) -> int:
        num_layers = self._layout.num_layers
        num_wanted = ceil(num_layers / STEPS_A_CHUNK)
        if blocks.end == self.sender.part.blocks.stop:
            num_tail_layers = ceil(TAIL_BYTES / (blocks.num_blocks * self._layout.block_bytes))
            num_wanted = min(num_wanted, max(num_layers - blocks.end_layer, num_tail_layers))
        return num_wanted

    def _note(self) -> None:
        if self._is_pausing and not any(lane.num_under_way for lane in self._lanes):
            self._is_pausing = False
            self._on_paused(self)
        super()._note()

    async def _send(self) -> None:
        """Let the lanes send, and commit what they sent: of ranges that land by themselves the last one here."""
        last = range(len(self.destinations))
        if self.sender.gives_back:
            for index in last[1:]:
                self._tasks.start_soon(self._land_range, index)
            last = last[:1]
        await self._send_last(last)

    async def _land_range(self, index: int) -> None:
        """Commit a range as soon as it is computed. The request goes on here only if it lands, so that has a limit."""
        await self._until(lambda: self.sender.has(self.destinations[index].part))
        self._lanes[index].flush()
        with anyio.move_on_after(self._deadline_s):
            await self._commit_until_landed((index,))
            await self._until(lambda: index not in self._unlanded)
            return
        self.fail(self._why_late())

    async def _send_last(self, last: Sequence[int]) -> None:
        """The commits leave beside the last pieces: decode waits for one way, not for an answer too.

        They leave again if nothing has landed for a while although all was taken: the receiver sees what was lost.
        The deadline runs once the whole KV is there: until then it waits for the computation, which may be long or
        preempted. A piece under way has the transport's no-progress limit.
        """
        await self._until(lambda: self.sender.committed_s is not None and not self._is_paused)
        self._work.deadline = anyio.current_time() + self._deadline_s
        await self._until(lambda: self.sender.has_all)
        await self._commit_until_landed(last)

    async def _commit_until_landed(self, indices: Sequence[int]) -> None:
        """Tell these destinations that all was sent; once more if that was not enough."""
        await self._tell_commits(indices)
        await self._until(lambda: all(self._lanes[index].is_done for index in self._unlanded.intersection(indices)))
        with anyio.move_on_after(COMMIT_AGAIN_S):
            await self._until(lambda: self._unlanded.isdisjoint(indices))
            return
        await self._tell_commits([index for index in indices if index in self._unlanded])

    async def _tell_commits(self, indices: Sequence[int]) -> None:
        try:
            for index in indices:
                address, part = self.destinations[index]
                sender, common = self.sender, self.sender.part.common(part)
                header = self._commit(common, sender.num_context_tokens, sender.first_token)
                await self._writer.tell(address, header._replace(destination=index), is_notice=True)
        except KvTransferError as error:
            self.fail(str(error))

    def _exposed_since_s(self) -> float:
        assert self.sender.committed_s is not None
        return self.sender.committed_s

    def _why_late(self) -> str:
        return f"the KV did not land within {self._deadline_s:g} s"
