"""The seams of scheduling policy: one-method Protocols over frozen views.

The core asks, checks every hard rule itself (room, roles, seats, plans in flight) and acts; a policy only ranks what is
possible. A policy reads no clock and no global state: what it needs comes as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

from pdmesh.model import MAX_GROUP_MEMBERS, ChunkPlan, InstanceId, Request, Role
from pdmesh.policy.batching import Batching
from pdmesh.policy.batching_theory import StepLimit
from pdmesh.policy.interruption import Interruption
from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel
from pdmesh.ranges import ANY_COUNT, COUNT, SHARE, Range
from pdmesh.settings import NO_SETTING, one_of

if TYPE_CHECKING:
    from pdmesh.policy.handover import RunAhead
    from pdmesh.policy.local_prefill import LocalPrefill
    from pdmesh.policy.rebalancing import Rebalancing
    from pdmesh.policy.relay import Relay

#: Of a group; with more than workers take, a prompt would begin again each time that one too many joined.
_MEMBERS = Range(1, MAX_GROUP_MEMBERS)


class InstanceView(NamedTuple):
    """An instance as the core's books have it.

    ``num_free_blocks`` leaves out what is promised to transfers on their way (*virtual usage*), and
    ``num_seats_taken`` counts their requests beside the decoding ones.
    """

    instance_id: InstanceId
    role: Role
    num_blocks: int
    num_free_blocks: int
    num_virtual_blocks: int
    num_seats_taken: int
    max_num_seqs: int
    num_prefilling: int
    num_decoding: int
    num_queued_tokens: int  # of placed prompts, not yet computed
    draining: bool
    reachable: bool = True
    suspected: bool = False  # silent for so long that nothing new is placed on it
    num_resident_tokens: int = 0  # that its decoding requests attend to, as reported; else the room that they have
    num_long_prefilling: int = 0
    num_long_decoding: int = 0
    shortest_long_prefill_tokens: int | None = None
    slo_tpots_s: frozenset[float | None] = frozenset()  # own targets of its decoding requests; None: the default
    number: int = 0  # its place among those that joined, from 1 on; that of one that was lost is taken again
    make: str = ""  # instances of one are equally fast


@dataclass(slots=True)
class PartialStep:
    """A step plan that is being packed, as far as it is."""

    now_s: float = 0.0
    chunks: list[ChunkPlan] = field(default_factory=list[ChunkPlan])
    shapes: list[ChunkShape] = field(default_factory=list[ChunkShape])
    num_tokens: int = 0
    longest_prompt_tokens: int = 0

    def add(self, chunk: ChunkPlan, request: Request) -> None:
        self.chunks.append(chunk)
        self.shapes.append(ChunkShape(chunk.num_tokens, chunk.start))
        self.num_tokens += chunk.num_tokens
        self.longest_prompt_tokens = max(self.longest_prompt_tokens, request.num_prompt_tokens)


class Rank(NamedTuple):
    """Where a request stands in an order, apart from the time; it changes only as its prompt is computed.

    Requests in one lane keep the order of their ``place`` whatever the time. So the line of those that wait stays
    sorted as time passes, and only the first of each lane are ever compared.
    """

    place: float = 0.0
    lane: float = 0.0
    latest_start_s: float = 0.0  # when what is left of it must start to be in time, in the orders that ask


class PrefillOrder(Protocol):
    """Who is served first."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None) -> Rank:
        """``placed_s`` is when an instance took it; None while it waits."""
        ...

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        """A key for each of ``ranks``, compared with each other now: smaller is earlier.

        Equal keys are served by arrival, then by id. In a lane the keys never contradict the places; and a key depends
        on the ranks of its own lane alone, so that they can be kept while those of another lane change.
        """
        ...

    def keeps_key_until_s(self, rank: Rank) -> float:
        """Until when one of this rank, alone of its lane, keeps its key; -inf if that changes with the time."""
        ...


class Packing(Protocol):
    """What goes into a step."""

    def num_tokens(
        self, instance: InstanceView, step: PartialStep, request: Request, start: int, *, shared: bool = False
    ) -> int:
        """How many tokens of ``request``, from ``start``, to add to ``step``; 0 leaves it out of this step.

        ``shared``: other prompts could use the step too.
        """
        ...

    def step_limit(self, instance: InstanceView) -> StepLimit:
        """Of a step of ``instance`` that has chunks beside its decodes."""
        ...

    def takes_local(self, instance: InstanceView) -> bool:
        """Whether steps of ``instance``, which only decodes, have room for some of a prompt."""
        ...

    def local_s(self, instance: InstanceView, num_prompt_tokens: int) -> float:
        """Predicted time of a prompt on such an instance, behind those that are computed there; infinite: no room."""
        ...


class PrefillPlacement(Protocol):
    """Where a prompt is computed: on the first instance that has room and an opening for it, and `takes` it.

    The core keeps the instances sorted by their keys, which so depend on nothing but the view.
    """

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Smaller is earlier; equal keys are in the order of instance ids."""
        ...

    def takes(self, request: Request, instance: InstanceView) -> bool:
        """Whether the request may go there now. If no instance that could takes it, it waits; others may go past it."""
        ...


class DecodePlacement(Protocol):
    """Where the output is generated: on the first instance with room for it, or where its prompt is computed."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Smaller is earlier; equal keys are in the order of instance ids."""
        ...

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        """Whether it decodes on ``prefill``, which has room for all of it, without a transfer, and not on ``first``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What the policies of any bundle are tuned by: the ``[policy]`` of the configuration."""

    chunk_tokens: Annotated[int, COUNT, "tokens of prefill per step, where steps are static"] = 512
    #: Of an instance; from `scheduler.profile`, or measured.
    latency: Annotated[LinearLatencyModel, NO_SETTING] = PROFILES["a100-llama3-8b"]
    #: Of makes of instances; those without one are as fast as ``latency`` says.
    latency_of_make: Annotated[Mapping[str, LinearLatencyModel], NO_SETTING] = field(
        default_factory=dict[str, LinearLatencyModel]
    )
    slo_ttft_s: Annotated[
        float, "a request that asks for no time to first token is due so long after its arrival..."
    ] = 1.0
    slo_ttft_stretch: Annotated[float, "...and so many times what its prompt is predicted to take alone"] = 2.0
    slo_tpot_s: Annotated[float, "time budget of an adaptive step beside decodes"] = 0.05
    prefill_step_s: Annotated[
        float, "time budget of an adaptive step without decodes: what an urgent request may wait"
    ] = 0.2
    max_chunk_tokens: Annotated[int, COUNT, "largest chunk of an adaptive step"] = 8192
    long_prompt_tokens: Annotated[int, COUNT, "a prompt as long as this is long: a step has at most one such"] = 8192
    max_shared: Annotated[float, SHARE, "the most of a step that a long prompt leaves to others"] = 0.4
    spare_slack: Annotated[float, "`pdmesh` serves the shortest first while everyone has this much relative slack"] = (
        0.25
    )
    min_share: Annotated[
        float, SHARE, "of an instance's time, that `pdmesh` leaves to a long prompt without a target of its own"
    ] = 0.125
    max_step_overhead: Annotated[
        float,
        Range(1e-3, 1),
        "long chunks that give way between layers are so long that a step's constant time is at most this share",
    ] = 0.05
    max_group_step_overhead: Annotated[
        float, Range(1e-3, 1), "the same of the shortest chunks of prompts that several instances compute"
    ] = 0.1
    give_way: Annotated[float, Range(1), "`pdmesh` interrupts a long prompt for one that is so many times shorter"] = (
        2.0
    )
    #: PecSched §5.2
    colocate_tokens: Annotated[int, "prompt tokens queued on an instance, up to which it takes more (`pecsched`)"] = (
        8192
    )
    relay_members: Annotated[
        int, _MEMBERS, "`pdmesh` has up to so many instances compute a long prompt in turn, where others idle; 1: never"
    ] = 4
    relay_improvement: Annotated[
        float | None,
        Range(0, 0.9),
        "...each more of them only if it brings the first token forward by this share; if not set, the best for the "
        "prompts of the last 30 s",
    ] = None
    relay_bytes_per_s: Annotated[float, Range(1), "...at which an instance passes KV on to others"] = 1e9
    sequence_parallel: Annotated[
        str,
        one_of("relay", "gang", "auto"),
        "...in turn (`relay`), all at once with a slice each (`gang`), or whichever is predicted to end first (`auto`)",
    ] = "relay"
    group_size: Annotated[
        int,
        _MEMBERS,
        "`pecsched`, its ablations, `fcfs`, `short-first` and `reservation` have so many instances compute every long "
        "prompt together, none of them two at a time; 1: each is computed alone",
    ] = 1
    reserved_instances: Annotated[
        int, ANY_COUNT, "`reservation` keeps the first so many instances that join for long prompts; 0: none"
    ] = 0
    rebalances: Annotated[
        bool,
        "`pdmesh` moves running decodes from an instance that is short of memory, or too slow for them, to one that "
        "is neither, with their KV",
    ] = True
    waiting_kv_share: Annotated[
        float, SHARE, "of an instance's KV, that may wait there to move away: beyond it no new prompt begins (`pdmesh`)"
    ] = 0.5
    prefills_locally: Annotated[
        bool,
        "`pdmesh` computes prompts that are not long where they decode, where that pays while others are busy",
    ] = True
    local_step_share: Annotated[float, SHARE, "of the TPOT target, that a step with such a prompt may take"] = 0.6
    batching: Annotated[str, NO_SETTING] = ""  # of `scheduler.batching`; empty: the bundle's own
    eb_threshold: Annotated[
        float | None,
        Range(0.001, 0.999),
        "the share of idle seats at which `eb` ends a decode phase; if not set, the best in theory",
    ] = None
    max_stall_s: Annotated[
        float,
        "the longest prefill phase of `ebplus` while somebody decodes without a TPOT target of its own",
    ] = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A named choice for every seam."""

    name: str
    order: PrefillOrder
    packing: Packing
    prefill_placement: PrefillPlacement
    decode_placement: DecodePlacement
    long_prompt_tokens: int  # a prompt as long as this is long
    batching: Batching
    interruption: Interruption | None = None  # None: nobody runs before a step that is in flight
    local_prefill: LocalPrefill | None = (
        None  # whether a prompt is computed on an instance that only decodes; None: none
    )
    num_reserved: int = 0  # instances, the first that joined, which compute long prompts only; the others short ones
    run_ahead: RunAhead | None = None  # None: no prompt is computed ahead of room to decode
    waiting_kv_share: float = 1.0  # of a prefill instance's KV, that may wait to move away
    sends_computed_first: bool = False  # KV that is all there goes before KV that is being computed
    relay: Relay | None = None  # None: no prompt is computed by several instances in turn
    rebalancing: Rebalancing | None = None  # None: what decodes moves only where an instance is to be empty

    def why_not(self, instances: Sequence[InstanceView]) -> str | None:
        """Why these instances cannot serve by it, in words; None if they can, or if none of them computes prompts."""
        prefilling = [instance for instance in instances if instance.role.can_prefill]
        num_reserved = sum(instance.number <= self.num_reserved for instance in prefilling)
        if self.num_reserved and prefilling and num_reserved in (0, len(prefilling)):
            who = "short" if num_reserved else "long"
            return (
                f"{self.name} keeps the first {self.num_reserved} instances that joined for long prompts, which are "
                f"{num_reserved} of the {len(prefilling)} that compute prompts: {who} ones would wait for ever"
            )
        return None

    def is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens >= self.long_prompt_tokens
