"""What a simulation does: a mesh, the requests it gets, and the faults it suffers.

A plan is plain data, so that it can be drawn from a seed (`pdmesh_testing.dst.drawing`), cut down when it fails
(`pdmesh_testing.dst.shrink`), printed, and written into a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.kv_layout import KvLayout
from pdmesh.model import Role
from pdmesh_testing.fake_engine import FAKE_LAYOUT, STATE_LAYOUT

SCHEDULER = "scheduler"

#: Of a prompt, and of a prompt and its output.
MAX_PROMPT_TOKENS = 48
MAX_MODEL_LEN = 96


class FaultKind(StrEnum):
    """Kind of a fault, or of an operator's change. Most of them last for the fault's ``duration_s``."""

    #: A process dies at once, and is started again at the end.
    KILL = "kill"
    #: A process is asked to stop, and is started again at the end.
    TERMINATE = "terminate"
    #: A process gets SIGSTOP, and SIGCONT at the end.
    STOP = "stop"
    #: All streams of a process break; one of the two ends may notice later.
    CUT = "cut"
    #: A process and ``other`` cannot reach each other.
    AWAY = "away"
    #: The steps of an instance take ten times as long.
    SLOW = "slow"
    #: A third of all streams' frames take up to a second longer.
    FRAMES = "frames"
    #: Pieces are lost, damaged, repeated and late.
    PIECES = "pieces"
    #: The device of an instance fails, and the instance ends. It is started again at the end.
    BREAK = "break"
    #: An operator drains an instance.
    DRAIN = "drain"
    #: An operator moves the decodes of an instance to another.
    MOVE = "move"
    #: An operator gives an instance another role.
    ROLE = "role"
    #: An operator switches the policies.
    BUNDLE = "bundle"
    #: A gateway submits invalid requests, and meddles with requests of other gateways.
    NONSENSE = "nonsense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault. ``target`` and ``other`` name processes, or the new value of an operator's change."""

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
    """Request of a client. Clients choose ``label`` (``X-Request-Id``), and several may choose the same."""

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
    #: Time after the arrival at which the client hangs up.
    hangs_up_s: float | None = None


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
    #: Longest time of a copy on a thread, half before and half after it; 0: copies run on the loop.
    copy_s: float = 0.0
    peer_reads: bool = False
    max_model_len: int = MAX_MODEL_LEN
    #: A restarted instance keeps its id.
    keeps_ids: bool = False
    max_num_seqs: int = 4
    #: Tokens of a range of a spread context; 0: contexts are not spread.
    range_tokens: int = 0
    #: Capacity of each instance's tier in host memory.
    num_offload_granules: int = 0
    #: Instances decode speculatively.
    drafts: bool = False
    #: Pages of each instance's layer with states; 0: the model has none.
    num_frames: int = 0
    #: Limit of each instance's cached states.
    num_cached_states: int = 0
    max_queue_entries: int = 4096
    #: Most messages that wait for a peer that does not read.
    max_outbox: int = 65_536
    window: int = 64
    #: Longest delay of a frame or a piece without faults.
    delay_s: float = 0.002
    #: Clock offset of each process in seconds.
    clocks: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def cached_states_share(self) -> float:
        """Share of the cache beside requests' states that `num_cached_states` pages take."""
        ratio = (self.num_cached_states + 0.5) * self.layout.bytes_per_frame / self.num_blocks
        return ratio / (ratio + self.layout.bytes_per_block - self.layout.bytes_per_frame)

    @property
    def layout(self) -> KvLayout:
        """Layout of the simulated model's KV."""
        return STATE_LAYOUT if self.num_frames else FAKE_LAYOUT

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
