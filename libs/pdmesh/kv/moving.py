"""A running decode's KV on its way out: it decodes on while full blocks go over, and stands still for the rest.

What is left then, and the commit, leave at once, and nothing of it waits for anything else of it: the stream stands
still for as long as one way takes. See `docs/architecture/moves.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.kv.granted import PIECES_IN_FLIGHT, GrantedTransfer, KvDestination
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import Blocks, PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.receiver import FirstToken
from pdmesh.model import Epoch, IndexRange, KvLayout, KvPart, RequestId, num_blocks_for

#: A request that stands still for so long without a buffer for its commit goes on where it is.
FREEZE_LIMIT_S = 0.25

#: For the acknowledgement of a commit. Then the core asks the target, which answers for itself.
LANDED_LIMIT_S = 2.0


class MoveSender(GrantedTransfer):
    """A source's side of a move.

    ``advance`` after each step names what has become complete; once ``has_caught_up``, ``freeze`` ends it with the last
    of it. Until ``committed`` whoever holds the request may go on with it by itself.
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
        clock: Callable[[], float],
        on_caught_up: Callable[[], None],
    ) -> None:
        """``on_caught_up`` is called each time that nothing is left to send of what was named."""
        super().__init__(request_id, epoch, capability=capability, destinations=(destination,), writer=writer)
        self.committed = False
        self._address = destination.address
        self._about_transcript = replace(self._about, kind=PieceKind.TRANSCRIPT)
        self._num_tokens_taken = destination.part.blocks.size * layout.block_size
        self._transcript = transcript
        self._layout = layout
        self._clock = clock
        self._on_caught_up = on_caught_up
        self._num_named = 0  # blocks of each layer
        self._ready: deque[Blocks] = deque()  # named, and not begun
        self._num_under_way = 0
        self._has_told = False  # the transcript as it was when the move began
        self._wanted = anyio.Event()  # there is something to send, or no more will come
        self._frozen = anyio.Event()
        self._frozen_s = 0.0
        self._landed = anyio.Event()
        self._landed_s = 0.0

    # --- called by the worker runtime, on the event loop --------------------------------------------------------------

    def advance(self, num_kv_tokens: int) -> None:
        """Note that ``num_kv_tokens`` tokens have their KV, and release the blocks that they fill for sending."""
        if not self.has_room_for(num_kv_tokens):
            self.fail(f"{num_kv_tokens} tokens are more than the {self._num_tokens_taken} that it has room for there")
            return
        self._name(num_kv_tokens // self._layout.block_size)

    def has_room_for(self, num_kv_tokens: int) -> bool:
        """Whether the target has."""
        return num_kv_tokens <= self._num_tokens_taken

    @property
    def has_caught_up(self) -> bool:
        """Whether at most a block of each layer is left to send, and the tokens since it began."""
        return self._has_told and not self._ready and not self._num_under_way and self._failure is None

    def freeze(self, *, num_kv_tokens: int, tail: bytes, next_token: FirstToken) -> None:
        """Send what is left and commit; the source computes nothing more of the request.

        ``tail`` is the transcript's end, since the move began; ``next_token`` is drawn, and has no KV yet. All of it is
        on its way once the event loop has had a turn, if there are buffers.
        """
        assert self.has_caught_up, "it stands still, and has not caught up"
        assert self.has_room_for(num_kv_tokens), f"{num_kv_tokens} tokens; the target takes {self._num_tokens_taken}"
        self._frozen_s = self._clock()
        self._work.deadline = anyio.current_time() + FREEZE_LIMIT_S
        self._name(num_blocks_for(num_kv_tokens, self._layout.block_size))
        rest, self._ready = self._ready, deque()
        self._frozen.set()
        self._wanted.set()
        for blocks in rest:
            self._sends.start_soon(self._send, blocks)
        self._sends.start_soon(self._send_tail, tail)
        self._sends.start_soon(self._send_commit, self._commit(num_kv_tokens, next_token))

    # --- called by the departures -------------------------------------------------------------------------------------

    def landed(self, destination: int) -> None:
        if self.committed and destination == 0:
            self._landed_s = self._clock()
            self._landed.set()

    async def run(self) -> SentTransfer:
        """Run the move, as `GrantedTransfer.run`; if it raises, ``committed`` says if the target may have begun."""
        started_s = self._clock()
        with self._work:
            async with anyio.create_task_group() as self._sends:
                self._sends.start_soon(self._answer)
                self._sends.start_soon(self._send_transcript)
                for _ in range(PIECES_IN_FLIGHT):
                    self._sends.start_soon(self._send_blocks)
                await self._landed.wait()
                self._end_answers()
        if self._landed.is_set():  # whatever became of the answers to its pieces
            return SentTransfer(
                request_id=self.request_id,
                epoch=self.epoch,
                num_bytes=self.num_bytes,
                duration_s=self._landed_s - started_s,
                exposed_s=self._landed_s - self._frozen_s,
            )
        if self._failure is not None:
            raise KvTransferError(self._failure)
        if self.committed:
            raise KvTransferError(f"not acknowledged within {LANDED_LIMIT_S:g} s of the commit")
        raise KvTransferError(f"it stood still for {FREEZE_LIMIT_S:g} s")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _name(self, num_blocks: int) -> None:
        """The first ``num_blocks`` of every layer are complete."""
        first, self._num_named = self._num_named, max(self._num_named, num_blocks)
        num_layers, number = self._layout.num_layers, self._num_named - first
        self._ready += Blocks(0, 0, first, number, num_layers).cut(self._writer.pages_a_piece(self._address))
        if self._ready:
            self._wanted.set()

    def _commit(self, num_kv_tokens: int, next_token: FirstToken) -> PieceHeader:
        layout = self._layout
        return replace(
            self._about,
            kind=PieceKind.COMMIT,
            part=KvPart(
                IndexRange(0, num_blocks_for(num_kv_tokens, layout.block_size)),
                IndexRange(0, layout.num_layers),
                IndexRange(0, layout.num_kv_heads),
            ),
            num_context_tokens=num_kv_tokens,
            has_token=True,
            token_id=next_token.token_id,
            token_index=next_token.token_index,
        )

    async def _send_transcript(self) -> None:
        """Send the transcript as it was when the move began."""
        try:
            await self._writer.send_bytes(self._address, 0, self._transcript, self._about_transcript)
        except KvTransferError as error:
            self.fail(str(error))
        else:
            self._has_told = True
            self._check_caught_up()

    async def _send_blocks(self) -> None:
        """One of several lanes, until it is frozen."""
        while not self._frozen.is_set():
            while self._ready:
                blocks = self._ready.popleft()
                self._num_under_way += 1
                await self._send(blocks)
                self._num_under_way -= 1
            self._check_caught_up()  # which may freeze it
            if self._wanted.is_set() and not self._frozen.is_set():
                self._wanted = anyio.Event()
            await self._wanted.wait()

    async def _send(self, blocks: Blocks) -> None:
        try:
            self._limits[0].add_sound(await self._writer.send(self._address, blocks, self._about))
        except KvTransferError as error:
            self.fail(str(error))

    def _has(self, destination: int, part: KvPart) -> bool:
        layout = self._layout
        return (
            IndexRange(0, self._num_named).holds(part.blocks)
            and IndexRange(0, layout.num_layers).holds(part.layers)
            and part.heads == IndexRange(0, layout.num_kv_heads)
        )

    async def _send_once_more(self, destination: int, blocks: Blocks) -> None:
        await self._send(blocks)

    async def _send_tail(self, tail: bytes) -> None:
        try:
            await self._writer.send_bytes(self._address, len(self._transcript), tail, self._about_transcript)
        except KvTransferError as error:
            self.fail(str(error))

    async def _send_commit(self, commit: PieceHeader) -> None:
        try:
            await self._writer.tell(self._address, commit, begins=self._commits)
        except KvTransferError as error:
            self.fail(str(error))

    def _commits(self) -> None:
        """Mark the move as committed: from here on the target may have begun."""
        self.committed = True
        self._work.deadline = anyio.current_time() + LANDED_LIMIT_S

    def _check_caught_up(self) -> None:
        if self.has_caught_up and not self._frozen.is_set():
            self._on_caught_up()
