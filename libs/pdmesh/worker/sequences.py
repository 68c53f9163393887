"""The requests an instance holds: their blocks, their transcripts, and how far each has come.

A request is *released* once: its transfer is stopped, its blocks go back to the pool, and when the last of them is free
the scheduler is told. While a step uses the blocks, or a copy still touches them, the release waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import anyio

from pdmesh.engine.base import EngineSequence
from pdmesh.instance.room import RoomReports
from pdmesh.instance.sequence import Sequence as SequenceState
from pdmesh.instance.sequence_phases import CopyState, SeqPhase
from pdmesh.kv.blocks import BlockGuard, BlockPool
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.mover import KvMover
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.model import (
    Epoch,
    InstanceId,
    PrefixHashes,
    RequestId,
    RequestKey,
    Resident,
    num_blocks_for,
)
from pdmesh.plans import ChunkPlan
from pdmesh.policy.on_demand import is_low
from pdmesh.wire.messages import Generation
from pdmesh.worker.spans import RequestTrace
from pdmesh.worker.windows import HeldBlocks, Windows

#: How requests are counted by phase, in metrics.
_STAGES = {
    SeqPhase.PREFILLING: "prefilling",
    SeqPhase.COMPUTED: "sending",
    SeqPhase.EXPECTED: "receiving",
    SeqPhase.HOLDING: "holding",
    SeqPhase.DECODING: "decoding",
    SeqPhase.PAUSED: "leaving",
}

#: Phases in which all tokens but the last one have their KV here.
_WITH_DRAWN = (SeqPhase.COMPUTED, SeqPhase.DECODING, SeqPhase.PAUSED)


class Drawn(NamedTuple):
    """Granules that a request drew, kept as it ends; the first so many were kept before."""

    granules: PrefixHashes = ()
    num_known: int = 0


class ContextTable(Sequence[int]):
    """A sequence's blocks by their place in its context, those that others hold among them: they are nowhere here."""

    def __init__(self, sequence: EngineSequence, block_size: int) -> None:
        self._table = sequence.block_table
        self._first = sequence.num_elsewhere_tokens // block_size

    def __len__(self) -> int:
        return self._first + len(self._table)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self._table[index - self._first] if index >= self._first else NO_BLOCK
        start, stop, _ = index.indices(len(self))
        elsewhere = [NO_BLOCK] * (min(stop, self._first) - start)
        return elsewhere + self._table[max(0, start - self._first) : max(0, stop - self._first)]


@dataclass(slots=True, kw_only=True, eq=False)
class LocalRequest:
    """One request of one epoch on this instance."""

    generation: Generation
    sequence: EngineSequence
    state: SequenceState  # phase, copies, members
    block_size: int
    max_kv_tokens: int  # that it may come to hold
    sender: KvSource | None = None  # set if its KV moves on after its prefill
    exchange: KvExchange | None = None  # set if a group computes its prompt
    load: KvLoad | None = None  # set while some of its KV comes from the offload tier
    move: KvSource | None = None  # set while it decodes, and moves to another instance
    num_tokens_told: int = 0  # tokens of the transcript that was sent as the move began
    trace: RequestTrace | None = None  # set if the request is traced
    held: HeldBlocks = field(default_factory=HeldBlocks)  # in layers with a window
    num_reused_tokens: int = 0  # the first ones, whose KV was here
    num_shared_tokens: int = 0  # of these, in blocks that others have, too: what is behind came from the offload tier
    num_drafted_tokens: int = 0  # verified here, by steps of its own decoding
    num_accepted_tokens: int = 0  # of these
    num_chunks: int = 0  # begun
    num_begun_tokens: int = 0  # up to the end of the last chunk that was begun
    reports: RoomReports = field(default_factory=RoomReports)
    began_s: float = 0.0  # when this instance began to compute it, if it is a lost range
    num_steps: int = 0  # that it is in: one, or of several stages some, each with a chunk of it
    has_drawn: bool = False  # all of its tokens but the last one had KV here as it was released

    @property
    def request_id(self) -> RequestId:
        return self.generation.request_id

    @property
    def epoch(self) -> Epoch:
        return self.generation.epoch

    @property
    def phase(self) -> SeqPhase:
        return self.state.phase

    @property
    def is_released(self) -> bool:
        """Whether it is released; a step or a copy may still use its blocks."""
        return self.state.is_freed

    @property
    def chain(self) -> PrefixHashes:
        """Granules of its prompt, cached as it is computed: see `pdmesh.model.Request.chain`."""
        return self.state.chain

    @property
    def gives_back(self) -> bool:
        """Whether its prompt is longer than the room here: ranges of it leave while it is computed."""
        return self.state.prompt.num_blocks_at_once > 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of its prompt that were computed here, or reused."""
        return self.state.prompt.num_computed_tokens

    @property
    def next_instance_id(self) -> InstanceId | None:
        """The instance that will decode the request, if that is another one and known."""
        onward = self.state.onward
        return None if onward is None or onward.transfer is None else onward.transfer.destination_ids[0]

    def note_commit(self) -> None:
        """Commit the move if its last message has left: from then on the target may have begun."""
        move = self.state.move
        if move is not None and move.state is CopyState.FROZEN and self.move is not None and self.move.committed:
            move.commit()

    @property
    def in_step(self) -> bool:
        """Whether a step uses its blocks."""
        return self.num_steps > 0

    def begins(self, part: ChunkPlan) -> bool:
        """Whether a chunk can be the next one here: it follows what is computed, or a group leaves gaps for others.

        Of several stages it may follow what is being computed.
        """
        if self.exchange is None:
            return part.start == (self.num_begun_tokens if self.in_step else self.num_computed_tokens)
        end = part.start + part.num_tokens
        if part.is_last and not self.exchange.leads:
            return False
        if part.start % self.block_size and part.start != self.num_begun_tokens:  # a page has one writer
            return False
        if end % self.block_size and not part.is_last:
            return False
        first = num_blocks_for(part.start, self.block_size)
        return self.exchange.begin(first, num_blocks_for(end, self.block_size) - first)

    @property
    def num_own_tokens(self) -> int:
        """Tokens of its transcript whose KV no other instance holds."""
        return len(self.sequence.token_ids) - self.sequence.num_elsewhere_tokens

    @property
    def context_table(self) -> ContextTable:
        """The blocks of its whole context, of which others may hold the first; as it grows."""
        return ContextTable(self.sequence, self.block_size)

    @property
    def has_room(self) -> bool:
        """Whether there is room for the KV that the next decode step writes."""
        return self.num_own_tokens <= len(self.sequence.block_table) * self.block_size

    @property
    def is_low(self) -> bool:
        """Whether it needs more blocks soon, or at once."""
        num_blocks = len(self.sequence.block_table)
        if self.is_released or num_blocks * self.block_size >= self.max_kv_tokens - self.sequence.num_elsewhere_tokens:
            return False
        return is_low(self.num_own_tokens, num_blocks, self.block_size)

    def is_news(self, range_tokens: int) -> bool:
        """Return whether the scheduler has not heard that it is low, out of room, or holds more than a range.

        The last token has no KV yet.
        """
        if self.is_released:
            return False
        num_blocks = len(self.context_table)
        room = num_blocks * self.block_size - len(self.sequence.token_ids)
        is_full = 0 < range_tokens < self.num_own_tokens - 1
        return self.reports.note(num_blocks, room, is_low=self.is_low, is_full=is_full)

    @property
    def decodes_nowhere(self) -> bool:
        """Whether it is to decode, and cannot have begun to, here or where its KV goes."""
        if self.phase is SeqPhase.COMPUTED:
            return self.sender is not None and not self.sender.may_have_landed
        return self.state.decodes_nowhere

    def end_trace(self, outcome: str) -> None:
        """What was open in its trace ended so. Does nothing the second time."""
        if self.trace is not None:
            self.trace.ended(self.sequence.num_output_tokens, outcome)

    def as_resident(self, granules: PrefixHashes) -> Resident:
        """Return what a scheduler is told of it; ``granules`` are those of its prompt that are kept, too."""
        return Resident(
            request_id=self.request_id,
            epoch=self.epoch,
            gateway_id=self.generation.gateway_id,
            num_blocks=len(self.sequence.block_table),
            num_context_tokens=len(self.sequence.token_ids),
            decoding=self.state.is_decoding,
            max_total_tokens=self.max_kv_tokens,
            transfer_id=self.state.received_by,
            granules=granules,
            members=self.state.members,
            part=self.state.part,
        )


class Sequences:
    """The requests that an instance has blocks for.

    ``on_released`` is called once per request, when its last block is free or kept, with what ``keep_drawn`` has kept.
    """

    def __init__(
        self,
        pool: BlockPool,
        mover: KvMover,
        *,
        windows: Windows,
        keep_drawn: Callable[[LocalRequest], Drawn],
        on_released: Callable[[LocalRequest, Drawn], None],
    ) -> None:
        self._pool = pool
        self._mover = mover
        self._windows = windows
        self._keep_drawn = keep_drawn
        self._on_released = on_released
        self._requests: dict[tuple[RequestId, Epoch], LocalRequest] = {}
        self.states: dict[RequestKey, SequenceState] = {}  # phase and copies of each
        self._decoding: dict[tuple[RequestId, Epoch], LocalRequest] = {}
        self._leaving: set[LocalRequest] = set()
        self._released = anyio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LocalRequest]:
        """Iterate over a copy, because requests may be released on the way."""
        return iter(list(self._requests.values()))

    def get(self, request_id: RequestId, epoch: Epoch) -> LocalRequest | None:
        return self._requests.get((request_id, epoch))

    def is_leaving(self, request_id: RequestId, epoch: Epoch) -> bool:
        """Whether the request was released but its blocks are not free yet."""
        return any(request.request_id == request_id and request.epoch == epoch for request in self._leaving)

    @property
    def decoding(self) -> list[LocalRequest]:
        """The residents that have room for a token more, and all of their KV, oldest first."""
        return [request for request in self._decoding.values() if request.has_room and not request.state.has_lost_range]

    @property
    def num_decoding(self) -> int:
        """Residents, those that wait for credit among them."""
        return len(self._decoding)

    def num_of_stage(self) -> dict[str, int]:
        """How many are held, by stage; prompts of which no chunk has begun are ``queued``.

        Residents that wait for room are ``out_of_credit``.
        """
        counts = dict.fromkeys(("queued", *_STAGES.values(), "out_of_credit"), 0)
        for request in self:
            if request.phase is SeqPhase.PREFILLING and request.num_chunks == 0:
                counts["queued"] += 1
            elif request.phase is SeqPhase.DECODING and not request.has_room:
                counts["out_of_credit"] += 1
            else:
                counts["holding" if request.state.is_range else _STAGES[request.phase]] += 1
        return counts

    def add(self, request: LocalRequest) -> None:
        self._requests[request.state.key] = request
        self.states[request.state.key] = request.state

    def decode(self, request: LocalRequest) -> None:
        """Let a request draw tokens from the next step on."""
        if request.trace is not None and request.phase is not SeqPhase.PAUSED:
            request.trace.decode_began()
        request.state.decode()
        self._decoding[request.request_id, request.epoch] = request

    def pause(self, request: LocalRequest) -> None:
        """Let a request draw no more tokens."""
        del self._decoding[request.request_id, request.epoch]

    def release(self, request: LocalRequest) -> None:
        """Stop what runs for the request and give its blocks back, at once or when the step that uses them ends."""
        if request.is_released:
            return
        key = request.request_id, request.epoch
        del self._requests[key], self.states[key]
        self._decoding.pop(key, None)
        self._leaving.add(request)
        request.has_drawn = request.phase in _WITH_DRAWN
        request.state.free()
        self._mover.cancel(*key)
        if request.load is not None:
            request.load.abort("the request was freed")
        if not request.in_step:
            self._free(request)

    def step_ended(self, request: LocalRequest) -> bool:
        """Note that a step does not use the request's blocks any more; False if it was released meanwhile."""
        request.num_steps -= 1
        if request.is_released and not request.in_step:
            self._free(request)
        return not request.is_released

    def abort_waiting(self, reason: str) -> None:
        """End what the engine's thread waits for."""
        for request in self:
            if request.exchange is not None:
                request.exchange.gate.abort(reason)
            if request.load is not None:
                request.load.abort(reason)

    def guards(self, request: LocalRequest, first_token: int, num_tokens: int) -> list[BlockGuard]:
        """Return the copies that must have ended before the KV of these tokens is written."""
        first_token -= request.sequence.num_elsewhere_tokens
        first = first_token // request.block_size
        end = num_blocks_for(first_token + num_tokens, request.block_size)
        return self._pool.guards_of(request.sequence.block_table[first:end])

    def may_write(self, request: LocalRequest, part: ChunkPlan) -> bool:
        """Whether there are blocks for a chunk to fill, which are this request's alone."""
        table, num_elsewhere_tokens = request.sequence.block_table, request.sequence.num_elsewhere_tokens
        first = (part.start - num_elsewhere_tokens) // request.block_size
        end = num_blocks_for(part.start - num_elsewhere_tokens + part.num_tokens, request.block_size)
        return 0 <= first < end <= len(table) and not any(map(self._pool.is_shared, table[first:end]))

    async def settled(self) -> None:
        """Wait until every released request's blocks are free."""
        while self._leaving:
            await self._released.wait()

    async def emptied(self) -> None:
        """Wait until nothing is held."""
        while self._requests or self._leaving:
            await self._released.wait()

    def check_integrity(self) -> None:
        """Check that each block is in as many of the requests' tables as the pool counts references."""
        self._pool.check_integrity()
        held, tables = (
            self._pool.references,
            Counter(block for request in self for block in request.sequence.block_table),
        )
        wrong = {block: number for block, number in tables.items() if held.get(block, 0) < number}
        assert not wrong, f"blocks in more tables than the pool counts: {wrong}"
        for request in self.decoding:
            block_id = request.sequence.block_table[(request.num_own_tokens - 1) // request.block_size]
            assert not self._pool.is_shared(block_id), f"{request.request_id} writes into shared block {block_id}"
        for request in self:
            request.state.check_integrity()
        everyone = [*self, *self._leaving]
        self._windows.check_integrity((each.held, each.sequence.block_table) for each in everyone)
        if not self._leaving:
            assert tables == held, f"{tables.total()} blocks in tables, {sum(held.values())} references in the pool"

    def _free(self, request: LocalRequest) -> None:
        drawn = self._keep_drawn(request)
        self._windows.end(request.held, request.sequence.block_table)
        self._pool.free(request.sequence.block_table, on_released=lambda: self._freed(request, drawn))

    def _freed(self, request: LocalRequest, drawn: Drawn) -> None:
        self._leaving.remove(request)
        self._on_released(request, drawn)
        self._released.set()
        self._released = anyio.Event()
