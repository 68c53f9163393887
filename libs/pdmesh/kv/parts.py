"""A context spread over several instances: its *home*, where it decodes, asks the *members*, which hold a range each.

In each layer the home sends its query rows to all members at once, and meanwhile attends to its own blocks. In a layer
with a window it asks only members whose ranges the rows see. A member attends to its range on a thread of its own,
beside its steps, because a range never changes. A query that comes before its range waits for the range. A member that
does not answer in time, stops, or is gone ends the request's step at its home, and nothing else.

Inside a host questions and answers take a line (`pdmesh.kv.part_lines`), which no event loop is part of. Between hosts,
and where a line cannot be had or has ended, they are pieces.
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
from pdmesh.kv.elsewhere import PartQuestion
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.part_lines import PartLines, PartPort, Said
from pdmesh.kv.piece import NO_PART, PieceHeader, PieceKind, request_key
from pdmesh.kv.spread import JoinedPieces, PartHolder, SpreadKv, pack_question, unpack_question
from pdmesh.model import Epoch, RequestId
from pdmesh.threads import CallThreads
from pdmesh.transport.address import unpack_address
from pdmesh.transport.kv_transport import KvTransport, ReceivedPiece

#: What an engine makes of a question, given a range's number and blocks (`pdmesh.engine.base.Engine.attend_part`);
#: ValueError: it is none.
AttendPart = Callable[[int, Sequence[int], PartQuestion], bytes]

#: Questions that wait for the event loop, of all contexts of an instance. Each home has one under way.
MAX_QUESTIONS = 4096


@dataclass(slots=True, eq=False)
class LostTokens:
    """Tokens of a range that was lost, as they come."""

    num_bytes: int
    on_all: Callable[[bytes, int], None]  # with them, and the number of its client's own prompt tokens
    on_failure: Callable[[str], None]  # with the reason: they came damaged, or not in time
    joined: JoinedPieces = field(default_factory=JoinedPieces)


@dataclass(slots=True, eq=False)
class HeldPart:
    """A member's side: a range in its blocks."""

    request_id: RequestId
    epoch: Epoch
    capability: int
    block_ids: Sequence[int]
    member: int  # its place among them
    has_landed: bool = False
    question: JoinedPieces = field(default_factory=JoinedPieces)  # that is coming
    waiting: list[tuple[PieceHeader, bytes]] = field(default_factory=list[tuple[PieceHeader, bytes]])
    lost: LostTokens | None = None  # set until these have come
    num_attending: int = 0  # threads of lines that read the blocks
    unpin: Callable[[], object] | None = None  # called on the event loop once the last thread has ended
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key = request_key(self.request_id)


class KvParts:
    """An instance's spread contexts, as their home and as a member. Event loop only, but for the last methods."""

    def __init__(
        self,
        context: KvContext,
        pool: BlockPool,
        threads: CallThreads | None,
        attend: AttendPart | None,
        wakeup: Wakeup,
    ) -> None:
        """Without ``attend``, which is called on ``threads``, an instance is no member."""
        self._context = context
        self._pool = pool
        self._threads = threads
        self._attend = attend
        self._wakeup = wakeup
        self._writer = context.writer()
        self._homes: dict[bytes, SpreadKv] = {}
        self._held: dict[bytes, HeldPart] = {}
        self._put, self._calls = anyio.create_memory_object_stream[Callable[[], object]](MAX_QUESTIONS)
        self._lock = threading.Lock()  # guards `HeldPart.num_attending`, and removals of ranges
        self._attending = threading.Lock()  # held by the one thread that attends
        self.num_answers = 0  # that were given
        address = context.transport.address
        self._lines: PartLines | None = None
        self.port: PartPort | None = None  # the owner enters this port
        if attend is not None and _process_of(context.transport, address) is not None:
            self._lines = PartLines(address, context.key, context.weights)
            self.port = PartPort(address, context.key, context.weights, self._answer_on_line)

    def __len__(self) -> int:
        return len(self._homes) + len(self._held)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def open(self, request_id: RequestId, epoch: Epoch, *, members: Sequence[PartHolder], num_tokens: int) -> SpreadKv:
        """Be the home of a context, whose first tokens these members hold, in their order.

        Of one that is open already it asks these from now on: between two steps.
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
        """Begin to be a member. Questions wait until `landed`. ``lost`` are tokens to come, if it is to be computed."""
        self._context.admit(home_address)
        part = HeldPart(request_id, epoch, capability, array("q", block_ids), member, lost=lost)
        self._held[part.key] = part
        if lost is not None:
            self._context.tasks.start_soon(self._limit, part, lost)

    async def _limit(self, part: HeldPart, lost: LostTokens) -> None:
        """Give up tokens that do not come in time: nobody acknowledges them, so their sender does not know."""
        limit_s = self._context.config.deadline_s
        await anyio.sleep(limit_s)
        if part.lost is lost and self._held.get(part.key) is part:
            lost.on_failure(f"its tokens did not come within {limit_s:g} s")

    def rehome(self, request_id: RequestId, epoch: Epoch, address: bytes) -> None:
        """Answer questions that come from this address, too."""
        if self._part(request_id, epoch) is not None:
            self._context.admit(address)

    def landed(self, request_id: RequestId, epoch: Epoch) -> None:
        """Answer from now on: a range is here."""
        part = self._part(request_id, epoch)
        if part is not None:
            part.has_landed = True
            for question in part.waiting:
                self._context.tasks.start_soon(self._answer, *question)
            part.waiting.clear()

    def close(self, request_id: RequestId, epoch: Epoch) -> None:
        """Ask nobody about a context any more. A range of it that is here stays."""
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
        """Send the packed tokens of a range to who is to compute it."""
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
        """Have no part in this epoch of a request, nor in older ones. Idempotent."""
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
        """Note that a peer is gone: nobody waits for its answers."""
        for spread in self._homes.values():
            for number, member in enumerate(spread.members):
                if member.address == address:
                    spread.fail(f"member {number} of its KV is gone", number)
        if self._lines is not None:
            self._lines.forget(address)

    def abort(self, reason: str) -> None:
        """End what the engine's thread waits for."""
        for spread in self._homes.values():
            spread.fail(reason)

    # --- for the mover ------------------------------------------------------------------------------------------------

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Take a question or an answer."""
        is_question = header.kind is not PieceKind.ANSWER
        side = self._held.get(header.request_key) if is_question else self._homes.get(header.request_key)
        fault: str | None = "unknown"
        if isinstance(side, HeldPart):
            fault = mismatch(side, header)
        elif side is not None:  # each member has a capability of its own
            fault = None if header.epoch == side.epoch else "epoch"
        if side is None or fault is not None:
            self._context.settle(piece, fault)
        elif not piece.load() or not self._context.key.opens_payload(piece.payload, header.check):
            self._context.drop(piece, "checksum")  # nobody asks again: the home's limit ends the step
            if header.kind is PieceKind.TOKENS and isinstance(side, HeldPart) and side.lost is not None:
                side.lost.on_failure("its tokens came damaged")
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
        """Answer a question by pieces, as soon as its range has landed."""
        part = self._held.get(header.request_key)
        if part is None:
            self._context.dropped["unknown"] += 1
        elif reason := mismatch(part, header):
            self._context.dropped[reason] += 1
        elif part.has_landed:
            self._context.tasks.start_soon(self._answer, header, question)
        else:
            part.waiting = [(header, question)]  # a home has one question under way

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
            lost.on_failure("its tokens came damaged")

    def clear(self) -> None:
        """End everything."""
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
        """Make the calls that other threads ask for. A task that they start has the context of this one."""
        async with self._calls:
            async for call in self._calls:
                call()

    def _call_soon(self, call: Callable[[], object]) -> None:
        """Let `run` make a call. Any thread."""
        self._context.call_soon(partial(self._add_call, call))

    def _add_call(self, call: Callable[[], object]) -> None:
        try:
            self._put.send_nowait(call)
        except anyio.WouldBlock:
            self._context.dropped["too many questions"] += 1
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # the instance is stopping

    def _send_queries(self, spread: SpreadKv, number: int, asked: PartQuestion, members: Sequence[int]) -> None:
        if number != spread.question:
            return  # the home asks another question now
        question = pack_question(self._context.transport.address, asked)
        for member in [each for each in members if each < len(spread.members)]:
            about, address = spread.question_header(number, asked.layer, member), spread.members[member].address

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
        """Send pieces to a peer one after the other, as long as they are due. Return whether all were sent."""
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
        """Attend on a thread, and answer by pieces. The request may be freed meanwhile."""
        part = self._begin(header)
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

    def _attend_to(self, part: HeldPart, question: PartQuestion) -> bytes:
        assert self._attend is not None, "a part is held where nothing attends to it"
        with self._attending:
            return self._attend(part.member, part.block_ids, question)

    def _answer_on_line(self, header: PieceHeader, query: bytes) -> Said | None:
        """Answer a question at once if it is about a range that is here, else leave it to the event loop."""
        layer = header.part.layers.start
        if (part := self._begin(header)) is not None:
            try:
                answer = self._attend_to(part, unpack_question(query, layer)[1])
            except ValueError:
                pass
            else:
                with self._lock:
                    self.num_answers += 1
                return _about_answer(part, header), answer
            finally:
                self._end(part)
        self._call_soon(partial(self._asked, header, query))
        return None

    def _begin(self, header: PieceHeader) -> HeldPart | None:
        """Return the range that a question is about, if it is here; its blocks stay until `_end`."""
        with self._lock:
            part = self._held.get(header.request_key)
            if part is None or mismatch(part, header) or not part.has_landed:
                return None
            if header.part.layers.start >= self._context.store.layout.num_layers:
                return None
            part.num_attending += 1
            return part

    def _end(self, part: HeldPart) -> None:
        with self._lock:
            part.num_attending -= 1
            unpin = None if part.num_attending else part.unpin
        if unpin is not None:
            self._context.call_soon(unpin)  # never dropped, unlike questions

    def _take_from_line(self, waiting: SpreadKv, header: PieceHeader, answer: bytes) -> None:
        """Take an answer to any home, on the thread that waits for one of them."""
        spread = self._homes.get(header.request_key)
        if spread is None or spread.epoch != header.epoch or not spread.take(header, answer, is_whole=True):
            self._context.dropped["late answer"] += 1
        elif spread is not waiting and spread.bell is not None:
            spread.bell.ring()


def _about_answer(part: HeldPart, question: PieceHeader) -> PieceHeader:
    return question._replace(kind=PieceKind.ANSWER, source=part.member, destination=0, part=NO_PART)


def _process_of(transport: KvTransport, address: bytes) -> int | None:
    """Return the process at a data address on this host; None if it is elsewhere, or that is no data address."""
    try:
        unpack_address(address)
        return transport.process_of(address)
    except KvTransferError:
        return None
