"""Our calls through the real FlashInfer's Python, where its wheel is installed; only its compiled kernels are torch.

What the wrappers check, copy and keep between `plan` and `run` is theirs; a stand-in takes what they hand to kernels.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionPlan, QuerySpan, TorchAttention
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention
from pdmesh.engine.cuda.page_tables import PageTables, write_pages
from pdmesh.engine.cuda.staging import PLAN_BYTES, Staging
from pdmesh.kv_layout import KvLayout
from pdmesh_testing.cuda import FakeStreams

flashinfer = pytest.importorskip("flashinfer", reason="needs FlashInfer's wheel", exc_type=ImportError)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
NUM_HEADS, SCALE = 6, 0.11
CPU = torch.device("cpu")


class Kernels:
    """What `get_batch_prefill_module` of FlashInfer gives, for the host."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self.pinned: list[int] = []  # where each plan was written

    def module(self, backend: str, *_: Any) -> SimpleNamespace:
        self.backends.append(backend)
        return SimpleNamespace(plan=self.plan, paged_run=self.paged_run)

    def plan(self, workspace: Tensor, _int: Tensor, pinned: Tensor, qo_indptr: Tensor, indptr: Tensor, lens: Tensor,
             num_rows: int, batch_size: int, num_heads: int, num_kv_heads: int, page_size: int, graph: bool,
             head_dim: int, head_dim_vo: int, causal: bool, window: int, *_: Any) -> list[int]:  # fmt: skip
        assert all(values.is_cpu and values.dtype == torch.int32 for values in (qo_indptr, indptr, lens))
        assert len(qo_indptr) == len(indptr) == len(lens) + 1 == batch_size + 1
        assert int(qo_indptr[-1]) == num_rows
        assert (-(-lens // page_size)).tolist() == indptr.diff().tolist()
        assert (num_heads, num_kv_heads, head_dim, head_dim_vo, window) == (NUM_HEADS, 2, 64, 64, -1)
        self.pinned.append(pinned.data_ptr())
        return [1]

    def paged_run(self, workspace: Tensor, _int: Tensor, plan: list[int], q: Tensor, keys: Tensor, values: Tensor,
                  qo_indptr: Tensor, indptr: Tensor, pages: Tensor, last_page_len: Tensor, out: Tensor,
                  lse: Tensor | None, mask_mode: int, layout: int, *rest: Any) -> None:  # fmt: skip
        assert plan == [1]
        assert layout == 1  # HND
        assert rest[9] == SCALE
        for number in range(len(last_page_len)):
            rows = slice(int(qo_indptr[number]), int(qo_indptr[number + 1]))
            used = pages[int(indptr[number]) : int(indptr[number + 1])].long()
            length = (len(used) - 1) * 16 + int(last_page_len[number])
            k, v = (part[used].float().transpose(0, 1).flatten(1, 2)[:, :length] for part in (keys, values))
            k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
            scores = q[rows].float().transpose(0, 1) @ k.transpose(1, 2) * SCALE
            if mask_mode == 1:  # causal
                later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - (rows.stop - rows.start) + 1)
                scores = scores.masked_fill(later, -torch.inf)
            out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
            if lse is not None:
                lse[rows] = scores.logsumexp(-1).t() / math.log(2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made, empty = Kernels(), torch.empty
    for module in (flashinfer.prefill, flashinfer.decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", made.module)
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
        monkeypatch.setattr(module, "determine_attention_backend", lambda *_: "fa3")
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


class Bench:
    def __init__(self, spans: list[QuerySpan]) -> None:
        self.spans = spans
        generator = torch.Generator().manual_seed(1)
        num_blocks = 1 + max(block for span in spans for block in span.block_table)
        self.cache = torch.randn(num_blocks, 2, 2, 16, 64, generator=generator).bfloat16()
        rows = spans[-1].row + spans[-1].num_tokens
        self.query = torch.randn(rows, NUM_HEADS + 4, 64, generator=generator).bfloat16()[:, :NUM_HEADS]
        self.staging = Staging(FakeStreams())
        self.tables = PageTables(block_size=16, max_blocks=num_blocks, device=CPU)
        self.flashinfer = FlashInfer(
            flashinfer, LAYOUT, num_heads=NUM_HEADS, scale=SCALE, max_decodes=8, num_multiprocessors=4, device=CPU
        )

    def check(self, plan: AttentionPlan) -> None:
        wide = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
        reference = TorchAttention(wide, SCALE, CPU).plan(self.spans)
        expected, expected_lse = reference.attend(self.query.float(), self.cache.float(), with_lse=True)
        for with_lse in (False, True):
            output, lse = plan.attend(self.query, self.cache, with_lse=with_lse)
            torch.testing.assert_close(output.float(), expected, atol=1e-2, rtol=1e-2)
            if with_lse:
                torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def test_chunks_and_decodes(kernels: Kernels) -> None:
    tables = [[4, 9, 0], list(range(10, 30)), [7, 1, 2, 3], [5]]
    parts = [(10, 30), (3, 200), (60, 1), (0, 1)]
    rows = [0, 30, 230, 231]
    bench = Bench([QuerySpan(row, n, start, table) for row, (start, n), table in zip(rows, parts, tables, strict=True)])
    bench.check(FlashInferAttention(bench.flashinfer, bench.tables, bench.staging).plan(bench.spans))
    assert kernels.backends == ["fa2", "fa3", "fa2"]  # a short chunk, a long one, decodes


def test_decodes_of_a_graph(kernels: Kernels) -> None:
    """From its second plan on FlashInfer copies nothing: the buffers hold what we wrote there."""
    first = [QuerySpan(row, 1, 0, [0]) for row in range(3)]
    bench = Bench([QuerySpan(0, 1, 40, [4, 9, 8]), QuerySpan(1, 1, 15, [7]), QuerySpan(2, 1, 16, [3, 2])])
    rows, pages = torch.zeros(3, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    packed = torch.zeros(7, dtype=torch.int32)
    indptr, last_page_len = packed[:4], packed[4:]
    decode = bench.flashinfer.graph_decode(indptr, pages, last_page_len)
    turns = [torch.empty(PLAN_BYTES, dtype=torch.uint8) for _ in range(2)]
    for spans, turn in ((first, 0), (bench.spans, 1), (first, 0), (bench.spans, 1)):
        rows.copy_(torch.from_numpy(bench.tables.rows([span.block_table for span in spans], bench.staging)))
        lengths = bench.tables.index(spans, bench.staging).lengths
        indptr.copy_(torch.from_numpy(lengths.indptr))
        last_page_len.copy_(torch.from_numpy(lengths.last_page_len))
        decode.plan(torch.from_numpy(lengths.indptr), torch.from_numpy(lengths.last_page_len), turns[turn])
        write_pages(bench.tables.table, rows, indptr, pages)  # as the graph does
    bench.check(decode)
    assert kernels.pinned == [turns[turn].data_ptr() for turn in (0, 1, 0, 1)]
    assert kernels.backends == ["fa2"]
