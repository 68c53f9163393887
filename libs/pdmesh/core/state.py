"""The core's books of one instance: what it holds, and what is in flight there.

They follow the core's own commands: a hold is taken at AdmitPrefill or PlaceDecode and given back only at
KvReleased, so they never promise blocks that a worker has not yet freed.
"""

from __future__ import annotations

from pdmesh.core.batching_state import BatchingState
from pdmesh.core.growth import Growth, GrowthSums
from pdmesh.core.holds import HeldBlocks, HoldKind, HoldSums
from pdmesh.core.requests import RequestState
from pdmesh.model import (
    NO_TRANSFER,
    IndexRange,
    InstanceId,
    InstanceProfile,
    KvPart,
    Request,
    RequestKey,
    Role,
    TransferId,
    num_blocks_for,
)
from pdmesh.plans import KvShard, StepPlan
from pdmesh.policy.credit import Room, first_tokens
from pdmesh.policy.profile import make_of
from pdmesh.policy.switching import SwitchTimes
from pdmesh.policy.views import InstanceView

#: By how much the context of residents must move, relative to what is known of it, for plans to be made by it.
_CONTEXT_MOVED = 0.05


class InstanceBooks:
    """One instance's books."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        changed: dict[InstanceId, None],
        growth: Growth,
        number: int = 0,
        next_plan_id: int = 0,
        draining: bool = False,
    ) -> None:
        """``changed`` takes note of every change; ``number`` is the instance's place among those that joined."""
        self.profile = profile
        self.number = number
        self.instance_id = profile.instance_id
        self.role = profile.role
        self.block_size = profile.kv_layout.block_size
        self.make = make_of(profile)  # instances of one make are equally fast
        self.switches = SwitchTimes()
        self.kv_group = f"{profile.model} {profile.kv_layout}"  # KV moves only inside a group
        self.arithmetic = profile.arithmetic
        self.exact_group = f"{self.kv_group} {profile.arithmetic}"  # what moves inside it goes on with the same bits
        layout = profile.kv_layout
        self._layers, self._heads = IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads)
        self.draining = draining
        self.closed = False  # by an operator
        self.reachable = True
        self.suspected = False
        self.next_plan_id = next_plan_id
        self.num_flights = 0  # changes of what is in flight, of the requests in it, and of the decodes beside it
        self.plans: dict[int, StepPlan] = {}  # in flight
        self.batching = BatchingState()
        self.urgent_plan_id: int | None = None  # of the one among them that overtakes the others
        self.prefills: list[RequestState] = []  # placed here, with tokens not yet planned
        self.holds: dict[RequestKey, HeldBlocks] = {}
        self.low: dict[RequestKey, None] = {}  # have asked for more than there was
        self._growth = growth
        self.held = HoldSums()
        self._growing = GrowthSums()
        self._room: Room | None = None
        self.num_quarantined_blocks = 0  # as reported; a worker cannot use them either
        self.num_queued_tokens = 0
        self._context_share = 1.0  # of the residents' room, that they attend to; the whole of it until reported
        self._view: InstanceView | None = None
        self._decode_tokens = self._prompt_tokens = 0  # what there is room for, and whether that has been counted
        self._knows_room = False
        self._changed = changed
        self._change()

    def _change(self) -> None:
        self._view = None
        self._knows_room = False
        self._changed[self.instance_id] = None

    # --- holds ---

    def take(
        self,
        key: RequestKey,
        num_blocks: int,
        kind: HoldKind,
        *,
        max_blocks: int = 0,
        num_tokens: int = 0,
        long_tokens: int = 0,
        slo_tpot_s: float | None = None,
        transfer_id: TransferId = NO_TRANSFER,
    ) -> None:
        """``max_blocks``: that it may be granted in all, if that is more."""
        max_blocks = max(num_blocks, max_blocks)
        hold = HeldBlocks(kind, num_blocks, long_tokens, slo_tpot_s, max_blocks, num_tokens, transfer_id=transfer_id)
        self.holds[key] = hold
        self._count(hold, 1)

    def grow(self, key: RequestKey, num_blocks: int) -> None:
        """Set the total number of blocks that a request holds."""
        hold = self.holds[key]
        self._count(hold, -1)
        hold.num_blocks = num_blocks
        self._count(hold, 1)

    def keep(self, key: RequestKey, num_blocks: int, max_blocks: int) -> None:
        """What was to move away stays, with room for its output and a seat."""
        self.let_wait(key, False)
        hold = self.holds[key]
        self._count(hold, -1)
        hold.kind, hold.num_blocks, hold.max_blocks = HoldKind.LOCAL, num_blocks, max(num_blocks, max_blocks)
        self._count(hold, 1)

    def let_wait(self, key: RequestKey, waits: bool) -> None:
        """Whether KV that is to move away waits for that."""
        hold = self.holds.get(key)
        if hold is not None and hold.kind is HoldKind.PREFILL and hold.waits != waits:
            self.held.let_wait(hold, waits)
            self._change()

    def settle(self, key: RequestKey) -> None:
        """The KV is whole and in place: what was promised, or computed to stay, is a resident."""
        hold = self.holds.get(key)
        if hold is not None and hold.kind in (HoldKind.PROMISED, HoldKind.LOCAL):
            self._count(hold, -1)
            hold.kind = HoldKind.RESIDENT
            self._count(hold, 1)

    def leave(self, key: RequestKey) -> None:
        """The request decodes elsewhere: what it still has here is soon given back."""
        hold = self.holds.get(key)
        self.low.pop(key, None)
        if hold is not None and hold.kind is HoldKind.RESIDENT:
            self._count(hold, -1)
            hold.kind, hold.long_tokens = HoldKind.PREFILL, 0
            self._count(hold, 1)

    def give_back(self, key: RequestKey, transfer_id: TransferId = NO_TRANSFER) -> HeldBlocks | None:
        """Give back what a request holds for a transfer; None if that is nothing."""
        if key in self.holds and self.holds[key].transfer_id != transfer_id:
            return None
        self.let_wait(key, False)
        hold = self.holds.pop(key, None)
        self.low.pop(key, None)
        if hold is not None:
            self._count(hold, -1)
        return hold

    def _count(self, hold: HeldBlocks, sign: int) -> None:
        if self._growth.by_credit:
            if sign > 0:
                hold.is_open = (hold.max_blocks - hold.num_blocks) * self.block_size > self._growth.mean_tokens
            self._growing.count(hold.num_blocks, hold.max_blocks, is_open=hold.is_open, sign=sign)
            self._room = None
        self.held.count(hold, sign)
        if hold.kind is HoldKind.RESIDENT:
            self.num_flights += 1
        self._change()

    def shard(self, num_blocks: int) -> KvShard:
        """The first so many blocks of a request, all layers and heads of them, as held here."""
        part = KvPart(IndexRange(0, num_blocks), self._layers, self._heads)
        return KvShard(instance_id=self.instance_id, part=part)

    # --- plans ---

    @property
    def num_regular_plans(self) -> int:
        """Number of plans in flight, without an urgent one."""
        return len(self.plans) - (self.urgent_plan_id is not None)

    def begin_plan(self, plan: StepPlan) -> None:
        self.next_plan_id = plan.plan_id + 1
        self.plans[plan.plan_id] = plan
        self.num_flights += 1
        if plan.urgent:
            self.urgent_plan_id = plan.plan_id
        self._change()

    def end_plan(self, plan_id: int) -> StepPlan | None:
        """The plan, if it was in flight."""
        if plan_id == self.urgent_plan_id:
            self.urgent_plan_id = None
        plan = self.plans.pop(plan_id, None)
        if plan is not None:
            self.num_flights += 1
            self.queue_tokens(-sum([chunk.num_tokens for chunk in plan.chunks]))
        return plan

    # --- prompt tokens ---

    def queue_tokens(self, num_tokens: int) -> None:
        """Count prompt tokens placed here (or, negative, computed or dropped)."""
        self.num_queued_tokens += num_tokens
        self._change()

    def add_prefill(self, state: RequestState) -> None:
        self.prefills.append(state)
        self.queue_tokens(state.request.num_prompt_tokens)

    def drop_prefill(self, state: RequestState) -> None:
        """The request ended: what was not planned of it never will be."""
        self.num_flights += 1
        self._change()
        if state in self.prefills:
            self.prefills.remove(state)
            self.queue_tokens(state.num_planned_tokens - state.request.num_prompt_tokens)

    # --- what fits ---

    @property
    def num_free_blocks(self) -> int:
        return self.profile.num_blocks - self.held.num_taken_blocks - self.num_quarantined_blocks

    def _count_room(self) -> None:
        """Count the room for one more request; only after a change, and when asked."""
        self._knows_room = True
        self._decode_tokens = self._prompt_tokens = 0
        room = int(max(self.room)) * self.block_size
        if room > 0 and self.takes_new:
            if self.takes_decodes:
                longest = self.profile.max_model_len - 1
                self._decode_tokens = room if room < longest else longest
            if self.role.can_prefill:
                self._prompt_tokens = room

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the largest request that could decode here now; 0 if it takes none."""
        if not self._knows_room:
            self._count_room()
        return self._decode_tokens

    @property
    def takes_decodes(self) -> bool:
        """Whether it has a seat for one more, whatever the memory."""
        return self.takes_new and self.role.can_decode and self.held.num_seats_taken < self.profile.max_num_seqs

    @property
    def room(self) -> Room:
        """Blocks for one more request, at an accepted risk for those that grow. An empty instance takes any."""
        free = max(0, self.num_free_blocks)
        if not self._growth.by_credit or not self.holds:
            return Room(free, free)
        if self._room is None:
            num_blocks = self.profile.num_blocks - self.num_quarantined_blocks
            safe = self._growing.room(num_blocks, self.block_size, self._growth)
            self._room = Room(max(0, min(free, safe.open)), max(0, min(free, safe.bounded)))
        return self._room

    def can_decode(self, request: Request) -> bool:
        """Whether the request fits now, with a seat: all of it, or by credit what it is admitted with."""
        if (request.request_id, request.epoch) in self.holds:
            return False
        if not self._growth.by_credit:
            return request.max_total_tokens <= self.num_decode_tokens
        return self.num_decode_tokens > 0 and self.could_decode(request) and self._has_room_for(request)

    def wanted_blocks(self, request: Request) -> tuple[int, bool]:
        """Return the free blocks that a request needs to decode here, and whether it may come to need more."""
        most = self.num_decode_blocks(request)
        if self._growth.by_credit:
            first = self.num_first_blocks(request)
            if (most - first) * self.block_size > self._growth.mean_tokens:
                return first, True
        return most, False

    def _has_room_for(self, request: Request, num_held_blocks: int = 0) -> bool:
        wanted, is_open = self.wanted_blocks(request)
        return wanted - num_held_blocks <= (self.room.open if is_open else self.room.bounded)

    def can_keep(self, request: Request) -> bool:
        """Whether the request, whose prompt is held here to move away, can decode here instead."""
        hold = self.holds.get((request.request_id, request.epoch))
        if hold is None or hold.freeing or not self.takes_decodes or not self.could_decode(request):
            return False
        if not self._growth.by_credit:
            return self.num_decode_blocks(request) - hold.num_blocks <= self.num_free_blocks
        return self._has_room_for(request, hold.num_blocks)

    def can_take_over(self, key: RequestKey, num_blocks: int, max_blocks: int, spare_blocks: int | None = None) -> bool:
        """Whether a request that decodes elsewhere fits now, with ``num_blocks`` of the ``max_blocks`` it may need.

        ``spare_blocks`` are to be free then, whatever those that are here will come to need; None: as for a new one.
        """
        if key in self.holds or not self.takes_decodes or max_blocks > self.profile.num_blocks:
            return False
        if spare_blocks is not None:
            return num_blocks + spare_blocks <= self.num_free_blocks
        is_open = self._growth.by_credit and (max_blocks - num_blocks) * self.block_size > self._growth.mean_tokens
        return num_blocks <= self.room.open if is_open else max_blocks <= self.room.bounded

    def may_add_waiting(self, num_blocks: int, share: float) -> bool:
        """Whether a prompt may begin of which so many blocks will wait, if ``share`` of all may. One may, of any size.

        A prompt with room promised is one of 0 blocks: it may while what waits is within the bound.
        """
        waiting = self.held.num_waiting_blocks
        return not waiting or waiting + num_blocks <= share * self.profile.num_blocks

    def can_prefill(self, request: Request) -> bool:
        """Whether the prompt fits now."""
        if not self._knows_room:
            self._count_room()
        return (
            request.num_prompt_tokens <= self._prompt_tokens
            and request.max_total_tokens < self.profile.max_model_len
            and (request.request_id, request.epoch) not in self.holds
        )

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts are placed on it, to compute them here."""
        return self.takes_new and self.role.can_prefill

    @property
    def has_long(self) -> bool:
        """Whether it computes or decodes a long request."""
        return self.held.num_long_decoding > 0 or bool(self.held.long_prefill_tokens)

    @property
    def longest_prefill_tokens(self) -> int:
        """Length of the longest long prompt computed here, or whose KV waits to move away; 0 without one."""
        return max(self.held.long_prefill_tokens, default=0)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides what it could take if it were empty."""
        profile = self.profile
        return self.role, self.kv_group, profile.num_blocks, profile.max_model_len

    @property
    def is_usable(self) -> bool:
        """Whether requests may wait for it."""
        return self.reachable and not self.draining and not self.closed

    @property
    def takes_new(self) -> bool:
        return self.is_usable and not self.suspected

    def num_prefill_blocks(self, request: Request) -> int:
        return num_blocks_for(request.num_prompt_tokens, self.block_size)

    def num_first_blocks(self, request: Request) -> int:
        """Return the blocks that a request is admitted with where it decodes."""
        if not self._growth.by_credit:
            return self.num_decode_blocks(request)
        return num_blocks_for(first_tokens(request, self.block_size), self.block_size)

    def num_decode_blocks(self, request: Request) -> int:
        return num_blocks_for(request.max_total_tokens, self.block_size)

    def could_prefill(self, request: Request) -> bool:
        """Whether the prompt fits this instance when it is empty."""
        return (
            self.role.can_prefill
            and request.num_prompt_tokens + request.max_tokens <= self.profile.max_model_len
            and self.num_prefill_blocks(request) <= self.profile.num_blocks
        )

    def could_decode(self, request: Request) -> bool:
        """Whether prompt and output fit this instance when it is empty."""
        return (
            self.role.can_decode
            and request.num_prompt_tokens + request.max_tokens <= self.profile.max_model_len
            and self.num_decode_blocks(request) <= self.profile.num_blocks
        )

    # --- views and checks ---

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._change()

    def set_closed(self, closed: bool) -> None:
        self.closed = closed
        self._change()

    def set_reachable(self, reachable: bool) -> None:
        self.reachable = reachable
        self._change()

    def set_suspected(self, suspected: bool) -> None:
        self.suspected = suspected
        self._change()

    def note_context(self, num_decodes: float, num_tokens: float) -> None:
        """A step with ``num_decodes`` of the residents attended to so many tokens of theirs."""
        room = self.held.num_resident_blocks * self.block_size * num_decodes / max(1, self.held.num_decoding)
        share = min(1.0, num_tokens / room) if room and num_tokens else self._context_share
        if abs(share - self._context_share) > _CONTEXT_MOVED * self._context_share:
            self._context_share = share
            self.num_flights += 1
            self._change()

    def set_quarantined(self, num_blocks: int) -> None:
        self.num_quarantined_blocks = num_blocks
        self._room = None
        self._change()

    def hear_of_growth(self) -> None:
        """The mean that requests grow by is another one."""
        self._room = None
        self._change()

    def set_role(self, role: Role) -> None:
        self.role = role
        self._change()

    @property
    def view(self) -> InstanceView:
        """What policies see; rebuilt only after a change."""
        if self._view is None:
            long_tokens = self.held.long_prefill_tokens
            self._view = InstanceView(  # in the order of its fields: keywords take twice as long, for each placement
                self.instance_id,
                self.role,
                self.profile.num_blocks,
                self.num_free_blocks,
                self.held.num_promised_blocks,
                self.held.num_seats_taken,
                self.profile.max_num_seqs,
                self.held.num_prefilling,
                self.held.num_decoding,
                self.num_queued_tokens,
                self.draining or self.closed,
                self.reachable,
                self.suspected,
                int(self.held.num_resident_blocks * self.block_size * self._context_share),
                long_tokens.total() if long_tokens else 0,
                self.held.num_long_decoding,
                min(long_tokens) if long_tokens else None,
                self.held.slo_tpots_s,
                self.number,
                self.make,
            )
        return self._view

    def check_integrity(self) -> None:
        """AssertionError names the numbers that do not balance."""
        name = self.instance_id
        held, taken = HoldSums.of(self.holds.values()), self.held.num_taken_blocks
        assert held == self.held, f"{name}: holds sum to {held}, books say {self.held}"
        assert taken <= self.profile.num_blocks, f"{name}: {taken} of {self.profile.num_blocks} blocks promised"
        assert self.low.keys() <= self.holds.keys(), f"{name}: {self.low} ask for more, and hold nothing"
        assert not self.low or self.num_free_blocks <= 0, f"{name}: {self.low} wait for blocks that are free"
        sums = GrowthSums()
        for hold in self.holds.values():
            assert hold.num_blocks <= hold.max_blocks, f"{name}: {hold} has more than it ever needs"
            if self._growth.by_credit:
                sums.count(hold.num_blocks, hold.max_blocks, is_open=hold.is_open, sign=1)
        assert sums == self._growing, f"{name}: {sums} may grow, books say {self._growing}"
        assert held.num_seats_taken <= self.profile.max_num_seqs, f"{name}: {held.num_seats_taken} seats taken"
        urgent = [plan_id for plan_id, plan in self.plans.items() if plan.urgent]
        known = [] if self.urgent_plan_id is None else [self.urgent_plan_id]
        assert urgent == known, f"{name}: plans {urgent} are urgent, books say {known}"
        queued = sum(chunk.num_tokens for plan in self.plans.values() for chunk in plan.chunks)
        queued += sum(state.request.num_prompt_tokens - state.num_planned_tokens for state in self.prefills)
        assert queued == self.num_queued_tokens, f"{name}: {queued} tokens queued, books say {self.num_queued_tokens}"
        for state in self.prefills:
            assert not state.is_planned, f"{name}: {state.key} is planned and still in line"
            assert name in state.prefill_ids, f"{name}: {state.key} is in line here, placed on {state.prefill_ids}"
