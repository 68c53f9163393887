"""What the core knows of each request, and the one place where that changes.

A request goes through the phases of `pdmesh.core.requests.phases`. Its methods are its transitions. No other module
assigns its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.group_state import GroupState
from pdmesh.core.requests.phases import DECODES, FACTS, IN_PREFILL, TRANSITIONS, Facts, IllegalTransition, Phase
from pdmesh.model import GRANULE_TOKENS, Epoch, InstanceId, PartMember, PrefixHash, Request, RequestId, RequestKey
from pdmesh.plans import KvShard, PrefillGroup
from pdmesh.policy.seams import PrefillOrder
from pdmesh.policy.views import Rank

#: A request that has lost ranges so often starts again when it loses the next one: it may be what ends instances.
MAX_LOST_PARTS = 3


class RequestView(NamedTuple):
    """A request as the core shows it to others."""

    request_id: RequestId
    phase: Phase
    instance_ids: tuple[InstanceId, ...]  # where its prompt is computed, then where it decodes
    num_prompt_tokens: int
    num_planned_tokens: int
    arrival_s: float
    helper_ids: tuple[InstanceId, ...] = ()  # that compute its prompt in turn with the first of those

    @property
    def decodes(self) -> bool:
        """Whether it decodes, even while it moves."""
        return self.phase in DECODES


@dataclass(slots=True, eq=False)
class RequestState:
    """An accepted request, until it ends."""

    request: Request
    rank: Rank
    work_us: int = 0  # of its prompt alone, as predicted when it came; a whole number, so that sums come back to 0
    phase: Phase = Phase.WAITING
    prefill_shards: tuple[KvShard, ...] = ()  # where its prompt is computed; of a group, its leader
    decode_shards: tuple[KvShard, ...] = ()  # where it decodes; the same where it stays
    given_ids: tuple[InstanceId, ...] = ()  # the instances that ever had its prompt or its KV, and may speak of it
    incoming: Copy | None = None  # brings or brought its KV to where it decodes
    rank_of_offer: int | None = None  # of its KV that has no receiver
    num_lost_receivers: int = 0
    outgoing: Copy | None = None  # takes it, or a range of its context, to another instance while it decodes
    num_failed_moves: int = 0  # of it, or of parts of it
    members: tuple[PartMember, ...] = ()  # that hold the first ranges of its context while it decodes, in their order
    lost_part: int | None = None  # the range whose member was lost, until another one has it
    num_lost_parts: int = 0
    rebalanced_s: float = -inf  # when it last began to move because of where it was
    resumed_s: float | None = None  # when it came, if that was not for the first time
    placed_s: float | None = None
    num_planned_tokens: int = 0  # those that are reused among them
    num_reused_tokens: int = 0  # of its prompt, that were kept where it is computed; while it waits, that are anywhere
    held_tokens: int | None = None  # of its prompt at most, where it is computed, at once; None: all
    num_ranges_away: int = 0  # of its prompt, that others hold and that were given back where it is computed
    awaits_until_s: float | None = None  # waits no longer for the instance that keeps its prefix
    #: The instance and the plan of each; not of helpers that were lost, though these may yet report them.
    chunks_in_flight: set[tuple[InstanceId, int]] = field(default_factory=set[tuple[InstanceId, int]])
    group: GroupState | None = None  # that computes its prompt; None: its leader alone does
    key: RequestKey = field(init=False)
    #: Decides between requests that an order finds equal. A resumed one may have come at the same time.
    arrival: tuple[float, RequestId, Epoch] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = request.request_id, request.epoch
        self.arrival = request.arrival_s, request.request_id, request.epoch

    # --- what is asked of it ---

    @property
    def is_in_prefill(self) -> bool:
        """Whether it is placed, and its whole KV is not where it decodes."""
        return self.phase in IN_PREFILL

    @property
    def decodes(self) -> bool:
        """Whether it draws tokens: its whole KV is where it decodes."""
        return self.phase in DECODES

    @property
    def is_planned(self) -> bool:
        return self.num_planned_tokens >= self.request.num_prompt_tokens

    @property
    def num_work_tokens(self) -> int:
        """Tokens of its prompt that are computed for it, since they were not kept where it was placed.

        While it waits: that are kept nowhere.
        """
        return self.request.num_prompt_tokens - self.num_reused_tokens

    @property
    def is_interrupted(self) -> bool:
        """Whether it is placed, with a part of its prompt still to compute, and no plan in flight has a chunk of it.

        Not one that gives ranges back: it may stand still because these have not moved.
        """
        is_in_line = self.phase is Phase.PREFILLING and not self.is_planned and not self.chunks_in_flight
        return is_in_line and not self.gives_back

    @property
    def gives_back(self) -> bool:
        """Whether its prompt is longer than the room where it is computed."""
        return self.held_tokens is not None

    @property
    def is_computed(self) -> bool:
        """Whether its whole prompt is known to be computed: by its leader, which has all of it."""
        return self.phase is not Phase.PREFILLING and self.phase is not Phase.WAITING

    @property
    def is_recovering(self) -> bool:
        """Whether a helper was lost, and what of its prompt is computed is not known yet."""
        return self.group is not None and self.group.is_recovering

    @property
    def first_granule(self) -> PrefixHash | None:
        """The first of its prompt that is computed, since it was not kept where it was placed; None: all were."""
        prefix, index = self.request.prefix, self.num_reused_tokens // GRANULE_TOKENS
        # Asked for at each placement: `Request.chain` would copy the prefix.
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
        """The instances that compute the prompt, the leader first."""
        if self.group is not None:
            return self.group.living_ids
        return tuple([shard.instance_id for shard in self.prefill_shards])

    @property
    def asked_ids(self) -> tuple[InstanceId, ...]:
        """The instances that were asked to help with the prompt and were not lost since."""
        return () if self.group is None else self.group.asked_ids

    @property
    def decode_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.decode_shards])

    @property
    def decode_id(self) -> InstanceId | None:
        """The instance that samples its tokens, once it is placed."""
        return self.decode_shards[0].instance_id if self.decode_shards else None

    def is_helped_by(self, instance_id: InstanceId) -> bool:
        """Whether this instance helps another one, the leader, with its prompt."""
        return self.group is not None and instance_id in self.group.living_ids[1:]

    def needs(self, instance_id: InstanceId) -> bool:
        """Whether it cannot go on without this instance."""
        if instance_id == self.lost_member_id:
            return False
        return instance_id in self.decode_ids or (self.is_in_prefill and instance_id in self.prefill_ids)

    # --- it waits, is placed, or found ---

    def resume(self, now_s: float) -> None:
        """Note that the request waits again: it was let in before, and half of its answer may be out."""
        self.resumed_s = now_s

    def await_until(self, until_s: float) -> None:
        """Wait no longer than that for the instance that keeps its prefix, while others have room."""
        self.awaits_until_s = until_s

    def rank_by(self, order: PrefillOrder) -> None:
        """Its rank in ``order``, with what is planned of it counted as done."""
        num_done = max(self.num_planned_tokens, self.num_reused_tokens)
        self.rank = order.rank(self.request, num_done, self.placed_s, self.num_reused_tokens)

    def place_as(self, request: Request) -> Request:
        """Take what is to be placed, which differs from what came in `Request.always_moves` alone."""
        self.request = request
        return request

    def use_weights(self, weights: str) -> Request:
        """Note the weights that compute it: the hashes of its granules are of no use if they are made for others."""
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
        """Its prompt is computed with this room, but for its first tokens if these are kept there.

        If it ``stays``, it decodes there. ``held_tokens`` is how much of it may be there at once, if not all.
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
        """Take over a request that turns out to be decoding already, with ``members`` that hold ``parts``."""
        self._go("adopt", Phase.DECODING)
        self.prefill_shards, self.decode_shards, self.members = (decode,), (decode, *parts), members
        self._give(self.decode_shards)
        self.num_planned_tokens = self.request.num_prompt_tokens

    # --- its prompt is computed ---

    def plan_chunk(self, instance_id: InstanceId, plan_id: int, num_tokens: int) -> None:
        """The next tokens of its prompt are in a plan of this instance."""
        self._go("plan_chunk", Phase.PREFILLING)
        self.num_planned_tokens += num_tokens
        self.chunks_in_flight.add((instance_id, plan_id))

    def end_chunk(self, instance_id: InstanceId, plan_id: int) -> None:
        """Note that a plan is no longer in flight; without effect if it had no chunk of this prompt."""
        self.chunks_in_flight.discard((instance_id, plan_id))

    def give_back(self, num_ranges: int) -> None:
        """Note that so many of its first ranges are given back where it is computed, since others hold them."""
        self._go("give_back", Phase.PREFILLING)
        self.num_ranges_away = max(self.num_ranges_away, num_ranges)

    def draw_first_token(self) -> None:
        """Its leader has computed the last chunk of its prompt."""
        self._go("draw_first_token", Phase.PREFILLING)

    def end_prompt(self) -> None:
        """Its prompt is computed, and its KV is to move on."""
        self._go("end_prompt", Phase.AWAITING_DECODE if self.incoming is None else Phase.TRANSFERRING)
        self.group = None

    def ask_helper(self, instance_id: InstanceId, leader_id: InstanceId, capability: int) -> GroupState:
        """An instance is asked to help: its group, which begins with the first. ``capability`` is for a new one."""
        self._go("ask_helper", Phase.PREFILLING)
        if self.group is None:
            self.group = GroupState(PrefillGroup(member_ids=(leader_id,), capability=capability))
        self.group.asked_ids = (*self.group.asked_ids, instance_id)
        return self.group

    def lose_helper(self, instance_id: InstanceId) -> None:
        """The rest of its group has most of what this one computed."""
        assert self.group is not None, f"{self.key} has no helper to lose"
        self.group.lose(instance_id)
        self.chunks_in_flight = {each for each in self.chunks_in_flight if each[0] != instance_id}

    def plan_again_from(self, num_tokens: int) -> None:
        """Plan the prompt again from this many tokens on."""
        self._go("plan_again_from", Phase.PREFILLING)
        self.num_planned_tokens = num_tokens

    # --- its KV goes to where it decodes ---

    def offer(self, rank: int) -> None:
        """Note its KV's rank among all offers while it has no receiver."""
        self.rank_of_offer = rank

    def receive(self, copy: Copy) -> None:
        """Give the request room where it decodes, and a copy of its KV."""
        self._go("receive", Phase.TRANSFERRING if self.is_computed else Phase.PREFILLING)
        self.incoming, self.decode_shards, self.members = copy, copy.plan.destinations, copy.members
        self._give(self.decode_shards)

    def lose_receiver(self) -> None:
        """Its receiver is lost: its KV waits where it was computed for another receiver."""
        assert self.incoming is not None, f"{self.key} has no receiver to lose"
        self._go("lose_receiver", Phase.AWAITING_DECODE if self.is_computed else Phase.PREFILLING)
        self.rank_of_offer = self.incoming.rank
        self.num_lost_receivers += 1
        self.incoming, self.decode_shards, self.members = None, (), ()

    def keep(self, shard: KvShard) -> None:
        """Let the request decode where its prompt is computed, with this room."""
        self._go("keep", self.phase)
        self.prefill_shards = self.decode_shards = (shard,)

    def land(self) -> None:
        """Its whole KV is where it decodes."""
        self._go("land", Phase.DECODING)
        self.group = None

    # --- its KV goes elsewhere while it decodes ---

    def rebalance(self, now_s: float) -> None:
        """Note when the request was last chosen to move away."""
        self.rebalanced_s = now_s

    @property
    def move(self) -> Copy | None:
        """The copy by which it moves to another instance."""
        return self.outgoing if self.phase is Phase.MOVING else None

    @property
    def range_copy(self) -> Copy | None:
        """The copy that takes a range of its context to another instance."""
        return None if self.phase is Phase.MOVING else self.outgoing

    def begin_copy(self, copy: Copy) -> None:
        """Begin to take the request, or a range of its context, to another instance; it decodes where it is."""
        self._go("begin_copy", Phase.MOVING if copy.plan.is_move else Phase.DECODING)
        self.outgoing = copy
        self._give(copy.plan.destinations)

    def end_copy(self, *, failed: bool) -> None:
        """End a copy that changes nothing, because it ``failed`` or because the request ends."""
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

    # --- its context is spread ---

    @property
    def next_members(self) -> tuple[PartMember, ...]:
        """All members as they are once the range that is on its way has its next holder."""
        copy, members = self.range_copy, self.members
        if copy is None:
            return members
        number = copy.range_number
        return (*members[:number], *copy.members, *members[number + 1 :])

    def hand_on_range(self, home: KvShard) -> None:
        """Give the range that was on its way its next holder. ``home`` is the shard left where the request decodes."""
        self._go("hand_on_range", Phase.DECODING)
        copy, self.members = self.outgoing, self.next_members
        assert copy is not None, f"{self.key} has no part on its way"
        number, (_, *shards) = copy.range_number, self.decode_shards
        self.outgoing = None
        self.lost_part = None if number == self.lost_part else self.lost_part
        self.decode_shards = (home, *shards[:number], *copy.plan.destinations, *shards[number + 1 :])

    @property
    def lost_member_id(self) -> InstanceId | None:
        """The instance that held the range that is lost."""
        return None if self.lost_part is None else self.members[self.lost_part].instance_id

    def may_lose(self, instance_id: InstanceId) -> bool:
        """Whether it can go on without what this instance holds, once another one has computed that again."""
        return (
            self.phase is Phase.DECODING
            and instance_id in self.decode_ids[1:]
            and self.lost_part is None
            and self.num_lost_parts < MAX_LOST_PARTS
        )

    def lose_part(self, instance_id: InstanceId) -> None:
        """This member's range is lost: the request stands still until another one has it."""
        self._go("lose_part", Phase.DECODING)
        self.lost_part = self.decode_ids.index(instance_id) - 1
        self.num_lost_parts += 1

    def _give(self, shards: tuple[KvShard, ...]) -> None:
        for shard in shards:
            if shard.instance_id not in self.given_ids:
                self.given_ids = (*self.given_ids, shard.instance_id)

    # --- the tables ---

    def _go(self, transition: str, phase: Phase) -> None:
        """Raises IllegalTransition."""
        begins, leads = TRANSITIONS[transition]
        if self.phase not in begins or phase not in leads:
            raise IllegalTransition(f"{self.key}: {transition} from {self.phase} to {phase}")
        self.phase = phase

    def check_integrity(self) -> None:
        """AssertionError names what is not as its phase has it."""
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
