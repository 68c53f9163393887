"""What the core knows of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from math import inf
from typing import NamedTuple

from pdmesh.core.transfers import Move, Transfer
from pdmesh.model import InstanceId, Request, RequestId, RequestKey
from pdmesh.plans import KvShard, PrefillGroup
from pdmesh.policy.seams import PrefillOrder
from pdmesh.policy.views import Rank


class Phase(StrEnum):
    WAITING = auto()  # in the queue
    PREFILLING = auto()  # placed; its KV is being computed or on its way
    DECODING = auto()  # its whole KV is where it decodes


class RequestView(NamedTuple):
    """A request as others may see it."""

    request_id: RequestId
    phase: Phase
    instance_ids: tuple[InstanceId, ...]  # where its prompt is computed, then where it decodes
    num_prompt_tokens: int
    num_planned_tokens: int
    arrival_s: float
    helper_ids: tuple[InstanceId, ...] = ()  # that compute its prompt in turn with the first of those


class ComputedPart(NamedTuple):
    """Tokens of a prompt that a member of its group has computed."""

    start: int
    end: int
    instance_id: InstanceId


@dataclass(slots=True)
class Shared:
    """How a prompt is shared by its group, if that was chosen for it."""

    is_gang: bool
    make: str  # of its instances
    predicted_s: float  # summed over its members, until all is computed
    num_members: int
    since_s: float  # there are so many
    member_s: float = 0.0  # that passed before, summed over members


@dataclass(slots=True, eq=False)
class RequestState:
    """An accepted request, until it ends."""

    request: Request
    rank: Rank
    phase: Phase = Phase.WAITING
    prefill_shards: tuple[KvShard, ...] = ()  # where its prompt is computed; of a group, its leader
    decode_shards: tuple[KvShard, ...] = ()  # where it decodes; the same where it stays
    transfer: Transfer | None = None  # that takes its KV from the ones to the others
    rank_of_offer: int | None = None  # of its KV that has no receiver
    num_lost_receivers: int = 0
    move: Move | None = None  # while it decodes: its way to another instance
    num_failed_moves: int = 0
    rebalanced_s: float = -inf  # when it last began to move because of where it was
    work_us: int = 0  # of its prompt alone, as predicted when it came; a whole number, so that sums come back to 0
    placed_s: float | None = None
    first_token_s: float | None = None  # as its last chunk's step was reported
    roomed_s: float | None = None  # when it had room to decode, if that was after its place
    num_planned_tokens: int = 0
    #: The instance and the plan of each; not of helpers that were lost, though these may yet report them.
    chunks_in_flight: set[tuple[InstanceId, int]] = field(default_factory=set[tuple[InstanceId, int]])
    group: PrefillGroup | None = None  # that computes its chunks: its leader, and the helpers that have joined
    asked_ids: tuple[InstanceId, ...] = ()  # to help: those helpers, and others that have not answered, or refused
    shared: Shared | None = None  # whether they take turns or compute at once, where that was to be chosen
    computed_parts: list[ComputedPart] = field(default_factory=list[ComputedPart])  # of which the leader may lack some
    is_healing: bool = False  # a helper was lost, and what of its prompt is computed is not known yet
    prefix_tokens: int | None = None  # of its prompt, that the leader said it had since then
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.request.request_id, self.request.epoch

    @property
    def is_planned(self) -> bool:
        return self.num_planned_tokens >= self.request.num_prompt_tokens

    @property
    def is_preempted(self) -> bool:
        """Whether it is placed, with a part of its prompt still to compute, and no plan in flight has a chunk of it."""
        return self.phase is Phase.PREFILLING and not self.is_planned and not self.chunks_in_flight

    @property
    def is_computed(self) -> bool:
        """Whether its whole prompt is known to be.

        Of instances that compute it together the leader has it all; others may tell late, or never, of their chunks.
        """
        is_known = not self.chunks_in_flight or self.first_token_s is not None
        return self.is_planned and is_known and not self.is_healing

    def waited_s(self, now_s: float) -> float:
        """So far: in line, and for room to decode once its prompt was computed."""
        if self.placed_s is None:
            return now_s - self.request.arrival_s
        waited_s = self.placed_s - self.request.arrival_s
        if self.first_token_s is None:
            return waited_s
        until_s = self.roomed_s if self.decode_shards else now_s
        return waited_s + (0.0 if until_s is None else max(0.0, until_s - self.first_token_s))

    @property
    def view(self) -> RequestView:
        is_relayed = self.phase is Phase.PREFILLING and self.group is not None
        leaders, helpers = (self.prefill_ids[:1], self.prefill_ids[1:]) if is_relayed else (self.prefill_ids, ())
        return RequestView(
            request_id=self.request.request_id,
            phase=self.phase,
            instance_ids=tuple(dict.fromkeys((*leaders, *self.decode_ids))),
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_planned_tokens=self.num_planned_tokens,
            arrival_s=self.request.arrival_s,
            helper_ids=helpers,
        )

    @property
    def prefill_ids(self) -> tuple[InstanceId, ...]:
        """Of those that compute its prompt, the leader first."""
        if self.group is not None:
            return self.group.living_ids
        return tuple([shard.instance_id for shard in self.prefill_shards])

    @property
    def decode_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.decode_shards])

    @property
    def decode_id(self) -> InstanceId | None:
        """The instance that samples its tokens, once it is placed."""
        return self.decode_shards[0].instance_id if self.decode_shards else None

    def rank_by(self, order: PrefillOrder) -> None:
        """Its rank in ``order``, with what is planned of it counted as done."""
        self.rank = order.rank(self.request, self.num_planned_tokens, self.placed_s)

    def is_helped_by(self, instance_id: InstanceId) -> bool:
        """Whether this instance computes chunks of its prompt for another one, which leads."""
        return self.phase is Phase.PREFILLING and self.group is not None and instance_id in self.prefill_ids[1:]

    def needs(self, instance_id: InstanceId) -> bool:
        """Whether it cannot go on without this instance."""
        return instance_id in self.decode_ids or (self.phase is Phase.PREFILLING and instance_id in self.prefill_ids)
