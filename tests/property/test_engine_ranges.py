"""Attention in ranges: what is drawn is transformers', and the same bits whoever holds which range."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import CpuLevel
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.model import SamplingParams
from pdmesh_testing.architectures import NUM_OUTPUT_TOKENS, PARAMS, assert_equal, prompt_of
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import ARCHITECTURE_LEVELS, library_or_skip
from pdmesh_testing.ranges import RANGE_TOKENS, HeldByEngines, spread
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

COMPUTES = ["float32", *(f"bfloat16, {level}" for level in ARCHITECTURE_LEVELS)]


#: Of architectures with windows, capped scores and sinks: windows that end in the range before, and in one of several.
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"sliding_window": 24, "attn_logit_softcapping": 2.0}),
    ("gemma2", {"sliding_window": 100, "attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"sliding_window": 64, "num_hidden_layers": 7}),
    ("gpt_oss", {"sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("gpt_oss", {"sliding_window": 130, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("mistral", {"sliding_window": 65}),
]
WINDOWED_IDS = [f"{family}, window {options['sliding_window']}" for family, options in WINDOWED]


def write_windowed(directory: Path, family: str, options: dict[str, Any]) -> Path:
    return write_transformers_checkpoint(directory, family, head_dim=16, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranges_draw_what_transformers_draws(family: str, tmp_path: Path) -> None:
    assert_draws_what_transformers_draws(write_checkpoint(tmp_path, architecture=family))  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "options"), WINDOWED, ids=WINDOWED_IDS)
def test_ranges_and_windows_draw_what_transformers_draws(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert_draws_what_transformers_draws(write_windowed(tmp_path, family, options))


def assert_draws_what_transformers_draws(directory: Path) -> None:
    """Whatever the chunks, and spread over three engines."""
    engines = [TorchEngine(directory, num_blocks=40, num_threads=1, range_tokens=RANGE_TOKENS) for _ in range(3)]
    reference = HfReference(directory)
    for length in (RANGE_TOKENS - 3, RANGE_TOKENS, RANGE_TOKENS + 1, 230):
        expected = reference.greedy_steps(prompt_of(length), NUM_OUTPUT_TOKENS)
        for chunk_tokens in (50, 1000):
            alone = generate(engines[0], prompt_of(length), NUM_OUTPUT_TOKENS, chunk_tokens=chunk_tokens, params=PARAMS)
            assert_equal(alone.results, expected)
        request = SteppedRequest(new_sequence(prompt_of(length), list(range(20)), PARAMS), NUM_OUTPUT_TOKENS)
        step(engines[0], [(request, 1000)])
        spread(request, engines)
        while not request.done:
            step(engines[0], [(request, 1)])
        assert_equal(request.results, expected)


@pytest.fixture(scope="module", params=COMPUTES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TorchEngine]:
    dtype, _, level = request.param.partition(", ")
    if level:
        library_or_skip(CpuLevel(level))
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        dtype=dtype,
        architecture="qwen3",
        hidden_size=256,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
    )
    return exact_engines(directory, level)


@pytest.fixture(scope="module", params=WINDOWED, ids=WINDOWED_IDS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = request.param
    return write_windowed(tmp_path_factory.mktemp("model"), family, options)


@pytest.fixture(scope="module", params=COMPUTES)
def windowed_engines(request: pytest.FixtureRequest, windowed: Path) -> list[TorchEngine]:
    dtype, _, level = request.param.partition(", ")
    if level:
        library_or_skip(CpuLevel(level))
    return exact_engines(windowed, level, dtype=dtype)


def exact_engines(directory: Path, level: str, **options: Any) -> list[TorchEngine]:
    """Three whose results depend on a token's own context alone."""
    return [
        TorchEngine(
            directory,
            num_blocks=96,
            num_threads=1,
            deterministic=True,
            cpu_level=level or "auto",
            ordered=not level or CpuLevel(level).is_ordered,
            range_tokens=RANGE_TOKENS,
            **options,
        )
        for _ in range(3)
    ]


#: Of one to three prompts.
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=3)


@settings(deadline=None, max_examples=examples(12))
@given(lengths=LENGTHS, schedule=st.randoms(use_true_random=False))
def test_who_holds_a_range_changes_no_bit(
    engines: list[TorchEngine], lengths: list[int], schedule: random.Random
) -> None:
    assert_same_bits(engines, lengths, schedule)


@settings(deadline=None, max_examples=examples(8))
@given(lengths=LENGTHS, schedule=st.randoms(use_true_random=False))
def test_who_holds_a_range_that_is_seen_in_part_changes_no_bit(
    windowed_engines: list[TorchEngine], lengths: list[int], schedule: random.Random
) -> None:
    assert_same_bits(windowed_engines, lengths, schedule)


def assert_same_bits(engines: list[TorchEngine], lengths: list[int], schedule: random.Random) -> None:
    """Of some prompts at once, in steps of any kind, which are spread at any time, and of each alone."""
    params, num_tokens = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3), 6
    home = engines[0]
    expected = [
        generate(home, prompt_of(length), num_tokens, chunk_tokens=schedule.choice([64, 1000]), params=params).results
        for length in lengths
    ]
    tables = separate_tables(home, [length + num_tokens for length in lengths])
    requests = [
        SteppedRequest(new_sequence(prompt_of(length), table, params), num_tokens)
        for length, table in zip(lengths, tables, strict=True)
    ]
    while running := [each for each in requests if not each.done]:
        chosen = schedule.sample(running, schedule.randint(1, len(running)))
        step(home, [(each, schedule.choice([1, 15, 16, 64, 1000])) for each in chosen])
        for index, each in enumerate(requests):
            if not each.done and schedule.random() < 0.5:
                spread(each, engines[: schedule.randint(2, 3)], first_block=24 * index)
    drawn = [[result.drawn for result in each.results if result.drawn] for each in requests]
    assert drawn == [[result.drawn for result in results if result.drawn] for results in expected]


def test_only_members_whose_range_is_seen_are_asked(tmp_path: Path) -> None:
    """Of 230 tokens, three members hold 192. A window of 100 ends in the third, one of 24 before it."""
    for window, first_range in ((100, 2), (24, None)):
        directory = write_windowed(tmp_path / str(window), "gemma2", {"sliding_window": window})
        engines = [TorchEngine(directory, num_blocks=40, num_threads=1, range_tokens=RANGE_TOKENS) for _ in range(2)]
        request = SteppedRequest(new_sequence(prompt_of(230), list(range(20)), PARAMS), 2)
        step(engines[0], [(request, 1000)])
        spread(request, engines)
        step(engines[0], [(request, 1)])
        held = request.sequence.elsewhere
        assert isinstance(held, HeldByEngines)
        windowed = [] if first_range is None else [(layer, first_range) for layer in (0, 2)]
        assert [(each.layer, each.first_range) for each in held.asked] == sorted([*windowed, (1, 0), (3, 0)])
        assert {each.start for each in held.asked} == {230}


def test_a_question_from_inside_a_range_is_refused(engines: list[TorchEngine]) -> None:
    rows = bytes(6 * 64 * TORCH_DTYPES[engines[0].kv.layout.dtype].itemsize)
    assert engines[0].attend_part(1, [0, 1, 2, 3], RangeQuestion(0, 2 * RANGE_TOKENS, rows))
    for start in (0, 2 * RANGE_TOKENS - 1):
        with pytest.raises(ValueError, match="which does not lie before it"):
            engines[0].attend_part(1, [0, 1, 2, 3], RangeQuestion(0, start, rows))


def test_all_kv_is_held_where_contexts_are_spread(tmp_path: Path) -> None:
    """Though an engine is told how many blocks layers with a window need: who is asked must have its range whole."""
    directory = write_windowed(tmp_path, "mistral", {"sliding_window": 24})
    engine = TorchEngine(directory, num_blocks=40, num_threads=1, range_tokens=RANGE_TOKENS, max_frames=4)
    assert engine.kv.layout.window == 0
