"""Runs, simulated or recorded, as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdmesh.model import InstanceId, RequestId
from pdmesh_lab.sim.result import RequestRun, SimResult, StepSpan

_Event = dict[str, Any]
_Span = tuple[float, float]


def chrome_trace(results: Mapping[str, SimResult]) -> dict[str, Any]:
    """Return the runs as one trace, a group for each run.

    A group has a row of steps for each instance. Each request that got a token has a track with its phases, preemptions
    and KV transfer. If several instances computed its prompt, each of them has a track, too.
    """
    events = [
        event
        for group, (name, result) in enumerate(results.items())
        for event in (
            {"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}},
            *_instances(group, result),
            *_requests(group, result),
            *_members(group, result),
        )
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _instances(group: int, result: SimResult) -> Iterator[_Event]:
    for row, instance in enumerate(result.instances):
        yield {"ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": {"name": instance.instance_id}}
        for step in instance.steps:
            yield {
                "ph": "X",
                "name": _title(step),
                "cat": "prefill" if step.chunks else "decode",
                "pid": group,
                "tid": row,
                "ts": _us(step.start_s),
                "dur": _us(step.end_s - step.start_s),
                "args": {
                    "num_steps": step.num_steps,
                    "num_decodes": step.num_decodes,
                    "chunks": [f"{c.request_id} {c.start}+{c.num_tokens}" for c in step.chunks],
                    **({"waited_for_kv_s": step.waited_s} if step.waited_s else {}),
                },
            }


def _requests(group: int, result: SimResult) -> Iterator[_Event]:
    preempted = _preemptions(result)
    for run in result.requests:
        if not run.token_times_s:
            continue
        track = {"cat": "request", "id": f"{group}/{run.request.request_id}", "pid": group, "tid": 0}
        yield from _spans(track, _phases(run, preempted.get(run.request.request_id, ())))
        if run.granted_s is not None and run.landed_s is not None:
            yield from _spans({**track, "cat": "kv"}, [("KV transfer", [(run.granted_s, run.landed_s)])])


def _members(group: int, result: SimResult) -> Iterator[_Event]:
    """Yield a track with its chunks for each instance that computed a shared prompt.

    A chunk's whole waiting time for other members' KV is drawn at its beginning. In fact each layer waits for a part of
    that time.
    """
    chunks: dict[RequestId, dict[InstanceId, list[StepSpan]]] = {}
    for instance in result.instances:
        for step in instance.steps:
            for chunk in step.chunks:
                chunks.setdefault(chunk.request_id, {}).setdefault(instance.instance_id, []).append(step)
    for request_id, steps_of in chunks.items():
        for instance_id, steps in steps_of.items() if len(steps_of) > 1 else ():
            track = {"cat": "request", "id": f"{group}/{request_id}/{instance_id}", "pid": group, "tid": 0}
            whole = [(step.start_s, step.end_s) for step in steps]
            waits = [(step.start_s, step.start_s + step.waited_s) for step in steps]
            yield from _spans(track, [(f"{request_id} on {instance_id}", whole), ("waits for KV", waits)])


def _phases(run: RequestRun, preempted: Sequence[_Span]) -> list[tuple[str, Sequence[_Span]]]:
    """Return the phases of a request, each after the phases that enclose it."""
    arrival_s, first_s, last_s = run.request.arrival_s, run.token_times_s[0], run.token_times_s[-1]
    started_s = first_s if run.started_s is None else run.started_s
    decode_s = min(last_s, first_s if run.landed_s is None else max(first_s, run.landed_s))
    return [
        (run.request.request_id, [(arrival_s, last_s)]),
        ("queued", [(arrival_s, started_s)]),
        ("prefill", [(started_s, first_s)]),
        ("preempted", preempted),
        ("decode", [(decode_s, last_s)]),
    ]


def _spans(track: Mapping[str, Any], phases: Sequence[tuple[str, Sequence[_Span]]]) -> Iterator[_Event]:
    """Return begin and end events in order of time. At one time ends come first, then the outermost begins."""
    found: list[tuple[float, int, int, _Event]] = []
    for depth, (name, spans) in enumerate(phases):
        for start_s, end_s in spans:
            if end_s > start_s:
                found.append((start_s, 1, depth, {"ph": "b", "name": name, **track, "ts": _us(start_s)}))
                found.append((end_s, 0, -depth, {"ph": "e", "name": name, **track, "ts": _us(end_s)}))
    return (event for *_, event in sorted(found, key=lambda item: item[:3]))


def _preemptions(result: SimResult) -> dict[RequestId, list[_Span]]:
    """Return when running prompts were passed over: between two of their chunks, with another planned step between."""
    spans: dict[RequestId, list[_Span]] = {}
    for instance in result.instances:
        latest: dict[RequestId, tuple[int, float]] = {}  # turn and end of the last chunk's step
        planned = (step for step in instance.steps if step.chunks)
        for turn, step in enumerate(planned):
            for chunk in step.chunks:
                before_turn, before_s = latest.get(chunk.request_id, (turn, 0.0))
                if chunk.start and turn - before_turn > 1:
                    spans.setdefault(chunk.request_id, []).append((before_s, step.start_s))
                latest[chunk.request_id] = turn, step.end_s
    return spans


def _title(step: StepSpan) -> str:
    if not step.chunks:
        return f"decode {step.num_decodes}"
    return ", ".join(chunk.request_id for chunk in step.chunks)


def _us(seconds: float) -> float:
    """Return microseconds, the unit of the format."""
    return seconds * 1e6
