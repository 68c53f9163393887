"""What policies see: an instance, a request's place in an order, and a step that is being packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.model import InstanceId, Role
from pdmesh.plans import ChunkPlan
from pdmesh.policy.latency import ChunkShape


@dataclass(slots=True, init=False)
class InstanceView:
    """An instance as the core's state has it. It must not be changed; freezing it would triple its cost.

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
    device_class: str = ""  # instances of one are equally fast
    num_stages: int = 1  # that each step passes; its decodes are dealt out to as many steps

    # Written out because mypyc leaves the one of a dataclass to the interpreter.
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
    """A step plan that is being packed, as far as it is."""

    now_s: float = 0.0
    chunks: list[ChunkPlan] = field(default_factory=list[ChunkPlan])
    shapes: list[ChunkShape] = field(default_factory=list[ChunkShape])
    num_tokens: int = 0
    longest_tokens: int = 0  # to compute, of the longest prompt of which it has a chunk

    def add(self, chunk: ChunkPlan, num_work_tokens: int) -> None:
        """Add a chunk of a prompt of which so many tokens are to be computed."""
        self.chunks.append(chunk)
        self.shapes.append(ChunkShape(chunk.num_tokens, chunk.start))
        self.num_tokens += chunk.num_tokens
        self.longest_tokens = max(self.longest_tokens, num_work_tokens)


class Rank(NamedTuple):
    """A request's position in an order, independent of time; it changes only as its prompt is computed.

    Requests in one bucket keep the order of their ``place`` whatever the time. So the line of those that wait stays
    sorted as time passes, and only the first of each bucket are ever compared.
    """

    place: float = 0.0
    bucket: float = 0.0
    latest_start_s: float = 0.0  # when what is left of it must start to be in time, in the orders that ask
