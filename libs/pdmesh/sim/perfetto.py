"""A simulated run as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdmesh.sim.result import SimResult, StepSpan


def chrome_trace(result: SimResult) -> dict[str, Any]:
    """One row for each instance with its steps; times in microseconds, as the format wants them."""
    return {"traceEvents": list(_events(result)), "displayTimeUnit": "ms"}


def _events(result: SimResult) -> Iterator[dict[str, Any]]:
    for row, instance in enumerate(result.instances):
        name = {"name": instance.instance_id}
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": name}
        for step in instance.steps:
            yield {
                "ph": "X",
                "name": _name(step),
                "cat": "prefill" if step.chunks else "decode",
                "pid": 0,
                "tid": row,
                "ts": step.start_s * 1e6,
                "dur": (step.end_s - step.start_s) * 1e6,
                "args": {
                    "num_steps": step.num_steps,
                    "num_decodes": step.num_decodes,
                    "chunks": [f"{c.request_id} {c.start}+{c.num_tokens}" for c in step.chunks],
                },
            }


def _name(step: StepSpan) -> str:
    if not step.chunks:
        return f"decode {step.num_decodes}"
    return ", ".join(chunk.request_id for chunk in step.chunks)
