"""Piecewise CUDA graphs of short steps with chunks: one graph for the part between two layers' attention.

Kernel by kernel, a step of 256 tokens took the host 14 ms to launch and the device 6 to compute (Llama-3-8B's shape,
H100, 2026-11-23). Attention kernels depend on the lengths of sequences, so attention is launched between the graphs, as
are the layer hooks. A step is padded to the next of a few sizes, by rows that write to the cache's scratch block and
that no row attends to. All sizes share the memory of a step, so one step at a time can use the graphs. A step inside
another is launched kernel by kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.cuda.flashinfer import FlashInferPlan
from pdmesh.engine.cuda.graphs import Recorder
from pdmesh.engine.cuda.staging import Staging
from pdmesh.engine.forward import StepArrays
from pdmesh.engine.kernels import Rotation
from pdmesh.engine.transformer_model import StepInputs, Transformer

#: Numbers of tokens that are recorded. Larger steps keep the device busy for longer than their launches take the host.
SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


class LayerGraphs:
    """Graphs of the parts between the attention of the transformer's layers, recorded in each of `SIZES`."""

    def __init__(
        self,
        transformer: Transformer,
        caches: Sequence[Tensor],
        recorder: Recorder,
        *,
        num_heads: int,
        hidden_size: int,
        scratch_block: int,
    ) -> None:
        first = caches[0]
        _, _, _, block_size, head_dim = first.shape
        self._transformer = transformer
        self._caches = caches
        self._recorder = recorder
        self._padding = np.array([[0], [0], [0], [scratch_block * block_size]], dtype=np.int32)
        self._steps: dict[int, list[Callable[[], object]]] = {}
        #: Rotations by size. They are kept because freed memory of a graph may be reused by another graph.
        self._rotations: dict[int, Sequence[Rotation]] = {}
        self._in_use = False
        self._integers = torch.zeros(4 * SIZES[-1], dtype=torch.int32, device=first.device)
        self._hidden = first.new_zeros(SIZES[-1], hidden_size, dtype=transformer.hidden_dtype)
        self._query = first.new_zeros(SIZES[-1], num_heads, head_dim)
        self._attended = first.new_zeros(SIZES[-1], num_heads, head_dim)

    def record_all(self) -> None:
        """Record all sizes. The largest is first, because the others reuse its memory."""
        for size in reversed(SIZES):
            self._step(size)

    @contextlib.contextmanager
    def lent(self, num_tokens: int) -> Iterator[LayerGraphs | None]:
        """Yield these graphs for a step of ``num_tokens``, or None if it is too long or the graphs are in use."""
        if self._in_use or num_tokens > SIZES[-1]:
            yield None
            return
        self._in_use = True
        try:
            yield self
        finally:
            self._in_use = False

    def forward(
        self, arrays: StepArrays, staging: Staging, attention: FlashInferPlan, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """Compute as `Transformer.forward` does. The next step overwrites the returned hidden states."""
        num_tokens = len(arrays.token_ids)
        size = next(size for size in SIZES if num_tokens <= size)
        segments = self._step(size)
        values = np.repeat(self._padding, size, axis=1)
        values[:, :num_tokens] = arrays
        self._integers[: values.size].copy_(staging.host(values.ravel()), non_blocking=True)
        query, attended = self._query[:num_tokens], self._attended[:num_tokens]
        segments[0]()
        for number, (cache, segment) in enumerate(zip(self._caches, segments[1:], strict=True)):
            if on_layer is not None:
                on_layer(number)
            attention.attend_into(attended, query, cache)
            segment()
        return self._hidden[:num_tokens]

    def _step(self, size: int) -> list[Callable[[], object]]:
        """Return the graphs of a step of this size: before the first layer's attention, after it, and so on."""
        found = self._steps.get(size)
        if found is None:
            self._integers[: 4 * size].view(4, size).copy_(torch.from_numpy(self._padding).expand(4, size))
            found = self._steps[size] = [self._recorder.record(work) for work in self._segments(size)]
        return found

    def _segments(self, size: int) -> Iterator[Callable[[], None]]:
        transformer, hidden = self._transformer, self._hidden[:size]
        query, attended = self._query[:size], self._attended[:size]

        def begin() -> None:
            token_ids, positions, num_prompt_tokens, slots = self._integers[: 4 * size].view(4, size).long().unbind()
            inputs = StepInputs(token_ids, positions, num_prompt_tokens, slots, rests=None)
            embedded, self._rotations[size] = transformer.embed(inputs)
            go_on(0, embedded, None)

        def go_on(layer: int, given: Tensor, delta: Tensor | None) -> None:
            left, asked = transformer.before_attention(layer, given, delta, self._rotations[size], self._caches[layer])
            _keep(left, hidden)
            _keep(asked, query)

        def between(layer: int, following: int) -> None:
            go_on(following, *transformer.after_attention(layer, hidden, attended))

        def end() -> None:
            left, delta = transformer.after_attention(len(self._caches) - 1, hidden, attended)
            torch.add(left, delta, out=hidden)

        yield begin
        for layers in pairwise(range(len(self._caches))):
            yield partial(between, *layers)
        yield end


def _keep(value: Tensor, place: Tensor) -> None:
    if value.data_ptr() != place.data_ptr():
        place.copy_(value)
