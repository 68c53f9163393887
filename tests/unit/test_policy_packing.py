from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from pdmesh.model import Epoch, Request, RequestId, Role
from pdmesh.plans import ChunkPlan
from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, AdaptiveChunks, ChunkSizer
from pdmesh.policy.prediction import Prediction, RemainingTime
from pdmesh.policy.views import InstanceView, PartialStep
from pdmesh_testing.core import a_request, a_view

#: A millisecond for each token, whatever comes before it.
MODEL = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_s=0.01, decode_context_s=1e-6)
SIZER = ChunkSizer(MODEL, 8192)
PACKING = AdaptiveChunks(
    sizer=SIZER,
    prediction=Prediction(RemainingTime(MODEL, lambda start, num_left: min(num_left, 640)), 1.0, 2.0, 4096),
    prefill_step_s=0.64,
    slo_tpot_s=0.32,
    max_shared=0.4,
    local_step_share=0.6,
)
PREFILL, MIXED = a_view("p", Role.PREFILL), a_view("p")
DEFAULT: frozenset[float | None] = frozenset([None])
SHORT, LONG = a_request("short", prompt=1000), a_request("long", prompt=8000)


def step_with(request: Request, num_tokens: int) -> PartialStep:
    step = PartialStep()
    step.add(
        ChunkPlan(request_id=RequestId("x"), epoch=Epoch(0), start=0, num_tokens=num_tokens, is_last=False),
        request.num_prompt_tokens,
    )
    return step


def test_a_chunk_fills_the_time_budget() -> None:
    assert PACKING.num_tokens(PREFILL, PartialStep(), SHORT, 0) == 640
    assert PACKING.num_tokens(PREFILL, PartialStep(), SHORT, 640) == 360
    assert PACKING.num_tokens(PREFILL, step_with(SHORT, 600), SHORT, 0) == CHUNK_UNIT_TOKENS
    assert PACKING.num_tokens(PREFILL, step_with(SHORT, 640), SHORT, 0) == 0


def test_decodes_come_out_of_the_budget_of_their_own_pace() -> None:
    assert PACKING.num_tokens(MIXED, PartialStep(), SHORT, 0) == 640
    busy = replace(MIXED, num_decoding=10, num_resident_tokens=60_000, slo_tpots_s=DEFAULT)  # 0.16 s
    assert PACKING.num_tokens(busy, PartialStep(), SHORT, 0) == 160
    hurried = replace(busy, slo_tpots_s=frozenset([None, 0.2, 1.0]))
    assert PACKING.num_tokens(hurried, PartialStep(), SHORT, 0) == CHUNK_UNIT_TOKENS
    patient = replace(busy, slo_tpots_s=frozenset([0.48, 0.6]))
    assert PACKING.num_tokens(patient, PartialStep(), SHORT, 0) == 320


@pytest.mark.parametrize(("num_stages", "least_speedup"), [(2, 1.85), (4, 3.6), (8, 7.0)])
def test_a_prompt_alone_keeps_all_stages_busy(num_stages: int, least_speedup: float) -> None:
    """Chunks through equal stages, each as the one before leaves it, against the same prompt through one."""
    latency = LinearLatencyModel(a_s=2e-3, b_s=1e-3, c_s=1e-8, d_s=5e-9)
    packing = replace(PACKING, sizer=ChunkSizer(latency, 8192))
    prompt = a_request("long", prompt=16_384)

    def prompt_s(instance: InstanceView) -> float:
        free_s = [0.0] * instance.num_stages
        start = 0
        while start < prompt.num_prompt_tokens:
            num_tokens = packing.num_tokens(instance, PartialStep(), prompt, start)
            stage_s = latency.step_s(StepShape((ChunkShape(num_tokens, start),), 0, 0)) / instance.num_stages
            left_s = 0.0
            for stage in range(instance.num_stages):
                left_s = free_s[stage] = max(left_s, free_s[stage]) + stage_s
            start += num_tokens
        return free_s[-1]

    assert prompt_s(PREFILL) >= least_speedup * prompt_s(replace(PREFILL, num_stages=num_stages))


def test_beside_others_chunks_of_stages_are_as_long_as_the_next_may_wait() -> None:
    staged = replace(PREFILL, num_stages=4)
    assert PACKING.num_tokens(staged, PartialStep(), SHORT, 0, least_other_tokens=9) == 1000
    assert PACKING.num_tokens(staged, PartialStep(), a_request("x", prompt=3000), 0, least_other_tokens=9) == 4 * 640


def test_a_step_of_stages_has_a_share_of_the_decodes() -> None:
    busy = replace(MIXED, num_decoding=20, num_resident_tokens=80_000, slo_tpots_s=DEFAULT)
    assert PACKING.num_tokens(busy, PartialStep(), SHORT, 0, least_other_tokens=9) == CHUNK_UNIT_TOKENS
    assert PACKING.num_tokens(replace(busy, num_stages=2), PartialStep(), SHORT, 0, least_other_tokens=9) == 160


def test_a_prompt_goes_on_beside_any_number_of_decodes() -> None:
    crowded = replace(MIXED, num_decoding=100, slo_tpots_s=DEFAULT)
    assert PACKING.num_tokens(crowded, PartialStep(), SHORT, 0) == CHUNK_UNIT_TOKENS
    assert PACKING.num_tokens(crowded, PartialStep(), SHORT, 990) == 10
    assert PACKING.num_tokens(crowded, step_with(SHORT, 10), SHORT, 0) == 0


def test_a_step_has_at_most_one_long_prompt() -> None:
    assert PACKING.num_tokens(PREFILL, step_with(LONG, 32), LONG, 0) == 0


def test_a_short_prompt_joins_a_long_one_that_has_more_chunks() -> None:
    """Otherwise the short prompt would wait for the next chunk of the long one, too."""
    assert PACKING.num_tokens(PREFILL, step_with(LONG, 400), SHORT, 0) == 224
    last = step_with(LONG, 400)
    last.chunks[0] = structs.replace(last.chunks[0], is_last=True)
    assert PACKING.num_tokens(PREFILL, last, SHORT, 0) == 0


@pytest.mark.parametrize(("weights_s", "num_tokens"), [(0.0, 0), (0.3, 192)])
def test_a_long_chunk_joins_short_prompts_where_that_costs_them_little(weights_s: float, num_tokens: int) -> None:
    """Arithmetic that is idle while the weights are read costs nothing."""
    step = step_with(SHORT, 100)
    step.chunks[0] = structs.replace(step.chunks[0], is_last=True)
    packing = replace(PACKING, sizer=ChunkSizer(replace(MODEL, weights_s=weights_s), 8192), prefill_step_s=0.3)
    assert packing.num_tokens(PREFILL, step, LONG, 0) == num_tokens


def test_a_prompt_is_long_by_what_is_left_to_compute() -> None:
    """Most of it is kept: it is one of the short ones, and nobody leaves room for others."""
    kept = 7000
    assert PACKING.num_tokens(PREFILL, step_with(LONG, 32), LONG, kept, num_reused_tokens=kept) > 0
    patient = replace(LONG, slo_ttft_s=100.0)
    assert PACKING.num_tokens(PREFILL, PartialStep(), patient, kept, least_other_tokens=9) < 640
    num_tokens = PACKING.num_tokens(PREFILL, PartialStep(), patient, kept, num_reused_tokens=kept, least_other_tokens=9)
    assert num_tokens == 640


@pytest.mark.parametrize(
    ("due_in", "share"),
    [(100.0, 0.6), (8.0 * 1.4, 0.6), (8.0 * 1.25, 0.75), (8.0, 1.0), (1.0, 1.0)],
    ids=["ample", "just the most", "some", "none", "late"],
)
def test_a_long_prompt_with_slack_shares_its_step(due_in: float, share: float) -> None:
    request = replace(LONG, slo_ttft_s=due_in)
    assert PACKING.num_tokens(PREFILL, PartialStep(), request, 0, least_other_tokens=9) == int(640 * share / 32) * 32
    assert PACKING.num_tokens(PREFILL, PartialStep(), request, 0) == 640
    # No other long prompt could use the rest of the step.
    assert PACKING.num_tokens(PREFILL, PartialStep(), request, 0, least_other_tokens=4096) == 640


@given(
    start=st.integers(0, 100_000),
    num_left=st.integers(1, 20_000),
    beside=st.lists(st.builds(ChunkShape, st.integers(1, 2000), st.integers(0, 50_000)), max_size=3),
    budget_s=st.floats(0.0, 2.0),
)
def test_the_largest_chunk_fits_and_a_unit_more_does_not(
    start: int, num_left: int, beside: list[ChunkShape], budget_s: float
) -> None:
    model = PROFILES["a100-llama3-8b"]
    sizer = ChunkSizer(model, 8192)
    found = sizer.largest(StepShape(tuple(beside), 3, 900), start, num_left, budget_s)

    def step_s(num_tokens: int) -> float:
        return model.step_s(StepShape((*beside, ChunkShape(num_tokens, start)), 3, 900))

    assert 0 <= found <= min(num_left, 8192)
    if found:
        assert step_s(found) <= budget_s + 1e-9
    more = min(found + CHUNK_UNIT_TOKENS, num_left)
    if found < num_left and more <= 8192:
        assert step_s(more) > budget_s
