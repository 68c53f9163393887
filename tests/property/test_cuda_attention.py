"""The FlashInfer backend against the torch reference, over random shapes; and its calls against FlashInfer's own.

FlashInfer itself needs a device (``tests/gpu``). Here a stand-in computes, whose calls are bound to the signatures of
the real classes, written down from the sources of 0.6.3 and 0.7.2.
"""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.attention import Span, TorchAttention
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention, GraphAttention
from pdmesh.engine.cuda.page_tables import PageTables
from pdmesh.engine.cuda.staging import Staging
from pdmesh.model import KvLayout, num_blocks_for
from pdmesh.testing.cuda import FakeStreams
from pdmesh.testing.flashinfer import FakeFlashInfer

HEAD_DIM, GROUP, NUM_KV_HEADS = 16, 3, 2
SCALE = HEAD_DIM**-0.5


class Backends:
    """Both backends over one random cache."""

    def __init__(self, parts: list[tuple[int, int]], block_size: int, seed: int) -> None:
        self.layout = KvLayout(
            num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype="float32"
        )
        generator = torch.Generator().manual_seed(seed)
        total = sum(num_blocks_for(start + length, block_size) for start, length in parts)
        ids = random.Random(seed).sample(range(total), total)
        self.spans: list[Span] = []
        row = block = 0
        for start, length in parts:
            num_blocks = num_blocks_for(start + length, block_size)
            self.spans.append(Span(row, length, start, ids[block : block + num_blocks]))
            row, block = row + length, block + num_blocks
        shape = (total, 2, NUM_KV_HEADS, block_size, HEAD_DIM)
        self.cache = torch.randn(shape, generator=generator)
        # part of wider rows, as the projections leave it
        self.query = torch.randn(row, NUM_KV_HEADS * (GROUP + 2), HEAD_DIM, generator=generator)
        self.query = self.query[:, : NUM_KV_HEADS * GROUP]
        self.library = FakeFlashInfer()
        self.flashinfer = FlashInfer(
            self.library, self.layout, num_heads=NUM_KV_HEADS * GROUP, scale=SCALE, device=torch.device("cpu")
        )
        self.tables = PageTables(block_size=block_size, max_blocks=total, device=torch.device("cpu"))
        self.staging = Staging(FakeStreams())

    def check(self, backend: FlashInferAttention | GraphAttention) -> None:
        reference = TorchAttention(self.layout, SCALE, torch.device("cpu")).plan(self.spans)
        expected, expected_lse = reference.attend(self.query, self.cache, with_lse=True)
        plan = backend.plan(self.spans)
        for with_lse in (False, True):
            output, lse = plan.attend(self.query, self.cache, with_lse=with_lse)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
            assert (lse is not None) == with_lse
            if lse is not None and expected_lse is not None:
                torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    parts=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 60))), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference(block_size: int, parts: list[tuple[int, int]], seed: int) -> None:
    backends = Backends(parts, block_size, seed)
    backend = FlashInferAttention(backends.flashinfer, backends.tables, backends.staging)
    backends.check(backend)
    backends.staging.restart()
    backends.check(backend)  # from tables that are on the device already


@settings(deadline=None, max_examples=20)
@given(starts=st.lists(st.integers(0, 70), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_a_plan_for_a_graph_equals_the_reference(starts: list[int], seed: int) -> None:
    backends = Backends([(start, 1) for start in starts], 16, seed)
    backends.check(
        GraphAttention(
            backends.flashinfer, backends.tables, backends.staging, batch_size=len(starts), max_pages=8 * len(starts)
        )
    )


PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


def signature(required: str, optional: str, *, keywords: str = "") -> inspect.Signature:
    """From the names of parameters; ``keywords`` may not be given by position."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, by_position) for name in required.split()]
        + [inspect.Parameter(name, by_position, default=None) for name in optional.split()]
        + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in keywords.split()]
    )


SIGNATURES = {
    (PREFILL, "__init__"): (
        signature(
            "self float_workspace_buffer",
            "kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
            "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs",
        ),
    ),
    (PREFILL, "plan"): (
        signature(
            "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
            "head_dim_qk page_size",
            "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction "
            "sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type "
            "non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr "
            "seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv fixed_split_size "
            "disable_split_kv",
        ),
    ),
    (PREFILL, "run"): (
        signature(
            "self q paged_kv_cache",
            "",
            keywords="q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks",
        ),
    ),
    (DECODE, "__init__"): (
        signature(
            "self float_workspace_buffer",
            "kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer "
            "paged_kv_last_page_len_buffer backend jit_args",
        ),
    ),
    (DECODE, "plan"): (
        signature(
            "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size",
            "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type "
            "sm_scale rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size "
            "disable_split_kv",
        ),
        signature(
            "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size",
            "",
            keywords="pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type "
            "sm_scale rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size "
            "disable_split_kv",
        ),  # 0.7
    ),
    (DECODE, "run"): (
        signature(
            "self q paged_kv_cache",
            "",
            keywords="q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks q_len_per_req",
        ),
    ),
}


def test_calls_are_those_that_flashinfer_takes() -> None:
    backends = Backends([(0, 20), (33, 1), (5, 7), (40, 1)], 16, 0)
    backends.check(FlashInferAttention(backends.flashinfer, backends.tables, backends.staging))
    only = Backends([(33, 1), (40, 1)], 16, 0)
    only.check(GraphAttention(only.flashinfer, only.tables, only.staging, batch_size=2, max_pages=8))
    calls = backends.library.calls + only.library.calls
    assert {(call.wrapper, call.method) for call in calls} == SIGNATURES.keys()
    for call in calls:
        for known in SIGNATURES[call.wrapper, call.method]:
            bound = known.bind(None, *call.args, **call.kwargs).arguments
            if call.method == "plan":
                assert bound["sm_scale"] == SCALE
                assert bound["q_data_type"] == bound["kv_data_type"] == torch.float32
                assert (bound["num_qo_heads"], bound["num_kv_heads"], bound["page_size"]) == (6, 2, 16)
                assert bound.get("causal", False) == (call.wrapper == PREFILL)


def test_an_installed_flashinfer_has_these_signatures() -> None:
    library = pytest.importorskip("flashinfer")
    for (wrapper, method), (known, *_) in SIGNATURES.items():
        actual = inspect.signature(getattr(getattr(library, wrapper), method)).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in actual)
        missing = known.parameters.keys() - {parameter.name for parameter in actual}
        assert takes_any or not missing
