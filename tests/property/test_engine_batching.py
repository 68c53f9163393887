"""Requests that share steps draw the tokens they draw alone, however they are cut into chunks and mixed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.examples import examples
from pdmesh_testing.stepping import GREEDY, SteppedRequest, generate, new_sequence, separate_tables, step

MAX_TOKENS = 8
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=3),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.2, top_p=0.9, repetition_penalty=1.2, seed=4, logprobs=1),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3")
    return TorchEngine(directory, num_blocks=64, num_threads=1, device="cpu")


@settings(deadline=None, max_examples=examples(30))
@given(
    requests=st.lists(st.tuples(st.integers(1, 120), st.integers(0, len(PARAMS) - 1)), min_size=1, max_size=6),
    schedule=st.randoms(use_true_random=False),
)
def test_mixing_changes_no_token(engine: TorchEngine, requests: list[tuple[int, int]], schedule: random.Random) -> None:
    @cache
    def alone(num_prompt_tokens: int, kind: int) -> list[int]:
        return generate(engine, prompt_of(num_prompt_tokens), MAX_TOKENS, params=PARAMS[kind]).output_ids

    expected = [alone(num_prompt_tokens, kind) for num_prompt_tokens, kind in requests]
    tables = separate_tables(engine, [num_prompt_tokens + MAX_TOKENS for num_prompt_tokens, _ in requests])
    generations = [
        SteppedRequest(new_sequence(prompt_of(num_prompt_tokens), table, PARAMS[kind]), MAX_TOKENS)
        for (num_prompt_tokens, kind), table in zip(requests, tables, strict=True)
    ]
    while running := [generation for generation in generations if not generation.done]:
        chosen = schedule.sample(running, schedule.randint(1, len(running)))
        step(engine, [(generation, schedule.choice([1, 2, 15, 16, 17, 64, 1000])) for generation in chosen])
    assert [generation.output_ids for generation in generations] == expected


def prompt_of(num_tokens: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]
