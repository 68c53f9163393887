from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdmesh.policy.fit import fit
from pdmesh.policy.latency import (
    PROFILES,
    TETRIS_A100_LLAMA_3_8B,
    ChunkShape,
    LinearLatencyModel,
    StepShape,
    features,
)

#: Tetris, Table 1: seconds to prefill 4k, 8k, ... tokens of Llama-3-8B on A100s, by sequence-parallel size.
TETRIS_TABLE_1 = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}


def prompt(num_tokens: int, history: int = 0) -> StepShape:
    return StepShape((ChunkShape(num_tokens, history),), 0, 0)


def row(size: int) -> list[tuple[StepShape, float]]:
    return [(prompt(4096 * 2**column), seconds) for column, seconds in enumerate(TETRIS_TABLE_1[size])]


@pytest.mark.parametrize("size", sorted(TETRIS_TABLE_1))
def test_the_fit_reproduces_every_cell_of_the_measured_table(size: int) -> None:
    fitted, built_in = fit(row(size)), TETRIS_A100_LLAMA_3_8B[size]
    for shape, seconds in row(size):
        assert fitted.step_s(shape) == pytest.approx(seconds, rel=0.01 if size == 1 else 0.07)
        assert built_in.step_s(shape) == pytest.approx(fitted.step_s(shape), rel=1e-4)
    assert fitted.c_s == 2 * fitted.d_s


def test_a_fit_finds_the_model_that_made_its_samples() -> None:
    made = LinearLatencyModel(
        a_s=2e-3,
        b_s=1e-5,
        c_s=3e-9,
        d_s=1e-9,
        decode_a_s=5e-3,
        decode_s=1e-4,
        decode_context_s=2e-8,
        mixed_a_s=7e-3,
        interference_s=4e-5,
    )
    chunks: list[tuple[ChunkShape, ...]] = [(), (ChunkShape(64, 9000), ChunkShape(300, 20))]
    chunks += [(ChunkShape(num_tokens, history),) for num_tokens in (32, 512, 2048) for history in (0, 700, 90_000)]
    decodes = [(0, 0), (1, 700), (9, 4000), (30, 90_000)]
    shapes = [StepShape(c, n, k) for c in chunks for n, k in decodes if c or n]
    fitted = fit([(shape, made.step_s(shape)) for shape in shapes])
    for name in LinearLatencyModel.__slots__:
        assert getattr(fitted, name) == pytest.approx(getattr(made, name), rel=1e-6), name


#: Reads the weights for as long as it computes 120 tokens.
READING = LinearLatencyModel(
    a_s=1e-3, b_s=5e-5, c_s=3e-9, d_s=1e-9, decode_a_s=2e-3, decode_s=6e-5, decode_context_s=2e-8, weights_s=6e-3
)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (prompt(32), 1e-3 + 6e-3 + 1e-9 * 32**2),
        (prompt(512), 1e-3 + 512 * 5e-5 + 1e-9 * 512**2),
        (StepShape((), 4, 1000), 2e-3 + 6e-3 + 1000 * 2e-8),
        (StepShape((ChunkShape(60, 0),), 40, 0), 1e-3 + 6e-3 + 1e-9 * 60**2),
        (StepShape((ChunkShape(90, 0),), 40, 0), 1e-3 + 90 * 5e-5 + 40 * 6e-5 + 1e-9 * 90**2),
    ],
)
def test_a_step_reads_the_weights_while_it_computes(shape: StepShape, seconds: float) -> None:
    assert READING.step_s(shape) == pytest.approx(seconds)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fit_finds_where_reading_the_weights_takes_longer(noise: float) -> None:
    rng = random.Random(1)
    chunks = [(size, history) for size in (16, 32, 64, 96, 128, 256, 1024) for history in (0, 3000)]
    shapes = [StepShape((ChunkShape(*chunk),), 0, 0) for chunk in chunks]
    shapes += [StepShape((ChunkShape(64, 0),), number, 300 * number) for number in (0, 8, 32, 128)]
    shapes += [StepShape((), number, 300 * number) for number in (1, 8, 64, 256)]
    fitted = fit([(shape, READING.step_s(shape) * rng.lognormvariate(0, noise)) for shape in shapes])
    assert fitted.weights_s == pytest.approx(READING.weights_s, rel=0.01 + 10 * noise)
    for shape in shapes:
        assert fitted.step_s(shape) == pytest.approx(READING.step_s(shape), rel=1e-6 + 3 * noise)


#: Interferes, and has three constants.
MIXING = replace(PROFILES["a100-llama3-8b"], decode_a_s=0.004, mixed_a_s=0.006, interference_s=1e-4)


def test_without_terms_of_its_own_a_mixed_step_costs_what_its_parts_do() -> None:
    """Written out as it was before there were any."""
    model = PROFILES["a100-llama3-8b"]
    chunk = ChunkShape(300, 5000)
    apart_s = model.decode_s * 7 + model.decode_context_s * 900 + model.a_s
    apart_s += 300 * (model.b_s + model.c_s * 5000 + model.d_s * 300)
    assert model.step_s(StepShape((chunk,), 7, 900)) == apart_s
    assert (model.mixed_a_s, model.interference_s) == (model.a_s, 0.0)


def test_each_kind_of_step_has_its_constant_and_mixed_ones_interfere() -> None:
    chunk, decodes = StepShape((ChunkShape(64, 0),), 0, 0), StepShape((), 32, 4000)
    both = StepShape(chunk.chunks, 32, 4000)
    parts_s = (MIXING.step_s(chunk) - MIXING.a_s) + (MIXING.step_s(decodes) - MIXING.decode_a_s)
    assert MIXING.step_s(both) == pytest.approx(MIXING.mixed_a_s + parts_s + 1e-4 * 64 * 32 / 96)
    assert MIXING.step_s(StepShape((), 0, 0)) == 0.0


@pytest.mark.parametrize("model", [MIXING, READING, replace(READING, interference_s=1e-4), PROFILES["a100-llama3-8b"]])
@pytest.mark.parametrize("num_decodes", [0, 1, 40])
def test_one_more_chunk_costs_the_same_bits(model: LinearLatencyModel, num_decodes: int) -> None:
    for chunks in ((), (ChunkShape(100, 7),), (ChunkShape(100, 7), ChunkShape(33, 0))):
        with_chunk_s = model.with_chunk_s(StepShape(chunks, num_decodes, 50 * num_decodes), 900)
        for num_tokens in (0, 1, 32, 777):
            shape = StepShape((*chunks, ChunkShape(num_tokens, 900)), num_decodes, 50 * num_decodes)
            assert with_chunk_s(num_tokens) == model.step_s(shape)


def test_features_times_coefficients_are_the_step() -> None:
    for shape in (prompt(64, 10), StepShape((), 3, 70), StepShape((ChunkShape(64, 10), ChunkShape(9, 0)), 3, 70)):
        for model, reads_longer in ((MIXING, False), (READING, True)):
            values = features(shape, reads_longer=reads_longer)
            total_s = sum(c * value for c, value in zip(model.coefficients, values, strict=True))
            assert total_s == pytest.approx(model.step_s(shape))


def test_a_fit_refuses_what_cannot_be_fitted() -> None:
    for samples in ([], [(prompt(8), 0.0)], [(prompt(8), 5e-324)]):
        with pytest.raises(ValueError, match="at least 1e-09 s"):
            fit(samples)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_built_in_profiles_cost_more_for_more(name: str) -> None:
    model = PROFILES[name]
    assert model.step_s(StepShape((), 0, 0)) == 0
    assert 0 < model.step_s(prompt(256)) < model.step_s(prompt(512)) < model.step_s(prompt(512, history=1000))
    alone = model.step_s(StepShape((), 1, 1000))
    assert 0 < alone < model.step_s(StepShape((), 64, 64_000))


def test_a_prompt_cut_in_chunks_has_the_arithmetic_of_the_whole() -> None:
    model = PROFILES["h100-llama3-8b"]
    pieces = sum(model.step_s(prompt(1000, history)) - model.a_s for history in range(0, 8000, 1000))
    assert pieces == pytest.approx(model.step_s(prompt(8000)) - model.a_s)


def test_the_analytic_a100_is_close_to_the_measured_one() -> None:
    for num_tokens in (8192, 32768, 131072):
        ratio = PROFILES["a100-llama3-8b-analytic"].step_s(prompt(num_tokens)) / PROFILES["a100-llama3-8b"].step_s(
            prompt(num_tokens)
        )
        assert 0.5 < ratio < 2, num_tokens


def test_decodes_are_dealt_out_whole() -> None:
    """A lone one is in one step with all of its context, however many stages there are."""
    lone, eight = StepShape((), 1, 1000), StepShape((), 8, 8000)
    assert lone.shared_by(4) == lone
    assert StepShape((), 2, 3000).shared_by(4) == StepShape((), 1, 1500)
    assert eight.shared_by(4) == StepShape((), 2, 2000)
    assert eight.shared_by(1) == eight
