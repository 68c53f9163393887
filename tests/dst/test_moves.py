"""The real services on virtual time: what decodes moves to and fro, everything fails, and nobody can tell."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from pdmesh.core.commands import Command, Hold, Restart
from pdmesh.core.events import Event, TransferFailed, TransferSent
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Role
from pdmesh_testing.dst.plan import MAX_MODEL_LEN, SCHEDULER, Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.run import run
from pdmesh_testing.examples import slow_beyond

PREFILL, ONE, OTHER, GATEWAY = "i0", "i1", "i2", "g0"
NUM_ASKS = 3

#: While the requests decode.
BEGIN_S, END_S = 0.1, 2.4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What schedulers heard of moves, and said."""
    counts: Counter[str] = Counter()
    handle = SchedulerCore.handle

    def watched(self: SchedulerCore, event: Event, now_s: float) -> list[Command]:
        commands = handle(self, event, now_s)
        match event:
            case TransferSent(was_decoding=True):
                counts["sent"] += 1
            case TransferFailed(committed=bool(committed)):
                counts["failed after the commit" if committed else "failed before the commit"] += 1
            case _:
                pass
        for command in commands:
            counts["resumed"] += isinstance(command, Hold) and command.ends_move
            counts["restarted"] += isinstance(command, Restart)
        return commands

    monkeypatch.setattr(SchedulerCore, "handle", watched)
    return counts


def a_plan(seed: int, *faults: Fault, delay_s: float = 0.002, copy_s: float = 0.0, stop_early: bool = False) -> Plan:
    """Long outputs, sampled or greedy, while an operator has all that decodes on either instance go to the other."""
    rng = random.Random(seed)
    asks = tuple(
        Ask(
            at_s=0.02 * number,
            gateway=GATEWAY,
            label=f"r{number}",
            prompt=tuple(rng.randrange(200) for _ in range(rng.choice((3, 4, 5, 15, 16, 17)))),
            max_tokens=MAX_MODEL_LEN - 20,
            temperature=float(number % 2),
            seed=number,
            n=2 if number == 0 else 1,
            eos_token_ids=(40, 41) if stop_early else (),
        )
        for number in range(NUM_ASKS)
    )
    moves = [
        Fault(at_s=BEGIN_S, kind=FaultKind.MOVE, target=here, other=there, duration_s=END_S - BEGIN_S)
        for here, there in ((ONE, OTHER), (OTHER, ONE))
    ]
    return Plan(
        seed=seed,
        roles=(Role.PREFILL, Role.DECODE, Role.DECODE),
        num_gateways=1,
        bundle="pdmesh",
        asks=asks,
        faults=(*moves, *faults),
        num_blocks=200,
        max_num_seqs=8,
        delay_s=delay_s,
        copy_s=copy_s,
    )


@pytest.mark.parametrize("seed", slow_beyond(2, range(4)))
def test_what_moves_to_and_fro_is_the_stream_of_an_undisturbed_run(seen: Counter[str], seed: int) -> None:
    result = run(a_plan(seed))
    assert result.broken is None
    assert seen["sent"] >= 20
    assert not seen["restarted"]


def test_states_move_to_and_fro_while_decodes_end_a_granule(seen: Counter[str]) -> None:
    plan = a_plan(0)
    prompt = tuple(range(GRANULE_TOKENS - 8))
    asks = tuple(replace(ask, prompt=prompt[number:], max_tokens=40, n=1) for number, ask in enumerate(plan.asks))
    result = run(replace(plan, asks=asks, max_model_len=2 * GRANULE_TOKENS, num_frames=plan.num_blocks))
    assert result.broken is None
    assert seen["sent"]


@pytest.mark.parametrize("seed", slow_beyond(2, range(6)))
def test_some_end_on_their_way(seen: Counter[str], seed: int) -> None:
    assert run(a_plan(seed, stop_early=True)).broken is None
    assert seen["sent"]


@pytest.mark.parametrize("target", [ONE, PREFILL, SCHEDULER, GATEWAY])
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP, FaultKind.CUT, FaultKind.TERMINATE])
@pytest.mark.parametrize("seed", slow_beyond(1, range(3)))
def test_and_whatever_fails_meanwhile(seen: Counter[str], kind: FaultKind, target: str, seed: int) -> None:
    if target == GATEWAY and kind is not FaultKind.CUT:
        pytest.skip("its clients go with it")
    rng = random.Random(f"{kind} {target} {seed}")
    fault = Fault(at_s=rng.uniform(BEGIN_S, END_S), kind=kind, target=target, duration_s=rng.choice((0.3, 2.0, 12.0)))
    assert run(a_plan(seed, fault)).broken is None
    assert seen["sent"]


@pytest.mark.parametrize("seed", slow_beyond(3, [0, 1, 2, 3, 4, 5, 6, 8, 9]))  # 7 fails no move
def test_and_whatever_becomes_of_the_pieces(seen: Counter[str], seed: int) -> None:
    """Lost, damaged, repeated and late; copied slowly, so that what stands still goes on after a while."""
    fault = Fault(at_s=0.6, kind=FaultKind.PIECES, target=ONE, duration_s=END_S)
    plan = a_plan(seed, fault, delay_s=0.05 if seed % 2 else 0.002, copy_s=0.4 if seed % 3 == 0 else 0.0)
    assert run(plan).broken is None
    assert seen["failed before the commit"] + seen["failed after the commit"]


@pytest.mark.parametrize("seed", slow_beyond(1, [3, 9]))  # the others below 16 restart instead
def test_what_moves_because_memory_is_short_is_the_stream_of_an_undisturbed_run(
    seen: Counter[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator: more are admitted than will fit, and some move instead of being computed again."""
    monkeypatch.setattr("pdmesh.policy.rebalancing.OVERHEAD_S", 0.0)  # prompts here are of no time
    monkeypatch.setattr("pdmesh.policy.on_demand.RemainingTokens.mean", property(lambda _: 1.0))
    monkeypatch.setattr("pdmesh.core.instances.kv_growth.risk_score", lambda _: 0.0)
    rng = random.Random(seed)
    asks = tuple(
        Ask(
            at_s=0.02 * number,
            gateway=GATEWAY,
            label=f"r{number}",
            prompt=tuple(rng.randrange(200) for _ in range(rng.choice((3, 15, 17)))),
            max_tokens=20 if number % 3 else MAX_MODEL_LEN - 20,
            temperature=float(number % 2),
            seed=number,
        )
        for number in range(9)
    )
    plan = replace(a_plan(seed), asks=asks, faults=(), num_blocks=30)
    assert run(plan).broken is None
    assert seen["sent"]
