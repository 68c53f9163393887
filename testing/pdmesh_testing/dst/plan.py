"""What a simulation does: a mesh, the requests it gets, and the faults it suffers.

A plan is plain data, so that it can be drawn from a seed (`pdmesh_testing.dst.drawing`), cut down when it fails
(`pdmesh_testing.dst.shrink`), printed, and written into a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.model import Role

SCHEDULER = "scheduler"

#: Of a prompt, and of a prompt and its output.
MAX_PROMPT_TOKENS = 48
MAX_MODEL_LEN = 96


class FaultKind(StrEnum):
    """What may go wrong, or be done by an operator. Most of it lasts for the fault's ``duration_s``."""

    KILL = "kill"  # a process dies at once, and is started again at the end
    TERMINATE = "terminate"  # a process is told to stop, and is started again at the end
    STOP = "stop"  # SIGSTOP, and SIGCONT at the end
    CUT = "cut"  # all streams of a process break; one of the two ends may notice later
    AWAY = "away"  # a process and ``other`` do not hear each other
    SLOW = "slow"  # an instance's steps take ten times as long
    FRAMES = "frames"  # a third of all streams' frames take up to a second longer
    PIECES = "pieces"  # pieces are lost, damaged, repeated and late
    BREAK = "break"  # an instance's device fails, which ends it; it is started again at the end
    DRAIN = "drain"  # an operator gives an instance no new work
    MOVE = "move"  # an operator moves what decodes on an instance to another
    ROLE = "role"  # an operator gives an instance another role
    BUNDLE = "bundle"  # an operator switches the policies
    NONSENSE = "nonsense"  # a gateway submits what no gateway may, and meddles with the requests of others


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; ``target`` and ``other`` name processes or, for an operator's change, what it changes to."""

    at_s: float
    kind: FaultKind
    target: str
    duration_s: float = 0.0
    other: str = ""

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s

    def __str__(self) -> str:
        other = f" ({self.other})" if self.other else ""
        return f"{self.kind} {self.target}{other} for {self.duration_s:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One client's request. Clients choose ``label`` (``X-Request-Id``), and several may choose the same."""

    at_s: float
    gateway: str
    label: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    hangs_up_s: float | None = None  # after its arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module's docstring. ``seed`` also draws delays and whatever else happens by chance."""

    seed: int
    roles: tuple[Role, ...]
    num_gateways: int
    bundle: str
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    num_blocks: int = 48
    chunk_tokens: int = 16
    num_backends: int = 2
    num_buffers: int = 2
    blocks_per_piece: int = 2
    copy_s: float = 0.0  # what a thread takes for a copy at most, half before and half after; 0: made on the loop
    peer_reads: bool = False
    max_model_len: int = MAX_MODEL_LEN
    keeps_ids: bool = False  # an instance that is started again has the id it had
    max_num_seqs: int = 4
    range_tokens: int = 0  # of a context that is spread over instances; 0: none is
    num_offload_granules: int = 0  # of each instance's tier in host memory
    drafts: bool = False  # instances guess tokens, and verify them
    max_queue_entries: int = 4096
    max_outbox: int = 65_536  # messages that wait for a peer that does not read
    window: int = 64
    delay_s: float = 0.002  # of a frame or a piece, at most, in good weather
    clocks: dict[str, float] = field(default_factory=dict[str, float])  # processes' offsets, seconds

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(f"i{index}" for index in range(len(self.roles)))

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(f"g{index}" for index in range(self.num_gateways))

    @property
    def quiet_from_s(self) -> float:
        """The time at which the last request has come and the last fault is over."""
        return max([ask.at_s for ask in self.asks] + [fault.end_s for fault in self.faults])
