"""Probes near a tie: a wrong prediction is corrected, and noise alone changes next to nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from pdmesh.policy.batching import Load, Mode, SwitchingBatching
from pdmesh.policy.batching_theory import LengthMoments, StepCosts
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.probing import PROBE_CYCLES, PROBE_EVERY, CycleMeter, Probing, SimultaneousStarts, StepTotals
from pdmesh_testing.batching_chain import geometric_threshold

MODEL = LinearLatencyModel(a_s=0.006, b_s=0.00015, c_s=1e-8, d_s=5e-9, decode_a_s=0.004, decode_s=0.0002)
LENGTHS = LengthMoments(mean_prompt_tokens=128, mean_output_tokens=128)
COSTS = StepCosts(
    switch_s=0.006, decode_step_s=0.004, mixed_step_s=0.006, prompt_token_s=0.00015, decode_token_s=0.0002
)
FREE = SwitchingBatching(slo_ttft_s=100.0, max_stall_s=10.0)


def a_load(costs: StepCosts) -> Load:
    return Load(
        num_slots=64,
        max_num_seqs=64,
        num_kv_tokens=1 << 22,
        lengths=LENGTHS,
        threshold=geometric_threshold(costs, LENGTHS.mean_output_tokens),
        costs=costs,
        tpot_s=None,
    )


def load_of_gain(log_gain: float) -> Load:
    """Costs of mixed steps so dear that exclusive batching is predicted to be so much faster."""
    low_s, high_s = 0.004, 0.02
    load = a_load(COSTS)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        load = a_load(replace(COSTS, mixed_step_s=middle_s))
        gain = FREE.choose(load, Mode.MIXED).gain
        assert gain is not None
        low_s, high_s = (middle_s, high_s) if math.log1p(gain) < log_gain else (low_s, middle_s)
    return load


def homes(predicted: float, true: float, noise: float, num_cycles: int, seed: int) -> list[Mode]:
    """What is chosen, cycle by cycle, where exclusive over mixed is ``true`` and a cycle's time is off by ``noise``."""
    rng = random.Random(seed)
    load = load_of_gain(predicted)
    probing, home, dwelt, found = Probing(), Mode.MIXED, 0, []
    choice = FREE.choose(load, home)
    for _ in range(num_cycles):
        doing = home if not probing.is_on else Mode.MIXED if home is Mode.EXCLUSIVE else Mode.EXCLUSIVE
        cost_s = math.exp((-true if doing is Mode.EXCLUSIVE else 0.0) + rng.gauss(0.0, noise)) * 4e-4
        num_decodes = 1000
        tally = StepTotals(wall_s=cost_s * num_decodes, num_prompt_tokens=1000, num_decodes=num_decodes)
        assert choice.gain is not None
        probed = probing.passed(tally, math.log1p(choice.gain))
        if probed is not None:
            there_s = probed.decode_s(MODEL, load.costs, load.lengths)
            here_s = probing.at_home.decode_s(MODEL, load.costs, load.lengths)
            assert there_s is not None
            assert here_s is not None
            measured = math.log(here_s / there_s) * (-1 if home is Mode.EXCLUSIVE else 1)
            probing.learn(measured - predicted)
        choice = FREE.choose(load._replace(correction=probing.correction), home)
        dwelt += 1
        if choice.mode is not home and dwelt >= 3:
            home, dwelt = choice.mode, 0
            probing.restart()
        found.append(home)
    return found


def num_changes(found: list[Mode]) -> int:
    return sum(before is not after for before, after in pairwise(found))


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_between_equal_modes_noise_changes_next_to_nothing(noise: float) -> None:
    for seed in range(4):
        assert num_changes(homes(0.0, 0.0, noise, 4000, seed)) <= 4


@pytest.mark.parametrize(("predicted", "true"), [(0.01, -0.01), (-0.01, 0.01), (0.015, -0.005), (-0.019, 0.019)])
def test_where_the_model_is_wrong_by_two_percent_probes_find_it(predicted: float, true: float) -> None:
    for seed in range(4):
        found = homes(predicted, true, 0.005, 1000, seed)
        best = Mode.EXCLUSIVE if true > 0 else Mode.MIXED
        assert sum(home is best for home in found) > 550
        assert all(home is best for home in found[500:])


def test_far_from_a_tie_nothing_is_probed() -> None:
    probing = Probing()
    for _ in range(1000):
        assert probing.passed(StepTotals(1.0, 100, num_decodes=100), 0.05) is None
        assert not probing.is_on


def test_a_probe_is_a_few_cycles_in_forty_and_its_first_does_not_count() -> None:
    probing, done = Probing(), []
    for index in range(3 * (PROBE_EVERY + PROBE_CYCLES)):
        done.append(probing.is_on)
        probed = probing.passed(StepTotals(wall_s=float(index), num_decodes=1), 0.0)
        if probed is not None:
            assert probed.num_decodes == PROBE_CYCLES - 1
            probing.learn(0.0)
    assert sum(done) == 3 * PROBE_CYCLES
    assert not any(done[:PROBE_EVERY])


def test_a_home_that_changes_ends_its_probe() -> None:
    probing = Probing()
    for _ in range(PROBE_EVERY):
        probing.passed(StepTotals(1.0, num_decodes=1), 0.0)
    assert probing.is_on
    probing.restart()
    assert not probing.is_on
    assert probing.passed(StepTotals(1.0, num_decodes=1), 0.0) is None


def test_one_probe_is_not_believed_and_many_are() -> None:
    probing = Probing()
    probing.learn(-0.02)
    once = probing.correction
    for _ in range(15):
        probing.learn(-0.02)
    assert -0.01 < once.log_gain < 0 < once.deviation
    assert probing.correction.log_gain == pytest.approx(-0.02, abs=0.002)
    assert probing.correction.deviation < once.deviation / 2


def test_a_meter_tallies_whole_cycles_and_all_their_work() -> None:
    meter = CycleMeter()
    chunk, decodes = StepShape((ChunkShape(100, 20),), 0, 0), StepShape((), 4, 400)
    now_s = 5.0
    for _ in range(3):
        for shape, seconds, number in ((chunk, 0.5, 1), (chunk, 0.25, 1), (decodes, 2.0, 10)):
            meter.step(now_s, now_s + seconds, shape, number)
            now_s += seconds + 0.125
    assert meter.take() == StepTotals(2 * 3.125, 400, 8000, 40_000, 80, 8000, num_steps=20)
    meter.step(now_s, now_s + 0.5, chunk)
    assert meter.take() == StepTotals(3.125, 200, 4000, 20_000, 40, 4000, num_steps=10)


def test_what_ran_inside_another_step_opens_no_tally() -> None:
    meter = CycleMeter()
    both = StepShape((ChunkShape(10, 0),), 2, 20)
    meter.step(0.0, 1.0, both)
    meter.step(1.25, 1.5, StepShape((ChunkShape(7, 0),), 0, 0))  # urgent, inside the next
    meter.step(1.0, 2.5, both)
    meter.step(2.5, 3.0, both)
    tally = meter.take()
    assert tally.wall_s == 2.5
    assert tally.num_prompt_tokens == 27
    meter.forget()
    meter.step(100.0, 101.0, both)
    meter.step(101.0, 102.0, both)
    assert meter.take().wall_s == 1.0


def test_work_is_what_a_step_is_predicted_to_take_without_constants() -> None:
    shape = StepShape((ChunkShape(100, 20), ChunkShape(7, 0)), 4, 400)
    meter = CycleMeter()
    meter.step(0.0, 1.0, shape)
    meter.step(1.0, 2.0, shape)
    free = replace(MODEL, a_s=0.0, mixed_a_s=0.0, decode_a_s=0.0)
    assert meter.take().work_s(MODEL) == pytest.approx(free.step_s(shape))


@pytest.mark.parametrize("at_once", [1, 4])
def test_how_many_begin_together_is_read_from_the_steps(at_once: int) -> None:
    rng, meter, together = random.Random(1), CycleMeter(), SimultaneousStarts()
    assert together.number == 1.0  # nothing is known
    for step in range(4000):
        num_begun = at_once * sum(rng.random() < 0.02 for _ in range(10))
        chunks = tuple(ChunkShape(100, 0) for _ in range(num_begun)) + (ChunkShape(50, 100),) * (step % 2)
        meter.step(float(step), step + 1.0, StepShape(chunks, 32, 1000))
        if step % 100 == 0:
            together.note(meter.take())
    assert together.number == pytest.approx(at_once, rel=0.15)
