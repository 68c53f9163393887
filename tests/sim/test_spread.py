"""Contexts that are spread over several instances as they grow, in the time that copies and steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from pdmesh.core.config import KvReservation
from pdmesh.kv_layout import KvLayout
from pdmesh.model import InstanceId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_lab.sim.faults import Death
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival

LIMIT = 1024
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
#: A step takes a millisecond, and a microsecond for each token that is read.
MODEL = LinearLatencyModel(a_s=1e-3, b_s=1e-6, c_s=0, d_s=0, decode_a_s=1e-3, decode_context_s=1e-6)


def simulator(
    arrivals: list[Arrival],
    *,
    limit: int,
    reservation: KvReservation = KvReservation.ON_DEMAND,
    num_kv_tokens: int = 8 * LIMIT,
    num_prefill_tokens: int = 8 * LIMIT,
    deaths: tuple[Death, ...] = (),
    part_exchange_s: float = 0.0,
) -> Simulator:
    """Four instances that decode, with so much memory each, and one that computes prompts."""
    mesh = MeshShape(num_prefill=1, num_decode=4, num_mixed=0, kv_layout=LAYOUT, num_kv_tokens=8 * LIMIT)
    instances = [
        (
            replace(
                profile,
                max_kv_tokens=limit,
                num_blocks=(num_kv_tokens if profile.role is Role.DECODE else num_prefill_tokens) // LAYOUT.block_size,
            ),
            model,
        )
        for profile, model in mesh.instances(MODEL)
    ]
    core = study_core("pdmesh", PolicyConfig(latency=MODEL), 0, kv_reservation=reservation)
    config = SimConfig(events_between_checks=1, deaths=deaths, part_exchange_s=part_exchange_s)
    return Simulator(core, instances, arrivals, config)


def test_a_context_that_grows_is_read_by_ever_more_instances() -> None:
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=100, num_output_tokens=4 * LIMIT - 100)
    (alone,) = simulator([arrival], limit=0).run().requests
    (spread,) = simulator([arrival], limit=LIMIT).run().requests
    assert len(spread.token_times_s) == len(alone.token_times_s) == arrival.num_output_tokens

    def tpot_s(times_s: Sequence[float], at: int) -> float:
        return (times_s[at] - times_s[at - 100]) / 100

    # Within a range they are alike; at the end each of four reads a quarter.
    assert tpot_s(spread.token_times_s, 500) == pytest.approx(tpot_s(alone.token_times_s, 500), rel=1e-3)
    last = arrival.num_output_tokens - 1
    assert tpot_s(alone.token_times_s, last) == pytest.approx(5e-3, rel=0.05)
    assert tpot_s(spread.token_times_s, last) == pytest.approx(2e-3, rel=0.1)


@pytest.mark.parametrize(
    ("reservation", "num_kv_tokens"),
    [(KvReservation.FULL, 4 * LIMIT), (KvReservation.ON_DEMAND, 4 * LIMIT), (KvReservation.ON_DEMAND, 2 * LIMIT)],
)
def test_contexts_that_grow_beside_each_other_all_end(reservation: KvReservation, num_kv_tokens: int) -> None:
    """On demand they come to need more than there is, and those that wait for each other's room are retracted."""
    arrivals = [
        Arrival(arrival_s=0.01 * number, num_prompt_tokens=200 + 100 * number, num_output_tokens=2500)
        for number in range(12)
    ]
    found = simulator(arrivals, limit=LIMIT, reservation=reservation, num_kv_tokens=num_kv_tokens).run().requests
    assert [len(run.token_times_s) for run in found] == [2500] * 12
    assert any(run.num_restarts for run in found) == (reservation is KvReservation.ON_DEMAND)


def test_a_lost_member_costs_the_time_of_its_range() -> None:
    """A thousand tokens are computed again, where others decode meanwhile."""
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=2 * LIMIT + LIMIT // 2, num_output_tokens=400)
    other = Arrival(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=900)
    (undisturbed, _) = simulator([arrival, other], limit=LIMIT).run().requests
    middle_s = undisturbed.token_times_s[200]
    gaps_s: list[float] = []
    for name in [f"decode-{number:03}" for number in range(4)]:
        if name == undisturbed.decode_id:
            continue
        deaths = (Death(InstanceId(name), middle_s, 5.0),)
        run, beside = simulator([arrival, other], limit=LIMIT, deaths=deaths).run().requests
        assert len(run.token_times_s) == 400
        assert len(beside.token_times_s) == 900
        assert run.num_restarts == 0, f"it lost a range of it with {name}"
        gaps_s.append(max(after - before for before, after in pairwise(run.token_times_s)))
    # Eight steps of 128 tokens, of a millisecond and 128 microseconds each; to start again takes twenty and a half.
    unhurt, *hurt = sorted(gaps_s)
    assert unhurt < 4e-3
    for gap_s in hurt:
        assert 8 * 1.128e-3 < gap_s < 20e-3


def test_a_prompt_longer_than_the_room_takes_the_time_of_its_chunks_and_of_the_exchange() -> None:
    """The first range's chunks ask nobody. Beside it a short one is computed, which waits for a step and no more."""
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=3 * LIMIT + LIMIT // 2, num_output_tokens=5)
    short = Arrival(arrival_s=0.1, num_prompt_tokens=100, num_output_tokens=5)

    def first_token_s(num_prefill_tokens: int, part_exchange_s: float) -> tuple[float, float]:
        run, beside = (
            simulator(
                [arrival, short],
                limit=LIMIT,
                num_prefill_tokens=num_prefill_tokens,
                part_exchange_s=part_exchange_s,
            )
            .run()
            .requests
        )
        assert [len(each.token_times_s) for each in (run, beside)] == [5, 5]
        assert run.num_restarts == 0
        return run.token_times_s[0], beside.token_times_s[0] - short.arrival_s

    spread_s, short_s = first_token_s(3 * LIMIT, 0.0)
    slow_s, _ = first_token_s(3 * LIMIT, 1e-3)
    # Of 28 chunks of 128 tokens, those behind the room for 12 ask others, in four layers.
    assert 4e-3 * (28 - 12) <= slow_s - spread_s <= 4e-3 * 28
    assert spread_s >= 28 * 1.128e-3
    assert short_s < 5e-3


def test_prompts_longer_than_the_room_end_though_an_instance_dies() -> None:
    arrivals = [
        Arrival(arrival_s=0.01 * number, num_prompt_tokens=3 * LIMIT + 100 * number, num_output_tokens=50)
        for number in range(4)
    ]
    for name in ("decode-000", "decode-003", "prefill-000"):
        deaths = (Death(InstanceId(name), 0.02, 5.0),)
        runs = simulator(arrivals, limit=LIMIT, num_prefill_tokens=2 * LIMIT, deaths=deaths).run().requests
        assert [len(run.token_times_s) for run in runs] == [50] * 4
        assert sum(run.num_restarts for run in runs) > 0
