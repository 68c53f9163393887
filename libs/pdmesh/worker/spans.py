"""A worker's part of a request's trace: its prefill with its chunks, the transfer of its KV, its decode."""

from __future__ import annotations

import time

from pdmesh.kv.outcome import SentTransfer
from pdmesh.model import InstanceId
from pdmesh.telemetry.tracing import AttributeValue, SpanEvent, Tracing
from pdmesh.wire.messages import Generation
from pdmesh.worker.times import StepTime

PREFILL = "prefill"
CHUNK = "chunk"
TRANSFER = "kv transfer"
DECODE = "decode"

#: Outcomes of a span. FREED: the request is not needed any more, as after a cancel or a stop string.
DONE, FREED, FAILED, ERROR = "done", "freed", "failed", "error"
FAILURES = (FAILED, ERROR)

#: Most chunk events of one span; later chunks of a very long prompt are only counted.
MAX_CHUNK_EVENTS = 256


def trace_of(tracing: Tracing, generation: Generation, instance_id: InstanceId) -> RequestTrace | None:
    """Begin an instance's part of a request's trace; None if the request is not traced."""
    if not tracing.on or generation.traceparent is None:
        return None
    return RequestTrace(tracing, generation.traceparent, generation, instance_id)


class RequestTrace:
    """A request's trace on this instance. Each method notes an event that happens now; finished spans are recorded."""

    def __init__(self, tracing: Tracing, traceparent: str, generation: Generation, instance_id: InstanceId) -> None:
        self._tracing = tracing
        self._traceparent = traceparent
        self._attributes: dict[str, AttributeValue] = {
            "pdmesh.request_id": generation.request_id,
            "pdmesh.epoch": generation.epoch,
            "pdmesh.instance_id": instance_id,
        }
        self._prefill_began_at: float | None = None
        self._num_chunks = 0
        self._num_tokens = 0
        self._chunks: list[SpanEvent] = []
        self._granted_at: float | None = None
        self._decode_began_at: float | None = None

    def prefill_began(self) -> None:
        self._prefill_began_at = time.time()

    def chunk_done(self, num_tokens: int, step: StepTime, *, is_last: bool) -> None:
        now = time.time()
        self._num_chunks += 1
        self._num_tokens += num_tokens
        if len(self._chunks) < MAX_CHUNK_EVENTS:
            attributes = {"pdmesh.num_tokens": num_tokens, "pdmesh.step_s": step.duration_s}
            if step.waited_s:
                attributes["pdmesh.kv_wait_s"] = step.waited_s
            self._chunks.append(SpanEvent(CHUNK, now, attributes))
        if is_last:
            self._end_prefill(now, DONE)

    def transfer_granted(self) -> None:
        self._granted_at = time.time()

    def transfer_sent(self, outcome: SentTransfer) -> None:
        now = time.time()
        attributes = {
            "pdmesh.kv_transfer.bytes": outcome.num_bytes,
            "pdmesh.kv_transfer.seconds": outcome.duration_s,
            "pdmesh.kv_transfer.exposed_seconds": outcome.exposed_s,
        }
        self._record(TRANSFER, now - outcome.duration_s, now, attributes, DONE)
        self._granted_at = None

    def receiver_lost(self) -> None:
        """Note that the granted transfer failed; the KV may go to another receiver."""
        if self._granted_at is not None:
            self._record(TRANSFER, self._granted_at, time.time(), {}, FAILED)
            self._granted_at = None

    def decode_began(self) -> None:
        self._decode_began_at = time.time()

    def ended(self, num_output_tokens: int, outcome: str) -> None:
        """End all open spans, because the instance is done with the request. Idempotent."""
        now = time.time()
        self._end_prefill(now, outcome)
        if self._granted_at is not None:
            self._record(TRANSFER, self._granted_at, now, {}, outcome)
            self._granted_at = None
        if self._decode_began_at is not None:
            attributes = {"pdmesh.num_output_tokens": num_output_tokens}
            self._record(DECODE, self._decode_began_at, now, attributes, outcome)
            self._decode_began_at = None

    def _end_prefill(self, now: float, outcome: str) -> None:
        if self._prefill_began_at is None:
            return
        attributes = {"pdmesh.num_prompt_tokens": self._num_tokens, "pdmesh.num_chunks": self._num_chunks}
        self._record(PREFILL, self._prefill_began_at, now, attributes, outcome, self._chunks)
        self._prefill_began_at = None
        self._chunks = []

    def _record(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        attributes: dict[str, int] | dict[str, float],
        outcome: str,
        events: list[SpanEvent] | None = None,
    ) -> None:
        self._tracing.record(
            name,
            self._traceparent,
            started_at,
            ended_at,
            {**self._attributes, **attributes, "pdmesh.outcome": outcome},
            events=events or (),
            error=outcome if outcome in FAILURES else None,
        )
