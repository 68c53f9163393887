"""Inputs of policies: an instance, a request's place in an order, and a step that is being packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.model import InstanceId, Role
from pdmesh.plans import ChunkPlan
from pdmesh.policy.latency import ChunkShape


@dataclass(slots=True, init=False)
class InstanceView:
    """State of an instance in the core. Policies must not change it; freezing the class would triple its cost.

    ``num_free_blocks``: free blocks without the blocks promised to coming transfers (*virtual usage*).
    ``num_seats_taken``: number of decoding requests and of coming transfers.
    ``num_queued_tokens``: number of tokens of placed prompts that are not yet computed.
    ``suspected``: whether the instance has been silent too long for new requests.
    ``num_resident_tokens``: reported context of the decoding requests; without a report, their room.
    ``slo_tpots_s``: TPOT targets of the decoding requests; None stands for the default target.
    ``number``: place among the instances that joined, from 1 on; the number of a lost instance is used again.
    ``device_class``: key of equally fast instances.
    ``num_stages``: number of stages that each step passes; the decodes are dealt out to as many steps.
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
    num_queued_tokens: int
    draining: bool
    reachable: bool = True
    suspected: bool = False
    num_resident_tokens: int = 0
    num_long_prefilling: int = 0
    num_long_decoding: int = 0
    shortest_long_prefill_tokens: int | None = None
    slo_tpots_s: frozenset[float | None] = frozenset()
    number: int = 0
    device_class: str = ""
    num_stages: int = 1

    # Written out because mypyc does not compile a dataclass's generated `__init__`.
    def __init__(
        self,
        instance_id: InstanceId,
        role: Role,
        num_blocks: int,
        num_free_blocks: int,
        num_virtual_blocks: int,
        num_seats_taken: int,
        max_num_seqs: int,
        num_prefilling: int,
        num_decoding: int,
        num_queued_tokens: int,
        draining: bool,
        reachable: bool = True,
        suspected: bool = False,
        num_resident_tokens: int = 0,
        num_long_prefilling: int = 0,
        num_long_decoding: int = 0,
        shortest_long_prefill_tokens: int | None = None,
        slo_tpots_s: frozenset[float | None] = frozenset(),
        number: int = 0,
        device_class: str = "",
        num_stages: int = 1,
    ) -> None:
        self.instance_id = instance_id
        self.role = role
        self.num_blocks = num_blocks
        self.num_free_blocks = num_free_blocks
        self.num_virtual_blocks = num_virtual_blocks
        self.num_seats_taken = num_seats_taken
        self.max_num_seqs = max_num_seqs
        self.num_prefilling = num_prefilling
        self.num_decoding = num_decoding
        self.num_queued_tokens = num_queued_tokens
        self.draining = draining
        self.reachable = reachable
        self.suspected = suspected
        self.num_resident_tokens = num_resident_tokens
        self.num_long_prefilling = num_long_prefilling
        self.num_long_decoding = num_long_decoding
        self.shortest_long_prefill_tokens = shortest_long_prefill_tokens
        self.slo_tpots_s = slo_tpots_s
        self.number = number
        self.device_class = device_class
        self.num_stages = num_stages


@dataclass(slots=True)
class PartialStep:
    """A step plan that is being packed.

    ``longest_tokens``: tokens to compute of the longest prompt with a chunk in the step.
    """

    now_s: float = 0.0
    chunks: list[ChunkPlan] = field(default_factory=list[ChunkPlan])
    shapes: list[ChunkShape] = field(default_factory=list[ChunkShape])
    num_tokens: int = 0
    longest_tokens: int = 0

    def add(self, chunk: ChunkPlan, num_work_tokens: int) -> None:
        """Add a chunk of a prompt that has ``num_work_tokens`` to compute in all."""
        self.chunks.append(chunk)
        self.shapes.append(ChunkShape(chunk.num_tokens, chunk.start))
        self.num_tokens += chunk.num_tokens
        self.longest_tokens = max(self.longest_tokens, num_work_tokens)


class Rank(NamedTuple):
    """A request's position in an order, independent of time; it changes only as its prompt is computed.

    Requests in one bucket keep the order of their ``place`` whatever the time. So the waiting line stays sorted as time
    passes, and only the first request of each bucket is compared with others. ``latest_start_s`` is when the rest of
    the prompt must start to be in time, in orders that use it.
    """

    place: float = 0.0
    bucket: float = 0.0
    latest_start_s: float = 0.0
