"""Learning a latency model from steps, and from what an instance measured of itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from statistics import fmean

import pytest

from pdmesh.kv_layout import KvLayout
from pdmesh.model import MeasuredStep, Role
from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.latency_profile import self_measured
from pdmesh.policy.packing import NOTHING, ChunkSizer
from pdmesh.policy.refine import Refinement, _solve_above
from pdmesh_testing.modelled import modelled_profile

#: The 82M-parameter Llama in bf16 on one core with AMX, from `pdmesh profile`.
CPU = LinearLatencyModel(
    a_s=1.9e-2, b_s=9.0e-5, c_s=6.9e-8, d_s=1.1e-7, decode_a_s=1.9e-2, decode_s=2.5e-4, decode_context_s=1.7e-6
)
SHAPES = [
    *(StepShape((ChunkShape(size, history),), 0, 0) for size in (32, 256, 512) for history in (0, 2000, 12_000)),
    StepShape((), 8, 4096),
    StepShape((ChunkShape(128, 500),), 8, 4096),
]


def scaled(model: LinearLatencyModel, factor: float) -> LinearLatencyModel:
    return LinearLatencyModel.of(factor * value for value in model.coefficients)


def worst_error(model: LinearLatencyModel, true: LinearLatencyModel, shapes: Sequence[StepShape] = SHAPES) -> float:
    return max(abs(model.step_s(shape) / true.step_s(shape) - 1) for shape in shapes)


@pytest.mark.parametrize("factor", [0.1, 0.5, 3.0, 10.0])
def test_a_model_wrong_by_a_factor_is_set_right_by_a_few_steps(factor: float) -> None:
    learnt = Refinement(scaled(CPU, factor))
    for shape in SHAPES[:9] * 3:
        learnt.observe(shape, CPU.step_s(shape))
    learnt.look()
    assert worst_error(learnt.model, CPU, SHAPES[:9]) < 0.2
    assert worst_error(learnt.model, CPU) < 0.6  # decodes, which were not seen, come along


def test_a_right_model_stays_as_it_is() -> None:
    learnt = Refinement(CPU)
    assert not any(learnt.observe(shape, CPU.step_s(shape)) for shape in SHAPES[:9] * 10)
    assert learnt.model is CPU


@pytest.mark.parametrize(("noise", "is_predictable"), [(0.02, True), (0.15, False)])
def test_steps_are_predictable_where_many_took_about_the_predicted_time(noise: float, is_predictable: bool) -> None:
    rng = random.Random(1)
    learnt = Refinement(CPU)
    chunks = StepShape((ChunkShape(512, 0),), 0, 0)
    for number in range(400):
        learnt.observe(chunks, CPU.step_s(chunks) * rng.lognormvariate(0, noise))
        assert not (learnt.is_predictable and number < 100), "the first steps say little"
    assert learnt.is_predictable is is_predictable
    for _ in range(60):
        learnt.observe(chunks, CPU.step_s(chunks) * rng.lognormvariate(0, 0.4))
    assert not learnt.is_predictable


def test_noise_and_stalls_do_not_move_predictions_far() -> None:
    rng = random.Random(1)
    learnt = Refinement(CPU)
    for _ in range(400):
        shape = rng.choice(SHAPES)
        stall = 20.0 if rng.random() < 0.03 else 1.0
        learnt.observe(shape, CPU.step_s(shape) * rng.lognormvariate(0, 0.15) * stall)
        assert worst_error(learnt.model, CPU) < 0.4


@pytest.mark.parametrize("interference_s", [0.0, 4e-5, 2e-4])
def test_interference_is_found_by_steps_of_chunks_and_decodes(interference_s: float) -> None:
    """And only where it is; the constant of mixed steps is another one too."""
    true = replace(CPU, mixed_a_s=2.4e-2, interference_s=interference_s)
    rng = random.Random(3)
    learnt = Refinement(CPU)
    for _ in range(600):
        num_decodes = rng.choice((4, 16, 32))
        decodes = StepShape((), num_decodes, 300 * num_decodes)
        beside = StepShape((ChunkShape(rng.choice((32, 64, 128, 256)), 0),), *decodes[1:])
        for shape in (decodes, beside):
            learnt.observe(shape, true.step_s(shape) * rng.lognormvariate(0, 0.02))
    learnt.look()
    found, mixed = learnt.estimate, StepShape((ChunkShape(100, 0),), 20, 6000)
    assert found.interference_s == pytest.approx(interference_s, rel=0.15, abs=5e-6)
    assert found.mixed_a_s == pytest.approx(true.mixed_a_s, rel=0.05)
    assert found.step_s(mixed) == pytest.approx(true.step_s(mixed), rel=0.01)


def test_what_no_step_exercises_keeps_its_proportion() -> None:
    learnt = Refinement(CPU)
    for shape in SHAPES[:9] * 10:
        learnt.observe(shape, 2 * CPU.step_s(shape))
    decodes = StepShape((), 8, 4096)
    assert learnt.model.step_s(decodes) == pytest.approx(2 * CPU.step_s(decodes), rel=0.1)


def test_nonsense_is_left_out() -> None:
    learnt = Refinement(CPU)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        for shape in SHAPES * 2:
            assert not learnt.observe(shape, seconds)
    assert not learnt.observe(StepShape((), 0, 0), 1.0)
    assert not learnt.look()


def test_a_step_of_an_impossible_duration_is_left_out() -> None:
    shape = SHAPES[0]
    learnt = Refinement(CPU)
    assert not learnt.observe(shape, 1e308), "the quotient of time and prediction is infinite"
    for _ in range(20):
        learnt.observe(shape, 2 * CPU.step_s(shape))
    learnt.look()
    assert learnt.estimate.step_s(shape) == pytest.approx(2 * CPU.step_s(shape), rel=0.05)


def test_solving_ends_when_no_value_is_a_number() -> None:
    _solve_above([[1.0, 0.0], [0.0, 1.0]], [nan, nan], [0.02, 0.02])


def test_coefficients_stay_positive_and_the_same_steps_give_the_same_bits() -> None:
    def learn() -> LinearLatencyModel:
        rng = random.Random(5)
        learnt = Refinement(PROFILES["a100-llama3-8b"])
        for _ in range(300):
            learnt.observe(rng.choice(SHAPES), rng.lognormvariate(-4, 2))
        return learnt.model

    model = learn()
    assert all(value > 0 for value in model.coefficients[:-2])
    assert model.interference_s >= 0
    assert model.weights_s == 0
    assert model == learn()


#: Reads the weights for as long as it computes 111 tokens.
READING = replace(CPU, a_s=2e-3, decode_a_s=2e-3, mixed_a_s=2e-3, decode_s=1e-4, weights_s=1e-2)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_the_time_to_read_the_weights_is_learnt_beside_the_arithmetic(factor: float) -> None:
    """The prior's steps are bound by reading up to 37, or 333, tokens."""
    rng = random.Random(7)
    learnt = Refinement(replace(READING, weights_s=factor * READING.weights_s))
    shapes = [StepShape((ChunkShape(size, 0),), 0, 0) for size in (16, 32, 64, 96, 160, 256, 512, 1024)]
    shapes += [StepShape((), number, 100 * number) for number in (1, 8, 32)]
    for _ in range(1000):
        shape = rng.choice(shapes)
        learnt.observe(shape, READING.step_s(shape) * rng.lognormvariate(0, 0.02))
    learnt.look()
    assert learnt.estimate.weights_s == pytest.approx(READING.weights_s, rel=0.2)
    assert worst_error(learnt.estimate, READING, shapes) < 0.1


#: The 82M-parameter Llama in bf16 on a core with AVX2 alone: a chunk's constant is twice a decode's.
AVX2 = LinearLatencyModel(
    a_s=4.2e-2, b_s=2.4e-3, c_s=6.8e-7, d_s=3.3e-7, decode_a_s=1.9e-2, decode_s=2.9e-3, decode_context_s=3.1e-6
)


def test_a_lone_decode_is_predicted_after_a_prior_that_took_too_long_reading_the_weights() -> None:
    """Terms at their floors leave no common bias: the other terms make up for them."""
    rng = random.Random(1)
    learnt = Refinement(replace(AVX2, decode_a_s=5.2e-2, weights_s=8.1e-2))
    decodes = [StepShape((), number, 256 * number) for number in (1, 2, 4, 8, 16)]
    chunks = [StepShape((ChunkShape(size, 0),), 0, 0) for size in (16, 32, 64, 256, 1024)]
    for _ in range(600):
        shape = rng.choice(decodes + chunks)
        learnt.observe(shape, AVX2.step_s(shape) * rng.lognormvariate(0, 0.05))
    learnt.look()
    errors = [learnt.estimate.step_s(shape) / AVX2.step_s(shape) - 1 for shape in decodes]
    assert abs(errors[0]) < 0.1, errors
    assert abs(fmean(errors)) < 0.03, errors


@pytest.mark.parametrize("true", [CPU, READING, replace(CPU, mixed_a_s=2.6e-2, interference_s=4e-5)])
def test_nine_steps_at_start_predict_the_others(true: LinearLatencyModel) -> None:
    shapes = [(256, 0, 0, 0), (32, 0, 0, 0), (64, 8192, 0, 0), (0, 0, 1, 64), (0, 0, 8, 4096)]
    shapes += [(256, 0, 32, 2048), (64, 0, 8, 512), (256, 0, 8, 512), (512, 512, 0, 0)]
    steps: list[MeasuredStep] = []
    for num_tokens, history, num_decodes, context in shapes:
        chunks = (ChunkShape(num_tokens, history),) if num_tokens else ()
        steps.append(
            MeasuredStep(
                num_tokens=num_tokens,
                num_history_tokens=history,
                num_decodes=num_decodes,
                num_decode_context_tokens=context,
                duration_s=true.step_s(StepShape(chunks, num_decodes, context)),
            )
        )
    layout = KvLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
    instance = replace(
        modelled_profile("i", Role.PREFILL),
        kv_layout=layout,
        num_parameters=81_788_928,
        num_heads=12,
        measured_steps=tuple(steps),
    )
    model = self_measured(instance)
    assert model is not None
    assert worst_error(model, true) < 0.25
    # A slow machine has time for the first alone: arithmetic fills in the rest.
    model = self_measured(replace(instance, measured_steps=tuple(steps[:1])))
    assert model is not None
    assert worst_error(model, true) < 2
    assert self_measured(replace(instance, measured_steps=())) is None


@pytest.mark.parametrize("num_stops", [1, 10, 30])
def test_steps_of_a_stopped_process_leave_chunks_about_as_long(num_stops: int) -> None:
    """So a group's chunks do not become tiny after long stops: nothing else sets how long they are."""
    learnt = Refinement(CPU)
    for number in range(200):
        shape = StepShape((ChunkShape(256, number % 40 * 256),), 0, 0)
        learnt.observe(shape, CPU.step_s(shape) + (5.0 if number >= 200 - num_stops else 0.0))
    before, after = (ChunkSizer(model, 8192).largest(NOTHING, 8192, 8192, 0.5) for model in (CPU, learnt.model))
    assert after > 0.7 * before > 0
