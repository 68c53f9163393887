"""The Chrome trace of a run shows what the run says."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.model import Epoch, RequestId
from pdmesh.plans import ChunkPlan
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.perfetto import chrome_trace
from pdmesh_lab.sim.result import StepSpan
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.sim import BINARY_MODEL, TINY_LAYOUT, simulate


def named(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def test_a_story() -> None:
    """One request on a prefill and a decode instance: queued behind nothing, 16 tokens in 0.5 s, KV until 1 s."""
    arrivals = [Arrival(arrival_s=0.25, num_prompt_tokens=16, num_output_tokens=2)]
    result = simulate(arrivals, prefill=1, decode=1, config=SimConfig(port_bytes_per_s=2048))
    (run,) = result.requests
    events = chrome_trace({"one": result})["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    assert [(e["name"], e["args"]["name"]) for e in named(events, "M")] == [
        ("process_name", "one"),
        ("thread_name", "prefill-000"),
        ("thread_name", "decode-000"),
    ]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in named(events, "X")] == [
        ("r0000000", 0, 250_000, 500_000),
        ("decode 1", 1, run.landed_s * 1e6, 140_625) if run.landed_s else None,
    ]
    spans = [(e["ph"], e["cat"], e["name"]) for e in events if e["ph"] in "be"]
    assert spans == [
        ("b", "request", "r0000000"),
        ("b", "request", "prefill"),
        ("e", "request", "prefill"),
        ("b", "request", "decode"),
        ("e", "request", "decode"),
        ("e", "request", "r0000000"),
        ("b", "kv", "KV transfer"),
        ("e", "kv", "KV transfer"),
    ]


def test_members_of_a_group_have_a_track_each() -> None:
    """Two instances compute a prompt in turn; the second waits a quarter of a second for the KV of the first."""
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=2)]
    result = simulate(arrivals, prefill=2, decode=1)
    first, second, _ = result.instances
    chunks = tuple(
        ChunkPlan(request_id=RequestId("r"), epoch=Epoch(0), start=start, num_tokens=8, is_last=start > 0)
        for start in (0, 8)
    )
    instances = [
        replace(first, steps=[StepSpan(1.0, 2.0, chunks[:1], 0)]),
        replace(second, steps=[StepSpan(1.5, 2.75, chunks[1:], 0, waited_s=0.25)]),
    ]
    events = chrome_trace({"one": replace(result, instances=instances)})["traceEvents"]
    assert [event["args"].get("waited_for_kv_s") for event in named(events, "X") if event["name"] == "r"] == [
        None,
        0.25,
    ]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] in "be" and event["id"].startswith("0/r/"):
            tracks[event["id"]].append((event["ph"], event["name"], event["ts"]))
    names = [first.instance_id, second.instance_id]
    assert tracks[f"0/r/{names[0]}"] == [("b", f"r on {names[0]}", 1e6), ("e", f"r on {names[0]}", 2e6)]
    assert tracks[f"0/r/{names[1]}"] == [
        ("b", f"r on {names[1]}", 1.5e6),
        ("b", "waits for KV", 1.5e6),
        ("e", "waits for KV", 1.75e6),
        ("e", f"r on {names[1]}", 2.75e6),
    ]


@pytest.mark.parametrize("bundle", ["sjf", "lrs"])
def test_spans_nest_and_preemptions_are_those_counted(bundle: str) -> None:
    policy = PolicyConfig(chunk_tokens=16, latency=BINARY_MODEL)
    mesh = MeshShape(num_prefill=0, num_decode=0, num_mixed=1, kv_layout=TINY_LAYOUT, num_kv_tokens=4096)
    arrivals = [Arrival(arrival_s=0.0, num_prompt_tokens=400, num_output_tokens=4)] + [
        Arrival(arrival_s=1.0 + 3 * n, num_prompt_tokens=40, num_output_tokens=3) for n in range(4)
    ]
    result = Simulator(study_core(bundle, policy, 0), mesh.instances(BINARY_MODEL), arrivals).run()
    events = chrome_trace({"run": result})["traceEvents"]
    num_preemptions = 0
    open_spans = defaultdict[tuple[str, str], list[str]](list)
    at_us = defaultdict[tuple[str, str], float](float)
    for event in events:
        if event["ph"] not in "be":
            continue
        track = event["cat"], event["id"]
        assert event["ts"] >= at_us[track]
        at_us[track] = event["ts"]
        if event["ph"] == "b":
            open_spans[track].append(event["name"])
            num_preemptions += event["name"] == "preempted"
        else:
            assert open_spans[track].pop() == event["name"]
    assert not any(open_spans.values())
    assert num_preemptions == sum(run.num_preemptions for run in result.requests) > 0


def test_a_request_without_a_token_has_no_track() -> None:
    result = simulate([Arrival(arrival_s=0.0, num_prompt_tokens=5000, num_output_tokens=1)], mixed=1)
    assert {event["ph"] for event in chrome_trace({"run": result})["traceEvents"]} == {"M"}
