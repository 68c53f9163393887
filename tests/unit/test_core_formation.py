"""Groups of a fixed size: who may be in one, and until when a prompt waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, InstanceLost, KvExpected, KvReleased, RequestDropped
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Epoch, InstanceId, InstanceProfile, RequestId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.modelled import modelled_profile

POLICY = PolicyConfig(
    chunk_tokens=64,
    latency=LinearLatencyModel(a_s=0.5, b_s=1.0, c_s=0.0, d_s=0.0),
    long_prompt_tokens=256,
    group_size=2,
)
KEY = RequestId("long"), Epoch(0)


def profile(name: str) -> InstanceProfile:
    return modelled_profile(name, Role.MIXED, num_blocks=1024, max_model_len=4096, num_layers=8, joins_groups=True)


def bench_of(*names: str, bundle: str = "fcfs", policy: PolicyConfig = POLICY) -> CoreBench:
    bench = CoreBench(*(profile(name) for name in names), config=CoreConfig(policy=policy))
    bench.feed(BundleChangeRequested(bundle))
    return bench


def admitted(commands: list[Command]) -> list[str]:
    """The leader, and those that were asked."""
    return [admit.instance_id for admit in of(AdmitPrefill, commands)]


def reservation(*names: str, group_size: int = 2) -> CoreBench:
    return bench_of(*names, bundle="reservation", policy=replace(POLICY, reserved_instances=2, group_size=group_size))


def test_a_group_is_as_large_as_what_is_left_of_a_reserved_pool() -> None:
    bench = reservation("a", "b", "c", "d")
    bench.feed(InstanceLost(InstanceId("a")))
    assert admitted(bench.arrive("long", 1024)) == ["b"], "nobody else may ever be in it"


@pytest.mark.parametrize("group_size", [1, 2])
def test_who_connects_again_is_reserved_as_before(group_size: int) -> None:
    bench = reservation("a", "b", "c", "d", group_size=group_size)
    for name in ("a", "b", "c"):
        bench.feed(InstanceJoined(profile(name), ()))
    assert admitted(bench.arrive("long", 1024)) == ["a", "b"][:group_size]
    assert admitted(bench.arrive("short", 8)) == ["c"]


@pytest.mark.parametrize("group_size", [1, 2])
def test_who_joins_takes_the_place_of_one_that_was_lost(group_size: int) -> None:
    bench = reservation("a", "b", "c", "d", group_size=group_size)
    for name in ("a", "b"):
        bench.feed(InstanceLost(InstanceId(name)))
    assert not admitted(bench.arrive("long", 1024))
    assert admitted(bench.feed(InstanceJoined(profile("e"), ()))) == ["e"]


def test_one_that_refuses_is_replaced_and_not_asked_again() -> None:
    bench = bench_of("a", "b", "c")
    assert admitted(bench.arrive("long", 1024)) == ["a", "b"]
    b = InstanceId("b")
    bench.feed(RequestDropped(b, *KEY, "no room"))
    assert admitted(bench.feed(KvReleased(b, *KEY))) == ["c"]
    bench.feed(KvExpected(InstanceId("c"), *KEY))
    (helped,) = bench.core.helped
    assert helped.helper_ids == ("c",)


def test_one_that_is_lost_before_it_joins_is_replaced() -> None:
    bench = bench_of("a", "b", "c")
    assert admitted(bench.arrive("long", 1024)) == ["a", "b"]
    assert admitted(bench.feed(InstanceLost(InstanceId("b")))) == ["c"]
