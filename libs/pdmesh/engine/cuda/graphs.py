"""CUDA graphs of decode steps: one launch for a whole step, in a few batch sizes.

The host launches the kernels of a small step more slowly than the device runs them. A graph replays them at once, but
with fixed shapes and addresses. A batch is therefore padded to the next size in `graph_batch_size`, by rows that use
the cache's scratch block. Its integers are copied to the addresses that the graph reads. All sizes share the memory of
the results: logits and the most likely tokens.

While a step is computed, the next one is *prepared* under the assumption that the same sequences continue. Its integers
and FlashInfer's plan are sent before the tokens are known; the tokens are copied on the device. If another batch comes
instead, the preparation is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionPlan
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.cuda.flashinfer import FlashInfer, GraphDecode
from pdmesh.engine.cuda.page_tables import PageTables, lengths_of
from pdmesh.engine.cuda.staging import Turns
from pdmesh.engine.cuda.streams import Streams
from pdmesh.engine.forward import Rows, take_rows
from pdmesh.engine.sampler import draw, takes_best
from pdmesh.engine.transformer_model import StepInputs

#: Largest batch that is recorded. Larger batches are worth launching kernel by kernel. The bound limits the graphs to
#: 16.
MAX_BATCH_SIZE = 256


def graph_batch_size(num_decodes: int) -> int:
    """Return the least power of two, or half more than one, that is at least ``num_decodes``.

    Half of the rows are padding at most, and a third in large batches.
    """
    power = 1 << (num_decodes - 1).bit_length()
    between = power * 3 // 4
    return between if power >= 4 and num_decodes <= between else power


class Recorder(Protocol):
    """Recorder of work on a device, to repeat the work with a single call."""

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Do ``work`` once or more. Return a function that repeats the work with the same memory."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs. Graphs run one after the other, and share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compile kernels, and let libraries allocate memory that a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads continue to copy transfers
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class _Batch(NamedTuple):
    """Decodes of one step: the token at ``starts[i]`` of each sequence."""

    sequences: list[EngineSequence]
    starts: list[int]

    def following(self) -> _Batch | None:
        """Return the same decodes one token later, or None unless every sequence will certainly continue.

        A sequence may end with its next token by length. A start that is not the last known token also gives None.
        """
        for sequence, start in zip(self.sequences, self.starts, strict=True):
            if start != len(sequence.token_ids) - 1 or sequence.num_output_tokens + 1 >= sequence.params.max_tokens:
                return None
        return _Batch(self.sequences, [start + 1 for start in self.starts])

    def has_blocks(self, block_size: int) -> bool:
        parts = zip(self.sequences, self.starts, strict=True)
        return all(start // block_size < len(sequence.block_table) for sequence, start in parts)


@dataclass(slots=True)
class _Prepared:
    batch: _Batch
    token_ids: list[int]

    def serves(self, batch: _Batch) -> bool:
        mine, parts = self.batch, list(zip(batch.sequences, batch.starts, strict=True))
        return (
            mine.starts == batch.starts
            and all(a is b for a, b in zip(mine.sequences, batch.sequences, strict=True))
            and [sequence.token_ids[start] for sequence, start in parts] == self.token_ids
        )


class _Graph:
    """Buffers of a graph of one batch size. The graph reads its integers from ``packed`` and ``pages``."""

    def __init__(self, size: int, max_pages: int, device: torch.device) -> None:
        self.size = size
        self.packed = torch.zeros(7 * size + 1, dtype=torch.int32, device=device)
        *fields, self.rows, self.last_page_len, self.indptr = torch.split(self.packed, [size] * 6 + [size + 1])
        self.token_ids = fields[0]
        self.fields = self.packed[: 4 * size].view(4, size)
        self.pages = torch.zeros(max_pages, dtype=torch.int32, device=device)

    def inputs(self) -> StepInputs:
        token_ids, positions, num_prompt_tokens, slots = self.fields.long().unbind()
        return StepInputs(token_ids, positions, num_prompt_tokens, slots, rests=None)


class DecodeGraphs:
    """Executor of decode batches of at most ``max_batch_size``, one after the other.

    ``forward`` and ``head`` are the transformer's functions: from a step's inputs to hidden states, and from these to
    logits.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs, AttentionPlan], Tensor],
        head: Callable[[Tensor, Tensor], object],
        flashinfer: FlashInfer,
        tables: PageTables,
        recorder: Recorder,
        streams: Streams,
        *,
        max_batch_size: int,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        scratch_block: int,
    ) -> None:
        self._forward = forward
        self._head = head
        self._flashinfer = flashinfer
        self._tables = tables
        self._recorder = recorder
        self._streams = streams
        self.max_batch_size = graph_batch_size(min(max_batch_size, MAX_BATCH_SIZE))
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._scratch_table = [scratch_block]
        self._turns = Turns(streams)
        self._graphs: dict[int, tuple[_Graph, GraphDecode, Callable[[], object]]] = {}
        self._prepared: _Prepared | None = None
        self._logits = torch.empty(self.max_batch_size, vocab_size, dtype=torch.float32, device=streams.device)
        self._best = torch.empty(self.max_batch_size, dtype=torch.int64, device=streams.device)
        self._host_ids = streams.host_buffer(self.max_batch_size, torch.int64)

    def record_all(self) -> None:
        """Record a graph of every size. The largest is first, because the others reuse its memory."""
        for size in sorted({graph_batch_size(n) for n in range(1, self.max_batch_size + 1)}, reverse=True):
            self._graph(size)

    def step(self, parts: Sequence[SequenceSlice]) -> GraphOutput:
        """Start a step and return its output, which the next step overwrites."""
        batch = _Batch([part.sequence for part in parts], [part.start for part in parts])
        graph, decode, replay = self._graph(graph_batch_size(len(parts)))
        prepared, self._prepared = self._prepared, None
        if prepared is None or not prepared.serves(batch):
            tokens = [sequence.token_ids[start] for sequence, start in zip(*batch, strict=True)]
            self._send(graph, decode, batch, tokens)
        replay()
        size = len(parts)
        draws = all(part.sample for part in parts)
        return GraphOutput(self, self._logits[:size], self._best[:size], batch if draws else None)

    def forget(self) -> None:
        """Discard the prepared step: another step may overwrite its page-table rows."""
        self._prepared = None

    def take(self, drawn: Tensor, batch: _Batch | None) -> list[int]:
        """Return the drawn token ids on the host. Meanwhile, prepare the step that probably follows ``batch``."""
        host = self._host_ids[: len(drawn)]
        host.copy_(drawn, non_blocking=True)
        arrived = self._streams.record(spins=True)
        following = None if batch is None else batch.following()
        if following is not None and following.has_blocks(self._block_size):
            graph, decode, _ = self._graph(graph_batch_size(len(drawn)))
            self._send(graph, decode, following, None)
            graph.token_ids[: len(drawn)].copy_(drawn)
            self._prepared = _Prepared(following, [])
        arrived.synchronize()
        token_ids: list[int] = host.tolist()
        if self._prepared is not None:
            self._prepared.token_ids = token_ids
        return token_ids

    def _graph(self, size: int) -> tuple[_Graph, GraphDecode, Callable[[], object]]:
        found = self._graphs.get(size)
        if found is None:
            graph = _Graph(size, self._num_blocks + size, self._streams.device)
            decode = self._flashinfer.graph_decode(graph.indptr, graph.pages, graph.last_page_len)
            self._send(graph, decode, _Batch([], []), [])

            def work() -> None:
                self._tables.write(graph.rows, graph.indptr, graph.pages)
                logits = self._logits[:size]
                self._head(self._forward(graph.inputs(), decode), logits)
                torch.argmax(logits, dim=-1, out=self._best[:size])

            found = self._graphs[size] = graph, decode, self._recorder.record(work)
        return found

    def _send(self, graph: _Graph, decode: GraphDecode, batch: _Batch, token_ids: list[int] | None) -> None:
        """Send a step's integers and plan, behind the device's earlier work. None: the token ids are copied later."""
        turn = self._turns.next()
        size, used = self._block_size, len(batch.starts)
        starts = np.zeros(graph.size, dtype=np.int32)
        starts[:used] = batch.starts
        values = np.zeros((4, graph.size), dtype=np.int32)
        if token_ids is not None:
            values[0, :used] = token_ids
        values[1] = starts
        values[2, :used] = [sequence.num_prompt_tokens for sequence in batch.sequences]
        values[3] = self._scratch_block * size
        tables = [sequence.block_table for sequence in batch.sequences]
        blocks = [table[start // size] for table, start in zip(tables, batch.starts, strict=True)]
        values[3, :used] = np.asarray(blocks, dtype=np.int32) * size + starts[:used] % size
        rows = self._tables.rows([*tables, *[self._scratch_table] * (graph.size - used)], turn.staging)
        lengths = lengths_of(starts + 1, size)
        packed = turn.staging.host(np.concatenate([values.ravel(), rows, lengths.last_page_len, lengths.indptr]))
        graph.packed.copy_(packed, non_blocking=True)
        _, last_page_len, indptr = torch.split(packed, [5 * graph.size, graph.size, graph.size + 1])
        decode.plan(indptr, last_page_len, turn.plan)


class GraphOutput:
    """`pdmesh.engine.forward.StepOutput` of a graph, valid until the next graph runs.

    ``ended`` is set when the tokens have arrived; the device has then computed everything before them.
    """

    def __init__(self, graphs: DecodeGraphs, logits: Tensor, best: Tensor, batch: _Batch | None) -> None:
        self._graphs = graphs
        self._logits = logits
        self._best = best
        self._batch = batch
        self.ended = False

    def kept(self) -> GraphOutput:
        """Return a copy of this output, which another graph does not overwrite."""
        return GraphOutput(self._graphs, self._logits.clone(), self._best.clone(), None)

    def logits(self, rows: Rows) -> Tensor:
        return take_rows(self._logits, rows)

    def embeddings(self, rows: Rows) -> Tensor:
        raise AssertionError("a graph keeps no hidden states: steps that embed are computed without one")

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        if all(takes_best(sequence) for sequence in sequences):
            drawn = take_rows(self._best, rows)
        else:
            drawn = draw(take_rows(self._logits, rows), sequences)
        token_ids = self._graphs.take(drawn, self._batch)
        self.ended = True
        return token_ids
