"""FlashInfer's kernels beside each other, without the rest of a step: which backend suits which shape."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.gpu_timing import queued_s
from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention, load_library
from pdmesh.engine.cuda.page_tables import PageTables
from pdmesh.engine.cuda.staging import PLAN_BYTES, Staging
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.kv_layout import KvLayout, num_blocks_for

#: (queries, context before them) of a chunk.
CHUNKS = ((128, 32_768), (192, 32_768), (256, 32_768), (512, 32_768), (2048, 6_144), (8192, 0))
#: (decodes, context of each).
DECODES = ((1, 4096), (64, 4096), (1, 65_536))

_XQA_BYTES = 256 * 1024 * 1024


def attention_lines(layout: KvLayout, num_heads: int, rounds: int) -> Iterator[str]:
    """One line a shape: microseconds of one layer's attention, by the device's clock, for each backend."""
    library = load_library()
    if library is None:
        yield "attention: FlashInfer is not installed"
        return
    bench = _Bench(library, layout, num_heads)
    for num_queries, start in CHUNKS:
        spans = bench.spans(1, num_queries, start)
        taken = {backend: bench.chunk_s(spans, backend, rounds) for backend in ("fa2", "fa3")}
        yield f"attention of {num_queries:5d} queries over {start + num_queries:6d} tokens: {_shown(taken)}"
    for number, context in DECODES:
        spans = bench.spans(number, 1, context - 1)
        taken = {"fa2": bench.decode_s(spans, rounds), "xqa": bench.xqa_s(spans, rounds)}
        yield f"attention of {number:5d} decodes at {context:6d} tokens: {_shown(taken)}"


def _shown(taken: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in taken.items())


class _Bench:
    def __init__(self, library: Any, layout: KvLayout, num_heads: int) -> None:
        self._library = library
        self._layout = layout
        self._num_heads = num_heads
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._streams = CudaStreams(self._device)
        self._staging = Staging(self._streams)
        most = max([start + n for n, start in CHUNKS] + [n * context for n, context in DECODES])
        self._num_blocks = num_blocks_for(most, layout.block_size) + max(n for n, _ in DECODES)
        shape = (self._num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self._cache = torch.randn(shape, dtype=torch.bfloat16, device=self._device)
        self._tables = PageTables(
            block_size=layout.block_size, max_blocks=num_blocks_for(most, layout.block_size), device=self._device
        )

    def spans(self, number: int, num_queries: int, start: int) -> list[QuerySpan]:
        """Sequences over blocks that lie anywhere."""
        each = num_blocks_for(start + num_queries, self._layout.block_size)
        ids = random.Random(0).sample(range(self._num_blocks), number * each)
        return [QuerySpan(i * num_queries, num_queries, start, ids[i * each : (i + 1) * each]) for i in range(number)]

    def chunk_s(self, spans: list[QuerySpan], backend: str, rounds: int) -> float:
        self._staging.restart()
        plan = FlashInferAttention(self._flashinfer(backend), self._tables, self._staging).plan(spans)
        query = self._query(spans)
        return queued_s(lambda: plan.attend(query, self._cache), rounds)

    def decode_s(self, spans: list[QuerySpan], rounds: int) -> float:
        self._staging.restart()
        index = self._tables.index(spans, self._staging)
        indptr, last_page_len = (torch.from_numpy(values).to(self._device) for values in index.lengths)
        decode = self._flashinfer("auto").graph_decode(indptr, index.pages, last_page_len)
        pinned = self._streams.host_buffer(PLAN_BYTES, torch.uint8)
        decode.plan(self._staging.host(index.lengths.indptr), self._staging.host(index.lengths.last_page_len), pinned)
        query = self._query(spans)
        return queued_s(lambda: decode.attend(query, self._cache), rounds)

    def xqa_s(self, spans: list[QuerySpan], rounds: int) -> float:
        """Its kernel wants contiguous queries, a table of pages, and semaphores that were zero."""
        tables = torch.tensor([list(span.block_table) for span in spans], dtype=torch.int32, device=self._device)
        lengths = torch.tensor([span.end for span in spans], dtype=torch.uint32, device=self._device)
        workspace = torch.zeros(_XQA_BYTES, dtype=torch.uint8, device=self._device)
        query = self._query(spans).contiguous()
        output = torch.empty_like(query)
        scale = self._layout.head_dim**-0.5

        def attend() -> None:
            self._library.decode.trtllm_batch_decode_with_kv_cache(
                query,
                self._cache,
                workspace,
                tables,
                lengths,
                max(span.end for span in spans),
                bmm1_scale=scale,
                bmm2_scale=1.0,
                out=output,
                kv_layout="HND",
                backend="xqa",
            )

        return queued_s(attend, rounds)

    def _flashinfer(self, backend: str) -> FlashInfer:
        return FlashInfer(
            self._library,
            self._layout,
            num_heads=self._num_heads,
            scale=self._layout.head_dim**-0.5,
            max_decodes=max(n for n, _ in DECODES),
            num_multiprocessors=torch.cuda.get_device_properties(self._device).multi_processor_count,
            device=self._device,
            prefill_backend=backend,
        )

    def _query(self, spans: list[QuerySpan]) -> torch.Tensor:
        rows = spans[-1].row + spans[-1].num_tokens
        width = self._num_heads + 2 * self._layout.num_kv_heads
        qkv = torch.randn(rows, width, self._layout.head_dim, dtype=torch.bfloat16, device=self._device)
        return qkv[:, : self._num_heads]
