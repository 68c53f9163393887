"""Simulated runs as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdmesh.sim.result import SimResult, StepSpan


def chrome_trace(results: Mapping[str, SimResult]) -> dict[str, Any]:
    """One group for each run, by its name, and in it one row for each instance with its steps."""
    events = [event for group, (name, result) in enumerate(results.items()) for event in _events(group, name, result)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(group: int, name: str, result: SimResult) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}}
    for row, instance in enumerate(result.instances):
        yield {"ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": {"name": instance.instance_id}}
        for step in instance.steps:
            yield {
                "ph": "X",
                "name": _title(step),
                "cat": "prefill" if step.chunks else "decode",
                "pid": group,
                "tid": row,
                "ts": step.start_s * 1e6,  # the format counts microseconds
                "dur": (step.end_s - step.start_s) * 1e6,
                "args": {
                    "num_steps": step.num_steps,
                    "num_decodes": step.num_decodes,
                    "chunks": [f"{c.request_id} {c.start}+{c.num_tokens}" for c in step.chunks],
                },
            }


def _title(step: StepSpan) -> str:
    if not step.chunks:
        return f"decode {step.num_decodes}"
    return ", ".join(chunk.request_id for chunk in step.chunks)
