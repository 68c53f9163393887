"""What every architecture is held to: the tokens and log-probabilities of transformers, whatever happens on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdmesh.engine.base import SliceResult
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.reference import GreedyStep, HfReference
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step

NUM_OUTPUT_TOKENS = 12
PROMPT_LENGTHS = (1, 19, 75)

#: Greedy, and with the log-probability of each token.
PARAMS = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=0)

_TOLERANCE = 1e-4


def prompt_of(num_tokens: int) -> list[int]:
    """Return ``length`` token ids, always the same for a length."""
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]


def references_of(checkpoint: Path) -> dict[int, list[GreedyStep]]:
    """Return transformers' greedy steps after prompts of `PROMPT_LENGTHS`, by length."""
    reference = HfReference(checkpoint)
    return {length: reference.greedy_steps(prompt_of(length), NUM_OUTPUT_TOKENS) for length in PROMPT_LENGTHS}


def assert_equal(results: Sequence[SliceResult], expected: Sequence[GreedyStep]) -> None:
    """Assert that these tokens were drawn, with log-probabilities that differ by rounding alone."""
    drawn = [result for result in results if result.token_id is not None]
    assert [result.token_id for result in drawn] == [step.token_id for step in expected]
    logprobs = [result.logprobs.logprob for result in drawn if result.logprobs is not None]
    assert len(logprobs) == len(expected)
    for found, wanted in zip(logprobs, expected, strict=True):
        assert abs(found - wanted.logprob) <= _TOLERANCE


def assert_computes_as_transformers(checkpoint: Path, references: dict[int, list[GreedyStep]], **options: Any) -> None:
    """Assert that engines compute the greedy steps of transformers, given by prompt length in ``references``.

    Covers several chunk sizes, batches of unlike sequences, and moves after the first token. ``options`` are options of
    `TorchEngine`.
    """
    engine, other = (TorchEngine(checkpoint, num_blocks=32, num_threads=1, **options) for _ in range(2))
    for length, expected in references.items():
        for chunk_tokens in (7, 1000):
            alone = generate(engine, prompt_of(length), NUM_OUTPUT_TOKENS, chunk_tokens=chunk_tokens, params=PARAMS)
            assert_equal(alone.results, expected)

    lengths = [length + NUM_OUTPUT_TOKENS for length in PROMPT_LENGTHS]
    requests = {
        length: SteppedRequest(new_sequence(prompt_of(length), table, PARAMS), NUM_OUTPUT_TOKENS)
        for length, table in zip(PROMPT_LENGTHS, separate_tables(engine, lengths), strict=True)
    }
    while left := [request for request in requests.values() if not request.done]:
        step(engine, [(request, 16) for request in left])
    for length, request in requests.items():
        assert_equal(request.results, references[length])

    length = PROMPT_LENGTHS[-1]
    moved = SteppedRequest(new_sequence(prompt_of(length), list(range(8)), PARAMS), NUM_OUTPUT_TOKENS)
    step(engine, [(moved, 40)])
    step(engine, [(moved, 40)])
    for source, target in ((engine, other), (other, engine)):
        move(moved, source, target)
        for _ in range(4):
            step(target, [(moved, 1)])
    assert_equal(moved.results, references[length][: len(moved.output_ids)])
    # Output wanders over the vocabulary.
    assert len({step.token_id for steps in references.values() for step in steps}) > 4


def move(request: SteppedRequest, source: TorchEngine, target: TorchEngine) -> None:
    """Take a request's KV to other blocks of another engine."""
    table, layout = request.sequence.block_table, source.kv.layout
    assert layout == target.kv.layout
    moved = [(block + 11) % target.kv.num_blocks for block in table]
    for layer in range(layout.num_layers):
        data = memoryview(bytearray(len(table) * layout.page_bytes(layer)))
        source.kv.gather(layer, table, data)
        target.kv.scatter(layer, moved, data)
    request.sequence.block_table[:] = moved
