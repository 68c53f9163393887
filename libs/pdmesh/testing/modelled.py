"""Modelled instances: workers without engine, wire or clock, which answer the core's commands with events.

A `ModelledInstance` checks on every command what a real worker takes for granted: that there is room, that chunks come
in order, that a transfer was offered before it is granted. What happens next (a step ends, a transfer lands or fails, a
generation ends) is up to the caller: a property test draws it, a simulator times it. Commands and events travel through
one queue each per instance, as on a stream, so that both may be late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from pdmesh.core.commands import (
    AdmitPrefill,
    CancelMove,
    FreeKv,
    GrantTransfer,
    GrowKv,
    InstanceCommand,
    KeepKv,
    PauseTransfer,
    PlaceDecode,
    ResumeDecode,
    RunStep,
    SetGroup,
    SetRole,
    StopInstance,
    WithdrawTransfer,
)
from pdmesh.core.events import (
    DecodeReserved,
    DecodeStepsDone,
    Event,
    GroupPrefix,
    HelperJoined,
    InstanceJoined,
    KvLow,
    KvReleased,
    LoadReported,
    MoveFailed,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferOffered,
    TransferPaused,
)
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.model import (
    NO_TRANSFER,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    KvLayout,
    RequestKey,
    Resident,
    Role,
    TransferId,
    TransferPurpose,
)
from pdmesh.plans import ChunkDone, PrefillGroup, ResidentContext, StepPlan
from pdmesh.testing.modelled_groups import ModelledMember, ModelledPieces, alone
from pdmesh.testing.modelled_holds import ModelledHold


def modelled_profile(
    instance_id: str,
    role: Role,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 1024,
    max_num_seqs: int = 8,
    num_transfer_backends: int = 2,
    num_layers: int = 2,
    model: str = "modelled",
    joins_groups: bool = False,
    arithmetic: str = "",
    deterministic: bool = False,
) -> InstanceProfile:
    return InstanceProfile(
        instance_id=InstanceId(instance_id),
        role=role,
        model=model,
        kv_layout=KvLayout(num_layers=num_layers, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="float32"),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_transfer_backends=num_transfer_backends,
        data_address=instance_id.encode(),
        joins_groups=joins_groups,
        arithmetic=arithmetic,
        deterministic=deterministic,
    )


class ModelledInstance:
    """One worker. Reports appear in ``events``, in order."""

    def __init__(
        self,
        profile: InstanceProfile,
        max_total_of: Mapping[RequestKey, int] | None = None,
        pieces: ModelledPieces | None = None,
    ) -> None:
        """``max_total_of`` says how much KV requests may come to hold, in tokens; of others it is not known.

        ``pieces`` are those between this one and other instances.
        """
        self.profile = profile
        self.pieces = ModelledPieces() if pieces is None else pieces
        self.max_total_of = {} if max_total_of is None else max_total_of
        self.instance_id = profile.instance_id
        self.commands: deque[InstanceCommand] = deque()  # on their way here
        self.events: deque[Event] = deque()  # on their way to the scheduler
        self.plans: deque[StepPlan] = deque()  # not begun
        self.running: list[StepPlan] = []  # the last one between two layers of the one before it
        self.holds: dict[RequestKey, ModelledHold] = {}
        self.role = profile.role
        self.admits = True  # False: it is stopping
        self.is_told_to_stop = False
        self.copies_run = False  # whatever is freed now is still touched, and quarantined until `end_copies`
        self.quarantined: dict[RequestKey, ModelledHold] = {}
        self.own = OwnSteps()

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(hold.num_blocks for hold in self.quarantined.values())

    @property
    def num_free_blocks(self) -> int:
        num_held = sum(hold.num_blocks for hold in self.holds.values())
        return self.profile.num_blocks - num_held - self.num_quarantined_blocks

    def take_command(self) -> None:
        """Receive the next command."""
        match self.commands.popleft():
            case AdmitPrefill() as admit:
                stays, key = admit.leads and not admit.moves_on, (admit.request_id, admit.epoch)
                is_held = self._hold(
                    key,
                    ModelledHold(
                        admit.num_blocks,
                        max_total_tokens=self.max_total_of.get(key, 0) if len(admit.shards) == 1 else 0,
                        seated=stays,
                        leads=admit.leads,
                        transfer=admit.transfer,
                        sends=admit.moves_on,
                        member=None if admit.group is None else self._member(key, admit.group),
                        is_again=any(
                            (chunk.request_id, chunk.epoch) == key
                            for plan in (*self.running, *self.plans)
                            for chunk in plan.chunks
                        ),
                    ),
                )
                if is_held and not admit.leads and admit.group is not None:
                    self.events.append(HelperJoined(self.instance_id, *key))
            case SetGroup() as told:
                key = (told.request_id, told.epoch)
                if (hold := self.holds.get(key)) is not None and not hold.computed:
                    self._regroup(key, hold, told.group)
            case PlaceDecode() as place:
                key = (place.request_id, place.epoch)
                if not self._hold(
                    key,
                    ModelledHold(
                        place.num_blocks,
                        max_total_tokens=self.max_total_of.get(key, 0),
                        seated=True,
                        leads=True,
                        transfer=place.transfer,
                    ),
                ):
                    return
                self.events.append(
                    DecodeReserved(self.instance_id, place.request_id, place.epoch, place.transfer.transfer_id)
                )
            case RunStep(plan=plan):
                assert not (plan.urgent and any(other.urgent for other in self.plans)), "two urgent plans"
                if plan.urgent:
                    self.plans.appendleft(plan)
                else:
                    self.plans.append(plan)
            case GrantTransfer(transfer=transfer) as grant if transfer.purpose is TransferPurpose.MOVE:
                hold = self.holds.get((grant.request_id, grant.epoch))
                if hold is not None:
                    assert hold.decoding, f"{grant}, which does not decode"
                    assert hold.leaving is None, f"{grant} of one that moves already"
                    hold.leaving = transfer
            case CancelMove() as cancel:
                hold = self.holds.get((cancel.request_id, cancel.epoch))
                if hold is not None:
                    is_of = hold.leaving is not None and hold.leaving.transfer_id == cancel.transfer_id
                    self.stop_move((cancel.request_id, cancel.epoch), cancel.transfer_id, ends=is_of)
            case ResumeDecode() as resume:
                hold = self.holds.get((resume.request_id, resume.epoch))
                if hold is not None and hold.leaving is not None and hold.leaving.transfer_id == resume.transfer_id:
                    assert not hold.landed, f"{resume}, which is decoded elsewhere"
                    hold.leaving, hold.committed, hold.given_up = None, False, False
                    hold.decoding = hold.seated = True
            case GrantTransfer() as grant:
                hold = self.holds.get((grant.request_id, grant.epoch))
                if hold is not None:
                    assert hold.offered, f"{grant} without an offer"
                    assert not hold.granted, f"{grant} twice"
                    assert hold.transfer in (grant.transfer, None), f"{grant} of another transfer"
                    hold.transfer = grant.transfer
                    hold.granted = True
            case PauseTransfer() as pause:
                hold = self.holds.get((pause.request_id, pause.epoch))
                if hold is not None:
                    assert hold.granted, f"{pause} without a grant"
                    assert not hold.computed, f"{pause}, but all of it is computed"
                    hold.granted = False
                    self.events.append(
                        TransferPaused(self.instance_id, pause.request_id, pause.epoch, pause.transfer_id)
                    )
            case WithdrawTransfer() as withdraw:
                hold = self.holds.get((withdraw.request_id, withdraw.epoch))
                if hold is not None and hold.transfer is not None:
                    assert hold.transfer.transfer_id == withdraw.transfer_id, f"{withdraw} of another transfer"
                    hold.lose_receiver()
            case KeepKv() as keep:
                hold = self.holds.get((keep.request_id, keep.epoch))
                if hold is not None:
                    assert hold.sends, f"{keep}, and its KV is to stay"
                    assert hold.transfer is None, f"{keep}, and its KV moves"
                    num_more = max(0, keep.num_blocks - hold.num_blocks)
                    assert num_more <= self.num_free_blocks, f"{self.instance_id}: no room for {keep}"
                    hold.num_blocks += num_more
                    hold.sends, hold.seated, hold.decoding = False, True, hold.computed
                    hold.max_total_tokens = self.max_total_of.get((keep.request_id, keep.epoch), 0)
            case GrowKv() as grow:
                hold = self.holds.get((grow.request_id, grow.epoch))
                if hold is not None:
                    num_more = max(0, grow.num_blocks - hold.num_blocks)
                    assert num_more <= self.num_free_blocks, f"{self.instance_id}: no room for {grow}"
                    hold.num_blocks += num_more
            case FreeKv() as free:
                key = (free.request_id, free.epoch)
                if key in self.holds:
                    self.release(key)
                elif key not in self.quarantined:
                    self.events.append(KvReleased(self.instance_id, *key, free.transfer_id))
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self.is_told_to_stop = True
            case command:
                assert_never(command)

    def _member(self, key: RequestKey, group: PrefillGroup) -> ModelledMember:
        return ModelledMember(self.instance_id, key, group, self.profile.kv_layout.block_size, self.pieces)

    def _regroup(self, key: RequestKey, hold: ModelledHold, group: PrefillGroup) -> None:
        if (member := hold.member) is None:
            member = hold.member = self._member(key, alone(self.instance_id, group))
            member.add_own(range(hold.num_computed_tokens // member.block_size))
        plan_ids = [plan.plan_id for plan in (*self.running, *self.plans)]
        if member.regroup(group, plan_ids) and member.leads:
            self.events.append(GroupPrefix(self.instance_id, *key, member.num_tokens, len(group.lost_ids)))

    def take_pieces(self, at_most: int) -> None:
        """The first so many of the pieces that are under way to this instance arrive."""
        coming = [piece for piece in self.pieces.under_way if piece.destination_id == self.instance_id][:at_most]
        for piece in coming:
            self.pieces.under_way.remove(piece)
            hold = self.holds.get(piece.key)
            if hold is not None and hold.member is not None:
                hold.member.take(piece)

    def stop_move(self, key: RequestKey, transfer_id: TransferId, *, ends: bool = True) -> None:
        """Send no more of a request that moves, and say whether it goes on here; not ``ends``: it is another move."""
        hold = self.holds[key]
        committed = ends and hold.committed
        if committed:
            hold.given_up = True
        elif ends:
            hold.leaving = None
        self.events.append(MoveFailed(self.instance_id, *key, transfer_id, committed, "modelled"))

    def _hold(self, key: RequestKey, hold: ModelledHold) -> bool:
        """False if the instance is stopping, and has said so."""
        if not self.admits:
            self.events.append(RequestDropped(self.instance_id, *key, "the instance is stopping"))
            self.events.append(KvReleased(self.instance_id, *key, hold.received_by))
            return False
        assert key not in self.holds, f"{self.instance_id} holds {key} already"
        assert hold.num_blocks <= self.num_free_blocks, f"{self.instance_id}: no room for {key}"
        self.holds[key] = hold
        num_seated = sum(held.seated for held in self.holds.values())
        assert num_seated <= self.profile.max_num_seqs, f"{self.instance_id}: no seat for {key}"
        return True

    @property
    def can_begin(self) -> bool:
        """Whether the next plan could start: nothing runs, or it is urgent."""
        return bool(self.plans) and (not self.running or self.plans[0].urgent)

    def begin_step(self) -> StepPlan:
        """The next plan's chunks start: first chunks whose KV moves are offered."""
        assert self.can_begin
        plan = self.plans.popleft()
        self._check_group(plan)
        self.running.append(plan)
        self.own.planned(plan)
        for chunk in plan.chunks:
            hold = self.holds.get((chunk.request_id, chunk.epoch))
            if hold is not None and hold.sends and not hold.offered:
                hold.offered = True
                transfer_id = NO_TRANSFER if hold.transfer is None else hold.transfer.transfer_id
                self.events.append(TransferOffered(self.instance_id, chunk.request_id, chunk.epoch, transfer_id))
        return plan

    def _check_group(self, plan: StepPlan) -> None:
        """Check what keeps pages whole, and waits free of circles, where prompts are computed in turn."""
        size = self.profile.kv_layout.block_size
        grouped = [
            (chunk, hold)
            for chunk in plan.chunks
            if (hold := self.holds.get((chunk.request_id, chunk.epoch))) is not None and hold.member is not None
        ]
        for chunk, hold in grouped:
            assert not plan.urgent, f"{chunk} in an urgent plan"
            assert len(grouped) == 1, f"{grouped} in one step"
            if not hold.leads:
                assert len(plan.chunks) == 1, f"{plan} on a helper"
                assert not chunk.is_last, f"{chunk} on a helper"
                assert chunk.start % size == 0 == chunk.num_tokens % size, f"{chunk} on a helper"

    @property
    def can_end(self) -> bool:
        """Whether nothing in the step that is running waits for what is computed elsewhere."""
        plan = self.running[-1]
        return all(
            hold.member.can_end(plan.plan_id, chunk)
            for chunk in plan.chunks
            if (hold := self.holds.get((chunk.request_id, chunk.epoch))) is not None and hold.member is not None
        )

    def end_step(self, *, ended_by_first_token: bool = False, duration_s: float = 0.0) -> None:
        """The running plan is done, of two the inner one.

        ``ended_by_first_token`` ends the generations of its last chunks at once.
        """
        plan = self.running.pop()
        results: list[ChunkDone] = []
        finished: list[RequestKey] = []
        for chunk in plan.chunks:
            key = (chunk.request_id, chunk.epoch)
            hold = self.holds.get(key)
            if hold is not None and hold.received_by != NO_TRANSFER:
                hold = None  # it was freed, and is to receive its KV since then
            if hold is not None and hold.is_again and chunk.start != hold.num_computed_tokens:
                self.events.append(RequestDropped(self.instance_id, *key, "the chunk does not follow"))
                self.release(key)
                hold = None
            is_computed = hold is not None and hold.compute(plan.plan_id, chunk)
            if hold is not None and is_computed and chunk.is_last:
                hold.computed = True
                hold.decoding = not hold.sends and hold.leads
                if ended_by_first_token and hold.leads:
                    finished.append(key)
            results.append(
                ChunkDone(
                    request_id=chunk.request_id,
                    epoch=chunk.epoch,
                    num_tokens=chunk.num_tokens if is_computed else 0,
                    is_last=chunk.is_last,
                )
            )
        num_decoding = sum(hold.decoding for hold in self.holds.values())
        self.events.append(
            StepDone(
                self.instance_id, plan.plan_id, duration_s, tuple(results), num_decoding, own_steps=self.own.take()
            )
        )
        for key in finished:
            self.finish(key)

    @property
    def can_decode(self) -> bool:
        """Whether it would make decode steps by itself now."""
        idle = not self.running and not self.plans
        return idle and not self.own.held and any(hold.decoding for hold in self.holds.values())

    def decode(self, num_steps: int) -> None:
        """Make so many decode steps without a plan, each of a second, of those that have room."""
        assert self.can_decode
        keys = [key for key, hold in self.holds.items() if hold.decoding]
        for index in range(num_steps):
            decoding = [self.holds[key] for key in keys if self.draw(key, 1)]
            if not decoding:
                return
            num_context_tokens = sum(hold.num_computed_tokens for hold in decoding)
            self.own.made(
                num_tokens=len(decoding),
                num_context_tokens=num_context_tokens,
                duration_s=1.0,
                began_s=float(index),
                ended_s=index + 1.0,
            )
            if self.own.num_left <= 0 and (own_steps := self.own.take()) is not None:
                self.events.append(DecodeStepsDone(self.instance_id, own_steps))

    def draw(self, key: RequestKey, num_tokens: int) -> bool:
        """Draw at most so many tokens, as far as there is room, and ask for more if there is little left.

        False if it waits for room, or for nothing.
        """
        hold, size = self.holds[key], self.profile.kv_layout.block_size
        has_drawn = hold.draw(num_tokens, size)
        if hold.asks(size):
            context = ResidentContext(request_id=key[0], epoch=key[1], num_tokens=hold.num_computed_tokens)
            self.events.append(KvLow(self.instance_id, (context,)))
        return has_drawn

    def finish(self, key: RequestKey, num_output_tokens: int = 1) -> None:
        """A generation ends here."""
        self.events.append(
            RequestFinished(self.instance_id, *key, FinishReason.STOP, num_output_tokens, self.own.take())
        )
        self.release(key)

    def release(self, key: RequestKey) -> None:
        """Give a request's blocks back: at once, or when the copies that touch them have ended."""
        hold = self.holds.pop(key)
        if self.copies_run:
            self.quarantined[key] = hold
        else:
            self.events.append(KvReleased(self.instance_id, *key, hold.received_by))

    def end_copies(self) -> None:
        """End every copy, so that quarantined blocks are free."""
        self.copies_run = False
        for key, hold in self.quarantined.items():
            self.events.append(KvReleased(self.instance_id, *key, hold.received_by))
        self.quarantined.clear()

    def report_load(self) -> None:
        num_held = sum(hold.num_blocks for hold in self.holds.values())
        num_decoding = sum(hold.decoding for hold in self.holds.values())
        self.events.append(
            LoadReported(self.instance_id, self.num_free_blocks, num_held, self.num_quarantined_blocks, num_decoding)
        )

    def rejoin(self, gateway_of: dict[RequestKey, GatewayId]) -> InstanceJoined:
        """A new stream: what does not decode is dropped, what was on its way is lost, and copies have ended."""
        self.end_copies()
        self.pieces.cut_off(self.instance_id)
        self.commands.clear()
        self.events.clear()
        self.plans.clear()
        self.running.clear()
        self.own.held = False
        self.holds = {key: hold for key, hold in self.holds.items() if hold.decoding}
        for hold in self.holds.values():
            hold.leaving = None
        residents = tuple(
            Resident(
                request_id=key[0],
                epoch=key[1],
                gateway_id=gateway_of[key],
                num_blocks=hold.num_blocks,
                num_context_tokens=hold.num_computed_tokens,
                decoding=True,
                max_total_tokens=hold.max_total_tokens,
                transfer_id=hold.received_by,
            )
            for key, hold in self.holds.items()
        )
        return InstanceJoined(replace(self.profile, role=self.role), residents, stopping=not self.admits)
