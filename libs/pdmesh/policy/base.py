"""The seams of scheduling policy: one-method Protocols over frozen views.

The core asks, checks every hard rule itself (room, roles, seats, plans in flight) and acts; a policy only ranks what is
possible. A policy reads no clock and no global state: what it needs comes as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdmesh.model import ChunkPlan, InstanceId, Request, Role
from pdmesh.policy.interruption import Interruption
from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
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
    num_resident_tokens: int = 0  # room that its decoding requests have for their context


@dataclass(slots=True)
class Draft:
    """A step plan being packed."""

    now_s: float = 0.0
    shared: bool = False  # other prompts could use the step too
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

    def rank(self, request: Request, num_done_tokens: int) -> Rank: ...

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        """A key for each of ``ranks``, compared with each other now: smaller is earlier.

        Equal keys are served by arrival, then by id. In a lane the keys never contradict the places.
        """
        ...


class Packing(Protocol):
    """What goes into a step."""

    def num_tokens(self, instance: InstanceView, draft: Draft, request: Request, start: int) -> int:
        """How many tokens of ``request``, from ``start``, to add to ``draft``; 0 leaves it out of this step."""
        ...


class PrefillPlacement(Protocol):
    """Where a prompt is computed."""

    def choose(self, request: Request, candidates: Sequence[InstanceView]) -> InstanceId | None:
        """One of ``candidates`` (never empty), or None to let the request wait."""
        ...


class DecodePlacement(Protocol):
    """Where the output is generated."""

    def choose(self, request: Request, prefill: InstanceView, candidates: Sequence[InstanceView]) -> InstanceId | None:
        """One of ``candidates`` (never empty), or None to let the request wait.

        If ``prefill`` is among them the request can stay where its prompt is computed, without a transfer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What the policies of any bundle are tuned by."""

    chunk_tokens: int = 512  # tokens of prefill per step, where steps are static
    latency: LinearLatencyModel = PROFILES["a100-llama3-8b"]
    # A request without a TTFT target is due this long after its arrival, and so many times its predicted prefill.
    slo_ttft_s: float = 1.0
    slo_ttft_stretch: float = 2.0
    # Adaptive steps: time budgets, beside decodes and without; and the largest chunk.
    slo_tpot_s: float = 0.05
    prefill_step_s: float = 0.2
    max_chunk_tokens: int = 8192
    long_prompt_tokens: int = 8192  # a step has at most one prompt as long as this
    max_shared: float = 0.4  # the most of a step that a long prompt leaves to others
    # `pdmesh` serves the shortest first while everyone has this much relative slack.
    spare_slack: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A named choice for every seam."""

    name: str
    order: PrefillOrder
    packing: Packing
    prefill_placement: PrefillPlacement
    decode_placement: DecodePlacement
    interruption: Interruption | None = None  # None: nobody runs before a step that is in flight
