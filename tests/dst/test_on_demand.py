"""The real services on virtual time, short of memory: requests are retracted again and again, and nobody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from pdmesh.core.copies.on_demand import OnDemandKv
from pdmesh.core.events import Event, RequestArrived
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import RequestId, Role
from pdmesh.plans import ResidentContext
from pdmesh_gateway.generate import Generator
from pdmesh_gateway.request_transcript import Transcript
from pdmesh_testing.core import FixedGrowth
from pdmesh_testing.dst.plan import MAX_MODEL_LEN, Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.run import run
from pdmesh_testing.examples import slow_beyond

ROLES = [(Role.MIXED,), (Role.PREFILL, Role.DECODE), (Role.MIXED, Role.MIXED)]
NUM_ASKS = 12


@pytest.fixture
def retractions(monkeypatch: pytest.MonkeyPatch) -> Counter[RequestId]:
    """How often each request was retracted, of a scheduler that expects every output to end with its next token."""
    counts: Counter[RequestId] = Counter()
    resume = Generator.resume

    def counted(
        self: Generator, transcript: Transcript, reason: str, *, blame: float = 0.0, retracted: bool = False
    ) -> None:
        counts[transcript.request_id] += retracted
        resume(self, transcript, reason, blame=blame, retracted=retracted)

    monkeypatch.setattr(Generator, "resume", counted)
    monkeypatch.setattr("pdmesh.core.scheduler.Growth", lambda on_demand, risk: FixedGrowth(1.0, risk=0.5))
    return counts


def a_plan(*faults: Fault, roles: tuple[Role, ...]) -> Plan:
    """Each request comes to hold nearly all blocks, sampled by its own seed or greedily."""
    asks = tuple(
        Ask(
            at_s=0.01 * number,
            gateway="g0",
            label=f"r{number}",
            prompt=(number, 2, 3, 4, 5, 6),
            max_tokens=MAX_MODEL_LEN - 6,
            temperature=float(number % 2),
            seed=number,
        )
        for number in range(NUM_ASKS)
    )
    num_blocks = MAX_MODEL_LEN // 4 + 2
    return Plan(seed=1, roles=roles, num_gateways=1, bundle="pdmesh", asks=asks, faults=faults, num_blocks=num_blocks)


@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_tokens_are_those_of_an_undisturbed_run(retractions: Counter[RequestId], roles: tuple[Role, ...]) -> None:
    result = run(a_plan(roles=roles))
    assert result.broken is None
    assert result.num_tokens == NUM_ASKS * (MAX_MODEL_LEN - 6) + 4  # and a probe's
    assert retractions.total() >= 5


@pytest.mark.parametrize("roles", slow_beyond(1, ((roles,) for roles in ROLES)), ids=str)
def test_and_through_twenty_retractions_of_each_request(
    retractions: Counter[RequestId], roles: tuple[Role, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever one asks for more it is retracted, the first twenty times."""
    is_low = OnDemandKv.is_low

    def retracted(self: OnDemandKv, instance: InstanceState, residents: Iterable[ResidentContext]) -> None:
        is_low(self, instance, residents)
        for resident in residents:
            state = self._mesh.find((resident.request_id, resident.epoch))
            if state is not None and state.request.epoch < 20:
                self._mesh.restart(state, "for the test", retracted=True)

    monkeypatch.setattr(OnDemandKv, "is_low", retracted)
    result = run(a_plan(roles=roles))
    assert result.broken is None
    assert result.num_tokens == NUM_ASKS * (MAX_MODEL_LEN - 6) + 4
    assert len(retractions) == NUM_ASKS
    assert min(retractions.values()) >= 20


@pytest.mark.parametrize("target", ["scheduler", "i0", "g0"])
def test_and_beside_faults(retractions: Counter[RequestId], target: str) -> None:
    fault = Fault(at_s=0.6, kind=FaultKind.CUT, target=target, duration_s=2.0)
    result = run(a_plan(fault, roles=(Role.MIXED,)))
    assert result.broken is None
    assert retractions


def test_the_oldest_is_never_retracted(retractions: Counter[RequestId], monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[RequestId] = []
    handle = SchedulerCore.handle

    def watched(self: SchedulerCore, event: Event, now_s: float) -> object:
        if isinstance(event, RequestArrived):
            arrived.append(event.request.request_id)
        return handle(self, event, now_s)

    monkeypatch.setattr(SchedulerCore, "handle", watched)
    run(a_plan(roles=(Role.MIXED,)))
    assert retractions.total() >= 5
    assert retractions[arrived[0]] == 0
