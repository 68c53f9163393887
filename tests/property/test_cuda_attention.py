"""The FlashInfer backend against the torch reference, over random shapes; and its calls against FlashInfer's own.

FlashInfer itself needs a device (``tests/gpu``). Here a stand-in computes, whose calls are bound to the signatures of
the real classes, written down from the sources of 0.6.3 and 0.7.2.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.attention import AttentionPlan, QuerySpan, TorchAttention
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention, workspace_bytes
from pdmesh.engine.cuda.page_tables import PageTables
from pdmesh.engine.cuda.staging import Staging
from pdmesh.kv_layout import KvLayout
from pdmesh_testing.attention import paged_case
from pdmesh_testing.cuda import FakeStreams
from pdmesh_testing.examples import examples
from pdmesh_testing.flashinfer import FakeFlashInfer

HEAD_DIM, GROUP, NUM_KV_HEADS = 16, 3, 2
SCALE = HEAD_DIM**-0.5


class Backends:
    """Both backends over one random cache."""

    def __init__(self, parts: list[tuple[int, int]], block_size: int, seed: int) -> None:
        self.layout, self.spans, self.query, self.cache = paged_case(
            parts, seed, num_kv_heads=NUM_KV_HEADS, group=GROUP, head_dim=HEAD_DIM, block_size=block_size
        )
        self.library = FakeFlashInfer()
        self.flashinfer = FlashInfer(
            self.library,
            self.layout,
            num_heads=NUM_KV_HEADS * GROUP,
            scale=SCALE,
            max_decodes=8,
            num_multiprocessors=4,
            device=torch.device("cpu"),
        )
        self.tables = PageTables(block_size=block_size, max_blocks=len(self.cache), device=torch.device("cpu"))
        self.staging = Staging(FakeStreams())

    def check(self, plan: AttentionPlan) -> None:
        reference = TorchAttention(self.layout, SCALE, torch.device("cpu")).plan(self.spans)
        expected, expected_lse = reference.attend(self.query, self.cache, with_lse=True)
        for with_lse in (False, True):
            output, lse = plan.attend(self.query, self.cache, with_lse=with_lse)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
            assert (lse is not None) == with_lse
            if lse is not None and expected_lse is not None:
                torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=examples(60))
@given(
    block_size=st.sampled_from([1, 4, 16]),
    parts=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 60))), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference(block_size: int, parts: list[tuple[int, int]], seed: int) -> None:
    backends = Backends(parts, block_size, seed)
    backend = FlashInferAttention(backends.flashinfer, backends.tables, backends.staging)
    backends.check(backend.plan(backends.spans))
    backends.staging.restart()
    backends.check(backend.plan(backends.spans))  # from tables that are on the device already


@settings(deadline=None, max_examples=examples(20))
@given(starts=st.lists(st.integers(0, 70), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_a_plan_for_a_graph_equals_the_reference(starts: list[int], seed: int) -> None:
    check_graph_decode(Backends([(start, 1) for start in starts], 16, seed))


def check_graph_decode(backends: Backends) -> None:
    """Twice with the same wrapper: what it is planned for first chooses its kernels, and no more."""
    size = len(backends.spans)
    indptr, last_page_len = torch.zeros(size + 1, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
    pages = torch.zeros(8 * size, dtype=torch.int32)
    decode = backends.flashinfer.graph_decode(indptr, pages, last_page_len)
    for spans in ([QuerySpan(row, 1, 0, [0]) for row in range(size)], backends.spans):
        index = backends.tables.index(spans, backends.staging)
        for buffer, values in ((indptr, index.lengths.indptr), (last_page_len, index.lengths.last_page_len)):
            buffer.copy_(torch.from_numpy(values))
        pages[: len(index.pages)] = index.pages
        planned = [torch.from_numpy(values) for values in index.lengths]
        decode.plan(planned[0], planned[1], torch.empty(8))
    backends.check(decode)


def test_the_workspace_is_what_the_planner_takes() -> None:
    """In MiB, for graphs of 256 decodes on 132 multiprocessors; worked out from the planner's sources.

    With 64 heads over 4, what is planned without a graph takes more (66 tiles of 128 rows) than the graph (257.5).
    """
    for num_heads, num_kv_heads, expected in ((64, 8, 193), (64, 4, 266), (128, 8, 515), (32, 8, 80.5)):
        layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=128, block_size=16, dtype="bfloat16")
        size = workspace_bytes(layout, num_heads=num_heads, max_decodes=256, num_multiprocessors=132)
        assert size / 2**20 == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("setting", "lengths", "backends"),
    [("auto", [5, 300, 128, 129], ["fa2", "auto"]), ("fa3", [5, 300], ["fa3"]), ("fa2", [5, 300], ["fa2"])],
)
def test_short_chunks_are_split_over_the_device(setting: str, lengths: list[int], backends: list[str]) -> None:
    both = Backends([(40, length) for length in lengths], 16, 0)
    both.flashinfer._prefill_backend = setting
    attention = FlashInferAttention(both.flashinfer, both.tables, both.staging)
    both.check(attention.plan(both.spans))
    assert list(attention._prefill) == backends


PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
LIBRARY = ""  # its own functions


def signature(required: str, optional: str, *, keywords: str = "") -> inspect.Signature:
    """From the names of parameters; ``keywords`` may not be given by position."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, by_position) for name in required.split()]
        + [inspect.Parameter(name, by_position, default=None) for name in optional.split()]
        + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in keywords.split()]
    )


SIGNATURES = {
    (LIBRARY, "fast_decode_plan"): (
        signature(
            "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size",
            "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale rope_scale "
            "rope_theta non_blocking fixed_split_size disable_split_kv global_override_indptr_cpu",
        ),
    ),
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
    backends.check(FlashInferAttention(backends.flashinfer, backends.tables, backends.staging).plan(backends.spans))
    only = Backends([(33, 1), (40, 1)], 16, 0)
    check_graph_decode(only)
    calls = backends.library.calls + only.library.calls
    assert {(call.wrapper, call.method) for call in calls} == SIGNATURES.keys()
    for call in calls:
        for known in SIGNATURES[call.wrapper, call.method]:
            args = call.args if call.wrapper == LIBRARY else (None, *call.args)
            bound = known.bind(*args, **call.kwargs).arguments
            if call.method in ("plan", "fast_decode_plan"):
                assert bound["sm_scale"] == SCALE
                assert bound["q_data_type"] == bound["kv_data_type"] == torch.float32
                assert (bound["num_qo_heads"], bound["num_kv_heads"], bound["page_size"]) == (6, 2, 16)
                assert bound.get("causal", False) == (call.wrapper == PREFILL)


def test_an_installed_flashinfer_has_these_signatures() -> None:
    """Names, their order, and which may be left out; and where a wrapper keeps its pinned memory."""
    library = pytest.importorskip("flashinfer", exc_type=ImportError)
    for (wrapper, method), variants in SIGNATURES.items():
        owner = getattr(library, wrapper) if wrapper else library
        actual = inspect.signature(getattr(owner, method))
        assert any(same_calls(known, actual) for known in variants), f"{wrapper}.{method}{actual}"
    for wrapper in (PREFILL, DECODE):
        assert "self._pin_memory_int_workspace_buffer" in inspect.getsource(getattr(library, wrapper).plan)


def same_calls(known: inspect.Signature, actual: inspect.Signature) -> bool:
    def facts(of: inspect.Signature) -> list[tuple[str, bool, bool]]:
        parameters = [one for one in of.parameters.values() if one.kind is not one.VAR_POSITIONAL]
        return [(one.name, one.default is one.empty, one.kind is one.KEYWORD_ONLY) for one in parameters]

    return facts(known) == facts(actual)
