"""The real services on virtual time: contexts that are spread over instances outlive what strikes who holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.events import Event, MembersSet
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import Role
from pdmesh_testing.dst.drawing import draw
from pdmesh_testing.dst.plan import SCHEDULER, Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.run import run

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE)
DECODERS = ("i1", "i2", "i3")
GROWS = Ask(at_s=0.0, gateway="g0", label="a", prompt=tuple(range(20)), max_tokens=28)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What instances told cores."""
    events: list[Event] = []
    handle = SchedulerCore.handle

    def watched(self: SchedulerCore, event: Event, now_s: float) -> object:
        events.append(event)
        return handle(self, event, now_s)

    monkeypatch.setattr(SchedulerCore, "handle", watched)
    return events


def a_plan(*faults: Fault) -> Plan:
    return Plan(
        seed=1,
        roles=ROLES,
        num_gateways=1,
        bundle="pdmesh",
        asks=(GROWS,),
        faults=faults,
        range_tokens=16,
        blocks_per_piece=8,
        keeps_ids=True,
    )


def test_a_context_begins_on_two_instances_and_grows_over_a_third(heard: list[Event]) -> None:
    result = run(a_plan())
    assert result.broken is None
    assert result.num_tokens == GROWS.max_tokens + 4  # of the probe that comes last
    assert [len(event.member_ids) for event in heard if isinstance(event, MembersSet)] == [2]


@pytest.mark.parametrize("target", DECODERS)
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP, FaultKind.TERMINATE, FaultKind.DRAIN])
def test_a_context_survives_each_of_those_that_hold_it(kind: FaultKind, target: str) -> None:
    result = run(a_plan(Fault(at_s=0.4, kind=kind, target=target, duration_s=3.0)))
    assert result.broken is None
    assert result.num_tokens == GROWS.max_tokens + 4


@pytest.mark.parametrize("target", DECODERS)
def test_a_home_whose_member_is_silent_while_there_is_no_scheduler_asks_it_again(target: str) -> None:
    """It stood still for ever: who heard that a range was lost did not know the context, or knows of it no more."""
    silent = Fault(at_s=0.3, kind=FaultKind.STOP, target=target, duration_s=2.6)
    for back_after_s in (0.1, 5.0):
        away = Fault(at_s=0.5, kind=FaultKind.TERMINATE, target=SCHEDULER, duration_s=back_after_s)
        result = run(a_plan(silent, away))
        assert result.broken is None
        assert result.num_tokens == GROWS.max_tokens + 4


@pytest.mark.parametrize("number", range(4, 9))
def test_a_context_that_ends_while_its_instances_register_again_leaves_nothing(number: int) -> None:
    """With another scheduler, one after the other."""
    restart = Fault(at_s=0.3 + 0.05 * number, kind=FaultKind.TERMINATE, target=SCHEDULER, duration_s=0.1)
    assert run(replace(a_plan(restart), seed=number)).broken is None


@pytest.mark.parametrize("seed", [3, 4, 6])
def test_a_range_whose_tokens_are_lost_on_their_way_is_computed_nevertheless(seed: int) -> None:
    """They were waited for without end."""
    member_dies = Fault(at_s=0.35, kind=FaultKind.KILL, target="i2", duration_s=0.2)
    pieces_are_lost = Fault(at_s=0.3, kind=FaultKind.PIECES, target="i1", duration_s=6.0)
    assert run(replace(a_plan(pieces_are_lost, member_dies), seed=seed)).broken is None


def test_spread_contexts_are_drawn_beside_all_kinds_of_faults(heard: list[Event]) -> None:
    plans = [plan for seed in range(300) if (plan := draw(seed)).range_tokens]
    assert 40 < len(plans) < 80
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FaultKind)
    for plan in plans[:12]:
        assert run(plan).broken is None
    assert any(isinstance(event, MembersSet) for event in heard)
