"""A running decode's KV on its way out: the request decodes on while full blocks are sent, and pauses for the rest.

The rest and the commit leave at once, without waiting for each other: the stream pauses for as long as one way takes.
See `docs/architecture/moves.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outbox import Outgoing
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.transfer import GrantedTransfer, KvDestination
from pdmesh.model import Epoch, IndexRange, KvLayout, KvPart, RequestId, num_blocks_for

#: A request that stands still for so long without a buffer for its commit goes on where it is.
FREEZE_LIMIT_S = 0.25

#: For the acknowledgement of a commit. Then the core asks the target, which answers for itself.
LANDED_LIMIT_S = 2.0


class MoveSender(GrantedTransfer):
    """The source's side of a move.

    Call ``advance`` after each step to name what has become complete; once ``has_caught_up``, call ``freeze`` to end
    the move with the last of it. Until ``committed``, the owner of the request may go on with it as if it did not move.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        writer: PieceWriter,
        destination: KvDestination,
        capability: int,
        transcript: bytes,
        layout: KvLayout,
        first_held: int = 0,
        clock: Callable[[], float],
        on_caught_up: Callable[[], None],
    ) -> None:
        """In layers with a window blocks before ``first_held`` are not there; it holds all others until it has moved.

        ``on_caught_up`` is called whenever everything that was named has been sent."""
        super().__init__(
            request_id,
            epoch,
            capability=capability,
            destinations=(destination,),
            ledger=PageLedger(layout.num_layers, 0),
            layout=layout,
            writer=writer,
            clock=clock,
        )
        self.committed = False
        self._about_transcript = self._about._replace(kind=PieceKind.TRANSCRIPT)
        self._first_block, most_blocks = destination.part.blocks
        self._first_held = max(self._first_block, first_held) if layout.windowed_layers else 0
        self._num_tokens_taken = most_blocks * layout.block_size
        self._transcript = transcript
        self._on_caught_up = on_caught_up
        self._num_named = self._first_block  # blocks of each layer, those among them that are there
        self._has_told = False  # the transcript as it was when the move began
        self._frozen_s: float | None = None

    # --- called by the worker runtime, on the event loop --------------------------------------------------------------

    def advance(self, num_kv_tokens: int) -> None:
        """Note that ``num_kv_tokens`` tokens have their KV, and release the blocks that they fill for sending."""
        if not self.has_room_for(num_kv_tokens):
            self.fail(f"{num_kv_tokens} tokens are more than the {self._num_tokens_taken} that it has room for there")
            return
        self._name(num_kv_tokens // self._layout.block_size)

    def has_room_for(self, num_kv_tokens: int) -> bool:
        """Whether the target has room for so many tokens."""
        return num_kv_tokens <= self._num_tokens_taken

    @property
    def has_caught_up(self) -> bool:
        """Whether at most one block of each layer is left to send, and the tokens since the move began."""
        return self._has_told and self._lanes[0].is_done and self._failure is None

    def freeze(self, *, num_kv_tokens: int, tail: bytes, next_token: FirstToken) -> None:
        """Send what is left and commit; the source computes nothing more of the request.

        ``tail`` is the transcript's end, since the move began; ``next_token`` has been sampled, and has no KV yet. All
        of it is on its way once the event loop has had a turn, if there are buffers.
        """
        assert self.has_caught_up, "it stands still, and has not caught up"
        assert self.has_room_for(num_kv_tokens), f"{num_kv_tokens} tokens; the target takes {self._num_tokens_taken}"
        self._frozen_s = self._clock()
        self._work.deadline = anyio.current_time() + FREEZE_LIMIT_S
        self._name(num_blocks_for(num_kv_tokens, self._layout.block_size))
        self._tasks.start_soon(self._tell, tail, len(self._transcript))
        commit = self._commit(self._named_part, num_kv_tokens, next_token)._replace(chunk=self._first_held)
        self._tasks.start_soon(self._send_commit, commit)

    # --- called by the departures -------------------------------------------------------------------------------------

    def landed(self, destination: int) -> None:
        if self.committed:
            super().landed(destination)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _name(self, num_blocks: int) -> None:
        """The first ``num_blocks`` of every layer are complete."""
        first, self._num_named = self._num_named, max(self._num_named, num_blocks)
        blocks = Blocks(0, 0, first, self._num_named - first, self._layout.num_layers)
        if blocks.num_pages:
            self._ledger.grow(self._num_named)
            for held in blocks.held(self._layout, self._first_held):
                self._ledger.place(held)
                self._lanes[0].put(Outgoing(held))

    @property
    def _named_part(self) -> KvPart:
        layout = self._layout
        return KvPart(
            IndexRange(self._first_block, self._num_named),
            IndexRange(0, layout.num_layers),
            IndexRange(0, layout.num_kv_heads),
        )

    def _note(self) -> None:
        super()._note()
        if self.has_caught_up and self._frozen_s is None:
            self._on_caught_up()  # which may freeze it

    async def _send(self) -> None:
        """Send the transcript as it is when the move begins; `advance` and `freeze` have the rest sent."""
        await self._tell(self._transcript, 0)
        self._has_told = True
        self._note()

    async def _tell(self, transcript: bytes, start: int) -> None:
        try:
            await self._writer.send_bytes(self.destinations[0].address, start, transcript, self._about_transcript)
        except KvTransferError as error:
            self.fail(str(error))

    async def _send_commit(self, commit: PieceHeader) -> None:
        try:
            await self._writer.tell(self.destinations[0].address, commit, begins=self._commits)
        except KvTransferError as error:
            self.fail(str(error))

    def _commits(self) -> None:
        """Mark the move as committed: from here on the target may have begun."""
        self.committed = True
        self._work.deadline = anyio.current_time() + LANDED_LIMIT_S

    def _exposed_since_s(self) -> float:
        assert self._frozen_s is not None
        return self._frozen_s

    def _why_late(self) -> str:
        if self.committed:
            return f"not acknowledged within {LANDED_LIMIT_S:g} s of the commit"
        return f"it stood still for {FREEZE_LIMIT_S:g} s"
