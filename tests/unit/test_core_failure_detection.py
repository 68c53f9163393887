"""Instances that have fallen silent: what is placed on them, and what leaves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import Command, ExpectCopy, Restart, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, InstanceLost, InstanceSuspected
from pdmesh.core.recovery.failure_detection import CHEAP_US, MAX_EPOCH
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.modelled import modelled_profile

P, D = InstanceId("p"), InstanceId("d")


def prefill(name: str = "p") -> InstanceProfile:
    return modelled_profile(name, Role.PREFILL)


def decode(name: str = "d") -> InstanceProfile:
    return modelled_profile(name, Role.DECODE)


def restarted(commands: list[Command]) -> list[str]:
    return [restart.request_id for restart in of(Restart, commands)]


def test_nothing_new_is_placed_on_a_silent_instance_until_it_speaks_again() -> None:
    bench = CoreBench(prefill(), decode())
    bench.feed(InstanceSuspected(P))
    assert bench.core.unready_reason is None, "requests may wait for one that is only silent"
    assert not of(RunStep, bench.arrive("a"))
    assert of(RunStep, bench.feed(InstanceSuspected(P, suspected=False)))


def test_one_that_joins_again_is_not_suspected() -> None:
    bench = CoreBench(prefill(), decode())
    bench.feed(InstanceSuspected(P))
    bench.arrive("a")
    assert of(RunStep, bench.feed(InstanceJoined(prefill(), ())))


def test_what_has_not_begun_starts_again_where_somebody_can_take_it() -> None:
    bench = CoreBench(prefill("p0"), prefill("p1"), decode())
    (step,) = of(RunStep, bench.arrive("a"))
    silent = step.instance_id
    assert restarted(bench.feed(InstanceSuspected(silent))) == ["a"]
    (again,) = of(RunStep, bench.arrive("a", epoch=1))
    assert again.instance_id != silent
    assert not bench.done(silent, step.plan), "what it says of the epoch before is late"
    assert not restarted(bench.feed(InstanceSuspected(silent, suspected=False)))


def test_kv_under_way_to_a_silent_instance_from_one_that_has_gone() -> None:
    """Found by simulation: the scheduler ended with a KeyError."""
    bench = CoreBench(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))
    commands = bench.arrive("a")
    (step,), (place,) = of(RunStep, commands), of(ExpectCopy, commands)
    bench.offered(step.instance_id, "a")
    bench.done(step.instance_id, step.plan)
    bench.sent(step.instance_id, "a")
    bench.released(step.instance_id, "a")
    assert not restarted(bench.feed(InstanceLost(step.instance_id)))
    assert restarted(bench.feed(InstanceSuspected(place.instance_id))) == ["a"]


def test_what_nobody_else_can_take_waits_until_somebody_joins() -> None:
    bench = CoreBench(prefill("p0"), decode())
    bench.arrive("a")
    assert not restarted(bench.feed(InstanceSuspected(InstanceId("p0"))))
    assert restarted(bench.feed(InstanceJoined(prefill("p1"), ()))) == ["a"]


def test_a_silent_decode_instance_keeps_its_streams_and_gives_up_what_is_on_its_way() -> None:
    bench = CoreBench(prefill(), decode("d0"), decode("d1"))
    place, step = _placed(bench, "a")
    bench.done("p", step.plan)
    bench.landed(place.instance_id, "a")
    assert not restarted(bench.feed(InstanceSuspected(place.instance_id)))
    bench.feed(InstanceSuspected(place.instance_id, suspected=False))
    place, step = _placed(bench, "b")
    bench.done("p", step.plan)
    commands = bench.feed(InstanceSuspected(place.instance_id))
    assert not restarted(commands), "its KV is kept"
    (other,) = of(ExpectCopy, commands)
    assert {place.instance_id, other.instance_id} == {"d0", "d1"}


def test_a_prefill_instance_that_left_after_it_sent_everything_is_not_looked_for() -> None:
    """Found by the simulation with faults, seed 1000913: the scheduler ended with a KeyError."""
    bench = CoreBench(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))
    place, step = _placed(bench, "a")
    bench.done(step.instance_id, step.plan)
    bench.sent(step.instance_id, "a")
    bench.released(step.instance_id, "a")
    bench.feed(InstanceLost(step.instance_id))
    assert restarted(bench.feed(InstanceSuspected(place.instance_id))) == ["a"], "computed again in no time"


@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_that_costs_much_stays_once_it_has_begun(begun: bool) -> None:
    slow = replace(PolicyConfig().latency, b_s=1.0)
    config = CoreConfig(policy=PolicyConfig(chunk_tokens=4, latency=slow))
    assert CHEAP_US < 4e6
    bench = CoreBench(prefill("p0"), prefill("p1"), decode(), config=config)
    step = of(RunStep, bench.arrive("a", prompt=12))[0]
    if begun:
        bench.done(step.instance_id, step.plan)
    assert restarted(bench.feed(InstanceSuspected(step.instance_id))) == ([] if begun else ["a"])


def test_a_request_that_silences_all_it_comes_to_is_left_in_peace_at_last() -> None:
    bench = CoreBench(prefill("p0"), prefill("p1"), decode())
    for epoch in range(MAX_EPOCH + 2):
        (step,) = of(RunStep, bench.arrive("a", epoch=epoch))
        moved = restarted(bench.feed(InstanceSuspected(step.instance_id)))
        assert moved == (["a"] if epoch <= MAX_EPOCH else [])
        bench.feed(InstanceSuspected(step.instance_id, suspected=False))


def _placed(bench: CoreBench, request_id: str) -> tuple[ExpectCopy, RunStep]:
    commands = bench.arrive(request_id)
    return of(ExpectCopy, commands)[0], of(RunStep, commands)[0]
