"""The scheduler's part of a request's trace: the time in its queue, and the time on instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.commands import AdmitPrefill, Command, ForgetRequest, Outcome
from pdmesh.core.events import Event, RequestArrived
from pdmesh.model import Request, RequestKey
from pdmesh.telemetry.tracing import AttributeValue, Tracing
from pdmesh.wire.messages import Generation

QUEUED = "queued"
PLACED = "placed"

#: Ends of our care that are no failure.
_WELL = (Outcome.FINISHED, Outcome.CANCELLED)


@dataclass(slots=True)
class _Trace:
    traceparent: str
    attributes: dict[str, AttributeValue]
    since_s: float  # when it arrived; once placed, when it was


class SchedulerSpans:
    """Told from events and commands, as the records are. Keeps something for each traced request until it ends."""

    def __init__(self, tracing: Tracing, wall_time: Callable[[float], float]) -> None:
        self._tracing = tracing
        self._wall_time = wall_time
        self._traces: dict[RequestKey, _Trace] = {}

    def observe(self, event: Event, generation: Generation | None, commands: Sequence[Command], now_s: float) -> None:
        if not self._tracing.on:
            return
        if isinstance(event, RequestArrived) and generation is not None and generation.traceparent is not None:
            self._arrived(event.request, generation.traceparent, now_s)
        for command in commands:
            match command:
                case AdmitPrefill():
                    self._placed(command, now_s)
                case ForgetRequest():
                    self._ended(command, now_s)
                case _:
                    pass

    def drop(self, key: RequestKey) -> None:
        """The core did not take the request."""
        self._traces.pop(key, None)

    def _arrived(self, request: Request, traceparent: str, now_s: float) -> None:
        attributes: dict[str, AttributeValue] = {
            "pdmesh.request_id": request.request_id,
            "pdmesh.epoch": request.epoch,
            "pdmesh.num_prompt_tokens": request.num_prompt_tokens,
        }
        self._traces.setdefault((request.request_id, request.epoch), _Trace(traceparent, attributes, now_s))

    def _placed(self, command: AdmitPrefill, now_s: float) -> None:
        trace = self._traces.get((command.request_id, command.epoch))
        if trace is None:
            return
        self._record(QUEUED, trace, now_s, None)
        trace.since_s = now_s
        decode_id = command.decode_instance_id or command.instance_id
        trace.attributes["pdmesh.prefill_instance_id"] = command.instance_id
        trace.attributes["pdmesh.decode_instance_id"] = decode_id

    def _ended(self, command: ForgetRequest, now_s: float) -> None:
        trace = self._traces.pop((command.request_id, command.epoch), None)
        if trace is None:
            return
        trace.attributes["pdmesh.outcome"] = command.outcome
        was_placed = "pdmesh.prefill_instance_id" in trace.attributes
        error = None if command.outcome in _WELL else str(command.outcome)
        self._record(PLACED if was_placed else QUEUED, trace, now_s, error)

    def _record(self, name: str, trace: _Trace, now_s: float, error: str | None) -> None:
        self._tracing.record(
            name,
            trace.traceparent,
            self._wall_time(trace.since_s),
            self._wall_time(now_s),
            dict(trace.attributes),
            error=error,
        )
