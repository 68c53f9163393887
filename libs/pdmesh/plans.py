"""Plans that the scheduling core makes for every request and step, and reports about them.

These are `msgspec.Struct`s, because making one takes a seventh of the time of a frozen dataclass (0.16 and 1.08 µs for
five fields, Xeon, Python 3.11). Both are written and read alike. These structs have a module of their own, as has
`pdmesh.core.commands`, because mypyc compiles whole modules and silently drops a Struct's keywords.
"""

from __future__ import annotations

from msgspec import Struct

from pdmesh.kv_layout import KvPart
from pdmesh.model import Epoch, InstanceId, NumTokens, PrefixHashes, RequestId, Then, TransferId


class KvShard(Struct, frozen=True, kw_only=True):
    """The part of a request's KV that one rank of an instance holds, or will hold.

    A request's KV is a list of shards, only one for a request on one instance. The first shard is the sampling
    instance's.
    """

    instance_id: InstanceId
    part: KvPart
    rank: int = 0

    @property
    def num_blocks(self) -> int:
        return self.part.blocks.size


class Evictions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Granules that an instance evicts, in this order, before a command takes its blocks.

    ``drop`` leave the cache, ``offload`` move from the cache to the offload tier, and ``evict`` leave the tier. The KV
    of ``states`` stays cached, without the state behind each.
    """

    drop: PrefixHashes = ()
    offload: PrefixHashes = ()
    evict: PrefixHashes = ()
    states: PrefixHashes = ()


NO_EVICTIONS = Evictions()

#: Largest number of members of a group: workers keep a bit for each.
MAX_GROUP_MEMBERS = 64


class PrefillGroup(Struct, frozen=True, kw_only=True):
    """The instances that compute one prompt's chunks in turn and exchange its KV. The first one leads.

    Each has room for the whole prompt. In one epoch of a request, members are only ever appended. A lost member keeps
    its number in `lost_ids` and never comes back. A piece between members without the 64 random bits of `capability` is
    dropped.
    """

    member_ids: tuple[InstanceId, ...]
    capability: int
    lost_ids: tuple[InstanceId, ...] = ()

    @property
    def living_ids(self) -> tuple[InstanceId, ...]:
        """The members that are not lost, the leader first."""
        if not self.lost_ids:
            return self.member_ids
        return tuple([member_id for member_id in self.member_ids if member_id not in self.lost_ids])


class TransferPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends of a transfer. Each source sends its KV to every destination that should hold the KV and does not yet.

    The request decodes at the first destination, which treats the KV as `then` says. Others hold ranges of a context
    that decodes there. A piece without the 64 random bits of `capability` is dropped. With `decoding`, the request
    decodes at its source until the source commits (a move). With `computes`, only tokens are sent, and the destination
    computes the KV of a lost range.
    """

    transfer_id: TransferId
    sources: tuple[KvShard, ...]
    destinations: tuple[KvShard, ...]
    capability: int
    #: Granules of the request's chain that the destinations have cached. The KV after them is sent.
    num_reused_granules: int = 0
    then: Then = Then.DECODE
    decoding: bool = False
    computes: bool = False

    @property
    def is_hand_over(self) -> bool:
        """Whether the transfer brings a prompt's KV to the instance where the request will decode."""
        return self.then is Then.DECODE and not self.decoding

    @property
    def is_move(self) -> bool:
        """Whether the transfer moves a decoding request to another instance."""
        return self.then is Then.DECODE and self.decoding

    @property
    def is_of_range(self) -> bool:
        """Whether the transfer brings a range of a decoding context: its KV, or its tokens if the KV was lost."""
        return self.then is Then.HOLD

    @property
    def source_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.sources])

    @property
    def destination_ids(self) -> tuple[InstanceId, ...]:
        return tuple([shard.instance_id for shard in self.destinations])


class ResidentContext(Struct, frozen=True, kw_only=True):
    """Progress of a decoding request: ``num_tokens`` of prompt and output, the latest without KV."""

    request_id: RequestId
    epoch: Epoch
    num_tokens: NumTokens


class ChunkPlan(Struct, frozen=True, kw_only=True):
    """A contiguous range of one request's prompt tokens, computed in one step.

    If the chunk `is_last`, the step samples the first output token from it.
    """

    request_id: RequestId
    epoch: Epoch
    start: NumTokens
    num_tokens: NumTokens
    is_last: bool


class StepPlan(Struct, frozen=True, kw_only=True):
    """Plan of a forward pass: chunks, with or without the instance's resident decodes (mixed or exclusive).

    `plan_id` increases for each instance. An `urgent` plan has no decodes. Such a plan runs before waiting plans, and
    between two layers of a running step.
    """

    plan_id: int
    chunks: tuple[ChunkPlan, ...]
    with_decodes: bool
    urgent: bool = False
    #: Hold the residents' own decode steps until a later plan that is not urgent: a round of prefill alone. A plan with
    #: decodes, without chunks and without this flag ends the round.
    holds_decodes: bool = False
    #: Other instances compute the ranges before and after the chunk at the same time (*parallel prefill*), none a turn
    #: behind.
    in_parallel: bool = False
    #: All members of a parallel prefill are in the same layer, so each waits for the others. Set for a prompt's last
    #: slices, and for slices whose staggered starts would wait too long.
    at_once: bool = False


class ChunkDone(Struct, frozen=True, kw_only=True):
    """Result of a chunk as the core sees it. ``num_tokens`` is 0 if the worker dropped the chunk (freed request)."""

    request_id: RequestId
    epoch: Epoch
    num_tokens: NumTokens
    is_last: bool
