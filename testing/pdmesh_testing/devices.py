"""Common parts of the tests of engines on a device (``tests/gpu``).

``GPU_TESTS_DEVICE=cpu`` runs the tests that use `DEVICE` on a machine without one, to find mistakes of the tests.
"""

from __future__ import annotations

import os
import random

import pytest

from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import SamplingParams
from pdmesh_testing.stepping import SteppedRequest, new_sequence, separate_tables, step

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
HAS_DEVICE = DEVICE != "cpu"

#: Of tests that use `DEVICE`: they are skipped where it is missing.
MARKS = [pytest.mark.gpu] if HAS_DEVICE else []

_PARAMS = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=0)


def prompt_of(num_tokens: int) -> list[int]:
    """Return ``length`` token ids, always the same for a length."""
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]


def drawn_in_any_order(engine: TorchEngine, lengths: list[int], max_tokens: int) -> list[SteppedRequest]:
    """Generate for all ``lengths`` in steps of random requests and chunk sizes, and return the finished requests.

    The chunk sizes lead to whole graphs, to graphs between layers, and to single kernels.
    """
    tables = separate_tables(engine, [length + max_tokens for length in lengths])
    generations = [
        SteppedRequest(new_sequence(prompt_of(length), table, _PARAMS), max_tokens)
        for length, table in zip(lengths, tables, strict=True)
    ]
    rng = random.Random(0)
    while running := [generation for generation in generations if not generation.done]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        step(engine, [(generation, rng.choice([1, 16, 33, 2000])) for generation in chosen])
    return generations


def drawn_logprobs(generations: list[SteppedRequest]) -> list[float]:
    """Return the log-probabilities of the drawn tokens."""
    drawn = [each for generation in generations for result in generation.results for each in result.drawn]
    return [each.logprobs.logprob for each in drawn if each.logprobs is not None]


def scored(engine: TorchEngine, generation: SteppedRequest) -> list[float]:
    """Return the log-probabilities of a request's output, computed as one prompt."""
    tokens = generation.sequence.token_ids.tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    sequence = new_sequence(tokens, list(range(num_blocks_for(len(tokens), 16))), params)
    part = SequenceSlice(sequence=sequence, start=0, num_tokens=len(tokens), sample=False, prompt_logprobs=True)
    (result,) = engine.execute([part])
    return [entry.logprob for entry in result.prompt_logprobs[generation.sequence.num_prompt_tokens - 1 :]]
