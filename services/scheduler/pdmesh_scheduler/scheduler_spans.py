"""The scheduler's part of a request's trace: the time in the queue, and the time on instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.commands import AdmitPrefill, ForgetRequest, Outcome
from pdmesh.core.events import RequestArrived
from pdmesh.core.requests.request_histories import Attempt
from pdmesh.model import Request, RequestKey
from pdmesh.telemetry.tracing import AttributeValue, Tracing
from pdmesh_scheduler.observing import Handled

QUEUED = "queued"
PLACED = "placed"

#: Outcomes that are no failure.
_WELL = (Outcome.FINISHED, Outcome.CANCELLED, Outcome.RETRACTED)


@dataclass(slots=True)
class _Trace:
    traceparent: str
    attributes: dict[str, AttributeValue]
    since_s: float  # arrival, or placement once placed


class SchedulerSpans:
    """Recorder of spans, made from milestones. Keeps state for each traced epoch of a request until the epoch ends."""

    def __init__(self, tracing: Tracing, wall_time: Callable[[float], float]) -> None:
        self._tracing = tracing
        self._wall_time = wall_time
        self._traces: dict[RequestKey, _Trace] = {}

    def observe(self, handled: Handled) -> None:
        """Begin and end the spans of the requests that have milestones. No-op without tracing."""
        if not self._tracing.on:
            return
        for _, attempt, what in handled.milestones:
            match what:
                case RequestArrived():
                    self._arrived(what.request, handled)
                case AdmitPrefill() if what.leads:
                    self._placed(attempt, what, handled.now_s)
                case ForgetRequest():
                    self._ended(attempt, what.outcome, handled.now_s)
                case _:
                    pass

    def _arrived(self, request: Request, handled: Handled) -> None:
        generation = handled.generation
        if generation is None or generation.traceparent is None:
            return
        attributes: dict[str, AttributeValue] = {
            "pdmesh.request_id": request.request_id,
            "pdmesh.epoch": request.epoch,
            "pdmesh.num_prompt_tokens": request.num_prompt_tokens,
        }
        self._traces[_key(request)] = _Trace(generation.traceparent, attributes, handled.now_s)

    def _placed(self, attempt: Attempt, command: AdmitPrefill, now_s: float) -> None:
        trace = self._traces.get(_key(attempt.request))
        if trace is None:
            return
        self._record(QUEUED, trace, now_s, None)
        trace.since_s = now_s
        trace.attributes["pdmesh.prefill_instance_id"] = command.instance_id
        decode_id = command.decode_instance_id if command.moves_on else command.instance_id
        if decode_id is not None:
            trace.attributes["pdmesh.decode_instance_id"] = decode_id

    def _ended(self, attempt: Attempt, outcome: Outcome, now_s: float) -> None:
        trace = self._traces.pop(_key(attempt.request), None)
        if trace is None:
            return
        trace.attributes["pdmesh.outcome"] = outcome
        error = None if outcome in _WELL else str(outcome)
        self._record(QUEUED if attempt.placed_s is None else PLACED, trace, now_s, error)

    def _record(self, name: str, trace: _Trace, now_s: float, error: str | None) -> None:
        self._tracing.record(
            name,
            trace.traceparent,
            self._wall_time(trace.since_s),
            self._wall_time(now_s),
            dict(trace.attributes),
            error=error,
        )


def _key(request: Request) -> RequestKey:
    return request.request_id, request.epoch
