"""Simulated instances that die, come back, and take a little more or less than their model says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from pdmesh.core.commands import Outcome
from pdmesh.core.config import KvReservation
from pdmesh.core.events import Event, GroupPrefix
from pdmesh.model import InstanceId
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh_lab.sim.faults import Death, NoisyModel, random_deaths
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import Core, SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.sim import TINY_LAYOUT, UNEVEN_MODEL, InstanceCounts, a_workload, tiny_mesh

POLICY = PolicyConfig(latency=UNEVEN_MODEL, long_prompt_tokens=200, prefill_step_s=0.3, slo_tpot_s=1.0)
PREFILL = [InstanceId(f"prefill-{index:03d}") for index in range(3)]
LEADER, HELPER, OTHER = PREFILL
LONG = Arrival(arrival_s=0.0, num_prompt_tokens=4096, num_output_tokens=4)


class Listening:
    """A core, and what it was told."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.handle_all = core.handle
        self.check_integrity = core.check_integrity
        self.heard: list[Event] = []

    def handle(self, event: Event, now_s: float) -> list:  # type: ignore[type-arg]
        self.heard.append(event)
        return self.handle_all(event, now_s)


def run(
    arrivals: Sequence[Arrival],
    deaths: Sequence[Death] = (),
    *,
    noise: float = 0.0,
    control_delay_s: float = 0.0,
    bytes_per_s: float = 1e12,
    members: int = 4,
    seed: int = 0,
    pools: InstanceCounts | None = None,
    bundle: str = "pdmesh",
    num_kv_tokens: int = 16_384,
    kv_reservation: KvReservation = KvReservation.FULL,
) -> tuple[SimResult, list[Event]]:
    shape = tiny_mesh(pools or {"prefill": 3, "decode": 1}, num_kv_tokens=num_kv_tokens)
    shape = replace(shape, kv_layout=replace(TINY_LAYOUT, num_layers=8), joins_groups=True)
    policy = replace(POLICY, max_group_members=members, link_bytes_per_s=bytes_per_s)
    core = Listening(study_core(bundle, policy, seed, kv_reservation=kv_reservation))
    config = SimConfig(
        port_bytes_per_s=bytes_per_s, control_delay_s=control_delay_s, deaths=deaths, events_between_checks=50
    )
    instances = [
        (profile, NoisyModel(model, noise, random.Random(f"{seed} {profile.instance_id}")) if noise else model)
        for profile, model in shape.instances(UNEVEN_MODEL)
    ]
    return Simulator(core, instances, arrivals, config).run(), core.heard


def check_whole(result: SimResult) -> None:
    """Every request has all of its tokens, one after the other, and nothing is under way."""
    for request in result.requests:
        assert request.outcome is Outcome.FINISHED
        assert len(request.token_times_s) == request.num_output_tokens
        assert list(request.token_times_s) == sorted(request.token_times_s)


def num_tokens_planned(result: SimResult, epoch: int = 0) -> int:
    steps = [step for instance in result.instances for step in instance.steps]
    return sum(chunk.num_tokens for step in steps for chunk in step.chunks if chunk.epoch == epoch)


def test_a_helper_that_dies_costs_its_chunks_and_not_the_epoch() -> None:
    undisturbed, _ = run([LONG])
    alone, _ = run([LONG], members=1)
    ttft_s = undisturbed.requests[0].ttft_s
    assert ttft_s is not None
    leader_id = undisturbed.requests[0].prefill_id
    helper_id = next(name for name in PREFILL if name != leader_id)
    result, heard = run([LONG], [Death(helper_id, ttft_s / 2, 1000.0)])
    (request,) = result.requests
    check_whole(result)
    assert request.num_restarts == 0
    assert [event.num_lost for event in heard if isinstance(event, GroupPrefix)] == [1]
    assert request.ttft_s is not None
    assert alone.requests[0].ttft_s is not None
    assert ttft_s < request.ttft_s < alone.requests[0].ttft_s
    chunk_tokens = max(chunk.num_tokens for run in result.instances for step in run.steps for chunk in step.chunks)
    assert 4096 <= num_tokens_planned(result) <= 4096 + 4 * chunk_tokens, "of two others, two in flight each"


def test_without_its_leader_a_prompt_begins_again() -> None:
    undisturbed, _ = run([LONG])
    leader_id, ttft_s = undisturbed.requests[0].prefill_id, undisturbed.requests[0].ttft_s
    assert leader_id is not None
    assert ttft_s is not None
    result, _ = run([LONG], [Death(leader_id, ttft_s / 2, 1000.0)])
    check_whole(result)
    assert result.requests[0].num_restarts == 1
    assert num_tokens_planned(result, 1) == 4096


def test_who_dies_with_kv_that_has_not_left_loses_it_and_no_token_comes_twice() -> None:
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=100, num_output_tokens=5)
    undisturbed, _ = run([arrival], bytes_per_s=1e4)
    (request,) = undisturbed.requests
    assert request.landed_s is not None
    assert request.prefill_id is not None
    died_s = request.landed_s - 0.5
    result, _ = run([arrival], [Death(request.prefill_id, died_s, 100.0)], bytes_per_s=1e4)
    check_whole(result)
    (request,) = result.requests
    assert request.num_restarts == 1
    assert request.token_times_s[0] < died_s < request.token_times_s[1], "its gateway had the first one"


def faulty(seed: int) -> tuple[SimResult, list[Event]]:
    """Eight deaths among 80 requests; every second time with delays, and two of four times with slow links."""
    arrivals = a_workload(seed, num_requests=80, requests_per_s=3.0)
    deaths = random_deaths(PREFILL, 8, arrivals[-1].arrival_s, 1.0, seed)
    delay_s, bytes_per_s = (0.0, 0.003)[seed % 2], (1e12, 2e5)[seed // 2 % 2]
    return run(arrivals, deaths, noise=0.2, control_delay_s=delay_s, bytes_per_s=bytes_per_s, seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_groups_with_deaths_loses_nothing(seed: int) -> None:
    """And the core's state agrees on the way."""
    result, _ = faulty(seed)
    check_whole(result)
    request_ids = {request.request.request_id for request in result.requests}
    for instance in result.instances:
        for step in instance.steps:
            assert step.waited_s >= 0.0
            assert {chunk.request_id for chunk in step.chunks} <= request_ids


def test_leaders_and_helpers_die_in_the_cases_above() -> None:
    results = [faulty(seed) for seed in range(4)]
    assert sum(isinstance(event, GroupPrefix) for _, heard in results for event in heard) > 4
    assert sum(request.num_restarts for result, _ in results for request in result.requests) > 4


def test_the_same_seed_gives_the_same_run() -> None:
    arrivals = a_workload(1, num_requests=40, requests_per_s=3.0)
    deaths = random_deaths(PREFILL, 4, arrivals[-1].arrival_s, 1.0, 1)
    (first, _), (second, _) = (run(arrivals, deaths, noise=0.2) for _ in range(2))
    assert [list(request.token_times_s) for request in first.requests] == [
        list(request.token_times_s) for request in second.requests
    ]
    assert first.num_events == second.num_events


def test_noise_has_the_models_mean_and_the_deviation_asked_for() -> None:
    shape = StepShape((ChunkShape(100, 0),), 0, 0)
    model = NoisyModel(UNEVEN_MODEL, 0.2, random.Random(0))
    factors = [model.step_s(shape) / UNEVEN_MODEL.step_s(shape) for _ in range(5000)]
    assert fmean(factors) == pytest.approx(1.0, abs=0.01)
    assert pstdev(factors) == pytest.approx(0.2, abs=0.01)


def test_deaths_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="decode-009 cannot be lost: it is not running"):
        run([LONG], [Death(InstanceId("decode-009"), 1.0, 1.0)])
    with pytest.raises(ValueError, match="before its loss is noticed"):
        run([LONG], [Death(HELPER, 1.0, 0.01)], control_delay_s=0.01)
    with pytest.raises(ValueError, match="no instance to lose"):
        random_deaths([], 1, 10.0, 1.0, 0)
    with pytest.raises(ValueError, match="cannot be lost 100 times"):
        random_deaths(PREFILL, 100, 10.0, 1.0, 0)
    deaths = random_deaths(PREFILL, 10, 100.0, 3.0, 7)
    assert deaths == random_deaths(PREFILL, 10, 100.0, 3.0, 7)
    assert all(0.0 <= death.at_s <= 100.0 for death in deaths)


# --- of instances that decode ---

SHORT = Arrival(arrival_s=0.0, num_prompt_tokens=100, num_output_tokens=40)


def test_what_decodes_on_an_instance_that_dies_goes_on_elsewhere_from_what_its_client_has() -> None:
    """Its prompt and its tokens are computed again, and none of these comes twice."""
    pools: InstanceCounts = {"prefill": 1, "decode": 2}
    undisturbed, _ = run([SHORT], pools=pools)
    before_s = list(undisturbed.requests[0].token_times_s)
    died_s = (before_s[14] + before_s[15]) / 2
    decode_id = undisturbed.requests[0].decode_id
    assert decode_id is not None
    result, _ = run([SHORT], [Death(decode_id, died_s, 1000.0)], pools=pools)
    check_whole(result)
    (request,) = result.requests
    assert request.num_restarts == 1
    assert request.decode_id != decode_id
    assert list(request.token_times_s[:15]) == before_s[:15], "what it drew in time is kept"
    assert request.token_times_s[15] > died_s
    assert num_tokens_planned(result, 1) == 100 + 15


def test_a_token_that_is_not_drawn_at_the_very_instant_is_drawn_again() -> None:
    pools: InstanceCounts = {"prefill": 1, "decode": 2}
    undisturbed, _ = run([SHORT], pools=pools)
    (before,) = undisturbed.requests
    assert before.decode_id is not None
    for index in (1, 20, 39):  # the first of its own, one between, the last of all
        result, _ = run([SHORT], [Death(before.decode_id, before.token_times_s[index], 1000.0)], pools=pools)
        check_whole(result)


def test_kv_on_its_way_to_an_instance_that_dies_goes_to_another_receiver_whole() -> None:
    """It is not computed again: its source has it."""
    arrival = replace(SHORT, num_output_tokens=5)
    pools: InstanceCounts = {"prefill": 1, "decode": 2}
    undisturbed, _ = run([arrival], bytes_per_s=1e5, pools=pools)
    (before,) = undisturbed.requests
    assert before.landed_s is not None
    assert before.decode_id is not None
    result, _ = run([arrival], [Death(before.decode_id, before.landed_s - 0.01, 1000.0)], bytes_per_s=1e5, pools=pools)
    check_whole(result)
    (request,) = result.requests
    assert request.num_restarts == 0
    assert request.decode_id != before.decode_id
    assert request.landed_s is not None
    assert request.landed_s - before.landed_s > 0.3, "all of it goes again"


def test_a_mixed_instance_loses_what_it_computes_and_what_decodes_there() -> None:
    arrivals = [replace(SHORT, arrival_s=0.1 * n) for n in range(6)]
    for at_s in (0.3, 0.6, 0.9):
        result, _ = run(arrivals, [Death(InstanceId("mixed-000"), at_s, 0.5)], pools={"mixed": 2})
        check_whole(result)
        assert sum(request.num_restarts for request in result.requests) > 0


@pytest.mark.parametrize("kv_reservation", list(KvReservation))
@pytest.mark.parametrize("seed", range(12))
def test_with_deaths_of_any_instance_nothing_is_lost(seed: int, kv_reservation: KvReservation) -> None:
    """With running decodes that move, memory that is scarce under credit, delays, noise and slow links in turns."""
    arrivals = a_workload(seed, num_requests=80, requests_per_s=4.0)
    pools: InstanceCounts = [{"prefill": 2, "decode": 3}, {"mixed": 3}, {"prefill": 1, "mixed": 2, "decode": 2}][
        seed % 3
    ]  # type: ignore[assignment]
    names = [InstanceId(f"{role}-{index:03d}") for role, number in pools.items() for index in range(number)]  # type: ignore[call-overload]
    deaths = random_deaths(names, 10, arrivals[-1].arrival_s, 0.7, seed)
    for bundle, bytes_per_s in (("pdmesh", 1e12), ("pdmesh", 2e5), ("pecsched", 1e6)):
        result, _ = run(
            arrivals,
            deaths,
            noise=0.2,
            control_delay_s=(0.0, 0.003)[seed % 2],
            bytes_per_s=bytes_per_s,
            seed=seed,
            pools=pools,
            bundle=bundle,
            num_kv_tokens=2_400,
            kv_reservation=kv_reservation,
        )
        check_whole(result)
