"""Plans drawn from seeds.

Not every plan has a bit of everything: in a mesh where all goes wrong at once, little goes far enough to go wrong in
an unusual way. As in *swarm testing* (Groce et al., ISSTA 2012), each seed first draws which kinds of faults and which
ways of clients there are at all, how close together faults come, and whether they strike one process again and again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from pdmesh.config import SchedulerConfig
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Role
from pdmesh.worker.state_frames import num_held_frames
from pdmesh_testing.dst.clients import expectation
from pdmesh_testing.dst.engine import STEP_S
from pdmesh_testing.dst.plan import MAX_MODEL_LEN, MAX_PROMPT_TOKENS, SCHEDULER, Ask, Fault, FaultKind, Plan
from pdmesh_testing.fake_engine import FAKE_LAYOUT

T = TypeVar("T")

SHAPES: tuple[tuple[Role, ...], ...] = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
)

#: Meshes whose contexts are spread over the instances that decode, and how many tokens each holds at most.
SPREAD_SHAPES: tuple[tuple[Role, ...], ...] = (
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.MIXED, Role.MIXED, Role.DECODE),
)
SPREAD_RANGE_TOKENS = (8, 16, 24, 32)
SHARE_OF_SPREAD_PLANS = 0.2

#: Of the other plans, those whose model has states.
SHARE_OF_STATE_PLANS = 0.25

#: Share of these with conversations. Shorter prompts leave no states.
SHARE_OF_CONVERSATIONS_WITH_STATES = 0.7

BUNDLES = ("pdmesh", "pdmesh", "fcfs", "sjf", "lars", "medha")

#: How likely a plan has each kind of faults, and how often it is then drawn beside others.
SHARE_OF_PLANS = 0.35

#: Of a conversation that is gone on with, prompt and answer.
_MAX_TURN_TOKENS = 450

#: An absence that ends the lease of an instance.
LONG_S = SchedulerConfig().lease_s + 1.0
WEIGHTS = {
    FaultKind.KILL: 4,
    FaultKind.TERMINATE: 2,
    FaultKind.STOP: 4,
    FaultKind.CUT: 3,
    FaultKind.AWAY: 2,
    FaultKind.SLOW: 2,
    FaultKind.FRAMES: 2,
    FaultKind.PIECES: 2,
    FaultKind.BREAK: 1,
    FaultKind.DRAIN: 1,
    FaultKind.MOVE: 3,
    FaultKind.ROLE: 1,
    FaultKind.BUNDLE: 1,
    FaultKind.NONSENSE: 2,
}


class Way(Enum):
    """What some clients do. Half of the plans have each."""

    COME_AT_ONCE = auto()
    HANG_UP = auto()
    WANT_CHOICES = auto()
    SAMPLE = auto()
    STOP_EARLY = auto()
    LONG_PROMPTS = auto()
    LONG_OUTPUTS = auto()
    DIFFER_IN_PRIORITY = auto()


@dataclass(frozen=True, slots=True)
class _Swarm:
    """Drawn properties of one plan."""

    gateways: tuple[str, ...]
    instances: tuple[str, ...]
    ways: frozenset[Way]
    kinds: tuple[FaultKind, ...]
    #: Longest time from a request, or another fault, to a fault.
    spread_s: float
    #: Longest time that a process is stopped, or cut off from another.
    stop_s: float
    #: Preferred target of faults.
    victim: str | None


def draw(seed: int) -> Plan:
    """Draw the plan of a seed; always the same plan for a seed."""
    rng = random.Random(seed)
    roles = rng.choice(SHAPES)
    spread = random.Random(f"spread {seed}")
    is_spread = spread.random() < SHARE_OF_SPREAD_PLANS
    if is_spread:
        roles = spread.choice(SPREAD_SHAPES)
    instances = tuple(f"i{index}" for index in range(len(roles)))
    gateways = tuple(f"g{index}" for index in range(rng.choice((1, 1, 2, 2, 3))))
    swarm = _Swarm(
        gateways=gateways,
        instances=instances,
        ways=frozenset(way for way in Way if rng.random() < 0.5),
        kinds=tuple(kind for kind in FaultKind if rng.random() < SHARE_OF_PLANS) or tuple(FaultKind),
        spread_s=rng.choice((0.05, 0.3, 1.0, 3.0)),
        stop_s=rng.choice((0.3, 3.0, 10.0, 35.0)),
        victim=rng.choice((None, None, SCHEDULER, *instances, gateways[-1])),
    )
    asks = tuple(_ask(rng, swarm) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 6))))
    faults = _faults(rng, swarm, asks)
    asks += _late_asks(random.Random(f"late {seed}"), swarm, faults)
    is_roomy = rng.random() < 0.5
    plan = Plan(
        seed=seed,
        roles=roles,
        num_gateways=len(gateways),
        bundle=rng.choice(BUNDLES),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        num_blocks=80 if is_roomy else rng.choice((24, 30, 48)),
        chunk_tokens=rng.choice((4, 8, 16, 64)),
        num_backends=8 if is_roomy else rng.choice((1, 2)),
        num_buffers=4 if is_roomy else rng.choice((1, 2)),
        max_num_seqs=4 if is_roomy else rng.choice((1, 2, 4)),
        max_queue_entries=4096 if is_roomy else rng.choice((4096, 2)),
        max_outbox=65_536 if is_roomy else rng.choice((65_536, 64)),
        blocks_per_piece=rng.choice((1, 2, 8)),
        copy_s=rng.choice((0.0, 0.0, 0.01, 0.4)),
        keeps_ids=rng.random() < 0.3,
        window=64 if is_roomy else rng.choice((1, 2, 64)),
        delay_s=rng.choice((0.002, 0.002, 0.05)),
        clocks={name: rng.uniform(0, 1e6) for name in (SCHEDULER, *gateways, *instances)},
        peer_reads=rng.random() < 0.5,
        drafts=random.Random(f"drafts {seed}").random() < SHARE_OF_PLANS,
        range_tokens=spread.choice(SPREAD_RANGE_TOKENS) if is_spread else 0,
    )
    if not is_spread and random.Random(f"hybrid {seed}").random() < SHARE_OF_STATE_PLANS:
        # Each later step knows by this that there are states.
        plan = replace(plan, num_frames=plan.num_blocks, drafts=False)
    conversations = random.Random(f"conversations {seed}")
    if conversations.random() < (SHARE_OF_CONVERSATIONS_WITH_STATES if plan.num_frames else SHARE_OF_PLANS):
        plan = _with_conversations(conversations, swarm, plan)
        if plan.num_frames:
            plan = _with_needed_states(random.Random(f"states {seed}"), plan)
    if plan.num_frames:
        few = random.Random(f"few frames {seed}")
        num_states = plan.num_blocks * plan.layout.block_size // GRANULE_TOKENS
        if few.random() < SHARE_OF_PLANS:
            # States of cached granules are soon evicted for others.
            plan = replace(plan, max_num_seqs=1)
            num_states = min(num_states, few.choice((0, 1, 2, 3)))
        num_frames = num_held_frames(plan.layout, plan.max_num_seqs) + num_states
        plan = replace(plan, num_frames=min(plan.num_blocks, num_frames), num_cached_states=num_states)
    return _spread(spread, plan) if is_spread else plan


def _spread(rng: random.Random, plan: Plan) -> Plan:
    """Lengthen most requests so that they need several instances, but never more than there are."""
    num_holders = sum(role.can_decode for role in plan.roles) - (Role.PREFILL not in plan.roles)
    most = min(plan.range_tokens * num_holders, plan.max_model_len)
    asks: list[Ask] = []
    for ask in plan.asks:
        wanted = rng.randint(plan.range_tokens + 2, most) if rng.random() < 0.7 else 0
        prompt, max_tokens = ask.prompt, ask.max_tokens
        if rng.random() < 0.5:
            max_tokens = max(max_tokens, min(wanted - len(prompt), 90))
        prompt += tuple(rng.randrange(200) for _ in range(wanted - len(prompt) - max_tokens))
        prompt = prompt[: most - 1]
        asks.append(replace(ask, prompt=prompt, max_tokens=min(max_tokens, most - len(prompt))))
    names = [name for name, role in zip(plan.instances, plan.roles, strict=True) if role.can_decode]
    faults = [_while_it_decodes(rng, asks, names) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    range_blocks = plan.range_tokens // FAKE_LAYOUT.block_size
    num_blocks = max(plan.num_blocks, -(-plan.max_model_len // FAKE_LAYOUT.block_size))
    if random.Random(f"give back {plan.seed}").random() < SHARE_OF_PLANS:
        # An instance streams ranges of a long prompt out, and asks their holders.
        num_blocks = 2 * range_blocks + 2
    return replace(
        plan,
        asks=tuple(asks),
        faults=tuple(sorted((*plan.faults, *faults), key=lambda fault: fault.at_s)),
        # Each answer of a shard holder takes this time, and a token needs one in each layer.
        copy_s=min(plan.copy_s, 0.01),
        num_blocks=num_blocks,
        # Otherwise no answer fits.
        blocks_per_piece=max(plan.blocks_per_piece, range_blocks + 1),
    )


def _with_conversations(rng: random.Random, swarm: _Swarm, plan: Plan) -> Plan:
    """Give prompts equal beginnings, or let them continue earlier answers. Lengths grow eightfold, and KV is reused."""
    stems = [tuple(rng.randrange(200) for _ in range(rng.choice((120, 130, 257, 300)))) for _ in range(2)]
    asks: list[Ask] = []
    for ask in (*plan.asks, *(_ask(rng, swarm) for _ in range(rng.choice((1, 2, 4))))):
        prompt = rng.choice(stems) + ask.prompt
        earlier = rng.choice(asks) if asks and rng.random() < 0.5 else None
        if earlier is not None and len(earlier.prompt) + earlier.max_tokens < _MAX_TURN_TOKENS:
            prompt = earlier.prompt + tuple(expectation(earlier, 0, plan.layout)[0]) + ask.prompt
            ask = replace(ask, at_s=earlier.at_s + rng.choice((0.0, 1.0, 3.0)))
        max_tokens = ask.max_tokens * rng.choice((1, 1, 6))
        asks.append(replace(ask, prompt=prompt, max_tokens=max_tokens))
    tiers = random.Random(f"tiers {plan.seed}")
    return replace(
        plan,
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        num_offload_granules=tiers.choice((4, 40)) if tiers.random() < 0.5 and not plan.num_frames else 0,
        num_blocks=plan.num_blocks * 8,
        chunk_tokens=plan.chunk_tokens * 8,
        blocks_per_piece=plan.blocks_per_piece * 8,
        max_model_len=MAX_MODEL_LEN * 8,
        range_tokens=plan.range_tokens * 8,
    )


def _with_needed_states(rng: random.Random, plan: Plan) -> Plan:
    """Let prompts end within the contexts of others, some of them aborted, and decodes move as they end granules."""
    asks = list(plan.asks)
    for earlier in rng.choices(plan.asks, k=rng.choice((0, 1, 2, 3))):
        context = earlier.prompt + tuple(expectation(earlier, 0, plan.layout)[0])
        if num_granules := (len(context) - 1) // GRANULE_TOKENS:
            end = GRANULE_TOKENS * rng.randint(1, num_granules) + rng.choice((1, 2, 9))
            at_s, hangs_up_s = earlier.at_s + rng.uniform(0.5, 8.0), rng.choice((None, rng.uniform(0.0, 1.0)))
            asks.append(replace(earlier, prompt=context[:end], at_s=at_s, hangs_up_s=hangs_up_s))
    faults = list(plan.faults)
    names = [name for name, role in zip(plan.instances, plan.roles, strict=True) if role.can_decode]
    if len(names) > 1 and rng.random() < 0.5:
        numbers = rng.sample(range(len(asks)), min(2, len(asks)))
        for number in numbers:
            rest = GRANULE_TOKENS - len(asks[number].prompt) % GRANULE_TOKENS
            asks[number] = replace(
                asks[number], max_tokens=rest + rng.randint(2, 40), eos_token_ids=(), hangs_up_s=None
            )
        at_s, pair = asks[numbers[0]].at_s + rng.uniform(0.2, 1.0), rng.sample(names, 2)
        faults += [
            Fault(at_s=at_s, kind=FaultKind.MOVE, target=here, other=there, duration_s=5.0)
            for here, there in (pair, pair[::-1])
        ]
    return replace(
        plan,
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _while_it_decodes(rng: random.Random, asks: Sequence[Ask], names: Sequence[str]) -> Fault:
    """Draw a fault for a spread context while it decodes, at its decode instance, a shard holder, or the scheduler."""
    ask = rng.choice(asks)
    at_s = ask.at_s + rng.uniform(0.1, 0.5) + rng.uniform(0, STEP_S * ask.max_tokens)
    kind = rng.choice(
        (
            FaultKind.KILL,
            FaultKind.KILL,
            FaultKind.STOP,
            FaultKind.TERMINATE,
            FaultKind.CUT,
            FaultKind.PIECES,
            FaultKind.DRAIN,
            FaultKind.MOVE,
        )
    )
    of_scheduler = kind in (FaultKind.KILL, FaultKind.CUT) and rng.random() < 0.3
    return Fault(
        at_s=at_s,
        kind=kind,
        target=SCHEDULER if of_scheduler else rng.choice(names),
        duration_s=rng.choice((rng.uniform(0, 0.5), rng.uniform(0.5, 4.0))),
        other=rng.choice(names) if kind is FaultKind.MOVE else "",
    )


def _ask(rng: random.Random, swarm: _Swarm) -> Ask:
    def mostly(way: Way, *values: T, otherwise: T) -> T:
        return rng.choice(values) if way in swarm.ways and rng.random() < 0.7 else otherwise

    num_prompt_tokens = mostly(
        Way.LONG_PROMPTS, 17, rng.randint(8, MAX_PROMPT_TOKENS), otherwise=rng.choice((1, 4, 5, 9))
    )
    return Ask(
        at_s=mostly(Way.COME_AT_ONCE, 0.0, rng.uniform(0, 0.1), otherwise=rng.uniform(0, 2.0)),
        gateway=rng.choice(swarm.gateways),
        label=rng.choice(("a", "a-0", "a-1", "b")),
        prompt=tuple(rng.randrange(200) for _ in range(num_prompt_tokens)),
        max_tokens=mostly(Way.LONG_OUTPUTS, rng.randint(6, 40), otherwise=rng.choice((1, 2, 3, 6))),
        n=mostly(Way.WANT_CHOICES, 2, 3, otherwise=1),
        temperature=mostly(Way.SAMPLE, 1.0, otherwise=0.0),
        seed=rng.getrandbits(31),
        eos_token_ids=mostly(Way.STOP_EARLY, (40,), (35, 50, 61, 77), otherwise=()),
        priority=mostly(Way.DIFFER_IN_PRIORITY, 0, 1, otherwise=0),
        hangs_up_s=mostly(Way.HANG_UP, rng.uniform(0, 0.08), rng.uniform(0, 0.4), rng.uniform(0, 1.5), otherwise=None),
    )


def _late_asks(rng: random.Random, swarm: _Swarm, faults: Sequence[Fault]) -> tuple[Ask, ...]:
    """Draw two requests during long faults, in `SHARE_OF_PLANS` of the plans with such faults.

    The random numbers are separate, so that all other plans stay as they were.
    """
    long = [fault for fault in faults if fault.duration_s > LONG_S]
    if not long or rng.random() > SHARE_OF_PLANS:
        return ()
    times = [rng.uniform(fault.at_s + LONG_S, fault.end_s) for fault in rng.choices(long, k=2)]
    return tuple(replace(_ask(rng, swarm), at_s=at_s) for at_s in times)


def _faults(rng: random.Random, swarm: _Swarm, asks: Sequence[Ask]) -> list[Fault]:
    """Draw faults, each near a request's hand-over or near the fault before."""
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        near_s = faults[-1].at_s if faults and rng.random() < 0.5 else rng.choice(asks).at_s
        at_s = max(0.0, near_s + rng.uniform(-0.02, swarm.spread_s))
        faults.append(_fault(rng, swarm, at_s))
    if rng.random() < 0.25:
        faults += _two_absences(rng, swarm, rng.choice(asks).at_s + rng.uniform(0, min(0.8, swarm.spread_s)))
    return faults


def _two_absences(rng: random.Random, swarm: _Swarm, at_s: float) -> list[Fault]:
    """Draw faults that kill or stop two processes at about the same time."""
    first, second = rng.sample((SCHEDULER, *swarm.instances, swarm.gateways[-1]), 2)
    duration_s = rng.uniform(0.1, 10.0)
    return [
        Fault(
            at_s=at_s,
            kind=rng.choice((FaultKind.KILL, FaultKind.STOP)),
            target=first,
            duration_s=duration_s,
        ),
        Fault(
            at_s=at_s + rng.uniform(0, min(1.0, duration_s)),
            kind=rng.choice((FaultKind.KILL, FaultKind.TERMINATE, FaultKind.STOP)),
            target=second,
            duration_s=rng.choice((0.1, rng.uniform(0.1, 10.0))),
        ),
    ]


def _fault(rng: random.Random, swarm: _Swarm, at_s: float) -> Fault:
    (kind,) = rng.choices(swarm.kinds, [WEIGHTS[kind] for kind in swarm.kinds])
    duration_s = rng.choice((rng.uniform(0, 0.3), rng.uniform(0, 3.0)))

    def one_of(*names: str) -> str:
        is_struck = swarm.victim in names and rng.random() < 0.7
        return swarm.victim if swarm.victim is not None and is_struck else rng.choice(names)

    target, other = one_of(*swarm.instances), ""
    match kind:
        case FaultKind.KILL | FaultKind.STOP:
            target = one_of(SCHEDULER, SCHEDULER, *swarm.instances, swarm.gateways[-1])
            if kind is FaultKind.STOP:
                duration_s = rng.uniform(0, swarm.stop_s)
        case FaultKind.TERMINATE:
            target = one_of(SCHEDULER, *swarm.instances)
        case FaultKind.CUT:
            target = one_of(SCHEDULER, SCHEDULER, *swarm.instances, *swarm.gateways)
        case FaultKind.AWAY:
            other = rng.choice((SCHEDULER, *swarm.gateways))
            if rng.random() < 0.3:
                target, other = SCHEDULER, rng.choice(swarm.gateways)
            duration_s = rng.uniform(0, swarm.stop_s)
        case FaultKind.MOVE:
            other = rng.choice(swarm.instances)
        case FaultKind.ROLE:
            other = rng.choice(tuple(Role))
        case FaultKind.BUNDLE:
            target, other = SCHEDULER, rng.choice(BUNDLES)
        case FaultKind.NONSENSE:
            target = rng.choice(swarm.gateways)
        case FaultKind.SLOW | FaultKind.FRAMES | FaultKind.PIECES | FaultKind.BREAK | FaultKind.DRAIN:
            pass
    return Fault(at_s=at_s, kind=kind, target=target, duration_s=duration_s, other=other)
