"""The seams of scheduling policy: one-method Protocols over frozen views.

The core asks, checks every hard rule itself (room, roles, seats, plans in flight) and acts; a policy only ranks what is
possible. A policy reads no clock and no global state: what it needs comes as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdmesh.model import ChunkPlan, InstanceId, Request, Role


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


@dataclass(slots=True)
class Draft:
    """A step plan being packed."""

    chunks: list[ChunkPlan] = field(default_factory=list[ChunkPlan])
    num_tokens: int = 0

    def add(self, chunk: ChunkPlan) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.num_tokens


class PrefillOrder(Protocol):
    """Who is served first."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller is earlier; equal keys are served by arrival, then by id."""
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

    chunk_tokens: int = 512  # tokens of prefill per step


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A named choice for every seam."""

    name: str
    order: PrefillOrder
    packing: Packing
    prefill_placement: PrefillPlacement
    decode_placement: DecodePlacement
