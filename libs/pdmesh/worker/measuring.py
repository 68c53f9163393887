"""Timing steps on an engine: a few when an instance starts, many for `pdmesh profile`."""

from __future__ import annotations

import array
import time
from collections.abc import Iterator, Mapping
from math import inf

from pdmesh.engine.base import Engine, EngineSequence, SequenceSlice
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import MeasuredStep, RequestId, SamplingParams
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.policy.latency_profile import shape_of
from pdmesh.worker.known_steps import KnownSteps

#: Steps that an instance times when it starts: the constant, decodes, a chunk, attention, and mixed steps. The cheap
#: ones come first, so that a slow machine times decodes too: arithmetic tells little of decodes.
_START_STEPS = (
    StepShape((ChunkShape(32, 0),), 0, 0),
    StepShape((), 1, 64),
    StepShape((), 8, 4096),
    StepShape((ChunkShape(256, 0),), 0, 0),
    StepShape((ChunkShape(64, 8192),), 0, 0),
    StepShape((ChunkShape(256, 0),), 32, 2048),
    StepShape((ChunkShape(64, 0),), 8, 512),
    StepShape((ChunkShape(256, 0),), 8, 512),
    StepShape((ChunkShape(512, 512),), 0, 0),
)
START_LIMIT_S = 1.0
#: Most times that each step is timed. Other processes on the cores slow some of them down.
START_ROUNDS = 4
#: Seconds for timing known steps again, since a machine that was busy before may be quiet now.
REFRESH_S = 0.1


def measure_at_start(
    engine: Engine, limit_s: float = START_LIMIT_S, known: KnownSteps | None = None
) -> tuple[MeasuredStep, ...]:
    """Time as many steps as fit in about ``limit_s``, in rounds, and return the least time of each. Blocking.

    Steps that are ``known`` are timed again only if no others fit, the shortest first, for `REFRESH_S`. New times are
    added to the known ones.

    Steps are timed in rounds, not several times in a row, because an interruption lasts. If an interruption slowed all
    timings of a short chunk, tokens would seem to cost nothing, and the first chunks would be far too long. An untimed
    step comes first, for the first use of code and memory.
    """
    began_s = time.perf_counter()
    step_s(engine, StepShape((ChunkShape(32, 0),), 0, 0))
    shapes = [shape for shape in _START_STEPS if fits(engine, shape)]
    earlier = {} if known is None else {shape_of(step): step.duration_s for step in known.read()}
    least_s = {shape: earlier[shape] for shape in shapes if shape in earlier}
    missing = [shape for shape in shapes if shape not in least_s and _expected_s(shape, least_s) < limit_s]
    if not missing:
        limit_s = min(limit_s, REFRESH_S)
    for shape in (missing or sorted(least_s, key=lambda shape: least_s[shape])) * START_ROUNDS:
        if time.perf_counter() - began_s > limit_s:
            break
        least_s[shape] = min(step_s(engine, shape), least_s.get(shape, inf))
    steps = tuple([_measured(shape, seconds) for shape, seconds in least_s.items()])
    if known is not None and least_s != earlier:
        known.write(steps)
    return steps


def _expected_s(shape: StepShape, known_s: Mapping[StepShape, float]) -> float:
    """Estimate the time of a step in proportion to the largest known step, by tokens; 0 if no step is known."""
    largest = max(known_s, key=_num_tokens, default=None)
    return 0.0 if largest is None else known_s[largest] * _num_tokens(shape) / _num_tokens(largest)


def _num_tokens(shape: StepShape) -> int:
    return sum(chunk.num_tokens for chunk in shape.chunks) + int(shape.num_decodes)


def _measured(shape: StepShape, seconds: float) -> MeasuredStep:
    chunk = shape.chunks[0] if shape.chunks else ChunkShape(0, 0)
    return MeasuredStep(
        num_tokens=chunk.num_tokens,
        num_history_tokens=chunk.num_history_tokens,
        num_decodes=int(shape.num_decodes),
        num_decode_context_tokens=int(shape.num_decode_context_tokens),
        duration_s=seconds,
    )


def fits(engine: Engine, shape: StepShape) -> bool:
    """Whether the step's blocks fit into the engine's KV cache, and its longest sequence into the context."""
    block_size = engine.kv.layout.block_size
    lengths = _lengths(shape)
    num_blocks = sum(num_blocks_for(length, block_size) for length in lengths)
    return num_blocks <= engine.kv.num_blocks and max(lengths) < engine.max_model_len


def step_s(engine: Engine, shape: StepShape) -> float:
    """Execute one step of this shape and return the time in seconds. Overwrites the KV cache."""
    batch = list(_batch(shape, engine.kv.layout.block_size))
    began_s = time.perf_counter()
    engine.execute(batch)
    return time.perf_counter() - began_s


def _lengths(shape: StepShape) -> list[int]:
    """Return the length of each sequence: first the chunks, then the decodes, which are equally long."""
    chunks = [chunk.num_history_tokens + chunk.num_tokens for chunk in shape.chunks]
    num_decodes = int(shape.num_decodes)
    return chunks + [int(shape.num_decode_context_tokens) // max(1, num_decodes)] * num_decodes


def _batch(shape: StepShape, block_size: int) -> Iterator[SequenceSlice]:
    first_block = 0
    lengths = _lengths(shape)
    for number, length in enumerate(lengths):
        num_blocks = num_blocks_for(length, block_size)
        sequence = EngineSequence(
            request_id=RequestId(f"measure-{number}"),
            params=SamplingParams(max_tokens=1 << 20),
            token_ids=array.array("i", bytes(4 * length)),
            num_prompt_tokens=length,
            block_table=list(range(first_block, first_block + num_blocks)),
            is_timing=True,
        )
        first_block += num_blocks
        is_decode = number >= len(shape.chunks)
        num_tokens = 1 if is_decode else shape.chunks[number].num_tokens
        yield SequenceSlice(sequence=sequence, start=length - num_tokens, num_tokens=num_tokens, sample=is_decode)
