"""Medha's worked example (§4.1) through the real core: a long prompt, and two short ones in its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.config import CoreConfig
from pdmesh.model import Request
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.testing.core import a_request
from pdmesh.testing.policies import run_prefills

TOKEN_S = 0.02 / 32

#: Work is proportional to tokens, and a quantum of 20 ms is 32 of them.
POLICY = PolicyConfig(
    latency=LinearLatencyModel(a_s=0.0, b_s=TOKEN_S, c_s=0.0, d_s=0.0),
    chunk_tokens=32,
    slo_tpot_s=0.02,
    prefill_step_s=0.02,
)
CONFIG = CoreConfig(plans_in_flight=1, max_queue_s=1e6, policy=POLICY)


def job(name: str, *, arrival: float, work: float, due_in: float) -> Request:
    request = a_request(name, prompt=round(work / TOKEN_S), output=1, arrival_s=arrival)
    return replace(request, slo_ttft_s=due_in)


EXAMPLE = (
    job("L", arrival=0.0, work=10.0, due_in=16.0),
    job("S1", arrival=5.0, work=0.5, due_in=1.0),
    job("S2", arrival=5.0, work=0.5, due_in=1.0),
)


@pytest.mark.parametrize(
    ("bundle", "s1", "s2", "long"),
    [
        ("fcfs", 10.5, 11.0, 10.0),  # the convoy
        ("edf", 5.5, 6.0, 11.0),
        ("lrs", 5.98, 6.0, 11.0),  # equals take turns
        ("lars", 6.2, 6.22, 11.0),  # waits until 5.22, then takes turns: both are late
        ("medha", 6.2, 6.22, 11.0),
        ("pdmesh", 5.5, 6.0, 11.0),
    ],
)
def test_the_worked_example(bundle: str, s1: float, s2: float, long: float) -> None:
    first_token_s = run_prefills(CONFIG, bundle, EXAMPLE).first_token_s
    assert first_token_s == pytest.approx({"S1": s1, "S2": s2, "L": long}, abs=1e-6)
