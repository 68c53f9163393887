"""Each request's life, as `pdmesh requests show` prints it, told from the core's events and commands alone."""

from __future__ import annotations

import heapq
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ForgetRequest,
    FreeKv,
    GrantTransfer,
    Outcome,
    PlaceDecode,
    Reject,
    Restart,
)
from pdmesh.core.events import (
    Event,
    KvReleased,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.metrics import NO_SLO, Slo, keeps_slo, tpot_between_s
from pdmesh.model import Epoch, InstanceId, Request, RequestId
from pdmesh.wire.messages import Generation, RecordEntry, RequestRecord

#: Outcomes after which the next epoch follows.
_GOES_ON = (Outcome.RESTARTED, Outcome.SUPERSEDED)

#: What an edge puts before the id of a request to make that of a response.
_OF_A_RESPONSE = re.compile(r"^(chatcmpl|cmpl)-")

_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(slots=True)
class _Record:
    request: Request
    bundle: str
    first_arrival_s: float
    num_prompt_tokens: int  # the client's own
    label: str = ""  # what its client calls it
    entries: list[RecordEntry] = field(default_factory=list[RecordEntry])
    state: str = "queued"
    num_done_tokens: int = 0
    num_output_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def slo_met(self) -> bool | None:
        """Of a finished request that has targets."""
        slo = Slo(ttft_s=self.request.slo_ttft_s, tpot_s=self.request.slo_tpot_s)
        if slo == NO_SLO or self.num_output_tokens is None or self.first_token_s is None or self.last_token_s is None:
            return None
        tpot_s = tpot_between_s(self.first_token_s, self.last_token_s, self.num_output_tokens)
        return keeps_slo(slo, ttft_s=self.first_token_s, tpot_s=tpot_s, e2e_s=self.last_token_s)

    @property
    def num_delivered(self) -> int:
        """Output tokens that earlier epochs delivered."""
        return self.request.num_prompt_tokens - self.num_prompt_tokens


class RequestRecords:
    """Remembers every request that is under way, and the last ``max_ended`` that ended."""

    def __init__(self, max_ended: int, wall_time: Callable[[float], float]) -> None:
        self._max_ended = max_ended
        self._wall_time = wall_time
        self._active: dict[RequestId, _Record] = {}
        self._ended: OrderedDict[RequestId, _Record] = OrderedDict()

    def find(self, name: str) -> tuple[RequestRecord, ...]:
        """What is remembered under a name that somebody has of a request, of the first kind that fits:

        its id, which may begin as in a response; that of an HTTP request with several choices; its client's label; the
        first characters of an id or a label. The choices of one HTTP request come in their order.
        """
        if not name:
            return ()
        request_id = _OF_A_RESPONSE.sub("", name)
        if (record := self.get(request_id)) is not None:
            return (record,)
        if records := self.choices(request_id):
            return records
        known = {**self._ended, **self._active}
        found = [key for key, record in known.items() if record.label == name]
        if not found:
            found = [
                key for key, record in known.items() if key.startswith(request_id) or record.label.startswith(name)
            ]
        return tuple(record for key in found if (record := self.get(key)) is not None)

    def label(self, request_id: RequestId) -> str:
        """What the client of a request that is under way calls it."""
        record = self._active.get(request_id)
        return "" if record is None else record.label

    def newest(self, limit: int) -> tuple[RequestRecord, ...]:
        """The ``limit`` that arrived last, the newest first, without their entries."""
        known = {**self._ended, **self._active}
        last = heapq.nlargest(max(0, limit), known, key=lambda key: known[key].first_arrival_s)
        found = (self.get(key) for key in last)
        return tuple(msgspec.structs.replace(record, entries=()) for record in found if record is not None)

    def get(self, request_id: str) -> RequestRecord | None:
        key = RequestId(request_id)
        record = self._active.get(key) or self._ended.get(key)
        if record is None:
            return None
        return RequestRecord(
            request_id=request_id,
            label=record.label,
            arrived_at=self._wall_time(record.first_arrival_s),
            num_prompt_tokens=record.num_prompt_tokens,
            bundle=record.bundle,
            entries=tuple(record.entries),
            state=record.state,
            num_output_tokens=record.num_output_tokens,
            first_token_s=record.first_token_s,
            last_token_s=record.last_token_s,
            slo_ttft_s=record.request.slo_ttft_s,
            slo_tpot_s=record.request.slo_tpot_s,
            slo_met=record.slo_met,
        )

    def choices(self, request_id: str) -> tuple[RequestRecord, ...]:
        """What is remembered of the choices of one HTTP request, in their order."""
        prefix = request_id + "-"
        numbers = sorted(
            int(key.removeprefix(prefix))
            for key in (*self._active, *self._ended)
            if key.startswith(prefix) and _NUMBER.fullmatch(key, len(prefix))
        )
        records = (self.get(f"{prefix}{number}") for number in numbers)
        return tuple(record for record in records if record is not None)

    def observe(
        self, event: Event, generation: Generation | None, commands: Sequence[Command], now_s: float, bundle: str
    ) -> None:
        """Note what an event and its commands mean for the requests they name. ``generation`` is an arrival's."""
        match event:
            case RequestArrived():
                self._arrived(event.request, generation, now_s, bundle)
            case RequestCancelled():
                record = self._find(event.request_id, event.epoch)
                if record is not None and record.state in ("queued", "placed"):
                    self._add(record, now_s, "cancelled", "by its gateway")
            case StepDone():
                self._step_done(event, now_s)
            case TransferOffered():
                self._note(event, now_s, "offered")
            case TransferPaused():
                self._note(event, now_s, "transfer paused")
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
                exposed = f"{_ms(event.exposed_s)} after the prompt was computed"
                detail = f"{event.num_bytes} bytes in {_ms(event.duration_s)}, {exposed}"
                self._note(event, now_s, "sent", detail, figures)
            case TransferFailed():
                self._note(event, now_s, "transfer failed", event.reason)
            case RequestDropped():
                self._note(event, now_s, "dropped", event.reason)
            case RequestFinished():
                figures = {"num_output_tokens": float(event.num_output_tokens)}
                detail = f"{event.reason}, {event.num_output_tokens} output tokens"
                self._note(event, now_s, "finished", detail, figures)
                self._finished(event, now_s)
            case KvReleased():
                self._note(event, now_s, "released")
            case _:
                pass
        for command in commands:
            self._commanded(command, now_s, bundle)

    def _arrived(self, request: Request, generation: Generation | None, now_s: float, bundle: str) -> None:
        known = self._active.get(request.request_id)
        if known is not None and known.request.epoch >= request.epoch:
            return  # sent again
        resumed = known or (self._ended.pop(request.request_id, None) if request.epoch > 0 else None)
        # A resumed request's output so far counts as prompt to the core; its client's prompt is shorter.
        num_prompt_tokens = request.num_prompt_tokens if generation is None else generation.num_prompt_tokens
        label = "" if generation is None else generation.label
        record = _Record(request, bundle, now_s, num_prompt_tokens, label)
        if resumed is not None:
            record.first_arrival_s = resumed.first_arrival_s
            record.entries = resumed.entries
            record.first_token_s = resumed.first_token_s
        self._active[request.request_id] = record
        delivered = f" and {record.num_delivered} delivered before" if record.num_delivered else ""
        detail = f"{num_prompt_tokens} prompt tokens{delivered}, up to {request.max_tokens} to generate"
        self._add(record, now_s, "queued" if request.epoch == 0 else f"queued again, epoch {request.epoch}", detail)

    def _step_done(self, event: StepDone, now_s: float) -> None:
        for chunk in event.chunks:
            record = self._find(chunk.request_id, chunk.epoch)
            if record is None or chunk.num_tokens == 0:
                continue
            first, record.num_done_tokens = record.num_done_tokens, record.num_done_tokens + chunk.num_tokens
            detail = f"tokens {first} to {record.num_done_tokens - 1}, step {event.plan_id} of {_ms(event.duration_s)}"
            figures = {"num_tokens": float(chunk.num_tokens), "step_s": event.duration_s}
            if chunk.is_last:
                detail += ", first token" if record.num_delivered == 0 else ", next token"
                if record.first_token_s is None:
                    record.first_token_s = now_s - record.first_arrival_s
            self._add(record, now_s, "chunk", detail, event.instance_id, figures)

    def _finished(self, event: RequestFinished, now_s: float) -> None:
        record = self._find(event.request_id, event.epoch)
        if record is not None:
            record.num_output_tokens = event.num_output_tokens
            record.last_token_s = now_s - record.first_arrival_s

    def _commanded(self, command: Command, now_s: float, bundle: str) -> None:
        match command:
            case PlaceDecode():
                what, detail = "placed for decode", f"{command.num_blocks} blocks"
            case AdmitPrefill(decode_instance_id=None):
                what, detail = "placed", f"{command.num_blocks} blocks, prefill and decode"
            case AdmitPrefill():
                what, detail = "placed for prefill", f"{command.num_blocks} blocks"
            case GrantTransfer():
                what, detail = "granted", f"to {', '.join(command.transfer.destination_ids)}"
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
            if what != "freed":
                record.state = "placed"
            if isinstance(command, AdmitPrefill):
                record.bundle = bundle
            self._add(record, now_s, what, detail, command.instance_id)

    def _ended_now(self, command: ForgetRequest, now_s: float) -> None:
        record = self._find(command.request_id, command.epoch)
        if record is None or self._active.get(command.request_id) is not record:
            return
        record.state = command.outcome
        if command.outcome not in _GOES_ON:
            self._add(record, now_s, "ended", command.outcome)
        self._ended[command.request_id] = self._active.pop(command.request_id)
        self._ended.move_to_end(command.request_id)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def _note(
        self,
        event: TransferOffered
        | TransferPaused
        | TransferLanded
        | TransferSent
        | TransferFailed
        | RequestDropped
        | RequestFinished
        | KvReleased,
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
