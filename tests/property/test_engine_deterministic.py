"""Deterministic mode: the bits of a request's results do not depend on what else is computed, nor in what pieces."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.levels import CpuLevel
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import ARCHITECTURE_LEVELS, library_or_skip, ordered_levels
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

COMPUTES = [
    "float32",
    pytest.param("bfloat16, plain torch", marks=pytest.mark.slow),  # torch's bf16 is, below AVX-512
    *(f"bfloat16, {level}" for level in ARCHITECTURE_LEVELS),
]


@pytest.fixture(scope="module", params=COMPUTES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """Wide enough for libraries to sum differently by the number of rows."""
    dtype, _, how = request.param.partition(", ")
    if how in ARCHITECTURE_LEVELS:
        library_or_skip(CpuLevel(how))
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        dtype=dtype,
        architecture="qwen3",
        hidden_size=768,
        intermediate_size=1024,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
    )
    return TorchEngine(
        directory,
        num_blocks=96,
        num_threads=1,
        device="cpu",
        deterministic=True,
        native=how != "plain torch",
        cpu_level=how if how in ARCHITECTURE_LEVELS else "auto",
    )


MAX_TOKENS = 4
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=3)


@settings(deadline=None, max_examples=examples(12))
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    schedule=st.randoms(use_true_random=False),
)
def test_deterministic_results_are_bit_identical(
    engine: TorchEngine, lengths: list[int], schedule: random.Random
) -> None:
    tables = separate_tables(engine, [length + MAX_TOKENS for length in lengths])
    expected = [logprobs_of(generate(engine, prompt_of(length), MAX_TOKENS, params=PARAMS)) for length in lengths]
    generations = [
        SteppedRequest(new_sequence(prompt_of(length), table, PARAMS), MAX_TOKENS)
        for length, table in zip(lengths, tables, strict=True)
    ]
    while running := [generation for generation in generations if not generation.done]:
        chosen = schedule.sample(running, schedule.randint(1, len(running)))
        step(engine, [(generation, schedule.choice([1, 15, 16, 17, 64, 1000])) for generation in chosen])
    assert [logprobs_of(generation) for generation in generations] == expected


SEEDED = SamplingParams(
    max_tokens=8,
    temperature=1.0,
    seed=3,
    top_p=0.95,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    min_tokens=3,
    eos_token_ids=tuple(range(0, 320, 7)),
    bad_token_sequences=((5,), (11, 12)),
    logprobs=2,
)


@settings(deadline=None, max_examples=examples(6))
@given(
    params=st.sampled_from([replace(PARAMS, max_tokens=8), SEEDED]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    schedule=st.randoms(use_true_random=False),
)
def test_drafts_change_no_bit(
    engine: TorchEngine, params: SamplingParams, lengths: list[int], schedule: random.Random
) -> None:
    """Whatever is drafted, right or wrong, and beside what: KV of what proved wrong is read by nobody."""

    def ends(one: SteppedRequest) -> bool:
        return bool(one.results) and any(drawn.finish_reason is not None for drawn in one.results[-1].drawn)

    def requests() -> list[SteppedRequest]:
        tables = separate_tables(engine, [length + 8 for length in lengths])
        return [
            SteppedRequest(new_sequence(prompt_of(length), table, params), 8)
            for length, table in zip(lengths, tables, strict=True)
        ]

    expected = requests()
    for one in expected:
        while not ends(one):
            step(engine, [(one, 1000)])
    drafted = requests()
    while running := [index for index, one in enumerate(drafted) if not ends(one)]:
        batch: list[tuple[SteppedRequest, SequenceSlice]] = []
        for index in schedule.sample(running, schedule.randint(1, len(running))):
            one = drafted[index]
            coming = expected[index].output_ids[one.sequence.num_output_tokens :]
            draft = [token if schedule.random() < 0.8 else schedule.randrange(320) for token in coming]
            batch.append((one, one.next_slice(schedule.choice([17, 1000]), draft[: schedule.randint(0, 5)])))
        for (one, part), result in zip(batch, engine.execute([part for _, part in batch]), strict=True):
            one.accept(part, result)
    assert [logprobs_of(one) for one in drafted] == [logprobs_of(one) for one in expected]


def logprobs_of(generation: SteppedRequest) -> list[object]:
    return [(drawn.token_id, drawn.logprobs) for result in generation.results for drawn in result.drawn]


def prompt_of(num_tokens: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]


@settings(deadline=None, max_examples=examples(4))
@given(
    num_shared_blocks=st.integers(1, 20),
    num_new=st.integers(1, 200),
    num_drawn=st.integers(2, 100),
    chunk_tokens=st.sampled_from([7, 16, 64, 1000]),
)
def test_kv_that_was_computed_or_drawn_before_gives_the_same_bits(
    engine: TorchEngine, num_shared_blocks: int, num_new: int, num_drawn: int, chunk_tokens: int
) -> None:
    """A next turn that shares the blocks of the last one, prompt and answer, as if all of it were computed anew."""
    block_size = engine.kv.layout.block_size
    num_first = max(1, num_shared_blocks * block_size + 1 - num_drawn)  # the last one drawn has no KV
    first = generate(engine, prompt_of(num_first), num_drawn, chunk_tokens=chunk_tokens, first_block=48)
    num_shared = min(num_shared_blocks, (len(first.sequence.token_ids) - 1) // block_size)
    shared = first.sequence.block_table[:num_shared]
    prompt = [*first.sequence.token_ids[: num_shared * block_size], *prompt_of(num_new)]
    cold = logprobs_of(generate(engine, prompt, MAX_TOKENS, params=PARAMS))
    own = generate(engine, prompt_of(len(prompt)), 1).sequence.block_table[num_shared:]  # of another's leavings
    before = [layer[shared].clone() for layer in engine.kv.layers]
    warm = SteppedRequest(new_sequence(prompt, [*shared, *own, 0, 1], PARAMS), MAX_TOKENS, num_shared * block_size)
    while not warm.done:
        step(engine, [(warm, chunk_tokens)])
    assert all(layer[shared].equal(held) for layer, held in zip(engine.kv.layers, before, strict=True))
    assert logprobs_of(warm)[-MAX_TOKENS:] == cold[-MAX_TOKENS:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5_text"])
def test_an_answer_that_is_resumed_has_the_same_bits_where_layers_have_states(
    model_type: str, dtype: str, tmp_path: Path
) -> None:
    """As after a death: what was drawn is computed again, in other chunks and beside another request."""
    variant = model_variants()[model_type][0]
    engine = TorchEngine(
        write_transformers_checkpoint(tmp_path, model_type, seed=1, **variant),
        num_blocks=8,
        block_size=128,
        num_threads=1,
        device="cpu",
        dtype=dtype,
        deterministic=dtype == "float32" or not ordered_levels(),
        max_frames=8,
    )
    params, prompt = replace(PARAMS, max_tokens=60), prompt_of(100)
    whole = generate(engine, prompt, 60, params=params)
    for num_drawn, chunk_tokens in ((1, 1000), (27, 64), (28, 17), (50, 100)):
        known = [*prompt, *whole.output_ids[:num_drawn]]
        resumed = SteppedRequest(new_sequence(known, range(4), params), 60 - num_drawn)
        beside = SteppedRequest(new_sequence(prompt_of(90), range(4, 8), params), 60)
        while not resumed.done:
            step(engine, [(each, chunk_tokens) for each in (resumed, beside)])
        assert logprobs_of(resumed) == logprobs_of(whole)[num_drawn:]
