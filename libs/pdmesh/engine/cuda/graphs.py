"""CUDA graphs of decode steps: one launch for a whole step, in a few batch sizes.

A step of few tokens launches its kernels more slowly than the device runs them. A graph replays them at once, but with
the same shapes and addresses: a batch is padded to the next size in `graph_batch_size`, by rows that read and write
the cache's scratch block, and its integers are copied to where the graph reads them. A graph is captured when its size
is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionBackend, AttentionPlan, Span
from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.model import StepInputs

#: Larger batches are worth launching kernel by kernel; this bounds how many graphs there are: 16.
MAX_BATCH_SIZE = 256

_NUM_FIELDS = 5  # of StepInputs


def graph_batch_size(num_decodes: int) -> int:
    """The least power of two, or half more than one, that holds them: at most half of the rows pad, of many a third."""
    power = 1 << (num_decodes - 1).bit_length()
    between = power * 3 // 4
    return between if power >= 4 and num_decodes <= between else power


class Recording(NamedTuple):
    output: Tensor  # the same memory after every replay
    replay: Callable[[], object]


class Recorder(Protocol):
    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Do ``work`` once or more, and keep it for replays; `Recording.output` holds nothing before the first."""
        ...


class CudaRecorder:
    """Captures on streams of its own; the graphs share their memory, since they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and makes libraries allocate what a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: transfers go on copying from other threads
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        return Recording(output, graph.replay)


@dataclass(slots=True)
class _Graph:
    inputs: Tensor  # (_NUM_FIELDS, batch size), int64, where the graph reads them
    attention: AttentionBackend
    recording: Recording | None = None


class DecodeGraphs:
    """Runs batches of decodes, at most `MAX_BATCH_SIZE`. One staging for all: they run one after the other."""

    def __init__(
        self,
        forward: Callable[[StepInputs, AttentionPlan], Tensor],
        make_attention: Callable[[int], AttentionBackend],
        recorder: Recorder,
        staging: Staging,
        *,
        block_size: int,
        scratch_block: int,
    ) -> None:
        self._forward = forward
        self._make_attention = make_attention
        self._recorder = recorder
        self._staging = staging
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._scratch_table = [scratch_block]
        self._graphs: dict[int, _Graph] = {}

    def step(self, batch: Sequence[SequenceSlice]) -> Tensor:
        """Hidden states (len(batch), hidden_size); the caller's own."""
        self._staging.restart()
        size = graph_batch_size(len(batch))
        graph = self._graphs.get(size)
        if graph is None:
            inputs = torch.zeros(_NUM_FIELDS, size, dtype=torch.int64, device=self._staging.device)
            graph = self._graphs[size] = _Graph(inputs, self._make_attention(size))
        self._fill(graph.inputs, batch)
        plan = graph.attention.plan(self._spans(batch, size))
        if graph.recording is None:
            step = _step_inputs(graph.inputs)
            graph.recording = self._recorder.record(lambda: self._forward(step, plan))
        graph.recording.replay()
        return graph.recording.output[: len(batch)].clone()

    def _fill(self, inputs: Tensor, batch: Sequence[SequenceSlice]) -> None:
        size = self._block_size
        values = np.zeros(inputs.shape, dtype=np.int32)
        values[3] = self._scratch_block * size
        values[4] = self._scratch_block
        starts = [part.start for part in batch]
        blocks = [part.sequence.block_table[start // size] for part, start in zip(batch, starts, strict=True)]
        offsets = np.asarray(starts) % size
        rows = slice(0, len(batch))
        values[0, rows] = [part.sequence.token_ids[start] for part, start in zip(batch, starts, strict=True)]
        values[1, rows] = starts
        values[2, rows] = [part.sequence.num_prompt_tokens for part in batch]
        values[3, rows] = np.asarray(blocks) * size + offsets
        # a decode that begins no block wipes the scratch block instead
        values[4, rows] = np.where(offsets == 0, blocks, self._scratch_block)
        (packed,) = self._staging.upload(values.reshape(-1))
        inputs.copy_(packed.view(inputs.shape))

    def _spans(self, batch: Sequence[SequenceSlice], size: int) -> list[Span]:
        spans = [Span(row, 1, part.start, part.sequence.block_table) for row, part in enumerate(batch)]
        return spans + [Span(row, 1, 0, self._scratch_table) for row in range(len(batch), size)]


def _step_inputs(fields: Tensor) -> StepInputs:
    token_ids, positions, num_prompt_tokens, slots, new_blocks = fields.unbind()
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        num_prompt_tokens=num_prompt_tokens,
        slots=slots,
        new_blocks=new_blocks,
    )
