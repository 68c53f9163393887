"""Steps on a device: their integers staged, attention by FlashInfer, decodes as graphs."""

from __future__ import annotations

import array
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionBackend, Span
from pdmesh.engine.base import EngineSequence, LayerHook, SequenceSlice
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention, GraphAttention
from pdmesh.engine.cuda.graphs import MAX_BATCH_SIZE, DecodeGraphs, Recorder
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.page_tables import PageTables
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.cuda.streams import Event, Streams
from pdmesh.engine.forward import step_inputs, step_spans
from pdmesh.engine.model import Transformer
from pdmesh.model import RequestId, SamplingParams, num_blocks_for

#: Tokens from which on a layer takes the device longer than its launches take the host, many times over.
_LARGE_STEP = 2048


class DeviceForward:
    """`pdmesh.engine.forward.Forward` on a device.

    A step inside a step (a layer hook may run one) has staging and wrappers of its own. A step ends by waiting for its
    own event: then its staging can be used again, its KV is written, and its time is that of the computation.
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
    ) -> None:
        layout = store.layout
        self._transformer = transformer
        self._flashinfer = flashinfer
        self._store = store
        self._streams = streams
        max_blocks = num_blocks_for(max_model_len, layout.block_size)
        self._tables = PageTables(block_size=layout.block_size, max_blocks=max_blocks, device=streams.device)
        self._free = [self._make_lane()]
        graph_staging = Staging(streams)

        def make_attention(batch_size: int) -> AttentionBackend:
            max_pages = store.num_blocks + batch_size
            return GraphAttention(flashinfer, self._tables, graph_staging, batch_size=batch_size, max_pages=max_pages)

        self._graphs = DecodeGraphs(
            lambda inputs, plan: transformer.forward(inputs, store.layers, plan, None),
            make_attention,
            recorder,
            graph_staging,
            block_size=layout.block_size,
            scratch_block=store.scratch_block,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a chunk and a decode on the scratch block: libraries compile their kernels when they are first used."""
        sequence = EngineSequence(
            request_id=RequestId("warm-up"),
            params=SamplingParams(max_tokens=1),
            token_ids=array.array("i", [0, 0]),
            num_prompt_tokens=2,
            block_table=[self._store.scratch_block],
        )
        for start, num_tokens in ((0, 2), (1, 1)):
            batch = [SequenceSlice(sequence=sequence, start=start, num_tokens=num_tokens, sample=False)]
            with self.step(batch, step_spans(batch), None):
                pass

    @contextlib.contextmanager
    def step(
        self, batch: Sequence[SequenceSlice], spans: Sequence[Span], on_layer: LayerHook | None
    ) -> Iterator[Tensor]:
        try:
            if len(batch) <= MAX_BATCH_SIZE and all(part.num_tokens == 1 for part in batch):
                hidden = self._graphs.step(batch)
                if on_layer is not None:  # a graph is not interrupted; a step that the hook runs may replay it
                    self._streams.record().synchronize()
                    for layer in range(self._store.layout.num_layers):
                        on_layer(layer)
                yield hidden
            else:
                with self._lane() as lane:
                    yield lane.forward(batch, spans, on_layer)
        finally:
            self.settle()

    def settle(self) -> None:
        self._streams.record().synchronize()

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
        attention = FlashInferAttention(self._flashinfer, self._tables, staging)
        return _Lane(self._transformer, attention, self._store, self._streams, staging)


class _Lane:
    """What one step at a time may use."""

    def __init__(
        self,
        transformer: Transformer,
        attention: FlashInferAttention,
        store: DeviceKvStore,
        streams: Streams,
        staging: Staging,
    ) -> None:
        self._transformer = transformer
        self._attention = attention
        self._store = store
        self._streams = streams
        self.staging = staging

    def forward(self, batch: Sequence[SequenceSlice], spans: Sequence[Span], on_layer: LayerHook | None) -> Tensor:
        inputs = step_inputs(batch, self._store.layout.block_size, self._upload)
        layers_ahead = 1 if len(inputs.token_ids) >= _LARGE_STEP else 2
        hook = None if on_layer is None else paced(on_layer, self._streams, layers_ahead)
        return self._transformer.forward(inputs, self._store.layers, self._attention.plan(spans), hook)

    def _upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[Tensor]:
        return [values.long() for values in self.staging.upload(*arrays)]


def paced(on_layer: LayerHook, streams: Streams, layers_ahead: int) -> Callable[[int], None]:
    """The hook, called while at most ``layers_ahead`` layers before it are still being computed.

    Enough of them keep the device busy; few let a layer hook interrupt the step soon.
    """
    events: deque[Event] = deque()

    def hook(layer: int) -> None:
        if len(events) == layers_ahead:
            events.popleft().synchronize()
        on_layer(layer)
        events.append(streams.record())

    return hook
