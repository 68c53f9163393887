"""Driving an `Engine` by hand, as a worker would: chunks, decodes, and mixtures of several requests."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from pdmesh.engine.base import Engine, EngineSequence, SequenceSlice, SliceResult
from pdmesh.engine.runner import TorchEngine
from pdmesh.engine.transformer_model import Transformer
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def new_sequence(
    prompt_ids: Sequence[int], block_table: Sequence[int], params: SamplingParams = GREEDY
) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId("test"),
        params=params,
        token_ids=array.array("i", prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        block_table=list(block_table),
    )


def sequence_of(prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any) -> EngineSequence:
    """Return a sequence without blocks, some tokens into its output; ``params`` are its sampling parameters."""
    sequence = new_sequence(prompt, [], SamplingParams(**{"max_tokens": 1000, **params}))
    sequence.token_ids.extend(output)
    return sequence


@dataclass(slots=True)
class SteppedRequest:
    """Request computed step by step: ``next_slice`` returns the next slice, and ``accept`` takes its result."""

    sequence: EngineSequence
    max_tokens: int
    num_computed: int = 0
    results: list[SliceResult] = field(default_factory=list[SliceResult])

    @property
    def done(self) -> bool:
        return self.sequence.num_output_tokens == self.max_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.sequence.token_ids[self.sequence.num_prompt_tokens :].tolist()

    def next_slice(self, chunk_tokens: int, draft: Sequence[int] = ()) -> SequenceSlice:
        """Return the next chunk; if it samples, with as much of ``draft`` as may be drawn before the last token."""
        num_left = len(self.sequence.token_ids) - self.num_computed
        num_tokens = min(chunk_tokens, num_left)
        samples = num_tokens == num_left
        drafted = tuple(draft[: self.max_tokens - self.sequence.num_output_tokens - 1]) if samples else ()
        return SequenceSlice(
            sequence=self.sequence,
            start=self.num_computed,
            num_tokens=num_tokens + len(drafted),
            sample=samples,
            prompt_logprobs=self.sequence.params.prompt_logprobs is not None,
            draft=drafted,
        )

    def accept(self, part: SequenceSlice, result: SliceResult) -> None:
        self.num_computed += part.num_tokens - len(part.draft) + max(0, len(result.drawn) - 1)
        self.results.append(result)
        self.sequence.token_ids.extend([drawn.token_id for drawn in result.drawn])


def step(engine: Engine, parts: Sequence[tuple[SteppedRequest, int]]) -> None:
    """Run one step over the next slices of some requests, each of at most the given number of tokens."""
    batch = [(generation, generation.next_slice(chunk_tokens)) for generation, chunk_tokens in parts]
    results = engine.execute([part for _, part in batch])
    for (generation, part), result in zip(batch, results, strict=True):
        generation.accept(part, result)


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    chunk_tokens: int = 1 << 20,
    params: SamplingParams = GREEDY,
    first_block: int = 0,
) -> SteppedRequest:
    """Run one request alone to its end, its blocks counted down from the cache's end so that ids are no order."""
    generation = SteppedRequest(
        new_sequence(prompt_ids, block_table(engine, len(prompt_ids) + max_tokens, first_block), params), max_tokens
    )
    while not generation.done:
        step(engine, [(generation, chunk_tokens)])
    return generation


def block_table(engine: Engine, num_tokens: int, first: int = 0) -> list[int]:
    """Return blocks for a sequence: descending ids, leaving out the ``first`` highest."""
    num_blocks = num_blocks_for(num_tokens, engine.kv.layout.block_size)
    highest = engine.kv.num_blocks - 1 - first
    assert num_blocks <= highest + 1, "the test's cache is too small"
    return list(range(highest, highest - num_blocks, -1))


def separate_tables(engine: Engine, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield disjoint block tables for sequences of these lengths."""
    first = 0
    for length in lengths:
        table = block_table(engine, length, first)
        first += len(table)
        yield table


def assert_nothing_changes_when_computed_again(engine: TorchEngine) -> None:
    """Assert that computing a prompt again, which ends inside a block, changes no key or value before it is stored."""
    table, layers = [7, 3, 5], engine.kv.layers
    request = SteppedRequest(new_sequence(list(range(40)), table), max_tokens=2)
    step(engine, [(request, 40)])
    before = [layer[table].clone() for layer in layers]
    before_attention, num_seen = Transformer.before_attention, 0

    def looking(self: Transformer, *args: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_seen
        num_seen += 1
        for number, (layer, held) in enumerate(zip(layers, before, strict=True)):
            assert layer[table].equal(held), f"layer {number} has changed"
        return before_attention(self, *args)

    with mock.patch.object(Transformer, "before_attention", looking):
        engine.execute([SequenceSlice(sequence=request.sequence, start=0, num_tokens=40, sample=False)])
    assert num_seen >= len(layers)
