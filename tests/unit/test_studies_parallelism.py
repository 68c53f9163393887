"""What ranks, stages and members of a context cost by arithmetic, and how a context is spread over members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.policy.latency import LLAMA_3_8B, LLAMA_3_70B, ChunkShape, StepShape
from pdmesh_lab.studies.fast_sp import LongPrompt, fast_s, ring_lag, ring_s
from pdmesh_lab.studies.kv_parallel import KvSpread, limit_tokens
from pdmesh_lab.studies.roofline import A100, H100, Degrees, Roofline, pipelined_s


def h100s(tensor: int, stages: int = 1, kv_members: int = 1) -> Roofline:
    return Roofline(model=LLAMA_3_8B, device=H100, degrees=Degrees(tensor, stages, kv_members))


def decode(num_context_tokens: int) -> StepShape:
    return StepShape((), 1, num_context_tokens)


def test_a_decode_reads_its_weights_and_its_kv_once() -> None:
    read = 2 * LLAMA_3_8B.num_parameters + 1_000_000 * h100s(1).kv_token_bytes
    kernels_s = 32 * 10 * H100.kernel_s
    assert h100s(1).step_s(decode(1_000_000)) == pytest.approx(read / (0.9 * 3.35e12) + kernels_s)


def test_a_large_chunk_costs_its_arithmetic() -> None:
    step = StepShape((ChunkShape(4096, 0),), 0, 0)
    linear_s = 2 * LLAMA_3_8B.num_parameters * 4096 / (0.7 * 989e12)
    attention_s = 4 * 32 * 32 * 128 * 4096 * 4096 / 2 / (0.35 * 989e12)
    assert h100s(1).step_s(step) == pytest.approx(linear_s + attention_s + 32 * 10 * H100.kernel_s)


def test_members_divide_attention_alone() -> None:
    one, four = h100s(1), h100s(1, 1, 4)
    assert four.attention_s(decode(1000)) == one.attention_s(decode(1000)) / 4
    assert four.step_s(decode(1000)) > one.step_s(decode(1000)), "a short context is not worth an exchange"
    assert four.step_s(decode(1_000_000)) < 0.36 * one.step_s(decode(1_000_000))


def test_members_add_room_and_stages_share_the_weights() -> None:
    assert h100s(8, 1, 2).num_kv_tokens == 2 * h100s(8).num_kv_tokens
    assert h100s(8, 2).num_kv_tokens > 2 * h100s(8).num_kv_tokens
    assert Roofline(model=LLAMA_3_70B, device=H100, degrees=Degrees(1)).num_kv_tokens == 0, "its weights do not fit"


def test_stages_do_not_make_a_decode_faster() -> None:
    assert h100s(8).step_s(decode(1000)) < h100s(8, 8).step_s(decode(1000)) < 1.1 * h100s(8).step_s(decode(1000))


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40), st.integers(1, 8), st.floats(0.0, 0.1)
)  # what each chunk keeps one stage
def test_a_pipeline_is_no_faster_than_its_longest_way(stages_s: list[float], num_stages: int, handoff_s: float) -> None:
    """Of all ways through it that change from a chunk to the next at a stage, the longest is what it takes."""
    end_s = pipelined_s(stages_s, num_stages, handoff_s)
    longest_s = sum(stages_s) + (num_stages - 1) * (max(stages_s) + handoff_s)
    assert end_s >= sum(stages_s) + (num_stages - 1) * handoff_s
    assert end_s == pytest.approx(longest_s), "equal stages: the longest chunk is the one that is waited for"


def test_a_prompt_of_one_chunk_gains_nothing_by_stages() -> None:
    assert h100s(8, 4).prefill_s(1000, 4096) == pytest.approx(
        h100s(8, 4).step_s(StepShape((ChunkShape(1000, 0),), 0, 0)), rel=0.01
    )
    many = h100s(8, 4).prefill_s(1_000_000, 4096)
    assert h100s(8).prefill_s(1_000_000, 4096) / many > 3.8


@given(st.lists(st.integers(1, 900), min_size=1, max_size=30), st.integers(1, 500))
def test_a_context_is_spread_in_its_order_however_it_grows(steps: list[int], limit: int) -> None:
    spread = KvSpread(limit, ())
    for num_tokens in steps:
        before = spread
        spread = spread.grown_to(before.num_tokens + num_tokens)
        full = before.shares[:-1]
        assert spread.shares[: len(full)] == full, "what is full stays where it is"
    assert spread.num_tokens == sum(steps)
    assert all(share == limit for share in spread.shares[:-1])
    assert 0 < spread.shares[-1] <= limit
    assert spread == KvSpread(limit, ()).grown_to(sum(steps))
    ends = [spread.part_of(member) for member in range(len(spread.shares))]
    assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
    assert (ends[0][0], ends[-1][1]) == (0, sum(steps))


def test_a_member_holds_what_its_target_lets_it_read() -> None:
    def step_s(share: int) -> float:
        return 0.001 + share * 1e-6

    assert limit_tokens(step_s, 1.0, 5000) == 5000
    assert limit_tokens(step_s, 0.002, 5000) in (999, 1000)
    assert limit_tokens(step_s, 0.0005, 5000) == 0


def test_contiguous_segments_make_a_ring_wait_for_the_last() -> None:
    """Each attends to all segments before it, and to half of its own."""
    attended = [segment + 0.5 for segment in range(4)]
    assert ring_lag(4) == pytest.approx(max(attended) / (sum(attended) / 4))
    assert ring_lag(1) == 1


@pytest.mark.parametrize("tensor", [1, 4])
def test_fast_sp_is_faster_than_a_ring_and_most_on_one_node(tensor: int) -> None:
    gains = []
    for num_gpus in (8, 16, 32):
        prompt = LongPrompt(LLAMA_3_8B, 300_000, tensor, num_gpus)
        gains.append(ring_s(prompt, A100) / fast_s(prompt, A100)[0])
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1


def test_short_prompts_keep_their_weights_where_they_are() -> None:
    """Ulysses moves weights, whatever the length; Megatron moves tokens."""
    assert fast_s(LongPrompt(LLAMA_3_70B, 1000, 4, 8), A100)[1].endswith("Megatron")
    assert fast_s(LongPrompt(LLAMA_3_70B, 500_000, 4, 8), A100)[1].endswith("Ulysses")
