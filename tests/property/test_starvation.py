"""No request starves under `lars`, `medha` and `pdmesh`, for any arrivals that hypothesis finds."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdmesh.core.config import CoreConfig
from pdmesh.model import Request
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import a_request
from pdmesh_testing.examples import examples
from pdmesh_testing.policies import PrefillRun, run_prefills

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
        gap_s = draw(st.sampled_from([0.0, 0.02, 0.1, 0.25, 0.5])) * max(1, prompt / 64)
        for index in range(draw(st.integers(1, 20))):
            requests.append(a_request(f"r{len(requests):04}", prompt=prompt, output=1, arrival_s=now_s + index * gap_s))
    return requests


def work_s(request: Request) -> float:
    return request.num_prompt_tokens * TOKEN_S


@settings(deadline=None, max_examples=examples(80))
@given(requests=floods(), bundle=st.sampled_from(["lars", "medha", "pdmesh"]))
def test_a_wait_is_bounded_by_the_work_that_may_go_ahead(requests: list[Request], bundle: str) -> None:
    """A request waits while the instance works on others, and only so long as they may go ahead of it.

    With c and s of the deadline (arrival + c + s * work), a request of work w that has waited t has a relative slack of
    s - (t - c) / w at most, and one of work v that came d later has s - 1 - (t - d - c) / v at least. The later one may
    go ahead only while its slack is the smaller one: d <= (t - c) * (1 - v / w) + v. So nobody of its own work or more
    goes ahead who came more than v later; of shorter ones a share 1 - v / w of the time that it waits.

    Under `pdmesh` that begins when the request has become urgent (at a relative slack of ``spare_slack``). A long one
    has the larger stretch s = 1 / ``min_share``, from when it was placed: so of shorter ones d may be (s - 2) * v more.
    """
    check_bound(bundle, requests)


def test_the_bound_is_broken_where_requests_starve() -> None:
    long = a_request("long", prompt=512, output=1, arrival_s=0.5)
    stream = [a_request(f"r{n:03}", prompt=255, output=1, arrival_s=float(n)) for n in range(60)]
    with pytest.raises(AssertionError, match="long waits"):
        check_bound("sjf", [long, *stream])
    for fair in ("lars", "medha", "pdmesh"):
        check_bound(fair, [long, *stream])


def check_bound(bundle: str, requests: list[Request]) -> None:
    run = run_prefills(CONFIG, bundle, requests)
    for request in requests:
        latest_s = functools.partial(latest_arrival_s, bundle, request, run)
        others = (other for other in requests if other is not request and other.arrival_s <= latest_s(work_s(other)))
        bound_s = sum(map(work_s, others)) + work_s(request) + NUM_STEPS * STEP_S
        wait_s = run.first_token_s[request.request_id] - request.arrival_s
        assert wait_s <= bound_s, f"{request.request_id} waits {wait_s} s of at most {bound_s} s"


def latest_arrival_s(bundle: str, request: Request, run: PrefillRun, other_work_s: float) -> float:
    """When one of that work may have come, at the latest, and yet have gone ahead of the request."""
    since_s, grace_s, stretch = request.arrival_s, 0.0, POLICY.slo_ttft_stretch
    work, wait_s = work_s(request), run.first_token_s[request.request_id] - request.arrival_s
    if bundle == "pdmesh":
        if request.num_prompt_tokens >= POLICY.long_prompt_tokens:
            stretch = 1 / POLICY.min_share
            since_s = run.placed_s[request.request_id]
            wait_s -= since_s - request.arrival_s
        grace_s = POLICY.slo_ttft_s + (stretch - POLICY.spare_slack) * work
    ratio = other_work_s / work
    overdue_s = (wait_s - POLICY.slo_ttft_s) * (1 - ratio / ROUNDING)
    early_s = POLICY.slo_ttft_s * (ratio * ROUNDING - 1)
    lag_s = (stretch - POLICY.slo_ttft_stretch + 1) * other_work_s
    return since_s + max(grace_s, overdue_s, early_s) + lag_s + NUM_STEPS * STEP_S
