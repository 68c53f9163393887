from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.policy.latency import PROFILES, ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, ChunkSizer, StaticChunks
from pdmesh.policy.prediction import Prediction, RemainingTime
from pdmesh_testing.core import a_request

A100 = PROFILES["a100-llama3-8b"]
PROPORTIONAL = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0)
NOTHING = StepShape((), 0, 0)


class Adaptive:
    def __init__(self, model: LinearLatencyModel, budget_s: float) -> None:
        self.sizer, self.budget_s = ChunkSizer(model, 8192), budget_s

    def chunk_alone(self, start: int, num_left: int) -> int:
        return self.sizer.largest(NOTHING, start, num_left, self.budget_s) or min(num_left, CHUNK_UNIT_TOKENS)


def simulate(model: LinearLatencyModel, chunker: Adaptive | StaticChunks, num_tokens: int) -> float:
    start, total_s = 0, 0.0
    while start < num_tokens:
        chunk = chunker.chunk_alone(start, num_tokens - start)
        total_s += model.step_s(StepShape((ChunkShape(chunk, start),), 0, 0))
        start += chunk
    return total_s


@pytest.mark.parametrize(
    "chunker",
    [Adaptive(A100, 0.1), Adaptive(A100, 0.02), Adaptive(A100, 1.0), StaticChunks(512), StaticChunks(700)],
    ids=["100 ms", "less than any step", "1 s", "512", "700"],
)
def test_the_table_equals_a_direct_simulation(chunker: Adaptive | StaticChunks) -> None:
    table = RemainingTime(A100, chunker.chunk_alone)
    for num_tokens in range(0, 64 * 1024, 1024):
        assert table.total_s(num_tokens) == pytest.approx(simulate(A100, chunker, num_tokens)), num_tokens
    between = table.total_s(5 * 1024 + 256)
    assert between == pytest.approx(0.75 * table.total_s(5 * 1024) + 0.25 * table.total_s(6 * 1024))


def test_what_remains_is_what_is_not_done() -> None:
    table = RemainingTime(A100, StaticChunks(512).chunk_alone)
    assert table.remaining_s(16384, 0) == table.total_s(16384)
    assert table.remaining_s(16384, 16384) == 0
    assert 0 < table.remaining_s(16384, 12288) < table.remaining_s(16384, 4096)


def test_deadlines_come_from_the_request_or_grow_with_the_prompt() -> None:
    prediction = Prediction(RemainingTime(PROPORTIONAL, StaticChunks(64).chunk_alone), 1.0, 2.0, 8192)
    request = a_request("r", prompt=2048, arrival_s=10.0)
    assert prediction.due_s(replace(request, slo_ttft_s=0.5)) == 10.5
    assert prediction.due_s(request) == pytest.approx(10 + 1 + 2 * 2.048)
    assert prediction.due_s(replace(request, num_tokens_before=4096)) == pytest.approx(10 + 1 + 2 * 3 * 2.048)
    assert prediction.due_s(replace(request, num_tokens_before=4096, slo_ttft_s=0.5)) == 10.5
    for nonsense in (float("nan"), float("inf"), -1.0, 0.0):
        assert prediction.due_s(replace(request, slo_ttft_s=nonsense)) == prediction.due_s(request)
    # due at 15.096, half of 2.048 s of work left
    assert prediction.relative_slack(request, 1024, 12.0) == pytest.approx((15.096 - 12 - 1.024) / 2.048)
