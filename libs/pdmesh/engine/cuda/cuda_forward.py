"""Steps on a CUDA device: staged integers, attention by FlashInfer, decodes as graphs."""

from __future__ import annotations

import array
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.base import EngineSequence, LayerHook, SequenceSlice
from pdmesh.engine.cuda.flashinfer import MAX_SHORT_CHUNK, FlashInfer, FlashInferAttention
from pdmesh.engine.cuda.graphs import DecodeGraphs, GraphOutput, Recorder
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.layer_graphs import LayerGraphs
from pdmesh.engine.cuda.page_tables import PageTables, PageWriter, write_pages
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.cuda.streams import Event, Streams
from pdmesh.engine.forward import HiddenOutput, Rows, StepOutput, begun_blocks, step_arrays, step_spans, unfilled_rows
from pdmesh.engine.sampler import draw
from pdmesh.engine.transformer_model import StepInputs, Transformer
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams

#: Least number of tokens for which a layer takes the device many times longer than its launches take the host.
_LARGE_STEP = 2048


class _Lane(NamedTuple):
    """Attention and staging of one step at a time."""

    attention: FlashInferAttention
    staging: Staging


class DeviceForward:
    """`pdmesh.engine.forward.Forward` on a device.

    A step inside a step (a layer hook may run one) has its own staging and wrappers. A step with chunks ends by waiting
    for its own event. Its staging is then free, its KV is written, and its duration includes the computation. A step of
    decodes ends when its tokens arrive; preparation of the next step may continue.
    """

    def __init__(
        self,
        transformer: Transformer,
        flashinfer: FlashInfer,
        store: DeviceKvStore,
        streams: Streams,
        recorder: Recorder,
        *,
        max_model_len: int,
        max_num_seqs: int,
        write: PageWriter = write_pages,
    ) -> None:
        layout = store.layout
        self._transformer = transformer
        self._flashinfer = flashinfer
        self._store = store
        self._streams = streams
        self._max_model_len = max_model_len
        max_blocks = num_blocks_for(max_model_len, layout.block_size)
        self._tables = PageTables(
            block_size=layout.block_size, max_blocks=max_blocks, device=streams.device, write=write
        )
        self._free = [self._make_lane()]
        self._layer_graphs = LayerGraphs(
            transformer,
            store.layers,
            recorder,
            num_heads=transformer.num_heads,
            hidden_size=transformer.hidden_size,
            scratch_block=store.scratch_block,
        )
        self._graphs = DecodeGraphs(
            lambda inputs, plan: transformer.forward(inputs, store.layers, plan, None),
            transformer.logits,
            flashinfer,
            self._tables,
            recorder,
            streams,
            max_batch_size=max_num_seqs,
            vocab_size=transformer.vocab_size,
            num_blocks=store.num_blocks,
            block_size=layout.block_size,
            scratch_block=store.scratch_block,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute steps on the scratch block, so that libraries compile their kernels, and record all graphs.

        Graphs are recorded now because recording waits for the whole device.
        """
        self._graphs.record_all()
        self._layer_graphs.record_all()
        num_tokens = min(MAX_SHORT_CHUNK + 1, self._max_model_len)
        sequence = EngineSequence(
            request_id=RequestId("warm-up"),
            params=SamplingParams(max_tokens=1),
            token_ids=array.array("i", bytes(4 * num_tokens)),
            num_prompt_tokens=num_tokens,
            block_table=[self._store.scratch_block] * num_blocks_for(num_tokens, self._store.layout.block_size),
        )
        lengths = (num_tokens, 2, 1)  # a long chunk, a short one and a decode use different kernels
        batch = [SequenceSlice(sequence=sequence, start=0, num_tokens=length, sample=False) for length in lengths]
        with self.step(batch, step_spans(batch), None) as output:
            output.logits([0])

    @contextlib.contextmanager
    def step(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], on_layer: LayerHook | None
    ) -> Iterator[StepOutput]:
        # A graph keeps no result but the logits.
        is_graph = all(part.num_tokens == 1 and not part.sequence.params.embeds for part in batch)
        if is_graph and len(batch) <= self._graphs.max_batch_size:
            with self._decode(batch, on_layer) as output:
                yield output
            return
        self._graphs.forget()
        num_tokens = sum(part.num_tokens for part in batch)
        try:
            with self._lane() as lane, self._layer_graphs.lent(num_tokens) as graphs:
                yield self._forward(lane, batch, spans, on_layer, graphs)
        finally:
            self.settle()

    def settle(self) -> None:
        self._streams.record().synchronize()

    @contextlib.contextmanager
    def _decode(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None) -> Iterator[GraphOutput]:
        output = self._graphs.step(batch)
        try:
            if on_layer is not None:  # a graph is not interrupted, and a step of the hook may replay it
                output = output.kept()
                self.settle()
                for layer in range(self._store.layout.num_layers):
                    on_layer(layer)
            yield output
        finally:
            if not output.ended:
                self.settle()

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._free.pop() if self._free else self._make_lane()
        lane.staging.restart()
        try:
            yield lane
        finally:
            self._free.append(lane)

    def _make_lane(self) -> _Lane:
        staging = Staging(self._streams)
        return _Lane(FlashInferAttention(self._flashinfer, self._tables, staging), staging)

    def _forward(
        self,
        lane: _Lane,
        batch: Sequence[SequenceSlice],
        spans: Sequence[QuerySpan],
        on_layer: LayerHook | None,
        graphs: LayerGraphs | None,
    ) -> StepOutput:
        arrays = step_arrays(batch, self._store.layout)
        layers_ahead = 1 if len(arrays.token_ids) >= _LARGE_STEP else 2
        hook = None if on_layer is None else paced(on_layer, self._streams, layers_ahead)
        plan = lane.attention.plan(spans)
        layout = self._store.layout
        if len(unfilled := unfilled_rows(begun_blocks(batch, layout), layout, layout.num_kv_heads)):
            (rests,) = lane.staging.upload(unfilled)
            self._store.wipe(rests.long())
        if graphs is None:
            ids, positions, num_prompt_tokens, slots = (values.long() for values in lane.staging.upload(*arrays))
            inputs = StepInputs(ids, positions, num_prompt_tokens, slots, rests=None)
            hidden = self._transformer.forward(inputs, self._store.layers, plan, hook)
        else:
            hidden = graphs.forward(arrays, lane.staging, plan, hook)
        return DeviceOutput(self._transformer, hidden)


class DeviceOutput(HiddenOutput):
    """`StepOutput` of hidden states on a device."""

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        token_ids: list[int] = draw(self.logits(rows), sequences).tolist()
        return token_ids


def paced(on_layer: LayerHook, streams: Streams, layers_ahead: int) -> Callable[[int], None]:
    """Return a hook that calls ``on_layer`` once at most ``layers_ahead`` earlier layers are in computation.

    More layers keep the device busy; fewer let a layer hook interrupt the step sooner.
    """
    events: deque[Event] = deque()

    def hook(layer: int) -> None:
        if len(events) == layers_ahead:
            events.popleft().synchronize()
        on_layer(layer)
        events.append(streams.record())

    return hook
