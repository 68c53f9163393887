"""What the scheduling core makes for every request and step: plans, and what is reported of them.

These are `msgspec.Struct`s: to make one takes a seventh of a frozen dataclass (0.16 and 1.08 µs for five fields, Xeon,
Python 3.11), and both are written and read alike. They have a module of their own, and `pdmesh.core.commands` is
another, because mypyc compiles modules as a whole and drops a Struct's keywords without a word.
"""

from __future__ import annotations

from msgspec import Struct

from pdmesh.model import (
    Epoch,
    InstanceId,
    KvPart,
    NumTokens,
    PrefixHashes,
    RequestId,
    Then,
    TransferId,
)


class KvShard(Struct, frozen=True, kw_only=True):
    """The part of a request's KV that one rank of an instance holds, or will.

    A request's KV is a list of them: one for a request on one instance; the first is of the instance that samples.
    """

    instance_id: InstanceId
    part: KvPart
    rank: int = 0

    @property
    def num_blocks(self) -> int:
        return self.part.blocks.size


class Evictions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Granules that an instance evicts, in this order, before a command takes its blocks.

    ``drop`` leave the cache, ``offload`` move from the cache to the offload tier, and ``evict`` leave the tier.
    """

    drop: PrefixHashes = ()
    offload: PrefixHashes = ()
    evict: PrefixHashes = ()


NO_EVICTIONS = Evictions()

#: A group has no more members than this: workers keep a bit for each.
MAX_GROUP_MEMBERS = 64


class PrefillGroup(Struct, frozen=True, kw_only=True):
    """The instances that compute one prompt's chunks in turn and pass each other its KV; the first of them leads.

    Each has room for the whole prompt. In one epoch of a request members are only ever appended: one that is lost keeps
    its number, and never comes back.
    """

    member_ids: tuple[InstanceId, ...]
    capability: int  # 64 random bits; a piece between members without them is dropped
    lost_ids: tuple[InstanceId, ...] = ()  # of these, which are members no more

    @property
    def living_ids(self) -> tuple[InstanceId, ...]:
        """The members, the leader first."""
        if not self.lost_ids:
            return self.member_ids
        return tuple([member_id for member_id in self.member_ids if member_id not in self.lost_ids])


class TransferPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transfer's ends. Each source sends what it holds to every destination that is to hold it, and does not yet."""

    transfer_id: TransferId
    sources: tuple[KvShard, ...]
    destinations: tuple[KvShard, ...]  # the first is where the request decodes
    capability: int  # 64 random bits; a piece without them is dropped
    #: So many granules of the request's chain are kept at the destinations, which share them: what follows is sent.
    num_reused_granules: int = 0
    then: Then = Then.DECODE  # what the first destination does; others hold ranges of a context that decodes there
    decoding: bool = False  # a move: the request decodes at its source until the source commits
    computes: bool = False  # a lost range: the destination computes the KV, and only the tokens come

    @property
    def is_hand_over(self) -> bool:
        """Whether it brings the KV of a prompt to where the request will decode."""
        return self.then is Then.DECODE and not self.decoding

    @property
    def is_move(self) -> bool:
        """Whether it takes a request that decodes to another instance."""
        return self.then is Then.DECODE and self.decoding

    @property
    def is_of_part(self) -> bool:
        """Whether it is of a range of a context that decodes: its KV, or its tokens if that was lost."""
        return self.then is Then.HOLD

    @property
    def is_of_lost_range(self) -> bool:
        """Whether it brings the tokens of a range that was lost."""
        return self.computes

    @property
    def source_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.sources])

    @property
    def destination_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.destinations])


class ResidentContext(Struct, frozen=True, kw_only=True):
    """How far a request has come that decodes: ``num_tokens`` of prompt and output, the latest without KV."""

    request_id: RequestId
    epoch: Epoch
    num_tokens: NumTokens


class ChunkPlan(Struct, frozen=True, kw_only=True):
    """A contiguous range of one request's prompt tokens, computed in one step."""

    request_id: RequestId
    epoch: Epoch
    start: NumTokens
    num_tokens: NumTokens
    is_last: bool  # the step samples the first output token from it


class StepPlan(Struct, frozen=True, kw_only=True):
    """One forward pass: chunks, with or without the instance's resident decodes (mixed or exclusive)."""

    plan_id: int  # per instance, increasing
    chunks: tuple[ChunkPlan, ...]
    with_decodes: bool
    urgent: bool = False  # before the plans that wait, and between two layers of a step that runs; without decodes
    #: From here on the residents' own decode steps wait until a later plan, not an urgent one, says otherwise: a phase
    #: of prefill alone. A plan without chunks, with decodes and without this ends the phase.
    holds_decodes: bool = False
    #: Other instances compute what comes before and after its chunk at the same time (*parallel prefill*): none is a
    #: turn behind.
    in_parallel: bool = False
    #: The same, and all are in the same layer, so each is waited for: to the end of the prompt, or where they begin it.
    at_once: bool = False


class ChunkDone(Struct, frozen=True, kw_only=True):
    """One chunk's result as the core sees it. ``num_tokens`` is 0 if the worker dropped the chunk (freed request)."""

    request_id: RequestId
    epoch: Epoch
    num_tokens: NumTokens
    is_last: bool
