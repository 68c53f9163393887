"""State of each request in the core, and the only place that changes it.

A request passes through the phases of `pdmesh.core.requests.phases`. The methods are its transitions. No other module
assigns its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.group_state import GroupState
from pdmesh.core.requests.phases import DECODES, FACTS, IN_PREFILL, TRANSITIONS, Facts, IllegalTransition, Phase
from pdmesh.core.sessions.session_state import Session
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PartMember, PrefixHash, Request, RequestId, RequestKey
from pdmesh.plans import KvShard, PrefillGroup
from pdmesh.policy.seams import PrefillOrder
from pdmesh.policy.views import Rank

#: A request that has lost this many ranges starts again when it loses the next one: it may be what ends instances.
MAX_LOST_PARTS = 3


class RequestView(NamedTuple):
    """A request as the core shows it to others.

    `instance_ids` are the instance that computes the prompt (of a group, its leader), then the decoding instance with
    its shard holders. `helper_ids` are the leader's helpers.
    """

    request_id: RequestId
    phase: Phase
    instance_ids: tuple[InstanceId, ...]
    num_prompt_tokens: int
    num_planned_tokens: int
    arrival_s: float
    helper_ids: tuple[InstanceId, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether the request decodes, including while it moves."""
        return self.phase in DECODES


@dataclass(slots=True, eq=False)
class RequestState:
    """An accepted request, until it ends."""

    request: Request
    rank: Rank
    #: Predicted work of the prompt alone at arrival, an integer so that sums return to 0.
    work_us: int = 0
    phase: Phase = Phase.WAITING
    #: Where the prompt is computed; of a group, the leader's shard. After a move, the move's source.
    prefill_shards: tuple[KvShard, ...] = ()
    #: Where the request decodes, then its context's shard holders; the same as `prefill_shards` if it stays.
    decode_shards: tuple[KvShard, ...] = ()
    #: Instances that ever had its prompt or KV, and may report about it.
    given_ids: tuple[InstanceId, ...] = ()
    #: Copy that brings or brought the KV to the decoding instance.
    incoming: Copy | None = None
    #: Rank of the first offer of KV that has no receiver.
    rank_of_offer: int | None = None
    num_lost_receivers: int = 0
    #: Copy of the decoding request, or of a range of its context, to another instance.
    outgoing: Copy | None = None
    num_failed_moves: int = 0
    #: Holders of the first ranges of the decoding request's context, in their order.
    members: tuple[PartMember, ...] = ()
    #: Number of the range whose holder was lost, until another instance has the range.
    lost_range: int | None = None
    num_lost_ranges: int = 0
    #: Time when rebalancing last chose the request to move.
    rebalanced_s: float = -inf
    #: Arrival time in the core of a request that was resumed; None for a new one.
    resumed_s: float | None = None
    placed_s: float | None = None
    #: Prompt tokens in plans, including reused ones.
    num_planned_tokens: int = 0
    #: Prompt tokens cached on the instance that computes it; while the request waits, cached anywhere.
    num_reused_tokens: int = 0
    #: Most prompt tokens to hold at once where the prompt is computed; None: all.
    held_tokens: int | None = None
    #: Number of the prompt's ranges that other instances hold and whose blocks the computing instance has freed.
    num_ranges_away: int = 0
    #: Time until which a waiting request prefers the instance that caches its prefix.
    awaits_until_s: float | None = None
    #: The chunks in flight by instance and plan. Lost helpers' chunks are left out, though they may still be reported.
    chunks_in_flight: set[tuple[InstanceId, int]] = field(default_factory=set[tuple[InstanceId, int]])
    #: The group that computes the prompt; None: one instance alone.
    group: GroupState | None = None
    session: Session | None = None
    key: RequestKey = field(init=False)
    #: Tie-breaker between requests that an order ranks equally. Epochs of one request share the arrival time.
    arrival: tuple[float, RequestId, Epoch] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = request.request_id, request.epoch
        self.arrival = request.arrival_s, request.request_id, request.epoch

    # --- questions ---

    @property
    def is_in_prefill(self) -> bool:
        """Whether the request is placed, and some of its KV has not reached the decoding instance."""
        return self.phase in IN_PREFILL

    @property
    def decodes(self) -> bool:
        """Whether the request draws tokens: its whole KV is on the decoding instance."""
        return self.phase in DECODES

    @property
    def is_planned(self) -> bool:
        return self.num_planned_tokens >= self.request.num_prompt_tokens

    @property
    def num_work_tokens(self) -> int:
        """Number of prompt tokens to compute: tokens that are not cached where the request was placed.

        While the request waits, the number of tokens cached on no instance.
        """
        return self.request.num_prompt_tokens - self.num_reused_tokens

    @property
    def is_interrupted(self) -> bool:
        """Whether the placed request still has prompt to compute, but no chunk of it in a plan in flight.

        Always false if the request `streams_out` ranges: it may pause because these have not moved yet.
        """
        is_in_line = self.phase is Phase.PREFILLING and not self.is_planned and not self.chunks_in_flight
        return is_in_line and not self.streams_out

    @property
    def streams_out(self) -> bool:
        """Whether the prompt is longer than the room where it is computed."""
        return self.held_tokens is not None

    @property
    def is_computed(self) -> bool:
        """Whether the whole prompt is known to be computed, and the leader has all of its KV."""
        return self.phase is not Phase.PREFILLING and self.phase is not Phase.WAITING

    @property
    def is_recovering(self) -> bool:
        """Whether a helper was lost, and the core does not know yet how much of the prompt is computed."""
        return self.group is not None and self.group.is_recovering

    @property
    def first_granule(self) -> PrefixHash | None:
        """First granule of the request's chain that is computed rather than reused; None if there is none."""
        prefix, index = self.request.prefix, self.num_reused_tokens // GRANULE_TOKENS
        # Read at each placement: `Request.chain` would copy the prefix.
        is_computed = index < len(prefix) and (index + 1) * GRANULE_TOKENS < self.request.num_prompt_tokens
        return prefix[index] if is_computed else None

    @property
    def view(self) -> RequestView:
        prefill_ids = self.prefill_ids
        num_leaders = len(prefill_ids) if self.group is None else 1
        return RequestView(
            request_id=self.request.request_id,
            phase=self.phase,
            instance_ids=tuple(dict.fromkeys((*prefill_ids[:num_leaders], *self.decode_ids))),
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_planned_tokens=self.num_planned_tokens,
            arrival_s=self.request.arrival_s,
            helper_ids=prefill_ids[num_leaders:],
        )

    @property
    def prefill_ids(self) -> tuple[InstanceId, ...]:
        """Instances that compute the prompt, the leader first, without lost helpers."""
        if self.group is not None:
            return self.group.living_ids
        return tuple([shard.instance_id for shard in self.prefill_shards])

    @property
    def asked_ids(self) -> tuple[InstanceId, ...]:
        """Instances that were asked to help with the prompt and were not lost since."""
        return () if self.group is None else self.group.asked_ids

    @property
    def decode_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.decode_shards])

    @property
    def decode_id(self) -> InstanceId | None:
        """Instance that samples the tokens; None before one is chosen."""
        return self.decode_shards[0].instance_id if self.decode_shards else None

    def is_helped_by(self, instance_id: InstanceId) -> bool:
        """Whether this instance is a helper for the request's prompt."""
        return self.group is not None and instance_id in self.group.living_ids[1:]

    def needs(self, instance_id: InstanceId) -> bool:
        """Whether this instance decodes the request, holds a range of its context, or leads or helps with its prompt.

        False for the holder of a lost range.
        """
        if instance_id == self.lost_member_id:
            return False
        return instance_id in self.decode_ids or (self.is_in_prefill and instance_id in self.prefill_ids)

    # --- waiting and placement ---

    def resume(self, now_s: float) -> None:
        """Note that the request waits again: it was accepted before, and a part of its answer may be delivered."""
        self.resumed_s = now_s

    def await_until(self, until_s: float) -> None:
        """Prefer the instance that caches the prefix until ``until_s``, although others have room."""
        self.awaits_until_s = until_s

    def rank_by(self, order: PrefillOrder) -> None:
        """Rank the request in ``order``, counting planned tokens as done."""
        num_done = max(self.num_planned_tokens, self.num_reused_tokens)
        self.rank = order.rank(self.request, num_done, self.placed_s, self.num_reused_tokens)

    def place_as(self, request: Request) -> Request:
        """Replace the request by the one to place, which differs in `Request.always_moves` alone."""
        self.request = request
        return request

    def use_weights(self, weights: str) -> Request:
        """Drop the granule hashes if they were made for other weights than ``weights``, and return the request."""
        if self.request.prefix and self.request.prefix_weights != weights:
            self.request = replace(self.request, prefix=())
        return self.request

    def place(
        self,
        prefill: KvShard,
        now_s: float,
        *,
        stays: bool,
        num_reused_tokens: int = 0,
        held_tokens: int | None = None,
    ) -> None:
        """Place the prompt on ``prefill``; the first ``num_reused_tokens`` are cached there and not computed.

        If it ``stays``, the request decodes there too. ``held_tokens`` limits the prompt tokens held at once; None:
        all.
        """
        self._go("place", Phase.PREFILLING)
        self.placed_s = now_s
        self.num_reused_tokens = self.num_planned_tokens = num_reused_tokens
        self.held_tokens = held_tokens
        self.prefill_shards = (prefill,)
        self._give(self.prefill_shards)
        if stays:
            self.decode_shards = self.prefill_shards

    def adopt(self, decode: KvShard, parts: tuple[KvShard, ...] = (), members: tuple[PartMember, ...] = ()) -> None:
        """Take over a request that already decodes on an instance. ``members`` hold ``parts`` of its context."""
        self._go("adopt", Phase.DECODING)
        self.prefill_shards, self.decode_shards, self.members = (decode,), (decode, *parts), members
        self._give(self.decode_shards)
        self.num_planned_tokens = self.request.num_prompt_tokens

    # --- computing the prompt ---

    def plan_chunk(self, instance_id: InstanceId, plan_id: int, num_tokens: int) -> None:
        """Count the prompt's next ``num_tokens`` as planned. The instance's plan is in flight until `end_chunk`."""
        self._go("plan_chunk", Phase.PREFILLING)
        self.num_planned_tokens += num_tokens
        self.chunks_in_flight.add((instance_id, plan_id))

    def end_chunk(self, instance_id: InstanceId, plan_id: int) -> None:
        """Note that a plan is no longer in flight; without effect if it had no chunk of this prompt."""
        self.chunks_in_flight.discard((instance_id, plan_id))

    def give_back(self, num_ranges: int) -> None:
        """Note that the first ``num_ranges`` ranges are freed where the prompt is computed, since others hold them."""
        self._go("give_back", Phase.PREFILLING)
        self.num_ranges_away = max(self.num_ranges_away, num_ranges)

    def draw_first_token(self) -> None:
        """Raise IllegalTransition unless the prompt is being computed, so that its first token may come."""
        self._go("draw_first_token", Phase.PREFILLING)

    def end_prompt(self) -> None:
        """End the prompt, whose KV will move: the request waits for a receiver or for its transfer."""
        self._go("end_prompt", Phase.AWAITING_DECODE if self.incoming is None else Phase.TRANSFERRING)
        self.group = None

    def ask_helper(self, instance_id: InstanceId, leader_id: InstanceId, capability: int) -> GroupState:
        """Add an instance to the helpers asked; return the group. A new group gets ``capability``."""
        self._go("ask_helper", Phase.PREFILLING)
        if self.group is None:
            self.group = GroupState(PrefillGroup(member_ids=(leader_id,), capability=capability))
        self.group.asked_ids = (*self.group.asked_ids, instance_id)
        return self.group

    def lose_helper(self, instance_id: InstanceId) -> None:
        """Remove a lost helper from the group, with its chunks in flight."""
        assert self.group is not None, f"{self.key} has no helper to lose"
        self.group.lose(instance_id)
        self.chunks_in_flight = {each for each in self.chunks_in_flight if each[0] != instance_id}

    def plan_again_from(self, num_tokens: int) -> None:
        """Plan the prompt again from this many tokens on."""
        self._go("plan_again_from", Phase.PREFILLING)
        self.num_planned_tokens = num_tokens

    # --- the KV moves to where the request decodes ---

    def offer(self, rank: int) -> None:
        """Note the KV's rank among all offers while it has no receiver."""
        self.rank_of_offer = rank

    def receive(self, copy: Copy) -> None:
        """Give the request a receiver: the copy's destinations hold its KV while it decodes."""
        self._go("receive", Phase.TRANSFERRING if self.is_computed else Phase.PREFILLING)
        self.incoming, self.decode_shards, self.members = copy, copy.plan.destinations, copy.members
        self._give(self.decode_shards)

    def lose_receiver(self) -> None:
        """Drop the lost receiver: the KV stays where it was computed and waits for another one."""
        assert self.incoming is not None, f"{self.key} has no receiver to lose"
        self._go("lose_receiver", Phase.AWAITING_DECODE if self.is_computed else Phase.PREFILLING)
        self.rank_of_offer = self.incoming.rank
        self.num_lost_receivers += 1
        self.incoming, self.decode_shards, self.members = None, (), ()

    def keep(self, shard: KvShard) -> None:
        """Let the request decode where its prompt is computed, with the room of ``shard``."""
        self._go("keep", self.phase)
        self.prefill_shards = self.decode_shards = (shard,)

    def land(self) -> None:
        """Begin to decode: the whole KV is on the decoding instance."""
        self._go("land", Phase.DECODING)
        self.group = None

    # --- the KV moves while the request decodes ---

    def rebalance(self, now_s: float) -> None:
        """Note the time when rebalancing chose the request to move."""
        self.rebalanced_s = now_s

    @property
    def move(self) -> Copy | None:
        """The copy that moves the request to another instance; None if the request is not moving."""
        return self.outgoing if self.phase is Phase.MOVING else None

    @property
    def range_copy(self) -> Copy | None:
        """The copy that takes a range of the context to another instance; None if none is on its way."""
        return None if self.phase is Phase.MOVING else self.outgoing

    def begin_copy(self, copy: Copy) -> None:
        """Begin to copy the request, or a range of its context; it decodes on where it is."""
        self._go("begin_copy", Phase.MOVING if copy.plan.is_move else Phase.DECODING)
        self.outgoing = copy
        self._give(copy.plan.destinations)

    def end_copy(self, *, failed: bool) -> None:
        """End an outgoing copy without effect, because it ``failed`` or because the request ends."""
        self._go("end_copy", Phase.DECODING)
        self.outgoing = None
        self.num_failed_moves += failed

    def land_move(self) -> None:
        """Land a move: the request decodes at its target."""
        self._go("land_move", Phase.DECODING)
        assert self.outgoing is not None, f"{self.key} lands without a move"
        self.incoming, self.outgoing = self.outgoing, None
        self.prefill_shards = self.incoming.plan.sources
        self.decode_shards = (*self.incoming.plan.destinations, *self.decode_shards[1:])

    # --- context parallelism ---

    @property
    def next_members(self) -> tuple[PartMember, ...]:
        """Members after the range copy under way lands; the current ones if there is none."""
        copy, members = self.range_copy, self.members
        if copy is None:
            return members
        number = copy.range_number
        return (*members[:number], *copy.members, *members[number + 1 :])

    def hand_on_range(self, home: KvShard) -> None:
        """Give the copied range its new holder. ``home`` is the shard left on the decoding instance."""
        self._go("hand_on_range", Phase.DECODING)
        copy, self.members = self.outgoing, self.next_members
        assert copy is not None, f"{self.key} has no part on its way"
        number, (_, *shards) = copy.range_number, self.decode_shards
        self.outgoing = None
        self.lost_range = None if number == self.lost_range else self.lost_range
        self.decode_shards = (home, *shards[:number], *copy.plan.destinations, *shards[number + 1 :])

    @property
    def lost_member_id(self) -> InstanceId | None:
        """Instance that held the lost range; None if no range is lost."""
        return None if self.lost_range is None else self.members[self.lost_range].instance_id

    def may_lose(self, instance_id: InstanceId) -> bool:
        """Whether this instance holds a range of the context that another instance may compute again if it is lost.

        False while the request moves or another range is lost, and after `MAX_LOST_PARTS` losses.
        """
        return (
            self.phase is Phase.DECODING
            and instance_id in self.decode_ids[1:]
            and self.lost_range is None
            and self.num_lost_ranges < MAX_LOST_PARTS
        )

    def lose_range(self, instance_id: InstanceId) -> None:
        """Mark this member's range as lost: the request pauses until another instance has the range."""
        self._go("lose_range", Phase.DECODING)
        self.lost_range = self.decode_ids.index(instance_id) - 1
        self.num_lost_ranges += 1

    def _give(self, shards: tuple[KvShard, ...]) -> None:
        for shard in shards:
            if shard.instance_id not in self.given_ids:
                self.given_ids = (*self.given_ids, shard.instance_id)

    # --- the tables ---

    def _go(self, transition: str, phase: Phase) -> None:
        """Enter ``phase``. Raises IllegalTransition if the transition may not lead there from the current phase."""
        begins, leads = TRANSITIONS[transition]
        if self.phase not in begins or phase not in leads:
            raise IllegalTransition(f"{self.key}: {transition} from {self.phase} to {phase}")
        self.phase = phase

    def check_integrity(self) -> None:
        """Raise AssertionError if the fields do not fit the phase."""
        found = Facts(
            is_placed=bool(self.prefill_shards),
            has_receiver=bool(self.decode_shards),
            has_transfer=self.incoming is not None,
            has_group=self.group is not None,
            copies=self.outgoing is not None,
            is_planned=self.is_planned,
        )
        for name, wanted, value in zip(Facts._fields, FACTS[self.phase], found, strict=True):
            assert wanted is None or wanted == value, f"{self.key} is {self.phase}, and {name} is {value}"
        is_move = self.outgoing is not None and self.outgoing.plan.is_move
        assert is_move == (self.phase is Phase.MOVING), f"{self.key} is {self.phase}, and moves: {is_move}"
        assert self.decode_ids[1:] == tuple([member.instance_id for member in self.members]), f"{self.key} has others"
        if self.phase is Phase.PREFILLING and self.incoming is None and self.decode_shards:
            assert self.decode_shards == self.prefill_shards, f"{self.key} decodes elsewhere, and has no transfer"
