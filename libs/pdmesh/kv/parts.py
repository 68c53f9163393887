"""A spread context: its owner (`home` in names) decodes it, and shard holders (`members`) hold a range of its KV each.

In each layer the owner sends its query rows to all shard holders at once, and meanwhile attends to its own blocks. In a
layer with a window it asks only the shard holders whose ranges the rows see. A shard holder attends to its range on a
separate thread, beside its steps, because a range never changes. A query that arrives before its range waits for the
range. If a shard holder does not answer in time, stops, or is lost, the request's step fails at its owner, and nothing
else.

Inside a host, questions and answers travel on lines (`pdmesh.kv.part_lines`), which bypass the event loops. Between
hosts, and where no line can be opened or the line has ended, they travel as pieces.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio

from pdmesh.errors import KvTransferError
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.part_lines import LineHeader, PartLines, PartPort
from pdmesh.kv.piece import NO_PART, PieceHeader, PieceKind, request_key
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv.spread import JoinedPieces, PartHolder, SpreadKv, pack_question, unpack_question
from pdmesh.model import Epoch, RequestId
from pdmesh.threads import CallThreads
from pdmesh.transport.address import unpack_address
from pdmesh.transport.kv_transport import KvTransport, ReceivedPiece

#: Returns the answer to a question about a range, given the range's index and blocks
#: (`pdmesh.engine.base.Engine.attend_part`). Raises ValueError if the question is malformed.
AttendPart = Callable[[int, Sequence[int], RangeQuestion], bytes]

#: Maximum number of calls that wait for the event loop, for all contexts of an instance. Each owner has one question
#: under way.
MAX_QUESTIONS = 4096


@dataclass(slots=True, eq=False)
class LostTokens:
    """Tokens of a lost range that arrive in pieces, for the instance that computes the range again.

    ``on_all`` is called with all tokens and the number of the client's own prompt tokens. ``on_failure`` is called with
    the reason if the tokens arrive damaged or not in time.
    """

    num_bytes: int
    on_all: Callable[[bytes, int], None]
    on_failure: Callable[[str], None]
    joined: JoinedPieces = field(default_factory=JoinedPieces)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A shard holder's side of a spread context: one range in its blocks.

    ``member`` is its index among the shard holders. ``question`` is the question that is arriving; ``waiting`` holds
    the complete question that waits for the range. ``lost`` is set until the tokens of a range to be computed again
    have arrived. ``num_attending`` counts the threads that read the blocks; the last one has ``unpin`` called on the
    event loop.
    """

    request_id: RequestId
    epoch: Epoch
    capability: int
    block_ids: Sequence[int]
    member: int
    has_landed: bool = False
    question: JoinedPieces = field(default_factory=JoinedPieces)
    waiting: list[tuple[PieceHeader, bytes]] = field(default_factory=list[tuple[PieceHeader, bytes]])
    lost: LostTokens | None = None
    num_attending: int = 0
    unpin: Callable[[], object] | None = None
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key = request_key(self.request_id)


class KvParts:
    """An instance's spread contexts, as owner and as shard holder. Event loop only, except the methods for threads."""

    def __init__(
        self,
        context: KvContext,
        pool: BlockPool,
        threads: CallThreads | None,
        attend: AttendPart | None,
        wakeup: Wakeup,
    ) -> None:
        """``attend`` is called on ``threads`` and on threads of lines. Without it, the instance holds no shards."""
        self._context = context
        self._pool = pool
        self._threads = threads
        self._attend = attend
        self._wakeup = wakeup
        self._writer = context.writer()
        self._homes: dict[bytes, SpreadKv] = {}
        self._held: dict[bytes, HeldPart] = {}
        self._put, self._calls = anyio.create_memory_object_stream[Callable[[], object]](MAX_QUESTIONS)
        self._lock = threading.Lock()  # guards `HeldPart.num_attending` and removals from `_held`
        self._attending = threading.Lock()
        self.num_answers = 0
        address = context.transport.address
        self._lines: PartLines | None = None
        self.port: PartPort | None = None
        if attend is not None and _process_of(context.transport, address) is not None:
            self._lines = PartLines(address, context.key, context.weights)
            self.port = PartPort(address, context.key, context.weights, self._answer_on_line)

    def __len__(self) -> int:
        return len(self._homes) + len(self._held)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def open(self, request_id: RequestId, epoch: Epoch, *, members: Sequence[PartHolder], num_tokens: int) -> SpreadKv:
        """Become the owner of a context whose first ``num_tokens`` tokens ``members`` hold, in this order.

        If the context is already open in this epoch, ask these members from now on. Call between two steps.
        """
        for member in members:
            self._context.admit(member.address)
            process = _process_of(self._context.transport, member.address)
            if self._lines is not None and process is not None:
                self._lines.connect(process, member.address)
        before = self._homes.get(request_key(request_id))
        if before is not None and before.epoch == epoch:
            before.set_members(members, num_tokens)
            return before
        spread = SpreadKv(
            request_id,
            epoch,
            members=members,
            num_tokens=num_tokens,
            limit_s=self._context.config.group_no_progress_s,
            wakeup=self._wakeup,
            send=lambda *question: self._call_soon(partial(self._send_queries, *question)),
            lines=self._lines,
            take=self._take_from_line,
        )
        self._homes[spread.key] = spread
        return spread

    def hold(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        home_address: bytes,
        member: int,
        lost: LostTokens | None = None,
    ) -> None:
        """Become a shard holder. Questions wait until `landed` is called.

        ``member`` is this instance's index among the shard holders. ``lost`` is given if this instance computes the
        range again from tokens that will arrive.
        """
        self._context.admit(home_address)
        part = HeldPart(request_id, epoch, capability, array("q", block_ids), member, lost=lost)
        self._held[part.key] = part
        if lost is not None:
            self._context.tasks.start_soon(self._limit, part, lost)

    async def _limit(self, part: HeldPart, lost: LostTokens) -> None:
        """Report lost tokens as failed if they do not arrive within the deadline.

        The receiver must limit this, because tokens are not acknowledged and so their sender does not notice.
        """
        limit_s = self._context.config.deadline_s
        await anyio.sleep(limit_s)
        if part.lost is lost and self._held.get(part.key) is part:
            lost.on_failure(f"its tokens did not arrive within {limit_s:g} s")

    def rehome(self, request_id: RequestId, epoch: Epoch, address: bytes) -> None:
        """Admit messages from the owner's new data address."""
        if self._part(request_id, epoch) is not None:
            self._context.admit(address)

    def landed(self, request_id: RequestId, epoch: Epoch) -> None:
        """Mark a range as here. Answer the questions that wait for it, and later ones at once."""
        part = self._part(request_id, epoch)
        if part is not None:
            part.has_landed = True
            for question in part.waiting:
                self._context.tasks.start_soon(self._answer, *question)
            part.waiting.clear()

    def close(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop owning a context: ask its shard holders no more. A range of the context that is held here stays."""
        spread = self._homes.get(request_key(request_id))
        if spread is not None and spread.epoch == epoch:
            del self._homes[spread.key]

    def send_tokens(
        self,
        request_id: RequestId,
        epoch: Epoch,
        token_ids: bytes,
        num_prompt_tokens: int,
        *,
        holder: PartHolder,
        on_failure: Callable[[str], None],
    ) -> None:
        """Send the packed tokens of a lost range to ``holder``, which computes the range again.

        ``on_failure`` is called with the reason if ``holder`` does not take them.
        """
        self._context.admit(holder.address)
        about = PieceHeader(
            kind=PieceKind.TOKENS,
            request_key=request_key(request_id),
            epoch=epoch,
            capability=holder.capability,
            num_context_tokens=num_prompt_tokens,
        )
        pieces = self._writer.cut_bytes(holder.address, 0, token_ids, about)
        self._context.tasks.start_soon(self._say, holder.address, pieces, on_failure)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Drop the context and the range of this epoch of a request, and of older ones. Idempotent.

        An owner's wait for answers fails. Blocks that a thread still reads stay pinned until it has ended.
        """
        key = request_key(request_id)
        spread, part = self._homes.get(key), self._held.get(key)
        if spread is not None and spread.epoch <= epoch:
            del self._homes[key]
            spread.fail("the request was freed")
        if part is not None and part.epoch <= epoch:
            with self._lock:
                del self._held[key]
                if part.num_attending:
                    pin = self._pool.pinned(part.block_ids)
                    pin.__enter__()
                    part.unpin = partial(pin.__exit__, None, None, None)

    def forget(self, address: bytes) -> None:
        """Fail the contexts that have a shard holder at this address, and close the line to it: the peer is gone."""
        for spread in self._homes.values():
            for number, member in enumerate(spread.members):
                if member.address == address:
                    spread.fail(f"shard holder {number} of its KV is gone", number)
        if self._lines is not None:
            self._lines.forget(address)

    def abort(self, reason: str) -> None:
        """Fail every wait for answers of the engine's thread."""
        for spread in self._homes.values():
            spread.fail(reason)

    # --- for the mover ------------------------------------------------------------------------------------------------

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Handle a question, an answer, or a piece of lost tokens.

        Pieces of unknown requests, of other epochs, or with a wrong capability or checksum are counted as dropped.
        """
        is_question = header.kind is not PieceKind.ANSWER
        side = self._held.get(header.request_key) if is_question else self._homes.get(header.request_key)
        fault: str | None = "unknown"
        if isinstance(side, HeldPart):
            fault = mismatch(side, header)
        elif side is not None:  # `SpreadKv.take` checks the capability
            fault = None if header.epoch == side.epoch else "epoch"
        if side is None or fault is not None:
            self._context.settle(piece, fault)
        elif not piece.load() or not self._context.key.opens_payload(piece.payload, header.check):
            self._context.drop(piece, "checksum")  # the owner's time limit ends the step
            if header.kind is PieceKind.TOKENS and isinstance(side, HeldPart) and side.lost is not None:
                side.lost.on_failure("its tokens arrived damaged")
        else:
            data = bytes(piece.payload)
            piece.release()
            if isinstance(side, SpreadKv):
                if not side.take(header, data):
                    self._context.dropped["late answer"] += 1
            elif header.kind is PieceKind.TOKENS:
                self._take_tokens(side, header, data)
            elif (question := side.question.take(header, data, header.num_context_tokens)) is not None:
                self._asked(header, question)

    def _asked(self, header: PieceHeader, question: bytes) -> None:
        """Answer a question by pieces, now or when its range has landed."""
        part = self._held.get(header.request_key)
        if part is None:
            self._context.dropped["unknown"] += 1
        elif reason := mismatch(part, header):
            self._context.dropped[reason] += 1
        elif part.has_landed:
            self._context.tasks.start_soon(self._answer, header, question)
        else:
            part.waiting = [(header, question)]

    def _take_tokens(self, part: HeldPart, header: PieceHeader, data: bytes) -> None:
        lost = part.lost
        if lost is None:
            self._context.dropped["unwanted tokens"] += 1
            return
        tokens = lost.joined.take(header, data, lost.num_bytes)
        if tokens is not None:
            part.lost = None
            lost.on_all(tokens, header.num_context_tokens)
        elif len(lost.joined.came) != header.part.blocks.stop:
            lost.on_failure("its tokens arrived damaged")

    def clear(self) -> None:
        """Fail every wait, close the lines, and forget all contexts and ranges."""
        self.abort("the instance is stopping")
        self._put.close()
        self._homes.clear()
        self._held.clear()
        if self._lines is not None:
            self._lines.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _part(self, request_id: RequestId, epoch: Epoch) -> HeldPart | None:
        part = self._held.get(request_key(request_id))
        return part if part is not None and part.epoch == epoch else None

    async def run(self) -> None:
        """Make the calls that other threads request. Tasks started by a call inherit this task's context variables."""
        async with self._calls:
            async for call in self._calls:
                call()

    def _call_soon(self, call: Callable[[], object]) -> None:
        """Have `run` make a call. Any thread."""
        self._context.call_soon(partial(self._add_call, call))

    def _add_call(self, call: Callable[[], object]) -> None:
        try:
            self._put.send_nowait(call)
        except anyio.WouldBlock:
            self._context.dropped["too many questions"] += 1
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # the instance is stopping

    def _send_queries(self, spread: SpreadKv, number: int, asked: RangeQuestion, members: Sequence[int]) -> None:
        if number != spread.question:
            return  # the owner asks another question now
        question = pack_question(self._context.transport.address, asked)
        for member in [each for each in members if each < len(spread.members)]:
            about = spread.question_header(number, asked.layer, member).as_question()
            address = spread.members[member].address

            def failed(reason: str, member: int = member) -> None:
                spread.fail(reason, member)

            self._context.tasks.start_soon(
                self._say,
                address,
                self._writer.divided(address, question, about),
                failed,
                lambda: number == spread.question,
            )

    async def _say(
        self,
        address: bytes,
        pieces: Iterable[tuple[bytes, PieceHeader]],
        on_failure: Callable[[str], object],
        is_due: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Send pieces to a peer one after the other, until ``is_due`` returns False. Return whether all were sent.

        ``on_failure`` is called with the reason if the peer does not take a piece that is still due.
        """
        try:
            for payload, header in pieces:
                if not is_due():
                    return False
                await self._writer.send_payload(address, payload, header)
        except KvTransferError as error:
            if is_due():
                on_failure(str(error))
            return False
        return True

    async def _answer(self, header: PieceHeader, query: bytes) -> None:
        """Attend on a thread, and answer by pieces. Do nothing if the range is not here any more."""
        part = self._begin(header, header.part.layers.start)
        if part is None:
            return
        assert self._threads is not None, "a part is held where none may be"
        try:
            home_address, question = unpack_question(query, header.part.layers.start)
            answer = await self._threads.run(partial(self._attend_to, part, question))
        except ValueError:
            self._context.dropped["malformed question"] += 1
            return
        finally:
            self._end(part)
        pieces = self._writer.divided(home_address, answer, _about_answer(part, header))
        if await self._say(home_address, pieces, partial(self._context.failed, part, sending=False)):
            self.num_answers += 1

    # --- on threads of lines, and of the engine -----------------------------------------------------------------------

    def _attend_to(self, part: HeldPart, question: RangeQuestion) -> bytes:
        assert self._attend is not None, "a part is held where nothing attends to it"
        with self._attending:
            return self._attend(part.member, part.block_ids, question)

    def _answer_on_line(self, header: LineHeader, query: bytes) -> bytes | None:
        """Return the answer to a question if its range is here. The thread of a line calls this.

        Otherwise, or if the question is malformed, return None and leave the question to the event loop.
        """
        if (part := self._begin(header, header.layer)) is not None:
            try:
                answer = self._attend_to(part, unpack_question(query, header.layer)[1])
            except ValueError:
                pass
            else:
                with self._lock:
                    self.num_answers += 1
                return answer
            finally:
                self._end(part)
        self._call_soon(partial(self._asked, header.as_question(), query))
        return None

    def _begin(self, header: PieceHeader | LineHeader, layer: int) -> HeldPart | None:
        """Return the range of a question about a layer, or None if it is not here.

        Its blocks are not freed before `_end`.
        """
        with self._lock:
            part = self._held.get(header.request_key)
            if part is None or mismatch(part, header) or not part.has_landed:
                return None
            if layer >= self._context.store.layout.num_layers:
                return None
            part.num_attending += 1
            return part

    def _end(self, part: HeldPart) -> None:
        with self._lock:
            part.num_attending -= 1
            unpin = None if part.num_attending else part.unpin
        if unpin is not None:
            self._context.call_soon(unpin)

    def _take_from_line(self, waiting: SpreadKv, header: LineHeader, answer: bytes) -> None:
        """Hand an answer to its owner's context, which may differ from the context ``waiting`` on this thread."""
        spread = self._homes.get(header.request_key)
        if spread is None or spread.epoch != header.epoch or not spread.take_from_line(header, answer):
            self._context.dropped["late answer"] += 1
        elif spread is not waiting and spread.bell is not None:
            spread.bell.ring()


def _about_answer(part: HeldPart, question: PieceHeader) -> PieceHeader:
    return question._replace(kind=PieceKind.ANSWER, source=part.member, destination=0, part=NO_PART)


def _process_of(transport: KvTransport, address: bytes) -> int | None:
    """Return the process at a data address, or None if it is on another host or the address is invalid."""
    try:
        unpack_address(address)
        return transport.process_of(address)
    except KvTransferError:
        return None
