"""The blocks and residents of an instance, in the form that `pdmesh.instance.machine` uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from pdmesh.core.commands import Hold, SendCopy
from pdmesh.core.events import KvReleased, MembersSet, RequestDropped
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.instance.effects import Effect
from pdmesh.instance.floor import MakesRoom, TakesBlocks
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.kv.spread import SpreadKv
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import TransferPlan
from pdmesh.worker.block_tables import StalePrefix
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.sequences import LocalRequest

log = structlog.get_logger()


class RequestFloor:
    """A `pdmesh.instance.floor.Floor` over requests. ``carry_out`` carries out all pending effects of the machine."""

    def __init__(
        self,
        context: InstanceContext,
        *,
        intake: Intake,
        growth: RoomGrowth,
        moves: MovingDecodes,
        own: OwnSteps,
        carry_out: Callable[[], None],
    ) -> None:
        self._context = context
        self._intake = intake
        self._growth = growth
        self._moves = moves
        self._carry_out = carry_out
        self._own = own
        self._effects: list[Effect] = []

    @property
    def instance_id(self) -> InstanceId:
        return self._context.instance_id

    @property
    def block_size(self) -> int:
        return self._context.block_size

    @property
    def range_tokens(self) -> int:
        return self._context.range_tokens

    @property
    def effects(self) -> list[Effect]:
        return self._effects

    @property
    def sequences(self) -> dict[RequestKey, Sequence]:
        return self._context.sequences.states

    @property
    def own(self) -> OwnSteps:
        return self._own

    def request(self, sequence: Sequence) -> LocalRequest:
        """Return the request of a sequence."""
        request = self._context.sequences.get(*sequence.key)
        assert request is not None, f"{sequence.key} is not held"
        return request

    # --- new sequences ---

    def chain_of(self, key: RequestKey) -> PrefixHashes:
        return self._intake.chain_of(key)

    def take(self, sequence: Sequence, command: TakesBlocks, num_reused: int) -> bool:
        if not isinstance(command, SendCopy):
            self.make_room(command)
        try:
            request = self._intake.take(sequence, command, num_reused)
        except PdmeshError as error:
            self._refuse(sequence, error)
            return False
        log.debug(
            "request held",
            request_id=request.request_id,
            epoch=request.epoch,
            num_tokens=len(request.sequence.token_ids),
            num_blocks=sequence.num_blocks,
        )
        return True

    def _refuse(self, sequence: Sequence, error: PdmeshError) -> None:
        """Report that a sequence is refused, and why.

        Unless the key is held here already, report that the sequence holds no room. After `StalePrefix`, report the
        cache, too.
        """
        key, reason = sequence.key, str(error)
        log.warning("request refused", request_id=key[0], epoch=key[1], reason=reason)
        self._context.metrics.refused_requests.inc()
        self._effects.append(RequestDropped(self.instance_id, *key, reason))
        if key not in self.sequences:
            self._effects.append(KvReleased(self.instance_id, *key, sequence.received_by))
        if isinstance(error, StalePrefix):
            self._context.metrics.stale_prefixes.inc()
            self._context.metrics.unseen_tokens.inc(error.num_unseen_tokens)
            self._effects.append(self._context.tables.report())

    # --- room ---

    def make_room(self, command: MakesRoom) -> None:
        self._context.tables.make_room(command.room)

    def grow(self, sequence: Sequence, command: Hold) -> None:
        self._growth.grow(self.request(sequence), command)

    def keep(self, sequence: Sequence, command: Hold) -> bool:
        """Keep a request here to decode, with room for its output. Drop it and return False if there is no room."""
        request = self.request(sequence)
        num_tokens = len(request.sequence.token_ids) - (request.phase is SeqPhase.COMPUTED)
        request.max_kv_tokens = num_tokens + request.generation.max_tokens_left - 1
        request.sender = None
        self._context.mover.departures.withdraw(request.request_id, request.epoch)
        try:
            if request.max_kv_tokens > self._context.max_model_len:
                raise ProtocolError(
                    f"{request.max_kv_tokens} tokens exceed the model's context of {self._context.max_model_len}"
                )
            self._growth.extend(request, command.num_blocks)
        except PdmeshError as error:
            self._context.drop(request, str(error))
            return False
        if request.phase is SeqPhase.COMPUTED:
            self._context.gateways.hand_over_stream(request, self.instance_id)
        return True

    def computed(self, sequence: Sequence, num_granules: int) -> None:
        self._context.tables.keep_prompt(self.request(sequence), num_granules * GRANULE_TOKENS)

    # --- residents ---

    def land(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.land(num_tokens)
        self._context.tables.keep_prompt(self.request(sequence), num_tokens)

    def decode(self, sequence: Sequence) -> None:
        """Let a request decode here. If it was paused for a move, notify the gateway."""
        request = self.request(sequence)
        if request.phase is SeqPhase.PAUSED:
            self._context.gateways.hand_over_stream(request, self.instance_id)
        self._context.sequences.decode(request)
        self._context.wake()

    def leave(self, sequence: Sequence) -> None:
        """Let a request leave now, or with the end of the step that computes it."""
        self._moves.leave(self.request(sequence))

    def stay(self, sequence: Sequence) -> None:
        """Do nothing, because the request decodes already."""

    # --- copies ---

    def why_not_sent(self, sequence: Sequence, transfer: TransferPlan) -> str:
        request = self.request(sequence)
        try:
            self._context.addresses.of(transfer.destination_ids)
        except ProtocolError as error:
            return str(error)
        if sequence.is_decoding and len(transfer.destinations) != 1:
            return "it would move to several instances"
        if transfer.is_of_range and not transfer.computes and not _has_range(request, transfer):
            return "the range is not here"
        return ""

    # --- ranges on other instances ---

    def num_kv_tokens(self, sequence: Sequence) -> int:
        request = self.request(sequence)
        return request.num_computed_tokens if request.streams_out else len(request.sequence.token_ids) - 1

    def spread(self, sequence: Sequence, members: tuple[PartMember, ...], num_blocks: int, done: MembersSet) -> None:
        self._carry_out()
        request, report = self.request(sequence), self._context.report
        holders = self._context.addresses.holders(members)
        num_tokens = len(members) * self.range_tokens
        request.sequence.elsewhere = self._context.mover.parts.open(
            request.request_id, request.epoch, members=holders, num_tokens=num_tokens
        )
        table = request.sequence.block_table
        given_back = table[:num_blocks]
        del table[:num_blocks]
        request.reports.spread()
        on_free = partial(report, done)
        if request.sender is not None:
            request.sender.give_back(num_tokens // request.block_size)
            on_free = partial(self._use_again, request, num_blocks, done)
        self._context.tables.take_out(given_back, on_free)
        self._growth.tell([request])
        self._context.wake()

    def _use_again(self, request: LocalRequest, num_blocks: int, done: MembersSet) -> None:
        """Allocate new blocks for the next tokens of a prompt in place of freed ones, and report the change.

        At most ``num_blocks``, and no more than the prompt still needs. Drops the request if too few blocks are free,
        since then the scheduler's count is wrong.
        """
        sender, table = request.sender, request.sequence.block_table
        if request.is_released or sender is None:
            return
        first = request.sequence.num_remote_tokens // request.block_size + len(table)
        try:
            new = self._context.tables.allocate(min(num_blocks, len(sender.block_ids) - first))
        except OutOfBlocks as error:
            self._context.drop(request, str(error))
            return
        table += new
        request.state.grow(len(new))
        sender.hold(first, new)
        self._context.report(done)

    def lose_range(self, sequence: Sequence, number: int) -> None:
        """Pause a request that lost a range, even within a running step."""
        sequence.lose_range(number)
        elsewhere = self.request(sequence).sequence.elsewhere
        if isinstance(elsewhere, SpreadKv):
            elsewhere.fail("a range of its KV was lost", number)

    # --- the end ---

    def release(self, sequence: Sequence) -> None:
        """Release a request after all earlier effects are carried out."""
        self._carry_out()
        self._context.sequences.release(self.request(sequence))

    def end(self, sequence: Sequence) -> None:
        self.release(sequence)

    def is_leaving(self, key: RequestKey) -> bool:
        return self._context.sequences.is_leaving(*key)


def _has_range(request: LocalRequest, transfer: TransferPlan) -> bool:
    """Whether the first blocks here are the range of a transfer, with complete KV. False for several destinations."""
    blocks = transfer.sources[0].part.blocks
    if len(transfer.destinations) != 1 or blocks.size > len(request.sequence.block_table):
        return False
    if request.phase is SeqPhase.HOLDING:
        return True
    num_elsewhere_blocks = request.sequence.num_remote_tokens // request.block_size
    has_kv = blocks.size * request.block_size <= request.num_own_tokens - 1
    return request.state.is_decoding and has_kv and blocks.start == num_elsewhere_blocks
