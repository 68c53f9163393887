"""No request starves under `lars`, `medha` and `pdmesh`, for any arrivals that hypothesis finds."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from pdmesh.core.config import CoreConfig
from pdmesh.model import Request
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.testing.core import a_request
from pdmesh.testing.policies import run_prefills

TOKEN_S = 1 / 256
STEP_S = 0.125

#: 32 tokens to a step, and a prompt of 256 is long: a second of work.
POLICY = PolicyConfig(
    latency=LinearLatencyModel(a_s=0.0, b_s=TOKEN_S, c_s=0.0, d_s=0.0),
    chunk_tokens=32,
    prefill_step_s=STEP_S,
    slo_tpot_s=STEP_S,
    slo_ttft_s=1.0,
    slo_ttft_stretch=2.0,
    long_prompt_tokens=256,
)
#: Whole works are rounded to classes at most 6 % off; steps in flight are not taken back.
ROUNDING, NUM_STEPS = 1.13, 3
CONFIG = CoreConfig(plans_in_flight=2, max_queue_s=1e6, policy=POLICY)


@st.composite
def floods(draw: st.DrawFn) -> list[Request]:
    """Bursts and streams of short and long prompts, up to far more than the instance can take."""
    requests: list[Request] = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, 6))):
        now_s += draw(st.floats(0.0, 8.0))
        prompt = draw(st.sampled_from([1, 16, 64, 255, 256, 512, 2048]))
        gap_s = draw(st.sampled_from([0.0, 0.02, 0.1, 0.5])) * max(1, prompt / 64)
        for index in range(draw(st.integers(1, 40))):
            requests.append(
                a_request(f"r{len(requests):04}", prompt=prompt, output=1, arrival_s=now_s + index * gap_s)
            )
    return requests


def work_s(request: Request) -> float:
    return request.num_prompt_tokens * TOKEN_S


@settings(deadline=None, max_examples=200)
@given(requests=floods(), bundle=st.sampled_from(["lars", "medha", "pdmesh"]))
def test_a_wait_is_bounded_by_the_work_that_may_go_ahead(requests: list[Request], bundle: str) -> None:
    """A request waits while the instance works on others, and only so long as they may go ahead of it.

    With c and s of the deadline (arrival + c + s * work), a request of work w that has waited t has a relative slack of
    s - (t - c) / w at most, and one of work v that came d later has s - 1 - (t - d - c) / v at least. The later one may
    go ahead only while its slack is the smaller one: d <= (t - c) * (1 - v / w) + v. So nobody of its own work or more
    goes ahead who came more than v later; of shorter ones a share 1 - v / w of the time that it waits.

    Under `pdmesh` that begins when the request has become urgent (at a relative slack of ``spare_slack``), and for a
    long one anew when it was placed, of which its wait for other long ones is no part.
    """
    run = run_prefills(CONFIG, bundle, requests)
    for request in requests:
        work, first_token_s = work_s(request), run.first_token_s[request.request_id]
        wait_s = first_token_s - request.arrival_s
        since_s, grace_s = request.arrival_s, 0.0
        if bundle == "pdmesh":
            grace_s = POLICY.slo_ttft_s + (POLICY.slo_ttft_stretch - POLICY.spare_slack) * work
            if request.num_prompt_tokens >= POLICY.long_prompt_tokens:
                since_s = run.placed_s[request.request_id]

        def may_go_ahead(other: Request) -> bool:
            later_s = other.arrival_s - since_s
            t, ratio = first_token_s - since_s - POLICY.slo_ttft_s, work_s(other) / work
            latest_s = max(grace_s, t * (1 - ratio / ROUNDING), -POLICY.slo_ttft_s * (1 - ratio * ROUNDING))
            return later_s <= latest_s + work_s(other) + NUM_STEPS * STEP_S

        ahead_s = sum(work_s(other) for other in requests if other is not request and may_go_ahead(other))
        assert wait_s <= ahead_s + work + NUM_STEPS * STEP_S
