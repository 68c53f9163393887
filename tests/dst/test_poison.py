"""The real services on virtual time, and a request that kills each instance that computes it: it alone ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pdmesh.core.commands import SHARED_BLAME
from pdmesh.engine.base import SequenceSlice, SliceResult
from pdmesh.model import Role
from pdmesh_gateway.request_transcript import MAX_BLAME
from pdmesh_testing.dst.clients import SimulatedClient
from pdmesh_testing.dst.engine import SimulatedEngine
from pdmesh_testing.dst.plan import Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.process import running_process
from pdmesh_testing.dst.run import run
from pdmesh_testing.dst.simulation import Simulation
from pdmesh_testing.examples import slow_beyond

#: Tokens of its prompt. Others have more, and where a request decodes that is all that is known of its prompt.
NUM_POISON_TOKENS = 3

ROLES = [(Role.MIXED, Role.MIXED), (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)]


def is_poison(part: SequenceSlice) -> bool:
    return part.sequence.num_prompt_tokens == NUM_POISON_TOKENS


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instances that computed the poison, which die at once and are started again by their supervisor."""
    died: list[str] = []
    simulations: list[Simulation] = []
    begin, execute = Simulation.__init__, SimulatedEngine.execute

    def begun(self: Simulation, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        simulations.append(self)

    def executed(self: SimulatedEngine, batch: Sequence[SequenceSlice], **kwargs: Any) -> list[SliceResult]:
        if any(is_poison(part) for part in batch) and self.kills(batch):  # type: ignore[attr-defined]
            simulation, name = simulations[-1], running_process().name
            died.append(name)
            simulation._later(0.0, partial(simulation.kill, name))
            simulation._later(0.2, partial(simulation.start, name))
        return execute(self, batch, **kwargs)

    monkeypatch.setattr(Simulation, "__init__", begun)
    monkeypatch.setattr(SimulatedEngine, "execute", executed)
    return died


def a_plan(roles: tuple[Role, ...]) -> Plan:
    asks = [
        Ask(at_s=0.4 * number, gateway="g0", label=f"r{number}", prompt=(number, 2, 3, 4, 5, 6), max_tokens=24)
        for number in range(8)
    ]
    asks.append(Ask(at_s=0.1, gateway="g0", label="poison", prompt=(1, 2, 3), max_tokens=24))
    return Plan(seed=1, roles=roles, num_gateways=1, bundle="pdmesh", asks=tuple(asks))


def ended_as(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The code of the error that each request ended with, by its label."""
    codes: dict[str, Any] = {}
    judge = SimulatedClient.judge

    def judged(self: SimulatedClient, allows: Any) -> None:
        codes[self.ask.label] = getattr(self.error, "code", self.error)
        judge(self, lambda error: error.code == "restarted_too_often" and self.ask.label == "poison")

    monkeypatch.setattr(SimulatedClient, "judge", judged)
    return codes


@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_it_ends_after_a_few_deaths_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, deaths: list[str], roles: tuple[Role, ...], while_decoding: bool
) -> None:
    def kills(self: SimulatedEngine, batch: Sequence[SequenceSlice]) -> bool:
        return any(is_poison(part) and (part.start >= NUM_POISON_TOKENS) is while_decoding for part in batch)

    monkeypatch.setattr(SimulatedEngine, "kills", kills, raising=False)
    codes = ended_as(monkeypatch)
    result = run(a_plan(roles))
    assert result.broken is None
    assert codes.pop("poison") == "restarted_too_often"
    assert not any(codes.values()), "those that were beside it have all their tokens"
    assert MAX_BLAME + 1 <= len(deaths) <= MAX_BLAME / SHARED_BLAME + 1


@pytest.mark.parametrize("seed", slow_beyond(2, range(1, 7)))  # in seed 0 a request is computed at ten deaths in a row
def test_requests_on_instances_that_are_killed_all_the_time_end_as_if_nothing_had_happened(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A prompt takes about as long as its instance lives. When each restart counted, two of them ended streams."""
    monkeypatch.setattr("pdmesh_testing.dst.engine.STEP_S", 0.4)
    codes, rng = ended_as(monkeypatch), random.Random(seed)
    kills = [Fault(at_s=0.3 + 0.4 * turn, kind=FaultKind.KILL, target=f"i{rng.randrange(4)}") for turn in range(50)]
    asks = [
        Ask(at_s=0.05 * number, gateway="g0", label=f"r{number}", prompt=tuple(range(1, 41)), max_tokens=8)
        for number in range(12)
    ]
    faults = tuple(replace(kill, duration_s=0.05) for kill in kills)
    plan = Plan(seed=seed, roles=ROLES[1], num_gateways=1, bundle="pdmesh", asks=tuple(asks), faults=faults)
    assert run(plan).broken is None
    assert len(codes) == 13, "and a probe at the end"
    assert not any(codes.values())
