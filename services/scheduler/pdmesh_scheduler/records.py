"""Each request's life, as `pdmesh requests show` prints it, told from the core's events and commands alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ForgetRequest,
    FreeKv,
    GrantTransfer,
    PlaceDecode,
    Reject,
    Restart,
)
from pdmesh.core.events import (
    Event,
    KvReleased,
    RequestArrived,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferSent,
)
from pdmesh.model import Epoch, InstanceId, Request, RequestId
from pdmesh.wire.messages import RecordEntry, RequestRecord


@dataclass(slots=True)
class _Record:
    request: Request
    bundle: str
    first_arrival_s: float
    entries: list[RecordEntry] = field(default_factory=list[RecordEntry])
    num_done_tokens: int = 0


class RequestRecords:
    """Remembers every request that is under way, and the last ``max_ended`` that ended."""

    def __init__(self, max_ended: int, wall_time: Callable[[float], float]) -> None:
        self._max_ended = max_ended
        self._wall_time = wall_time
        self._active: dict[RequestId, _Record] = {}
        self._ended: OrderedDict[RequestId, _Record] = OrderedDict()

    def get(self, request_id: str) -> RequestRecord | None:
        key = RequestId(request_id)
        record = self._active.get(key) or self._ended.get(key)
        if record is None:
            return None
        return RequestRecord(
            request_id=request_id,
            arrived_at=self._wall_time(record.first_arrival_s),
            num_prompt_tokens=record.request.num_prompt_tokens,
            bundle=record.bundle,
            entries=tuple(record.entries),
        )

    def observe(self, event: Event, commands: Sequence[Command], now_s: float, bundle: str) -> None:
        """Note what an event and its commands mean for the requests they name."""
        match event:
            case RequestArrived():
                self._arrived(event.request, now_s, bundle)
            case StepDone():
                self._step_done(event, now_s)
            case TransferOffered():
                self._note(event, now_s, "offered")
            case TransferLanded():
                figures = {"num_bytes": float(event.num_bytes), "duration_s": event.duration_s}
                detail = f"{event.num_bytes} bytes in {_ms(event.duration_s)}"
                self._note(event, now_s, "landed", detail, figures)
            case TransferSent():
                figures = {
                    "num_bytes": float(event.num_bytes),
                    "duration_s": event.duration_s,
                    "exposed_s": event.exposed_s,
                }
                exposed = f"{_ms(event.exposed_s)} after the last layer"
                detail = f"{event.num_bytes} bytes in {_ms(event.duration_s)}, {exposed}"
                self._note(event, now_s, "sent", detail, figures)
            case TransferFailed():
                self._note(event, now_s, "transfer failed", event.reason)
            case RequestFinished():
                self._note(event, now_s, "finished", f"{event.reason}, {event.num_output_tokens} output tokens")
            case KvReleased():
                self._note(event, now_s, "released")
            case _:
                pass
        for command in commands:
            self._commanded(command, now_s)

    def _arrived(self, request: Request, now_s: float, bundle: str) -> None:
        known = self._active.get(request.request_id)
        if known is not None and known.request.epoch >= request.epoch:
            return  # sent again
        resumed = known or (self._ended.pop(request.request_id, None) if request.epoch > 0 else None)
        record = _Record(request, bundle, now_s if resumed is None else resumed.first_arrival_s)
        if resumed is not None:
            record.entries = resumed.entries
        self._active[request.request_id] = record
        detail = f"{request.num_prompt_tokens} prompt tokens, up to {request.max_tokens} to generate"
        self._add(record, now_s, "queued" if resumed is None else f"queued again, epoch {request.epoch}", detail)

    def _step_done(self, event: StepDone, now_s: float) -> None:
        for chunk in event.chunks:
            record = self._find(chunk.request_id, chunk.epoch)
            if record is None or chunk.num_tokens == 0:
                continue
            first, record.num_done_tokens = record.num_done_tokens, record.num_done_tokens + chunk.num_tokens
            detail = f"tokens {first} to {record.num_done_tokens - 1}, step {event.plan_id} of {_ms(event.duration_s)}"
            figures = {"num_tokens": float(chunk.num_tokens), "step_s": event.duration_s}
            self._add(record, now_s, "chunk", detail, event.instance_id, figures)

    def _commanded(self, command: Command, now_s: float) -> None:
        match command:
            case PlaceDecode():
                what, detail = "placed for decode", f"{command.num_blocks} blocks"
            case AdmitPrefill(decode_instance_id=None):
                what, detail = "placed", f"{command.num_blocks} blocks, prefill and decode"
            case AdmitPrefill():
                what, detail = "placed for prefill", f"{command.num_blocks} blocks"
            case GrantTransfer():
                what, detail = "granted", f"to {command.decode_instance_id}"
            case FreeKv():
                what, detail = "freed", ""
            case Reject() | Restart():
                record = self._find(command.request_id, command.epoch)
                if record is not None:
                    kind = f"rejected: {command.reason}" if isinstance(command, Reject) else "restarted"
                    message = command.message if isinstance(command, Reject) else command.reason
                    self._add(record, now_s, kind, message)
                return
            case ForgetRequest():
                self._ended_now(command, now_s)
                return
            case _:
                return
        record = self._find(command.request_id, command.epoch)
        if record is not None:
            self._add(record, now_s, what, detail, command.instance_id)

    def _ended_now(self, command: ForgetRequest, now_s: float) -> None:
        record = self._find(command.request_id, command.epoch)
        if record is None or self._active.get(command.request_id) is not record:
            return
        self._add(record, now_s, "ended", command.outcome)
        self._ended[command.request_id] = self._active.pop(command.request_id)
        self._ended.move_to_end(command.request_id)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def _note(
        self,
        event: TransferOffered | TransferLanded | TransferSent | TransferFailed | RequestFinished | KvReleased,
        now_s: float,
        what: str,
        detail: str = "",
        figures: dict[str, float] | None = None,
    ) -> None:
        record = self._find(event.request_id, event.epoch)
        if record is not None:
            self._add(record, now_s, what, detail, event.instance_id, figures)

    def _find(self, request_id: RequestId, epoch: Epoch) -> _Record | None:
        record = self._active.get(request_id) or self._ended.get(request_id)
        return record if record is not None and record.request.epoch == epoch else None

    def _add(
        self,
        record: _Record,
        now_s: float,
        what: str,
        detail: str = "",
        instance_id: InstanceId | None = None,
        figures: dict[str, float] | None = None,
    ) -> None:
        at_s = now_s - record.first_arrival_s
        record.entries.append(
            RecordEntry(at_s=at_s, what=what, instance_id=instance_id, detail=detail, figures=figures or {})
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
