"""Incoming KV of requests: which pieces are accepted, and when all of them have landed. Part of `pdmesh.kv.mover`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict, Unpack

import anyio.lowlevel

from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.intake import PageIntake
from pdmesh.kv.lane import Lane
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.kv.pages import NO_BLOCK, Blocks
from pdmesh.kv.piece import FirstToken, PieceHeader, PieceKind, request_key
from pdmesh.kv.transcript import is_complete
from pdmesh.kv_layout import IndexRange, KvPart, num_blocks_for
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece

#: Maximum bytes of a transcript before its tokens. They hold the sampling parameters and the gateway.
MAX_TRANSCRIPT_HEAD_BYTES = 1 << 20


class Expected(TypedDict):
    """Expected KV of a request, and the blocks for it.

    ``num_context_tokens`` is None for a decode: the commit names the number, which the blocks bound. For a decode,
    ``hold`` reserves room for a range of blocks in layers with a window; False: there is no room.

    This instance is destination number ``destination``. The first ``num_present_blocks`` blocks are here already, and
    no page is taken into them. For a spread context, only ``blocks`` come, into ``block_ids``. With ``draws``, the copy
    has landed only when a source has also sent the next token.
    """

    capability: int
    block_ids: Sequence[int]
    num_context_tokens: int | None
    source_addresses: tuple[bytes, ...]
    destination: NotRequired[int]
    num_present_blocks: NotRequired[int]
    blocks: NotRequired[IndexRange | None]
    draws: NotRequired[bool]
    hold: NotRequired[Callable[[IndexRange], bool]]


class CopyIn:
    """A destination's side of a copy: its ledger, and a lane to each source for requests to send pages again.

    Every source ends with a commit that names its part; all parts together must cover all pages. A commit may overtake
    the last pieces, also pieces of a transcript. A second commit of a source means that all its pieces were taken:
    pages that are neither here nor requested again were lost.

    ``has_landed`` is set when everything is in place, before the outcome is reported.
    """

    def __init__(
        self,
        context: KvContext,
        request_id: RequestId,
        epoch: Epoch,
        *,
        on_placed: Callable[[CopyIn], object],
        on_failed: Callable[[CopyIn, str], object],
        **expected: Unpack[Expected],
    ) -> None:
        layout, writer = context.store.layout, context.writer()
        block_ids, num_context_tokens = expected["block_ids"], expected["num_context_tokens"]
        num_present_blocks, blocks = expected.get("num_present_blocks", 0), expected.get("blocks")
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
        self.capability = expected["capability"]
        self.destination = expected.get("destination", 0)
        self.first_piece_s: float | None = None
        self.first_token: FirstToken | None = None
        self.num_bytes = 0
        self.transcript = bytearray()
        self.ledger = PageLedger(layout.num_layers, num_blocks)
        self.block_ids = list(block_ids[:num_blocks])
        self.has_landed = False
        self.is_over = False
        self._on_placed, self._on_failed = on_placed, on_failed
        self._is_decode = num_context_tokens is None
        self._draws = expected.get("draws", True)
        self._num_context_tokens = num_context_tokens
        self._layout = layout
        self._hold = expected.get("hold")
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
                    capability=self.capability,
                    source=source,
                    destination=self.destination,
                ),
                writer,
                layout=layout,
                num_pages=self._part.num_pages,
                max_in_flight=1,
                start=context.tasks.start_soon,
            )
            for source, address in enumerate(expected["source_addresses"])
        ]
        self._committed: dict[int, KvPart] = {}
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
        """Whether there is room for a part in layers with a window. If not, fail the copy.

        Without ``hold`` (a hand-over) the room was reserved in advance.
        """
        if self._hold is None or not any(number in self._layout.windowed_layers for number in range(*part.layers)):
            return True
        has_room = self._hold(part.blocks)
        if not has_room:
            self.give_up("there are no free frames for its layers with a window")
        return has_room

    def _discard_before(self, first_block: int) -> None:
        """Expect no pages before this block in layers with a window."""
        first, end = self._part.blocks
        num_blocks = max(0, min(first_block, end) - first)
        for layer in self._layout.windowed_layers:
            self.ledger.discard(Blocks(0, layer, first, num_blocks))

    def take_transcript(self, header: PieceHeader, payload: memoryview) -> str | None:
        """Append the next bytes of a decode's transcript. Return the reason to drop them, else None."""
        start, stop = header.part.blocks
        most_bytes = self._part.blocks.stop * self._layout.block_size * 4 + MAX_TRANSCRIPT_HEAD_BYTES
        if not self._is_decode or stop - start != len(payload) or stop > most_bytes or start > len(self.transcript):
            return "range"
        if start < len(self.transcript):
            return "duplicate"
        self.transcript += payload
        return None

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        self.ledger.place(blocks)
        self.num_bytes += blocks.num_bytes(self._layout)
        self._on_placed(self)

    def give_up(self, reason: str) -> None:
        self._on_failed(self, reason)

    def commit(self, header: PieceHeader) -> str | None:
        """Record a source's commit. Return the reason if it shows that the copy has failed, else None."""
        if header.source >= len(self.lanes) or header.destination != self.destination:
            return f"a commit of source {header.source} for destination {header.destination}"
        if self._num_context_tokens is None and (reason := self._end_move(header)):
            return reason
        if header.num_context_tokens != self._num_context_tokens:
            return f"the sender moved {header.num_context_tokens} tokens instead of {self._num_context_tokens}"
        if header.source in self._committed:
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
        """Reduce a decode's expected pages to the part that its commit names.

        Return why this is impossible, else None.
        """
        num_tokens = header.num_context_tokens
        num_blocks = num_blocks_for(num_tokens, self._layout.block_size)
        first, end = self._part.blocks
        part = self._part._replace(blocks=IndexRange(first, num_blocks))
        if not first < num_blocks <= end or header.part != part:
            return f"a commit of {num_tokens} tokens in {header.part}"
        if header.chunk > max(first, self._layout.first_seen_block(num_tokens)):
            return f"{num_tokens} tokens arrived without the window's KV before block {header.chunk}"
        beyond = self.ledger.everything._replace(first_block=num_blocks, num_blocks=end - num_blocks)
        if self.ledger.num_unclaimed(beyond) != beyond.num_pages:
            return "more blocks arrived than the commit names"
        self._part, self._num_context_tokens = part, num_tokens
        self._discard_before(header.chunk)
        return None

    @property
    def complete(self) -> bool:
        return (
            self._all_committed
            and self.ledger.num_present + self._num_gone == self._part.num_pages
            and (not self._is_decode or self._has_transcript)
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


class KvArrivals:
    """The copies that this instance expects. Event loop only."""

    def __init__(self, context: KvContext, pages: PageIntake) -> None:
        self._context = context
        self.pages = pages
        self._copies: dict[bytes, CopyIn] = {}

    def __len__(self) -> int:
        return len(self._copies)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def expect(self, request_id: RequestId, epoch: Epoch, **expected: Unpack[Expected]) -> None:
        """Receive a request's KV into the first of its blocks. The rest is room for its output.

        An earlier copy of the request is cancelled. The sources are admitted.
        """
        context = self._context
        copy = CopyIn(context, request_id, epoch, on_placed=self._check_landed, on_failed=self._give_up, **expected)
        if (older := self._copies.get(copy.key)) is not None:
            self._forget(older)
        self._copies[copy.key] = copy
        for address in expected["source_addresses"]:
            context.admit(address)

    # --- for the mover ------------------------------------------------------------------------------------------------

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop expecting copies of this epoch and older ones, without an outcome. Idempotent."""
        key = request_key(request_id)
        copy = self._copies.get(key)
        if copy is not None and copy.epoch <= epoch:
            self._forget(copy)

    def take_abort(self, header: PieceHeader) -> bool:
        """Fail the copy that a peer has aborted. Return False if no such copy is expected here."""
        copy = self._copies.get(header.request_key)
        if copy is None or mismatch(copy, header) is not None:
            return False
        self._give_up(copy, "the sender cancelled the transfer", tell=False)
        return True

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Handle a piece of KV, a peer read, a piece of a transcript, or a commit. Count any other piece as dropped.

        Dropped, too, is a piece of an unknown copy, or one that does not match its copy.
        """
        context, copy = self._context, self._copies.get(header.request_key)
        if copy is None:
            context.drop(piece, "unknown")
            return
        if reason := mismatch(copy, header):
            context.drop(piece, reason)
            return
        if copy.first_piece_s is None:
            copy.first_piece_s = context.clock()
        if header.kind is PieceKind.COMMIT:
            piece.release()
            if reason := copy.commit(header):
                self._give_up(copy, reason)
            else:
                self._check_landed(copy)
        elif header.kind is PieceKind.TRANSCRIPT:
            self._take_transcript(copy, header, piece)
        elif header.kind in (PieceKind.KV, PieceKind.PEER_READ):
            self.pages.take(copy, header, piece)
        else:
            context.drop(piece, "kind")

    def check_integrity(self) -> None:
        for copy in self._copies.values():
            copy.ledger.check_integrity()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_transcript(self, copy: CopyIn, header: PieceHeader, piece: ReceivedPiece) -> None:
        if not piece.load() or not self._context.key.opens_payload(piece.payload, header.check):
            self._context.drop(piece, "checksum")
            self._give_up(copy, "a piece of its transcript arrived damaged")
        elif reason := copy.take_transcript(header, piece.payload):
            self._context.drop(piece, reason)
        else:
            piece.release()
            self._check_landed(copy)

    def _check_landed(self, copy: CopyIn) -> None:
        if copy.complete and not copy.is_over and not copy.has_landed:
            copy.has_landed = True
            self._context.tasks.start_soon(self._land, copy)

    async def _land(self, copy: CopyIn) -> None:
        """Notify the sources, then report the outcome.

        The notices go first because the instance's next step holds the interpreter for longer than sending takes.
        """
        self._context.tasks.start_soon(self._tell_sources, PieceKind.LANDED, copy)
        await anyio.lowlevel.checkpoint()
        if copy.is_over:
            return  # cancelled
        token = copy.first_token
        assert copy.first_piece_s is not None
        self._forget(copy)
        self._context.on_outcome(
            LandedTransfer(
                request_id=copy.request_id,
                epoch=copy.epoch,
                token_id=None if token is None else token.token_id,
                token_index=0 if token is None else token.token_index,
                num_bytes=copy.num_bytes,
                duration_s=self._context.clock() - copy.first_piece_s,
                transcript=bytes(copy.transcript),
            )
        )

    def _give_up(self, copy: CopyIn, reason: str, *, tell: bool = True) -> None:
        if copy.is_over or copy.has_landed:
            return
        self._forget(copy)
        if tell:
            self._context.tasks.start_soon(self._tell_sources, PieceKind.ABORT, copy)
        self._context.failed(copy, reason, sending=False)

    def _forget(self, copy: CopyIn) -> None:
        del self._copies[copy.key]
        copy.is_over = True
        for lane in copy.lanes:
            lane.close()

    async def _tell_sources(self, kind: PieceKind, copy: CopyIn) -> None:
        for lane in copy.lanes:
            await self._context.tell(kind, copy, lane.address, destination=copy.destination)
