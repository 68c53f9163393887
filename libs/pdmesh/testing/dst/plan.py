"""What a simulation does: a mesh, the requests it gets, and the faults it suffers, all drawn from one seed.

A plan is plain data, so that a failing one can be cut down (`pdmesh.testing.dst.shrink`) and printed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.model import Role

#: Requests arrive within these seconds.
ARRIVALS_S = 3.0

SCHEDULER = "scheduler"

#: Of a prompt, and of a prompt and its output.
MAX_PROMPT_TOKENS = 48
MAX_MODEL_LEN = 96

SHAPES: tuple[tuple[Role, ...], ...] = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
)

BUNDLES = ("pdmesh", "pdmesh", "fcfs", "sjf", "lars", "medha")


class FaultKind(StrEnum):
    """What may go wrong, or be done by an operator. Most of it lasts for the fault's ``duration_s``."""

    KILL = "kill"  # a process dies at once, and is started again at the end
    TERMINATE = "terminate"  # a process is told to stop, and is started again at the end
    STOP = "stop"  # SIGSTOP, and SIGCONT at the end
    CUT = "cut"  # all streams of a process break; it can connect again at once
    AWAY = "away"  # a process and ``other`` do not hear each other
    SLOW = "slow"  # an instance's steps take ten times as long
    FRAMES = "frames"  # some frames of all streams take up to a second longer
    PIECES = "pieces"  # pieces are lost, damaged, repeated and late
    BREAK = "break"  # an instance's device fails, which ends it; it is started again at the end
    ROLE = "role"  # an operator gives an instance another role
    BUNDLE = "bundle"  # an operator switches the policies
    NONSENSE = "nonsense"  # a gateway submits what no gateway may, and meddles with the requests of others


#: How often each is drawn.
WEIGHTS = {
    FaultKind.KILL: 4,
    FaultKind.TERMINATE: 1,
    FaultKind.STOP: 3,
    FaultKind.CUT: 2,
    FaultKind.AWAY: 2,
    FaultKind.SLOW: 2,
    FaultKind.FRAMES: 1,
    FaultKind.PIECES: 2,
    FaultKind.BREAK: 1,
    FaultKind.ROLE: 1,
    FaultKind.BUNDLE: 1,
    FaultKind.NONSENSE: 2,
}


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
    copies_on_threads: bool = False
    keeps_ids: bool = False  # an instance that is started again has the id it had
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
        """When the last request has come and the last fault is over."""
        return max([ask.at_s for ask in self.asks] + [fault.end_s for fault in self.faults])


def draw(seed: int) -> Plan:
    """The plan of a seed: always the same one."""
    rng = random.Random(seed)
    roles = rng.choice(SHAPES)
    num_gateways = rng.choice((1, 2))
    instances = [f"i{index}" for index in range(len(roles))]
    gateways = [f"g{index}" for index in range(num_gateways)]
    names = [SCHEDULER, *gateways, *instances]
    asks = tuple(_ask(rng, gateways) for _ in range(rng.randint(1, 8)))
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        at_s = max(0.0, rng.choice(asks).at_s + rng.uniform(-0.1, rng.choice((0.2, 1.0, 3.0))))
        if faults and rng.random() < 0.4:
            at_s = faults[-1].at_s + rng.choice((0.0, rng.uniform(0, 0.3)))
        faults.append(_fault(rng, at_s, gateways, instances))
    if rng.random() < 0.35:
        faults += _two_deaths(rng, rng.choice(asks).at_s + rng.uniform(0, 0.8), instances)
    return Plan(
        seed=seed,
        roles=roles,
        num_gateways=num_gateways,
        bundle=rng.choice(BUNDLES),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        num_blocks=rng.choice((26, 40, 80)),
        chunk_tokens=rng.choice((4, 8, 16, 64)),
        num_backends=rng.choice((1, 2, 8)),
        num_buffers=rng.choice((1, 2, 4)),
        blocks_per_piece=rng.choice((1, 2, 8)),
        copies_on_threads=rng.random() < 0.3,
        keeps_ids=rng.random() < 0.3,
        window=rng.choice((1, 2, 64)),
        delay_s=rng.choice((0.002, 0.002, 0.05)),
        clocks={name: rng.uniform(0, 1e6) for name in names},
    )


def _ask(rng: random.Random, gateways: list[str]) -> Ask:
    prompt = tuple(rng.randrange(200) for _ in range(rng.choice((1, 4, 5, 17, rng.randint(1, MAX_PROMPT_TOKENS)))))
    return Ask(
        at_s=rng.choice((0.0, rng.uniform(0, 0.2), rng.uniform(0, ARRIVALS_S))),
        gateway=rng.choice(gateways),
        label=rng.choice(("a", "a-0", "a-1", "b", "b-0")),
        prompt=prompt,
        max_tokens=rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, 40))),
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.getrandbits(31),
        eos_token_ids=rng.choice(((), (40,), (35, 50, 61, 77))),
        priority=rng.choice((0, 0, 1)),
        hangs_up_s=rng.choice((None, None, None, rng.uniform(0, 0.08), rng.uniform(0, 1.0))),
    )


def _two_deaths(rng: random.Random, at_s: float, instances: list[str]) -> list[Fault]:
    """Two processes are away at about the same time."""
    return [
        Fault(
            at_s=at_s + rng.choice((0.0, rng.uniform(0, 1.0))),
            kind=rng.choice((FaultKind.KILL, FaultKind.STOP)),
            target=target,
            duration_s=rng.uniform(0.1, 10.0),
        )
        for target in rng.sample((SCHEDULER, SCHEDULER, *instances), 2)
    ]


def _fault(rng: random.Random, at_s: float, gateways: list[str], instances: list[str]) -> Fault:
    (kind,) = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
    target, other, duration_s = rng.choice(instances), "", rng.choice((rng.uniform(0, 0.5), rng.uniform(0, 3.0)))
    match kind:
        case FaultKind.KILL | FaultKind.STOP:
            target = rng.choice((SCHEDULER, SCHEDULER, *instances, gateways[-1]))
            if kind is FaultKind.STOP:
                duration_s = rng.choice((duration_s, rng.uniform(4, 8), rng.uniform(15, 35)))
        case FaultKind.TERMINATE:
            target = rng.choice((SCHEDULER, *instances))
        case FaultKind.CUT:
            target = rng.choice((SCHEDULER, *instances, *gateways))
        case FaultKind.AWAY:
            target, other = rng.choice(instances), rng.choice((SCHEDULER, *gateways))
            if rng.random() < 0.3:
                target, other = SCHEDULER, rng.choice(gateways)
            duration_s = rng.choice((duration_s, rng.uniform(4, 12)))
        case FaultKind.ROLE:
            other = rng.choice(tuple(Role))
        case FaultKind.BUNDLE:
            target, other = SCHEDULER, rng.choice(BUNDLES)
        case FaultKind.NONSENSE:
            target = rng.choice(gateways)
        case FaultKind.SLOW | FaultKind.FRAMES | FaultKind.PIECES | FaultKind.BREAK:
            pass
    return Fault(at_s=at_s, kind=kind, target=target, duration_s=duration_s, other=other)
