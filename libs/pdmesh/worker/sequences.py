"""The requests of an instance: their blocks, their transcripts, and their progress.

A request is *released* once: its transfer is stopped, its blocks go back to the pool, and the scheduler gets a report
when the last block is free. The release waits while a step or a copy still uses the blocks.
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
from pdmesh.instance.sequence_phases import LeavingState, SeqPhase
from pdmesh.kv.blocks import BlockGuard, BlockPool
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.mover import KvMover
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import Epoch, InstanceId, PrefixHashes, RequestId, RequestKey, Resident
from pdmesh.plans import ChunkPlan
from pdmesh.policy.on_demand import is_low
from pdmesh.wire.messages import Generation
from pdmesh.worker.spans import RequestTrace
from pdmesh.worker.windows import HeldBlocks, Windows

#: Names of phases in metrics.
_STAGES = {
    SeqPhase.PREFILLING: "prefilling",
    SeqPhase.COMPUTED: "sending",
    SeqPhase.EXPECTED: "receiving",
    SeqPhase.HOLDING: "holding",
    SeqPhase.DECODING: "decoding",
    SeqPhase.PAUSED: "leaving",
}

#: Phases in which all tokens except the last one have their KV here.
_WITH_DRAWN = (SeqPhase.COMPUTED, SeqPhase.DECODING, SeqPhase.PAUSED)


class Drawn(NamedTuple):
    """Drawn granules that are cached when a request ends. The first ``num_known`` of them were cached before.

    ``states`` are granules whose states are cached from then on.
    """

    granules: PrefixHashes = ()
    num_known: int = 0
    states: PrefixHashes = ()


class ContextTable(Sequence[int]):
    """A sequence's blocks by their place in the context, with `NO_BLOCK` for blocks on other instances."""

    def __init__(self, sequence: EngineSequence, block_size: int) -> None:
        self._table = sequence.block_table
        self._first = sequence.num_remote_tokens // block_size

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
    """A request of one epoch on this instance.

    ``state``: phase, copies and shard holders.
    ``max_kv_tokens``: most tokens whose KV the request may come to have.
    ``sender``: set if the KV moves on after the prefill.
    ``exchange``: set if a group computes the prompt.
    ``load``: set while KV comes from the offload tier.
    ``move``: set while the request decodes and moves to another instance.
    ``num_tokens_told``: length of the transcript that was sent when the move began.
    ``trace``: set if the request is traced.
    ``held``: frames in layers with a window.
    ``num_reused_tokens``: number of first tokens whose KV was cached here, in blocks or in the offload tier.
    ``num_shared_tokens``: number of first tokens in blocks shared with others; other reused tokens came from the tier.
    ``num_drafted_tokens``: drafted tokens that steps here verified, ``num_accepted_tokens`` of them successfully.
    ``num_chunks``: number of chunks that have begun, and ``num_begun_tokens`` the end of the last one.
    ``began_s``: when this instance began to compute the request's lost range.
    ``num_steps``: number of steps that use the request now; with several stages, each may have a chunk of it.
    ``decoded_in``: number of the instance's last batch that decodes the request; 0: none yet.
    ``has_drawn``: whether all tokens except the last one had KV here at the release.
    ``num_cached_granules``: number of the prompt's first granules whose KV was computed here, or has come.
    """

    generation: Generation
    sequence: EngineSequence
    state: SequenceState
    block_size: int
    max_kv_tokens: int
    sender: KvSource | None = None
    exchange: KvExchange | None = None
    load: KvLoad | None = None
    move: KvSource | None = None
    num_tokens_told: int = 0
    trace: RequestTrace | None = None
    held: HeldBlocks = field(default_factory=HeldBlocks)
    num_reused_tokens: int = 0
    num_shared_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_chunks: int = 0
    num_begun_tokens: int = 0
    reports: RoomReports = field(default_factory=RoomReports)
    began_s: float = 0.0
    num_steps: int = 0
    decoded_in: int = 0
    has_drawn: bool = False
    num_cached_granules: int = 0

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
        """Whether the request is released; a step or a copy may still use its blocks."""
        return self.state.is_freed

    @property
    def chain(self) -> PrefixHashes:
        """Granules of the prompt, cached as they are computed: see `pdmesh.model.Request.chain`."""
        return self.state.chain

    @property
    def streams_out(self) -> bool:
        """Whether the prompt is longer than the room here, so that ranges leave while it is computed."""
        return self.state.prompt.num_blocks_at_once > 0

    @property
    def num_computed_tokens(self) -> int:
        """Number of prompt tokens that were computed here or reused."""
        return self.state.prompt.num_computed_tokens

    @property
    def next_instance_id(self) -> InstanceId | None:
        """The other instance that will decode the request; None if it is unknown or this one."""
        onward = self.state.onward
        return None if onward is None or onward.transfer is None else onward.transfer.destination_ids[0]

    def note_commit(self) -> None:
        """Commit a frozen move whose last message has left, since the target may decode from then on."""
        move = self.state.move
        if move is not None and move.state is LeavingState.FROZEN and self.move is not None and self.move.committed:
            move.commit()

    @property
    def in_step(self) -> bool:
        """Whether a step uses the request's blocks."""
        return self.num_steps > 0

    def begins(self, part: ChunkPlan) -> bool:
        """Whether a chunk can be the next one here, and begin it in the group's exchange, if any.

        Without a group, a chunk must follow the computed tokens, or with several stages the tokens being computed. A
        group's chunk may leave gaps for other members, but must be made of whole blocks, since a page has one writer.
        """
        if self.exchange is None:
            return part.start == (self.num_begun_tokens if self.in_step else self.num_computed_tokens)
        end = part.start + part.num_tokens
        if part.is_last and not self.exchange.leads:
            return False
        if part.start % self.block_size and part.start != self.num_begun_tokens:
            return False
        if end % self.block_size and not part.is_last:
            return False
        first = num_blocks_for(part.start, self.block_size)
        return self.exchange.begin(first, num_blocks_for(end, self.block_size) - first)

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens of the transcript whose KV is not on other instances."""
        return len(self.sequence.token_ids) - self.sequence.num_remote_tokens

    @property
    def context_table(self) -> ContextTable:
        """Live view of the blocks of the whole context; other instances may hold the first ones."""
        return ContextTable(self.sequence, self.block_size)

    @property
    def has_room(self) -> bool:
        """Whether there is room for the KV that the next decode step writes."""
        return self.num_own_tokens <= len(self.sequence.block_table) * self.block_size

    @property
    def is_low(self) -> bool:
        """Whether the request needs more blocks, soon or at once. False once its room suffices to the end."""
        num_blocks = len(self.sequence.block_table)
        if self.is_released or num_blocks * self.block_size >= self.max_kv_tokens - self.sequence.num_remote_tokens:
            return False
        return is_low(self.num_own_tokens, num_blocks, self.block_size)

    def is_news(self, range_tokens: int) -> bool:
        """Note the room of the request, and return whether it is worth a report.

        A report is due when the request gets low or out of room, or has more KV here than a range. The last token has
        no KV yet.
        """
        if self.is_released:
            return False
        num_blocks = len(self.context_table)
        room = num_blocks * self.block_size - len(self.sequence.token_ids)
        is_full = 0 < range_tokens < self.num_own_tokens - 1
        return self.reports.note(num_blocks, room, is_low=self.is_low, is_full=is_full)

    @property
    def decodes_nowhere(self) -> bool:
        """Whether the request waits to decode, and cannot have begun here or at the receiver of its KV."""
        if self.phase is SeqPhase.COMPUTED:
            return self.sender is not None and not self.sender.may_have_landed
        return self.state.decodes_nowhere

    def end_trace(self, outcome: str) -> None:
        """End the open spans of the trace with an outcome. Does nothing the second time."""
        if self.trace is not None:
            self.trace.ended(self.sequence.num_output_tokens, outcome)

    def as_resident(self, granules: PrefixHashes) -> Resident:
        """Return the request for a registration. ``granules`` are the cached ones of the prompt."""
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
            user=self.generation.user,
        )


class Sequences:
    """The requests that an instance has blocks for.

    ``on_released`` is called once per request, when the last block is free or only cached, with the result of
    ``keep_end``, which caches the drawn granules and states.
    """

    def __init__(
        self,
        pool: BlockPool,
        mover: KvMover,
        *,
        windows: Windows,
        keep_end: Callable[[LocalRequest], Drawn],
        on_released: Callable[[LocalRequest, Drawn], None],
    ) -> None:
        self._pool = pool
        self._mover = mover
        self._windows = windows
        self._keep_end = keep_end
        self._on_released = on_released
        self._requests: dict[tuple[RequestId, Epoch], LocalRequest] = {}
        self.states: dict[RequestKey, SequenceState] = {}
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
        """Residents with room for one more token and without a lost range, oldest first."""
        return [request for request in self._decoding.values() if request.has_room and not request.state.has_lost_range]

    @property
    def num_decoding(self) -> int:
        """Number of residents, including residents that wait for room."""
        return len(self._decoding)

    def num_of_stage(self) -> dict[str, int]:
        """Return the number of requests by stage.

        Prompts without a begun chunk are ``queued``, and residents that wait for room are ``out_of_credit``.
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
        """Stop a request's copies and loads and free its blocks, at once or when the step that uses them ends."""
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
        """End a step's use of the request's blocks; return False if the request was released meanwhile."""
        request.num_steps -= 1
        if request.is_released and not request.in_step:
            self._free(request)
        return not request.is_released

    def abort_waiting(self, reason: str) -> None:
        """Abort all waits of the engine's thread for groups and loads."""
        for request in self:
            if request.exchange is not None:
                request.exchange.gate.abort(reason)
            if request.load is not None:
                request.load.abort(reason)

    def guards(self, request: LocalRequest, first_token: int, num_tokens: int) -> list[BlockGuard]:
        """Return the copies that must have ended before the KV of these tokens is written."""
        first_token -= request.sequence.num_remote_tokens
        first = first_token // request.block_size
        end = num_blocks_for(first_token + num_tokens, request.block_size)
        return self._pool.guards_of(request.sequence.block_table[first:end])

    def may_write(self, request: LocalRequest, part: ChunkPlan) -> bool:
        """Whether the table has all blocks that a chunk fills, and none of them is shared."""
        table, num_remote_tokens = request.sequence.block_table, request.sequence.num_remote_tokens
        first = (part.start - num_remote_tokens) // request.block_size
        end = num_blocks_for(part.start - num_remote_tokens + part.num_tokens, request.block_size)
        return 0 <= first < end <= len(table) and not any(map(self._pool.is_shared, table[first:end]))

    async def settled(self) -> None:
        """Wait until every released request's blocks are free."""
        while self._leaving:
            await self._released.wait()

    async def emptied(self) -> None:
        """Wait until no request is left and all blocks of released ones are free."""
        while self._requests or self._leaving:
            await self._released.wait()

    def check_integrity(self) -> None:
        """Raise AssertionError if tables and the pool's references disagree, or residents write into shared blocks."""
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
            if request.move is not None:
                assert request.held.first <= request.move.first_held, f"{request.request_id} freed frames as it moves"
        everyone = [*self, *self._leaving]
        self._windows.check_integrity((each.held, each.sequence.block_table) for each in everyone)
        if not self._leaving:
            assert tables == held, f"{tables.total()} blocks in tables, {sum(held.values())} references in the pool"

    def _free(self, request: LocalRequest) -> None:
        drawn = self._keep_end(request)
        self._windows.end(request.held, request.sequence.block_table)
        self._pool.free(request.sequence.block_table, on_released=lambda: self._freed(request, drawn))

    def _freed(self, request: LocalRequest, drawn: Drawn) -> None:
        self._leaving.remove(request)
        self._on_released(request, drawn)
        self._released.set()
        self._released = anyio.Event()
