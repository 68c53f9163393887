"""What an instance does, without the time that it takes: the commands that it obeys, and what may happen next.

This is a worker without engine, wire and clock. It checks what a real one takes for granted: that there is room, that
chunks come in order, that a transfer was offered before it is granted.

* `obey` takes the scheduler's commands, of which each changes the state at once.
* All else *may happen* when its time has come, and says itself what must have happened before: a step begins and ends,
  decode steps are made, residents change between two steps, a transfer is sent, lands or fails, a move stands still and
  is committed. Each changes the state and reports what a worker would.

Who owns the instance says when that is. The simulator does by a clock (`pdmesh_lab.sim.instance`); the laws of the core
let chance choose, and have everything fail (`pdmesh_testing.modelled`). Both learn through `Surroundings` what a
command lets happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from pdmesh.core.commands import (
    AdmitPrefill,
    FetchKept,
    FreeKv,
    GrantTransfer,
    Hold,
    InstanceCommand,
    PlaceDecode,
    RunStep,
    SendKept,
    SetPlaces,
    SetRole,
    Stop,
    StopCopy,
    StopInstance,
)
from pdmesh.core.events import (
    DecodeReserved,
    DecodeStepsDone,
    GroupPrefix,
    HelperJoined,
    InstanceEvent,
    KvLow,
    MoveFailed,
    RequestFinished,
    StepDone,
    TransferOffered,
    TransferPaused,
)
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.model import (
    GRANULE_TOKENS,
    NO_TRANSFER,
    FinishReason,
    InstanceId,
    InstanceProfile,
    PartMember,
    RequestKey,
    TransferPurpose,
)
from pdmesh.plans import ChunkDone, ChunkPlan, PrefillGroup, StepPlan, TransferPlan
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.residents import Length, Shares
from pdmesh_lab.sim.surroundings import Surroundings
from pdmesh_lab.sim.transferring import Transferring

#: Commands for a request that is here.
_OfHeld = SetPlaces | GrantTransfer | StopCopy | Hold

_UNWANTED = "it is not wanted any more"


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A planned step that has begun."""

    plan: StepPlan
    num_decodes: int
    num_context_tokens: int  # of the decodes
    has_share: bool  # of the residents, which may be none of them


class UntimedInstance(Transferring):
    """``report`` takes what it tells the scheduler, in order; ``length_of`` says how long a request gets."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        report: Callable[[InstanceEvent], None],
        length_of: Callable[[RequestKey], Length],
        surroundings: Surroundings,
    ) -> None:
        super().__init__(profile, report=report, length_of=length_of, surroundings=surroundings)
        self.role = profile.role
        self.is_told_to_stop = False
        self.plans: deque[StepPlan] = deque()  # not begun
        #: The last one between two layers of the one before it; or, of several stages, each behind the one before it.
        self.running: list[RunningStep] = []
        self._num_stages = profile.num_stages
        self.shares = Shares(profile.num_stages)
        self.own = OwnSteps()

    # --- what it is told ---

    def obey(self, command: InstanceCommand) -> None:
        match command:
            case AdmitPrefill():
                self._admit(command)
            case PlaceDecode(transfer=transfer):
                key = (command.request_id, command.epoch)
                part, members = _part_of(transfer, self.instance_id), command.members or _members_of(transfer)
                receiver = Held(
                    key,
                    command.num_blocks,
                    None,
                    leads=part is None,
                    transfer=transfer,
                    chain=() if members or part is not None else self._length_of(key).chain,
                    part=part,
                    members=members if part is None else (),
                )
                if self._take(receiver, command, transfer.num_reused_granules):
                    self._report(DecodeReserved(self.instance_id, *key, transfer.transfer_id))
            case FetchKept() | SendKept():
                self._copy_kept(command)
            case RunStep(plan=plan):
                assert not (plan.urgent and self.plans and self.plans[0].urgent), "two urgent plans"
                if plan.urgent:
                    self.plans.appendleft(plan)
                else:
                    self.plans.append(plan)
                self._surroundings.planned(plan)
            case FreeKv():
                self._free((command.request_id, command.epoch), command.transfer_id)
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self.is_told_to_stop = True
            case _:
                if isinstance(command, Hold):
                    self._make_room(command)
                held = self.held.get((command.request_id, command.epoch))
                if held is not None:  # else it ended while this was on its way
                    self._obey_for(held, command)

    def _obey_for(self, held: Held, command: _OfHeld) -> None:
        """Obey what concerns a request that is here."""
        match command:
            case SetPlaces():
                self._set_places(held, command)
            case GrantTransfer(transfer=transfer) if transfer.purpose is TransferPurpose.MOVE and held.stands_still:
                pass  # that it lost a range is told, and it starts again
            case GrantTransfer(transfer=transfer) if transfer.purpose is TransferPurpose.MOVE:
                assert held.is_decoding, f"{command}, which does not decode"
                assert held.leaving is None, f"{command} of one that moves already"
                held.leaving = transfer
                self._surroundings.sends(held)
            case GrantTransfer(transfer=transfer) if transfer.is_of_part:
                assert held.is_decoding or held.is_part or held.stands_still, f"{command}, which holds none here"
                assert held.handing is None, f"{command} of one that hands another on"
                if transfer.purpose is TransferPurpose.LOST_PART:
                    self._stand_still(held)
                held.handing = transfer
                self._surroundings.sends(held)
            case GrantTransfer(transfer=transfer):
                assert held.is_offered, f"{command} without an offer"
                assert not held.is_granted, f"{command} twice"
                assert held.transfer in (transfer, None), f"{command} of another transfer"
                held.transfer, held.is_granted = transfer, True
                self._surroundings.sends(held)
            case StopCopy():
                self._stop_copy(held, command)
            case Hold(decodes=False):
                if self._grow(held, command) and self.residents.grow(held.key, self._num_context_blocks(held)):
                    self._surroundings.stirs()
            case Hold(ends_move=True):
                if held.is_leaving_by(command.move_id):
                    self._stay(held)
            case Hold():
                assert held.moves_on, f"{command}, and its KV is to stay"
                assert held.transfer is None, f"{command}, and its KV moves"
                self._grow(held, command)
                held.moves_on = False
                if held.is_computed:
                    self._decode(held)
            case _:
                assert_never(command)

    def _set_places(self, held: Held, command: SetPlaces) -> None:
        """Take in which other instances have KV of a request that is here."""
        match command.places:
            case PrefillGroup() as group:
                if not held.is_computed:
                    self._regroup(held, group)
            case str():
                pass  # questions are answered wherever they come from
            case members:
                held.next_members = members
                self._surroundings.stirs()

    def _stop_copy(self, held: Held, command: StopCopy) -> None:
        """Stop sending KV of a request that is here."""
        match command.how:
            case Stop.PAUSE:
                if held.transfer is None:
                    return  # the transfer failed here, too
                assert held.is_granted, f"{command} without a grant"
                assert not held.is_computed, f"{command}, but all of it is computed"
                self._surroundings.stops_sending(held)
                held.is_granted = False
                self._report(TransferPaused(self.instance_id, *held.key, command.transfer_id))
            case Stop.CANCEL if held.is_leaving_by(command.transfer_id):
                self.fail_move(held, _UNWANTED)
            case Stop.CANCEL:  # the move never began here, or is over
                self._report(MoveFailed(self.instance_id, *held.key, command.transfer_id, False, _UNWANTED))
            case Stop.WITHDRAW if held.handing is not None:
                if held.handing.transfer_id == command.transfer_id:
                    self._surroundings.stops_sending(held)
                    held.handing = None
            case Stop.WITHDRAW if held.is_decoding or held.is_part or held.stands_still:
                pass  # all of the range had been sent
            case Stop.WITHDRAW:
                if held.transfer is not None:
                    assert held.transfer.transfer_id == command.transfer_id, f"{command} of another transfer"
                    self._surroundings.stops_sending(held)
                    held.lose_receiver()
            case _:
                assert_never(command.how)

    def _copy_kept(self, command: FetchKept | SendKept) -> None:
        """Take part in a copy of granules that are kept, of no request."""
        key, transfer = (command.request_id, command.epoch), command.transfer
        sends = isinstance(command, SendKept)
        shard = transfer.sources[0] if sends else transfer.destinations[0]
        held = Held(key, shard.num_blocks, None, leads=False, chain=command.chain, transfer=transfer)
        held.is_computed = held.is_granted = sends
        if isinstance(command, FetchKept):
            if self._take(held, command, transfer.num_reused_granules):
                self._report(DecodeReserved(self.instance_id, *key, transfer.transfer_id))
        elif self._take(held, command, len(command.chain)):
            self._surroundings.sends(held)

    def _admit(self, command: AdmitPrefill) -> None:
        key = (command.request_id, command.epoch)
        length = self._length_of(key)
        held = Held(
            key,
            command.num_blocks,
            length if command.leads else None,
            chain=length.chain if (command.leads or command.keeps_prefix) and not command.num_blocks_at_once else (),
            num_blocks_at_once=command.num_blocks_at_once,
            num_loaded_granules=command.num_loaded_granules,
            num_computed_tokens=command.num_reused_granules * GRANULE_TOKENS,
            leads=command.leads,
            group=command.group,
            transfer=command.transfer,
            moves_on=command.moves_on,
            is_again=any(_has_chunk(plan, key) for plan in self._plans_under_way()),
        )
        if not self._take(held, command, command.num_reused_granules):
            return
        if command.group is not None:
            self._surroundings.regrouped(held, None)
        if command.leads:
            self._surroundings.admitted(held)
        else:
            self._report(HelperJoined(self.instance_id, *key))

    def _regroup(self, held: Held, group: PrefillGroup) -> None:
        """Take the members that a group has from now on. If one was lost, what was planned waits for nobody."""
        known, held.group = held.group, group
        self._surroundings.regrouped(held, known)
        if not set(group.lost_ids).difference(() if known is None else known.lost_ids):
            return
        held.given_up.update([plan.plan_id for plan in self._plans_under_way() if _has_chunk(plan, held.key)])
        if held.leads:
            num_tokens = self._surroundings.num_present_tokens(held)
            self._report(GroupPrefix(self.instance_id, *held.key, num_tokens, len(group.lost_ids)))
        self._surroundings.gave_up(held)

    def _plans_under_way(self) -> list[StepPlan]:
        return [*[step.plan for step in self.running], *self.plans]

    def drop_all_but_decoding(self) -> None:
        """Forget all plans, and all that does not decode: a scheduler that it registers with knows nothing of them."""
        self.end_copies()
        self.plans.clear()
        self.running.clear()
        self.shares.forget()
        self.own.held = False
        for held in list(self.held.values()):
            if held.leaving is not None and not held.is_committed:
                self._stay(held)
            if held.handing is not None:
                self._surroundings.stops_sending(held)
            held.handing = held.next_members = None
            if not held.is_decoding and not (held.is_part and held.num_tokens):
                self._surroundings.forgets(held)
                self._let_go(held)

    # --- steps ---

    def turn(self) -> list[Held]:
        """Let residents change, between two steps. Those are returned that stand still from now on, to move away."""
        frozen: list[Held] = []
        if self.running and not self.shares.is_between_rounds:
            return frozen  # some have their token of the round already
        for held in list(self.held.values()) if self.profile.max_kv_tokens else ():
            if held.next_members is not None:
                self._set_members(held, held.next_members)
        for key, num_tokens in self.residents.seat():
            held = self.held[key]
            held.is_decoding, held.num_tokens = False, num_tokens
            if held.is_freed:
                self.release(held)
            elif not held.stands_still:
                held.is_frozen = True
                frozen.append(held)
        return frozen

    @property
    def can_begin(self) -> bool:
        """Whether the next plan could start: nothing runs, or it is urgent; or a stage has nothing to compute."""
        if self._num_stages > 1:
            return bool(self.plans) and len(self.running) < self._num_stages
        return bool(self.plans) and (not self.running or self.plans[0].urgent)

    def begin_step(self) -> RunningStep:
        """The next plan's chunks start: first chunks whose KV moves are offered.

        Of several stages a step has as large a part of the residents.
        """
        plan = self.plans.popleft()
        self.own.planned(plan)
        for chunk in plan.chunks:
            held = self.held.get((chunk.request_id, chunk.epoch))
            if held is not None and held.moves_on and not held.is_offered:
                held.is_offered = True
                transfer_id = NO_TRANSFER if held.transfer is None else held.transfer.transfer_id
                self._report(TransferOffered(self.instance_id, *held.key, transfer_id))
        residents = self.residents
        num_decodes = num_context_tokens = 0
        if has_share := plan.with_decodes and len(residents) > 0:
            num_decodes = self.shares.begin(len(residents))
            num_context_tokens = residents.num_context_tokens * num_decodes // len(residents)
        step = RunningStep(plan, num_decodes, num_context_tokens, has_share)
        self.running.append(step)
        return step

    @property
    def _next_to_end(self) -> int:
        return 0 if self._num_stages > 1 else -1

    @property
    def can_end(self) -> bool:
        """Whether nothing in the step that ends next waits for KV of other members."""
        plan = self.running[self._next_to_end].plan
        return all(
            held.group is None or plan.plan_id in held.given_up or self._surroundings.has_before(held, chunk)
            for chunk in plan.chunks
            if (held := self.held.get((chunk.request_id, chunk.epoch))) is not None
        )

    def end_step(
        self,
        *,
        duration_s: float = 0.0,
        began_s: float = 0.0,
        ended_s: float = 0.0,
        ended_by_first_token: bool = False,
    ) -> None:
        """The running plan is done, of two the inner one; of several stages, the one that began first.

        ``ended_by_first_token`` ends the generations of its last chunks at once.
        """
        step = self.running.pop(self._next_to_end)
        computed: list[tuple[Held, ChunkPlan]] = []
        results: list[ChunkDone] = []
        for chunk in step.plan.chunks:
            held = self._computes(step, chunk)
            if held is not None:
                held.num_computed_tokens = chunk.start + chunk.num_tokens
                self._keep(held, held.num_computed_tokens // GRANULE_TOKENS)
                computed.append((held, chunk))
            results.append(
                ChunkDone(
                    request_id=chunk.request_id,
                    epoch=chunk.epoch,
                    num_tokens=0 if held is None else chunk.num_tokens,
                    is_last=chunk.is_last,
                )
            )
        self._report(
            StepDone(
                self.instance_id,
                step.plan.plan_id,
                duration_s,
                tuple(results),
                step.num_decodes,
                step.num_context_tokens,
                self.own.take(),
                began_s,
                ended_s,
            )
        )
        for held, chunk in computed:
            if chunk.is_last:
                self._end_prompt(held, chunk, ended_by_first_token=ended_by_first_token)
            else:
                self._surroundings.computed(held, chunk, ends=False)
        draws = self.draws_with(step)
        if step.has_share:
            self.shares.end()
        if draws:
            self.draw(1)

    def draws_with(self, step: RunningStep) -> bool:
        """Whether all residents have a token more as a step ends: if with it each has been part of one."""
        return step.has_share and self.shares.ends_round

    def _computes(self, step: RunningStep, chunk: ChunkPlan) -> Held | None:
        """The request of a chunk that is computed; None if it has gone, or would wait for KV that does not come."""
        held = self.held.get((chunk.request_id, chunk.epoch))
        if held is None or held.received_by != NO_TRANSFER:  # it was freed, and may receive its KV since then
            return None
        if held.group is not None:
            if self._surroundings.has_before(held, chunk):
                return held
            assert step.plan.plan_id in held.given_up, f"{chunk} does not wait"
            return None
        if held.is_again and chunk.start != held.num_computed_tokens:
            self.drop(held, "the chunk does not follow")
            return None
        assert chunk.start == held.num_computed_tokens, f"{chunk} after {held.num_computed_tokens} tokens"
        if held.num_blocks_at_once:
            num_tokens = self._num_context_blocks(held) * self.profile.kv_layout.block_size
            assert chunk.start + chunk.num_tokens <= num_tokens, f"{chunk} where there is room for {num_tokens}"
        return held

    def _end_prompt(self, held: Held, chunk: ChunkPlan, *, ended_by_first_token: bool) -> None:
        """Sample the first token: with it the generation ends, or decodes here, or its KV moves on."""
        length = held.length
        assert length is not None, f"{chunk} on a helper"
        held.is_computed, held.num_tokens = True, held.num_computed_tokens + 1
        is_full = held.num_tokens >= length.num_total_tokens
        ends = is_full or ended_by_first_token
        self._surroundings.computed(held, chunk, ends=ends)
        if ends:
            self.finish(held, FinishReason.LENGTH if is_full else FinishReason.STOP)
        elif not held.moves_on:
            self._decode(held)

    def make_own_steps(self, num_steps: int, *, duration_s: float, began_s: float, ended_s: float) -> None:
        """So many decode steps were made without a plan: no more than residents and reports allow at once."""
        num_decodes = len(self.residents)
        self.own.made(
            num_steps=num_steps,
            num_tokens=num_steps * num_decodes,
            num_context_tokens=num_steps * self.residents.num_context_tokens
            + num_decodes * num_steps * (num_steps - 1) // 2,
            duration_s=duration_s,
            began_s=began_s,
            ended_s=ended_s,
        )
        self.draw(num_steps)
        if self.own.num_left <= 0 and (own_steps := self.own.take()) is not None:
            self._report(DecodeStepsDone(self.instance_id, own_steps))

    def draw(self, num_steps: int) -> None:
        """Every resident has a token more for each of the steps; those with all of theirs end."""
        told = self.residents.decoded(num_steps)
        for key in told.finished:
            held = self.held[key]
            held.is_decoding = False
            self.finish(held, FinishReason.LENGTH)
        if told.low:
            self._report(KvLow(self.instance_id, told.low))

    def finish(self, held: Held, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """A generation ends here, with as many tokens as it was to draw unless it says otherwise."""
        self._surroundings.forgets(held)
        held.has_ended = num_output_tokens is None
        if num_output_tokens is None:
            assert held.length is not None
            num_output_tokens = held.length.num_output_tokens
        self._report(RequestFinished(self.instance_id, *held.key, reason, num_output_tokens, self.own.take()))
        self._let_go(held)


def _part_of(transfer: TransferPlan, instance_id: InstanceId) -> int | None:
    """Return the number of the range that a transfer brings to an instance; None where it decodes."""
    if transfer.is_of_part:
        blocks = transfer.destinations[0].part.blocks
        return blocks.start // blocks.size
    place = transfer.destination_ids.index(instance_id)
    return place - 1 if place else None


def _members_of(transfer: TransferPlan) -> tuple[PartMember, ...]:
    """Return those to which a hand-over brings the first ranges."""
    others = transfer.destination_ids[1:]
    return tuple([PartMember(instance_id=each, capability=transfer.capability) for each in others])


def _has_chunk(plan: StepPlan, key: RequestKey) -> bool:
    return any((chunk.request_id, chunk.epoch) == key for chunk in plan.chunks)
