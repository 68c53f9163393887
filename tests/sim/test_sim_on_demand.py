"""Memory on demand on simulated instances: grants, residents that stand still, preemptions, and modes beside them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.commands import Outcome
from pdmesh.core.config import KvReservation
from pdmesh_lab.sim.mesh import study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop
from pdmesh_testing.examples import examples
from pdmesh_testing.sim import PHASES_PAY_MODEL, InstanceCounts, tiny_mesh, without_targets


def run(
    reservation: KvReservation,
    *,
    batching: str = "mb",
    mesh: InstanceCounts | None = None,
    num_kv_tokens: int = 4096,
    number: int = 120,
    clients: int = 32,
    mean_output: int = 60,
    mean_then: int | None = None,
    control_delay_s: float = 0.0,
    seed: int = 0,
) -> SimResult:
    """Requests that may draw 1,000 tokens; state is checked after every event. ``mean_then`` is of the second half."""
    rng = random.Random(seed)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=rng.randint(1, 128),
            num_output_tokens=min(1000, 1 + int(rng.expovariate(1 / mean))),
            max_tokens=1000,
        )
        for mean in [mean_output] * (number // 2) + [mean_then or mean_output] * (number - number // 2)
    ]
    policy = without_targets(batching)
    shape = tiny_mesh(mesh or {"mixed": 1}, num_kv_tokens=num_kv_tokens, max_num_seqs=64)
    core = study_core("pdmesh", policy, 0, kv_reservation=reservation)
    config = SimConfig(control_delay_s=control_delay_s, events_between_checks=1)
    loop = ClosedLoop(num_clients=((0, clients),))
    return Simulator(core, shape.instances(PHASES_PAY_MODEL), arrivals, config, closed_loop=loop).run()


def served(result: SimResult) -> bool:
    """Whether every request has all its tokens, one after the other."""
    return all(
        run.outcome is Outcome.FINISHED
        and len(run.token_times_s) == run.num_output_tokens
        and all(before < after for before, after in pairwise(run.token_times_s))
        for run in result.requests
    )


def end_s(result: SimResult) -> float:
    return max(run.token_times_s[-1] for run in result.requests)


def num_restarts(result: SimResult) -> int:
    return sum(run.num_restarts for run in result.requests)


def test_by_credit_far_more_run_at_once_than_with_full_reservation() -> None:
    full, credit = (run(reservation) for reservation in (KvReservation.FULL, KvReservation.ON_DEMAND))
    assert served(full)
    assert served(credit)
    assert num_restarts(full) == 0
    assert end_s(credit) < 0.5 * end_s(full)


def test_outputs_far_above_what_was_expected_preempt_and_are_all_served() -> None:
    result = run(KvReservation.ON_DEMAND, mean_output=20, mean_then=400, number=200)
    assert served(result)
    assert num_restarts(result) >= 5


@pytest.mark.parametrize("mesh", [{"prefill": 1, "decode": 1}, {"mixed": 2}], ids=str)
@pytest.mark.parametrize("control_delay_s", [0.0, 0.002])
def test_grants_and_preemptions_come_late_too(mesh: InstanceCounts, control_delay_s: float) -> None:
    result = run(
        KvReservation.ON_DEMAND,
        mesh=mesh,
        mean_output=20,
        mean_then=400,
        number=160,
        control_delay_s=control_delay_s,
    )
    assert served(result)
    assert num_restarts(result) > 0


@settings(max_examples=examples(12), deadline=None)
@given(
    batching=st.sampled_from(("mb", "eb", "ebplus")),
    num_kv_tokens=st.sampled_from((1280, 2048, 8192)),
    mean_output=st.sampled_from((20, 200, 800)),
    clients=st.integers(1, 48),
    seed=st.integers(0, 1000),
)
def test_whatever_the_mode_and_the_memory_all_are_served_and_phases_stay_apart(
    batching: str, num_kv_tokens: int, mean_output: int, clients: int, seed: int
) -> None:
    result = run(
        KvReservation.ON_DEMAND,
        batching=batching,
        num_kv_tokens=num_kv_tokens,
        mean_output=20,
        mean_then=mean_output,
        clients=clients,
        seed=seed,
        number=80,
    )
    assert served(result)
    if batching == "eb":
        assert not any(step.chunks and step.num_decodes for step in result.instances[0].steps)
