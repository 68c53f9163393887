"""Each request's history as `pdmesh requests show` prints it, made from the request's milestones."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pdmesh.core.commands import AdmitPrefill
from pdmesh.core.events import RequestArrived
from pdmesh.core.record_line import RecordLine, ms
from pdmesh.core.requests.request_histories import Chunk, Forgotten, Happening, Life, Milestone
from pdmesh.metrics import NO_SLO, Slo, keeps_slo, tpot_between_s
from pdmesh.model import RequestId
from pdmesh.wire.messages import RecordEntry, RequestRecord
from pdmesh_scheduler.observing import Handled

#: Prefix by which an edge turns a request's id into the id of a response.
_OF_A_RESPONSE = re.compile(r"^(chatcmpl|cmpl)-")

_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(slots=True, eq=False)
class _Record:
    life: Life
    bundle: str
    num_prompt_tokens: int
    label: str
    entries: list[RecordEntry] = field(default_factory=list[RecordEntry])

    @property
    def state(self) -> str:
        attempt = self.life.attempt
        if attempt.outcome is not None:
            return attempt.outcome
        if attempt.placed_s is None:
            return "queued"
        return "prefilling" if attempt.num_done_tokens < attempt.request.num_prompt_tokens else "decoding"

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the first arrival to the first token; None before that token."""
        return self._since_arrival_s(self.life.first_token_s)

    @property
    def last_token_s(self) -> float | None:
        return self._since_arrival_s(self.life.last_token_s)

    @property
    def slo_met(self) -> bool | None:
        """Whether a finished request met its targets; None if it has no target or has not finished."""
        request, num_output_tokens = self.life.attempt.request, self.life.num_output_tokens
        slo = Slo(ttft_s=request.slo_ttft_s, tpot_s=request.slo_tpot_s)
        first_s, last_s = self.first_token_s, self.last_token_s
        if slo == NO_SLO or num_output_tokens is None or first_s is None or last_s is None:
            return None
        tpot_s = tpot_between_s(first_s, last_s, num_output_tokens)
        return keeps_slo(slo, ttft_s=first_s, tpot_s=tpot_s, e2e_s=last_s)

    @property
    def num_delivered(self) -> int:
        """Output tokens that earlier epochs delivered."""
        return self.life.attempt.request.num_prompt_tokens - self.num_prompt_tokens

    def _since_arrival_s(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self.life.first_arrival_s


class RequestRecords:
    """Records of all requests that `pdmesh.core.requests.request_histories.RequestHistories` keeps."""

    def __init__(self, wall_time: Callable[[float], float]) -> None:
        self._wall_time = wall_time
        self._records: dict[RequestId, _Record] = {}

    def find(self, name: str) -> tuple[RequestRecord, ...]:
        """Return the records that a name stands for, by the first of these rules that finds any.

        The name is a request's id (perhaps with the prefix of a response), or the id of an HTTP request with several
        choices. Otherwise it is a client's label, or the first characters of an id or label. The choices of one HTTP
        request are in their order.
        """
        if not name:
            return ()
        request_id = _OF_A_RESPONSE.sub("", name)
        if (record := self.get(request_id)) is not None:
            return (record,)
        if records := self.choices(request_id):
            return records
        known = self._records.items()
        found = [key for key, record in known if record.label == name]
        if not found:
            found = [key for key, record in known if key.startswith(request_id) or record.label.startswith(name)]
        return tuple(record for key in found if (record := self.get(key)) is not None)

    def label(self, request_id: RequestId) -> str:
        """Return the client's name for a request."""
        record = self._records.get(request_id)
        return "" if record is None else record.label

    def newest(self, limit: int) -> tuple[RequestRecord, ...]:
        """Return the ``limit`` requests that arrived last, the newest first, without their entries."""
        known = self._records
        last = heapq.nlargest(max(0, limit), known, key=lambda key: known[key].life.first_arrival_s)
        found = (self.get(key) for key in last)
        return tuple(msgspec.structs.replace(record, entries=()) for record in found if record is not None)

    def get(self, request_id: str) -> RequestRecord | None:
        record = self._records.get(RequestId(request_id))
        if record is None:
            return None
        request = record.life.attempt.request
        return RequestRecord(
            request_id=request_id,
            label=record.label,
            arrived_at=self._wall_time(record.life.first_arrival_s),
            num_prompt_tokens=record.num_prompt_tokens,
            bundle=record.bundle,
            entries=tuple(record.entries),
            state=record.state,
            num_output_tokens=record.life.num_output_tokens,
            first_token_s=record.first_token_s,
            last_token_s=record.last_token_s,
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
            slo_met=record.slo_met,
        )

    def choices(self, request_id: str) -> tuple[RequestRecord, ...]:
        """Return the remembered choices of one HTTP request, in their order."""
        prefix = request_id + "-"
        numbers = sorted(
            int(key.removeprefix(prefix))
            for key in self._records
            if key.startswith(prefix) and _NUMBER.fullmatch(key, len(prefix))
        )
        records = (self.get(f"{prefix}{number}") for number in numbers)
        return tuple(record for record in records if record is not None)

    def observe(self, handled: Handled) -> None:
        """Add each milestone of a request's newest epoch to the request's record, and drop forgotten requests."""
        for milestone in handled.milestones:
            self._note(milestone, handled)

    def _note(self, milestone: Milestone, handled: Handled) -> None:
        life, what = milestone.life, milestone.what
        request_id = life.request.request_id
        if isinstance(what, Forgotten):
            self._records.pop(request_id, None)
            return
        if isinstance(what, RequestArrived):
            self._arrived(life, handled)
        record = self._records.get(request_id)
        if record is None or not milestone.is_of_newest:
            return
        if isinstance(what, AdmitPrefill):
            record.bundle = handled.bundle
        line = _line(record, what)
        if line is not None:
            at_s = handled.now_s - life.first_arrival_s
            record.entries.append(
                RecordEntry(
                    at_s=at_s,
                    what=line.what,
                    instance_id=line.instance_id,
                    detail=line.detail,
                    figures=line.figures or {},
                )
            )

    def _arrived(self, life: Life, handled: Handled) -> None:
        generation = handled.generation
        # A resumed request's output so far counts as prompt to the core; its client's prompt is shorter.
        num_prompt_tokens = (
            life.attempt.request.num_prompt_tokens if generation is None else generation.num_prompt_tokens
        )
        label = "" if generation is None else generation.label
        record = _Record(life, handled.bundle, num_prompt_tokens, label)
        known = self._records.pop(life.request.request_id, None)
        if known is not None and known.life is life:
            record.entries = known.entries
        self._records[life.request.request_id] = record


def _line(record: _Record, what: Happening) -> RecordLine | None:
    """Return the milestone's line in the record; None if records do not mention milestones of this kind."""
    match what:
        case RequestArrived():
            request = what.request
            delivered = f" and {record.num_delivered} delivered before" if record.num_delivered else ""
            detail = f"{record.num_prompt_tokens} prompt tokens{delivered}, up to {request.max_tokens} to generate"
            return RecordLine("queued" if request.epoch == 0 else f"queued again, epoch {request.epoch}", detail)
        case Chunk():
            end = what.start + what.num_tokens
            detail = f"tokens {what.start} to {end - 1}, step {what.plan_id} of {ms(what.step_s)}"
            if what.in_parallel:
                detail += " in a parallel step"
            if what.waited_s > 0:
                detail += f" and {ms(what.waited_s)} of waiting for KV"
            if what.num_decodes:
                detail += f" beside {what.num_decodes} decodes (mixed batching)"
            elif what.is_exclusive:
                detail += " (exclusive batching)"
            if what.is_last:
                detail += ", first token" if record.num_delivered == 0 else ", next token"
            figures = {
                "start": float(what.start),
                "num_tokens": float(what.num_tokens),
                "step_s": what.step_s,
                "num_decodes": float(what.num_decodes),
                "waited_s": what.waited_s,
            }
            return RecordLine("chunk", detail, what.instance_id, figures)
        case Forgotten():
            return None
        case _:
            return what.record_line
