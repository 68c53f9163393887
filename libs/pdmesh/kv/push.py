"""One transfer of a request's KV, at a source: what is computed is pushed to the destinations until they have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.kv.granted import PIECES_IN_FLIGHT, GrantedTransfer, KvDestination
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import Blocks, PieceWriter
from pdmesh.kv.piece import PieceKind
from pdmesh.kv.sender import KvSender
from pdmesh.model import IndexRange, KvPart


class KvPush(GrantedTransfer):
    """A granted transfer. Each destination gets what it and ``sender`` have in common."""

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
            sender.request_id, sender.epoch, capability=capability, destinations=destinations, writer=writer
        )
        self.sender = sender
        self._deadline_s = deadline_s
        self._clock = clock
        self._on_paused = on_paused
        self._num_begun = 0  # of the sender's ready blocks
        self._cut: deque[Blocks] = deque()  # pieces of the last of these
        self._granted = anyio.Event()
        self._granted.set()
        self._pausing = False  # asked to stop, with pieces under way
        self._num_under_way = 0
        self._unlanded = set(range(len(self.destinations)))  # have not acknowledged
        self._landed = anyio.Event()

    # --- called by the departures -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no piece until granted again. Ignored if it is paused, or has all it waits for."""
        if self._granted.is_set() and self.sender.committed_s is None:
            self._granted = anyio.Event()
            self._pausing = True
            self._check_paused()

    def grant_again(self) -> None:
        self._granted.set()

    def _check_paused(self) -> None:
        if self._pausing and self._num_under_way == 0:
            self._pausing = False
            self._on_paused(self)

    def landed(self, destination: int) -> None:
        self._unlanded.discard(destination)
        if not self._unlanded:
            self._landed.set()

    async def run(self) -> SentTransfer:
        """Send the transfer, as `GrantedTransfer.run` says.

        The deadline runs once the whole KV is there: until then it waits for the computation, which may be long or
        preempted. A piece under way has the transport's no-progress limit.
        """
        granted_s, landed_s = self._clock(), None
        self._pages_a_piece()
        with self._work:
            async with anyio.create_task_group() as answers:
                answers.start_soon(self._answer)
                async with anyio.create_task_group() as lanes:
                    for _ in range(PIECES_IN_FLIGHT):
                        lanes.start_soon(self._send_ready)
                    await self.sender.committed()
                    await self._wait_for_grant()
                    self._work.deadline = anyio.current_time() + self._deadline_s
                await self._send_commits()
                await self._landed.wait()
                landed_s = self._clock()
                self._end_answers()
        if landed_s is not None:  # whatever became of the answers to its pieces
            return SentTransfer(
                request_id=self.request_id,
                epoch=self.epoch,
                num_bytes=self.num_bytes,
                duration_s=landed_s - granted_s,
                exposed_s=landed_s - await self.sender.committed(),
            )
        raise KvTransferError(self._failure or f"the KV did not land within {self._deadline_s:g} s")

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _wait_for_grant(self) -> None:
        while not self._granted.is_set():  # a pause takes it back, perhaps before this task has its turn
            await self._granted.wait()

    async def _next(self) -> Blocks | None:
        """The next piece to send, when it is computed and may be sent; None after the last."""
        while True:
            await self._wait_for_grant()
            if self._cut:
                return self._cut.popleft()
            if self._num_begun < len(self.sender.ready):
                self._cut.extend(self.sender.ready[self._num_begun].cut(self._pages_a_piece()))
                self._num_begun += 1
            elif self.sender.has_all:
                return None
            else:
                await self.sender.news()

    def _pages_a_piece(self) -> int:
        """What all destinations take, which the sender is told."""
        limits = (self._writer.pages_a_piece(destination.address) for destination in self.destinations)
        self.sender.pages_a_piece = min(limits, default=self._writer.max_pages)
        return self.sender.pages_a_piece

    async def _send_ready(self) -> None:
        try:
            while (blocks := await self._next()) is not None:
                self._num_under_way += 1
                for index in range(len(self.destinations)):
                    await self._send_to(index, blocks)
                self._num_under_way -= 1
                self._check_paused()
        except KvTransferError as error:
            self.fail(str(error))

    def _has(self, destination: int, part: KvPart) -> bool:
        theirs = self.destinations[destination].part
        return theirs.blocks.holds(part.blocks) and theirs.layers.holds(part.layers) and self.sender.has(part)

    async def _send_once_more(self, destination: int, blocks: Blocks) -> None:
        await self._wait_for_grant()
        self._num_under_way += 1
        try:
            await self._send_to(destination, blocks)
        except KvTransferError as error:
            if self._unlanded:
                self.fail(str(error))
        else:
            self._num_under_way -= 1
            self._check_paused()

    async def _send_to(self, index: int, blocks: Blocks) -> None:
        """What of ``blocks`` goes to a destination."""
        destination = self.destinations[index]
        wanted = destination.part.blocks.common(IndexRange(blocks.first_block, blocks.end))
        layers = destination.part.layers.common(IndexRange(blocks.layer, blocks.end_layer))
        if wanted.size == 0 or layers.size == 0:
            return
        wanted_blocks = Blocks(blocks.chunk, layers.start, wanted.start, wanted.size, layers.size)
        about = replace(self._about, source=self.sender.source, destination=index)
        self._limits[index].add_sound(await self._writer.send(destination.address, wanted_blocks, about))

    async def _send_commits(self) -> None:
        try:
            for index, destination in enumerate(self.destinations):
                await self._send_commit(index, destination)
        except KvTransferError as error:
            self.fail(str(error))

    async def _send_commit(self, index: int, destination: KvDestination) -> None:
        token = self.sender.first_token
        header = replace(
            self._about,
            kind=PieceKind.COMMIT,
            source=self.sender.source,
            destination=index,
            part=self.sender.part.common(destination.part),
            num_context_tokens=self.sender.num_context_tokens,
            has_token=token is not None,
            token_id=0 if token is None else token.token_id,
            token_index=0 if token is None else token.token_index,
        )
        await self._writer.tell(destination.address, header)
