"""Admission: a request that would not keep its own target is refused as it comes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.admission.admission import (
    HORIZON_S,
    MAX_REJECT_TTL_S,
    MAX_RETRY_AFTER_S,
    ONE_LATE_IN,
    Admission,
    Forecast,
    Margin,
    Pace,
    Refusal,
)
from pdmesh.core.commands import Reject
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestArrived
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.queue import WaitingQueue
from pdmesh.model import InstanceId, RejectReason, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.order import Fcfs
from pdmesh.policy.views import Rank
from pdmesh_testing.core import CoreBench, a_request, of
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.sim import UNEVEN_MODEL


def refusal(
    ttft_s: float | None,
    *,
    work_s: float = 0.0,
    work_before_s: float = 0.0,
    num_instances: int = 1,
    admission_ttft_s: float | None = None,
) -> Refusal | None:
    """Of a request that asks for ``ttft_s`` and comes to a line with so much work in it."""
    mesh = MeshState(random.Random(0), Growth())
    changed: dict[InstanceId, None] = {}
    for number in range(num_instances):
        profile = modelled_profile(f"p{number}", Role.PREFILL)
        mesh.instances[profile.instance_id] = InstanceState(profile, changed=changed, growth=mesh.growth)
    for name, waiting_s in (("waits", work_before_s), ("comes", work_s)):
        state = mesh.open(replace(a_request(name), slo_ttft_s=ttft_s), Rank())
        state.work_us = round(1e6 * waiting_s)
        if name == "waits" and waiting_s:
            mesh.queue.add(state, 100.0)
    config = CoreConfig(refuses_early=True, admission_ttft_s=admission_ttft_s)
    return Admission(mesh, config).refusal(state, Fcfs(), 0.0)


@given(per_s=st.floats(0.05, 50.0), num_instances=st.integers(1, 64), step_s=st.floats(0.01, 1.0))
def test_the_pace_becomes_what_is_placed_while_anybody_waits(per_s: float, num_instances: int, step_s: float) -> None:
    pace = Pace()
    now_s = 0.0
    pace.passed(now_s, waited=False)
    while now_s < 12 * HORIZON_S:
        now_s += step_s
        pace.passed(now_s, waited=True)
        pace.placed(per_s * step_s)
        pace.passed(now_s + 100.0, waited=False)  # nobody waits: it says nothing
        pace.passed(now_s, waited=False)
    assert pace.per_s(num_instances) == pytest.approx(per_s, rel=0.3, abs=0.1 * num_instances)


@given(factor=st.floats(0.2, 5.0), placed=st.lists(st.floats(0.5, 2.0), min_size=60, max_size=80))
def test_a_model_that_is_wrong_by_a_factor_hardly_matters(factor: float, placed: list[float]) -> None:
    """It is wrong in what was placed and in what waits. Only the prior knows no better."""

    def wait_s(factor: float) -> float:
        forecast = Forecast()
        for second, work_s in enumerate(placed):
            forecast.pace.passed(float(second), waited=True)
            forecast.pace.placed(factor * work_s)
        return forecast.wait_s(factor * 10.0, 1)

    assert wait_s(factor) == pytest.approx(wait_s(1.0), rel=0.3)


def test_who_has_nobody_before_it_is_taken_whatever_it_asks() -> None:
    assert refusal(1e-6, work_s=3.0) is None


def test_what_would_miss_its_target_is_refused_and_told_when_it_would_not() -> None:
    late = refusal(2.0, work_s=0.5, work_before_s=9.5)
    assert late is not None
    assert (late.predicted_s, late.limit_s, late.retry_after_s) == (10.0, 2.0, 8.0)
    assert late.reject_ttl_s == MAX_REJECT_TTL_S
    assert refusal(2.0, work_s=0.5, work_before_s=9.5, num_instances=8) is None


def test_without_a_target_a_request_may_wait_as_long_as_the_queue_lets_it() -> None:
    assert refusal(None, work_before_s=100.0) is None
    refused = refusal(None, work_before_s=600.0)
    assert refused is not None
    assert refused.retry_after_s == MAX_RETRY_AFTER_S
    assert refusal(None, work_before_s=100.0, admission_ttft_s=5.0) is not None


@given(work_before_s=st.floats(0.001, 1e4), ttft_s=st.floats(0.001, 1e3), more_s=st.floats(0.0, 1e3))
def test_more_before_it_or_less_time_never_lets_a_request_in(
    work_before_s: float, ttft_s: float, more_s: float
) -> None:
    late = refusal(ttft_s, work_before_s=work_before_s)
    if late is not None:
        assert 1.0 <= late.retry_after_s <= MAX_RETRY_AFTER_S
        assert refusal(ttft_s, work_before_s=work_before_s + more_s) is not None
        assert refusal(max(1e-3, ttft_s - more_s), work_before_s=work_before_s) is not None
        # Others like it are let in before the line could be empty.
        assert 0.0 < late.reject_ttl_s <= min(0.5 * work_before_s, MAX_REJECT_TTL_S)


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_margin_learns_what_predictions_are_exceeded_by(spread: float) -> None:
    rng, margin, late = random.Random(1), Margin(), 0
    for seen in range(6000):
        took_s = 1.0 + rng.expovariate(1 / spread)
        late += seen >= 3000 and took_s > 1.0 + margin.margin_s
        margin.seen(1.0, took_s)
    assert late / 3000 == pytest.approx(1 / ONE_LATE_IN, rel=0.5)


# --- fair shares ---


def work_before_s(waiting: dict[str, int], tenant: str, shares: dict[str, int] | None = None) -> float:
    """Of a request of ``tenant`` that comes last to a line with so many requests of each, of a second's work each."""
    order, queue, shares = Fcfs(), WaitingQueue(), shares or {}

    def state_of(name: str, number: int) -> RequestState:
        request = replace(a_request(f"{name}{number}", prompt=100), tenant=name, share=shares.get(name, 1))
        return RequestState(request, order.rank(request, 0, None), work_us=1_000_000)

    for name, number in waiting.items():
        for each in range(number):
            queue.add(state_of(name, each), 100.0)
    return queue.work_before_s(state_of(tenant, 9999), order, 0.0)


def test_the_work_before_a_request_is_its_tenants_and_of_the_others_as_much_as_their_turns() -> None:
    assert work_before_s({"a": 50}, "a") == 50.0
    assert work_before_s({"a": 50}, "b") == 0.0
    assert work_before_s({"a": 50, "b": 3}, "b") == 6.0
    assert work_before_s({"a": 50, "b": 3, "c": 1}, "b") == 7.0, "no more than there is of another's"
    assert work_before_s({"a": 50, "b": 4}, "b", shares={"b": 2}) == 6.0
    assert work_before_s({"a": 50, "b": 4}, "b", shares={"a": 2}) == 12.0


def test_another_that_is_behind_goes_first() -> None:
    order, queue = Fcfs(), WaitingQueue()
    requests = [replace(a_request(str(number), prompt=100), tenant="b") for number in range(4)]
    states = [RequestState(request, Rank(), work_us=1_000_000) for request in requests]
    other = RequestState(replace(a_request("a", prompt=300), tenant="a"), Rank(), work_us=3_000_000)
    queue.add(other, 100.0)
    for state in states[:3]:
        queue.add(state, 100.0)
    for state in states[:2]:
        queue.remove(state)
        queue.counters.placed(state.request)
    assert queue.work_before_s(states[3], order, 0.0) == 1.0 + 3.0, "200 tokens behind, and 100 more until its turn"


# --- in the core ---

CONFIG = CoreConfig(
    refuses_early=True,
    policy=PolicyConfig(chunk_tokens=16, latency=UNEVEN_MODEL, slo_ttft_s=1.0, long_prompt_tokens=200),
)


def bench(bundle: str) -> CoreBench:
    """One request decodes and takes the only seat; a prompt of 150 tokens waits."""
    full = CoreBench(
        modelled_profile("p", Role.PREFILL, num_blocks=512, max_model_len=1024),
        modelled_profile("d", Role.DECODE, num_blocks=512, max_model_len=1024, max_num_seqs=1),
        config=CONFIG,
    )
    full.feed(BundleChangeRequested(bundle))
    full.arrive("first")
    full.arrive("waits", prompt=150)
    return full


def rejected(full: CoreBench, name: str, *, ttft_s: float, prompt: int = 8, epoch: int = 0) -> list[Reject]:
    request = replace(a_request(name, prompt=prompt, epoch=epoch), slo_ttft_s=ttft_s)
    return of(Reject, full.feed(RequestArrived(request)))


def test_the_core_refuses_what_would_come_too_late_and_nothing_else() -> None:
    full = bench("fcfs")
    (reject,) = rejected(full, "late", ttft_s=0.2)
    assert reject.reason is RejectReason.OVERLOADED
    assert "above the limit of 0.2 s" in reject.message
    assert not rejected(full, "in time", ttft_s=60.0)
    assert full.core.num_waiting == 2


def test_a_resumed_request_is_never_refused() -> None:
    assert not rejected(bench("fcfs"), "late", ttft_s=0.2, epoch=1)


def test_short_requests_do_not_count_long_ones_that_wait_behind_them() -> None:
    assert rejected(bench("fcfs"), "short", ttft_s=0.2)
    assert not rejected(bench("sjf"), "short", ttft_s=0.2)
    assert rejected(bench("sjf"), "longer", prompt=160, ttft_s=0.5)
