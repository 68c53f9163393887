"""Medha's worked example (§4.1) through the real core: a long prompt, and two short ones in its way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pdmesh.core.config import CoreConfig
from pdmesh.model import Request
from pdmesh.policy.bundles import BUNDLE_NAMES
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import a_request
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.policies import run_prefills

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


def mixture(load: float) -> tuple[list[Request], list[Request]]:
    """A minute of short prompts (0.2 s of work, due in 1 s) as ``load``, and two long ones (5 s, due in 16 s)."""
    shorts = [
        job(f"s{index:04}", arrival=index * 0.2 / load, work=0.2, due_in=1.0) for index in range(round(60 * load / 0.2))
    ]
    return shorts, [job("L1", arrival=1.0, work=5.0, due_in=16.0), job("L2", arrival=20.0, work=5.0, due_in=16.0)]


@cache
def ttfts(bundle: str, load: float) -> tuple[list[float], list[float]]:
    """Of the short ones, sorted, and of the long ones."""
    shorts, longs = mixture(load)
    first_token_s = run_prefills(CONFIG, bundle, [*shorts, *longs]).first_token_s
    short_s, long_s = (
        [first_token_s[request.request_id] - request.arrival_s for request in group] for group in (shorts, longs)
    )
    return sorted(short_s), long_s


def test_with_room_for_all_nobody_is_late_and_the_default_keeps_short_ones_shortest() -> None:
    convoy_s, _ = ttfts("fcfs", 0.7)
    assert convoy_s[-1] > 5.0
    strict_s, strict_long_s = ttfts("lars", 0.7)
    short_s, long_s = ttfts("pdmesh", 0.7)
    assert max(strict_s[-1], short_s[-1]) <= 1.0
    assert max(*strict_long_s, *long_s) <= 16.0
    median = len(short_s) // 2
    assert short_s[median] == pytest.approx(0.2, abs=0.05)
    assert strict_s[median] > 0.5


@pytest.mark.parametrize("load", slow_beyond(1, [0.9, 1.0, 1.3]))
@pytest.mark.parametrize("bundle", ["lars", "medha", "pdmesh"])
def test_under_overload_lateness_is_shared_by_work_and_nobody_convoys(bundle: str, load: float) -> None:
    short_s, long_s = ttfts(bundle, load)
    edf_s, _ = ttfts("edf", load)
    assert short_s[-1] < 0.7 * edf_s[-1]  # EDF lets the long ones convoy once they are past their deadlines
    # Starved would be: late by more of its own work than the latest of the others.
    assert (max(long_s) - 16.0) / 5.0 <= (short_s[-1] - 1.0) / 0.2


def test_shortest_first_alone_starves() -> None:
    short_s, long_s = ttfts("sjf", 1.0)
    assert short_s[-1] < 0.25
    assert max(long_s) > 60.0


def test_priority_comes_before_arrival() -> None:
    jobs = [replace(job(name, arrival=0.0, work=1.0, due_in=9.0), priority=p) for name, p in (("a", 2), ("b", -1))]
    first_token_s = run_prefills(
        CONFIG, "priority", [*jobs, job("first", arrival=0.0, work=0.1, due_in=9.0)]
    ).first_token_s
    assert sorted(first_token_s, key=lambda name: first_token_s[name]) == ["b", "first", "a"]


@pytest.mark.parametrize("target", BUNDLE_NAMES)
def test_switching_while_serving_drops_nothing(target: str) -> None:
    shorts, longs = mixture(1.0)
    requests = [request for request in [*shorts, *longs] if request.arrival_s < 10]

    def bundle_at(now_s: float) -> str:
        return target if int(now_s / 0.7) % 2 else "lars"

    run = run_prefills(CONFIG, "lars", requests, bundle_at=bundle_at)
    assert run.first_token_s.keys() == {request.request_id for request in requests}
    work_s = 0.02 * sum(request.num_prompt_tokens / 32 for request in requests)
    assert max(run.first_token_s.values()) == pytest.approx(work_s, abs=0.5)  # and nothing is computed twice


@pytest.mark.parametrize("bundle", ["edf", "lrs", "lars", "medha", "pdmesh"])
def test_a_clients_many_choices_are_no_reason_to_be_late_for_another(bundle: str) -> None:
    """30 choices of half a second each are due one after the other, so a short prompt finds none of them late."""
    tokens = round(0.5 / TOKEN_S)
    choices = [replace(a_request(f"c{n:02}", tokens, 1), num_tokens_before=n * tokens) for n in range(30)]
    short = a_request("short", prompt=round(0.05 / TOKEN_S), output=1, arrival_s=10.0)

    def waits_s(requests: list[Request]) -> float:
        return run_prefills(CONFIG, bundle, [*requests, short]).first_token_s[short.request_id] - 10.0

    together, apart = waits_s(choices), waits_s([replace(choice, num_tokens_before=0) for choice in choices])
    assert together <= 1.0 + 2 * 0.05, "as any short prompt is promised"
    assert together <= apart
