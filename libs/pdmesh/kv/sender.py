"""One request's KV on its way out: a source's side of its transfers.

What is computed is noted here once. A transfer pushes it, layer by layer as it is computed (`pdmesh.kv.push.KvPush`).
If its receiver fails, all of it is here for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import anyio

from pdmesh.kv.outgoing import Blocks, marked, runs
from pdmesh.kv.piece import request_key
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch, IndexRange, KvPart, RequestId, num_blocks_for

#: What is computed of a chunk is sent in so many steps at least, as far as a piece holds more than a layer of it.
STEPS_A_CHUNK = 4

#: Decode waits for the last of a context, which is sent in smaller and smaller steps, as long as they are as large.
TAIL_BYTES = 4 << 20

#: Of pages that were named, or not: the others.
_NOT_YET = marked(0)

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
        store: KvStore,
        pages_a_piece: int,
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
        self.ready: list[Blocks] = []  # in the order in which they were computed
        self.committed_s: float | None = None  # when all was computed that this source computes
        self.first_token: FirstToken | None = None  # if it drew it
        self.pages_a_piece = pages_a_piece  # so many wait for each other at most; a transfer sets it as it sends
        self._store = store
        self._call_soon = call_soon
        self._clock = clock
        self._num_awaited = self.part.num_pages  # not yet computed
        self._named = [bytearray(num_blocks) for _ in range(layout.num_layers)]  # pages that are in ``ready``
        self._held: dict[int, Blocks] = {}  # layers of chunks that more will join, by their first block
        self._news = anyio.Event()

    # --- called by the worker runtime ---------------------------------------------------------------------------------

    def blocks_ready(self, *, chunk: int, layer: int, first_block: int, num_blocks: int) -> None:
        """Blocks ``first_block`` … of the request's block table are complete in this layer. The engine's thread; cheap.

        The context's last block when its last token was computed. One that is named again has the same bits, and is
        ignored: members of a group that lost one compute what they miss, and perhaps more.
        """
        if num_blocks > 0:
            blocks = Blocks(chunk, layer, first_block, num_blocks)
            self._store.when_written(lambda: self._call_soon(lambda: self._gather(blocks)))

    def blocks_landed(self, blocks: Blocks) -> None:
        """The same of blocks that another instance computed, and that are in place here now. Event loop only."""
        self._gather(blocks)

    def commit(self, first_token: FirstToken | None) -> None:
        """All that this source computes is computed; ``first_token`` if it drew it. Event loop only.

        From here on, the transfer is what decode waits for: its exposed seconds begin.
        """
        self.committed_s = self._clock()
        self.first_token = first_token
        while self._held:  # of chunks that ended before their last layer, and that were computed again
            self._add_ready(self._held.popitem()[1])
        self._tell()

    # --- called by its pushes -----------------------------------------------------------------------------------------

    @property
    def has_all(self) -> bool:
        """Whether `ready` is complete."""
        return self._num_awaited == 0

    def has(self, part: KvPart) -> bool:
        """Whether these pages are this source's to send, and computed."""
        return (
            self.part.blocks.holds(part.blocks)
            and self.part.layers.holds(part.layers)
            and self.part.heads == part.heads
            and all(all(named[slice(*part.blocks)]) for named in self._named[slice(*part.layers)])
        )

    async def news(self) -> None:
        """Wait until there is more in `ready`, or all is computed."""
        await self._news.wait()

    async def committed(self) -> float:
        """Wait until all is computed that this source computes; when that was."""
        while self.committed_s is None:
            await self.news()
        return self.committed_s

    # --- inside -------------------------------------------------------------------------------------------------------

    def _gather(self, blocks: Blocks) -> None:
        """Join blocks with those of the next layers as long as they fit into one piece."""
        held = self._held.pop(blocks.first_block, None)
        if held is not None and blocks == held._replace(layer=held.end_layer, num_layers=blocks.num_layers):
            blocks = held._replace(num_layers=held.num_layers + blocks.num_layers)
        elif held is not None:
            self._add_ready(held)
        layout = self._store.layout
        num_left = layout.num_layers - blocks.end_layer
        is_tail = blocks.end == self.part.blocks.stop and blocks.num_pages * layout.block_bytes >= TAIL_BYTES
        if (
            blocks.num_layers * STEPS_A_CHUNK < layout.num_layers
            and num_left > (blocks.num_layers if is_tail else 0)
            and blocks.num_pages + blocks.num_blocks <= self.pages_a_piece
        ):
            self._held[blocks.first_block] = blocks
        else:
            self._add_ready(blocks)

    def _add_ready(self, blocks: Blocks) -> None:
        assert blocks.end_layer <= self._store.layout.num_layers, f"layer {blocks.layer}"
        own = self.part.blocks
        assert own.holds(IndexRange(blocks.first_block, blocks.end)), f"{blocks} of {own}"
        pages = slice(blocks.first_block, blocks.end)
        layers = self._named[blocks.layer : blocks.end_layer]
        if any(any(named[pages]) for named in layers):
            for new in self._unnamed(blocks):
                self._add_ready(new)
            return
        for named in layers:
            named[pages] = b"\1" * blocks.num_blocks
        self._num_awaited -= blocks.num_pages
        self.ready.append(blocks)
        self._tell()

    def _unnamed(self, blocks: Blocks) -> Iterator[Blocks]:
        for layer in range(blocks.layer, blocks.end_layer):
            named = self._named[layer][blocks.first_block : blocks.end]
            for first, count in runs(named.translate(_NOT_YET)):
                yield Blocks(blocks.chunk, layer, blocks.first_block + first, count)

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
