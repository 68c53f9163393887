"""One request's KV on its way in: which pieces may land where, and when all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdmesh.kv.lane import Lane, StartTask
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.transcript import is_complete
from pdmesh.model import Epoch, IndexRange, KvLayout, KvPart, RequestId, num_blocks_for

#: Of a move's transcript, beside its tokens: how they are drawn, and for whom.
MAX_TRANSCRIPT_HEAD_BYTES = 1 << 20


#: In a table, of a context's blocks that are held elsewhere.
NO_BLOCK = -1


class FirstToken(NamedTuple):
    """What a COMMIT brought."""

    token_id: int
    token_index: int


class KvReceiver:
    """A destination's side of a transfer: its ledger, and a lane to each source to ask for pages again.

    `pdmesh.kv.arrivals.KvArrivals` does the work. Every source ends with a commit that says what it sends; together
    they must send all pages. A commit may overtake the last pieces, and those of a move's transcript. One that comes
    again says that all were taken: what is neither here nor to come again then was lost.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        num_context_tokens: int | None,
        source_addresses: tuple[bytes, ...],
        destination: int,
        num_present_blocks: int = 0,
        blocks: IndexRange | None = None,
        draws: bool = True,
        layout: KvLayout,
        hold: Callable[[IndexRange], bool] | None = None,
        writer: PieceWriter,
        on_placed: Callable[[KvReceiver], object],
        on_failed: Callable[[KvReceiver, str], object],
        start: StartTask,
    ) -> None:
        """``num_context_tokens`` is None for a move: as many as the blocks hold at most, which the commit tells.

        Of a move, ``hold`` is asked for room for blocks that come in layers with a window; False: there is none.

        A request that ``draws`` needs a token to go on from. Of a context that is spread only ``blocks`` come here, and
        ``block_ids`` are theirs.
        """
        if blocks is not None:
            block_ids = [*[NO_BLOCK] * blocks.start, *block_ids]
            num_present_blocks = blocks.start
        most_tokens = len(block_ids) * layout.block_size
        num_blocks = num_blocks_for(
            most_tokens if num_context_tokens is None else num_context_tokens, layout.block_size
        )
        if blocks is not None:
            num_blocks = min(num_blocks, blocks.stop)
        assert 0 < num_blocks <= len(block_ids), f"{num_context_tokens} tokens in {len(block_ids)} blocks"
        assert 0 <= num_present_blocks < num_blocks, f"{num_present_blocks} of {num_blocks} blocks are there"
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.capability = capability
        self.destination = destination
        self.first_piece_s: float | None = None
        self.first_token: FirstToken | None = None
        self.num_bytes = 0
        self.transcript = bytearray()
        self.ledger = PageLedger(layout.num_layers, num_blocks)
        self.block_ids = list(block_ids[:num_blocks])
        self.has_landed = False  # everything is in place, whoever has heard of it
        self.is_over = False
        self._on_placed, self._on_failed = on_placed, on_failed
        self._is_move = num_context_tokens is None
        self._draws = draws
        self._num_context_tokens = num_context_tokens
        self._layout = layout
        self._hold = hold
        self._part = KvPart(
            IndexRange(num_present_blocks, num_blocks),
            IndexRange(0, layout.num_layers),
            IndexRange(0, layout.num_kv_heads),
        )
        self.lanes = [
            Lane(
                address,
                PieceHeader(
                    kind=PieceKind.AGAIN,
                    request_key=self.key,
                    epoch=epoch,
                    capability=capability,
                    source=source,
                    destination=destination,
                ),
                writer,
                num_layers=layout.num_layers,
                num_pages=self._part.num_pages,
                max_in_flight=1,  # a source that takes nothing holds one buffer here
                start=start,
            )
            for source, address in enumerate(source_addresses)
        ]
        self._committed: dict[int, KvPart] = {}  # by source
        if num_context_tokens is not None:
            self._discard_before(layout.first_held_block(num_context_tokens))

    def lane_from(self, source: int) -> Lane | None:
        return self.lanes[source] if source < len(self.lanes) else None

    def expects(self, header: PieceHeader) -> bool:
        return (
            header.destination == self.destination
            and header.part.heads == self._part.heads
            and self._part.layers.holds(header.part.layers)
            and self._part.blocks.holds(header.part.blocks)
            and self._has_room_for(header.part)
        )

    def _has_room_for(self, part: KvPart) -> bool:
        """Whether there is room for a part in layers with a window. A hand-over's is known before, and there."""
        if self._hold is None or not any(number in self._layout.windowed_layers for number in range(*part.layers)):
            return True
        has_room = self._hold(part.blocks)
        if not has_room:
            self.give_up("there is no room for it in layers with a window")
        return has_room

    def _discard_before(self, first_block: int) -> None:
        """Expect no blocks before this one in layers with a window."""
        first, end = self._part.blocks
        num_blocks = max(0, min(first_block, end) - first)
        for layer in self._layout.windowed_layers:
            self.ledger.discard(Blocks(0, layer, first, num_blocks))

    def take_transcript(self, header: PieceHeader, payload: memoryview) -> str | None:
        """Take the next bytes of a move's transcript, or say why they must be dropped."""
        start, stop = header.part.blocks
        most_bytes = self._part.blocks.stop * self._layout.block_size * 4 + MAX_TRANSCRIPT_HEAD_BYTES
        if not self._is_move or stop - start != len(payload) or stop > most_bytes or start > len(self.transcript):
            return "range"
        if start < len(self.transcript):
            return "duplicate"
        self.transcript += payload
        return None

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        self.ledger.place(blocks)
        self.num_bytes += blocks.num_pages * self._layout.block_bytes
        self._on_placed(self)

    def give_up(self, reason: str) -> None:
        self._on_failed(self, reason)

    def commit(self, header: PieceHeader) -> str | None:
        """Take a source's commit, or say why the transfer has failed."""
        if header.source >= len(self.lanes) or header.destination != self.destination:
            return f"a commit of source {header.source} for destination {header.destination}"
        if self._num_context_tokens is None and (reason := self._end_move(header)):
            return reason
        if header.num_context_tokens != self._num_context_tokens:
            return f"the sender moved {header.num_context_tokens} tokens, {self._num_context_tokens} were expected"
        if header.source in self._committed and not self._is_move:
            num_gone = self.ledger.num_gone(self.ledger.everything.within(header.part))
            num_missing = header.part.num_pages - num_gone - self.ledger.num_pages_of(header.source)
            if num_missing:
                return f"{num_missing} blocks of source {header.source} are missing"
        if header.has_token:
            self.first_token = FirstToken(header.token_id, header.token_index)
        self._committed[header.source] = header.part
        if not self._all_committed:
            return None
        num_committed = sum(part.common(self._part).num_pages for part in self._committed.values())
        if num_committed < self._part.num_pages:
            return f"{self._part.num_pages - num_committed} blocks are missing"
        if self._draws and self.first_token is None:
            return "no source drew the first token"
        return None

    def _end_move(self, header: PieceHeader) -> str | None:
        """Expect no more than the commit names. None, or why it cannot be."""
        num_tokens = header.num_context_tokens
        num_blocks = num_blocks_for(num_tokens, self._layout.block_size)
        first, end = self._part.blocks
        part = self._part._replace(blocks=IndexRange(first, num_blocks))
        if not first < num_blocks <= end or header.part != part:
            return f"a commit of {num_tokens} tokens in {header.part}"
        if header.chunk > max(first, self._layout.first_seen_block(num_tokens)):
            return f"{num_tokens} tokens came without what is seen from block {header.chunk} back"
        beyond = self.ledger.everything._replace(first_block=num_blocks, num_blocks=end - num_blocks)
        if self.ledger.num_unclaimed(beyond) != beyond.num_pages:
            return "more blocks came than the commit names"
        self._part, self._num_context_tokens = part, num_tokens
        self._discard_before(header.chunk)
        return None

    @property
    def complete(self) -> bool:
        return (
            self._all_committed
            and self.ledger.num_present + self._num_gone == self._part.num_pages
            and (not self._is_move or self._has_transcript)
        )

    @property
    def _all_committed(self) -> bool:
        return len(self._committed) == len(self.lanes)

    @property
    def _num_gone(self) -> int:
        return self.ledger.num_gone(self.ledger.everything.within(self._part)) if self._layout.window else 0

    @property
    def _has_transcript(self) -> bool:
        return self._num_context_tokens is not None and is_complete(self.transcript, self._num_context_tokens)
