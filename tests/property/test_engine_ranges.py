"""Attention in ranges: what is drawn is transformers', and the same bits whoever holds which range."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.levels import CpuLevel
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.kv.elsewhere import KvElsewhereLost
from pdmesh.model import SamplingParams
from pdmesh.testing.architectures import NUM_OUTPUT_TOKENS, PARAMS, assert_equal, prompt_of
from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.examples import examples
from pdmesh.testing.levels import ARCHITECTURE_LEVELS, library_or_skip
from pdmesh.testing.ranges import RANGE_TOKENS, HeldByEngines, spread
from pdmesh.testing.reference import HfReference
from pdmesh.testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh.testing.transformers_checkpoints import write_transformers_checkpoint

COMPUTES = ["float32", *(f"bfloat16, {level}" for level in ARCHITECTURE_LEVELS if CpuLevel(level).is_ordered)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranges_draw_what_transformers_draws(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture=family)  # type: ignore[arg-type]
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
    return [
        TorchEngine(
            directory,
            num_blocks=96,
            num_threads=1,
            deterministic=True,
            cpu_level=level or "auto",
            ordered=True,
            range_tokens=RANGE_TOKENS,
        )
        for _ in range(3)
    ]


@settings(deadline=None, max_examples=examples(12))
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    schedule=st.randoms(use_true_random=False),
)
def test_who_holds_a_range_changes_no_bit(
    engines: list[TorchEngine], lengths: list[int], schedule: random.Random
) -> None:
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
            decodes = 0 < each.sequence.num_output_tokens < num_tokens
            if decodes and each.sequence.elsewhere is None and schedule.random() < 0.5:
                spread(each, engines[: schedule.randint(2, 3)], first_block=24 * index)
    drawn = [[result.drawn for result in each.results if result.drawn] for each in requests]
    assert drawn == [[result.drawn for result in results if result.drawn] for results in expected]


def test_a_part_that_gives_no_answer_ends_the_step_and_nothing_else(engines: list[TorchEngine]) -> None:
    home = engines[0]
    request, other = (
        SteppedRequest(new_sequence(prompt_of(length), table, PARAMS), 6)
        for length, table in zip((200, 20), separate_tables(home, [210, 40]), strict=True)
    )
    step(home, [(request, 1000), (other, 1000)])
    spread(request, engines)
    held = request.sequence.elsewhere
    assert isinstance(held, HeldByEngines)

    class Silent(HeldByEngines):
        def answers(self) -> list[bytes]:
            raise KvElsewhereLost(self, "silent")

    request.sequence.elsewhere = Silent(held.members)
    with pytest.raises(KvElsewhereLost) as lost:
        step(home, [(request, 1), (other, 1)])
    assert lost.value.elsewhere is request.sequence.elsewhere
    step(home, [(other, 1)])
    assert other.results[1].drawn == generate(engines[1], prompt_of(20), 2, params=PARAMS).results[1].drawn


def test_windows_are_refused(tmp_path: Path) -> None:
    directory = write_transformers_checkpoint(tmp_path, "mistral", sliding_window=24)
    with pytest.raises(ConfigError, match="max_kv_tokens_per_instance is set, but this model has windows"):
        TorchEngine(directory, num_blocks=8, range_tokens=RANGE_TOKENS)
