"""What happens to each request, from its arrival to its end, reduced from the core's events and commands alone.

Whoever tells of requests (records, spans, metrics, recorded runs) follows the milestones that `Lives` finds. The core
itself knows nothing of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ExpectCopy,
    ForgetRequest,
    Hold,
    Outcome,
    Reject,
    Restart,
    RunStep,
    SendCopy,
    ToGateway,
    ToInstanceOfRequest,
)
from pdmesh.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestReport,
    StepDone,
    TransferLanded,
    TransferSent,
)
from pdmesh.core.record_line import RecordLine
from pdmesh.model import (
    GRANULE_TOKENS,
    Epoch,
    InstanceId,
    Request,
    RequestId,
    RequestKey,
    Then,
    TransferId,
)
from pdmesh.plans import ChunkPlan

#: Fetches whose landing is told of to who waited; beyond that the oldest are forgotten.
MAX_FETCHES = 4096


@dataclass(slots=True, eq=False)
class Attempt:
    """One epoch of a request. Times are the core's clock, in seconds."""

    request: Request
    arrived_s: float
    placed_s: float | None = None  # when it left the queue
    num_done_tokens: int = 0  # of its prompt, computed or reused
    num_reused_tokens: int = 0  # of these, kept where it was placed
    #: Its chunks in flight by instance and plan: where each starts, whether in a parallel step, whether decodes wait
    #: for it. They end in any order.
    in_flight: dict[tuple[InstanceId, int], tuple[int, bool, bool]] = field(
        default_factory=dict[tuple[InstanceId, int], tuple[int, bool, bool]]
    )
    num_planned_tokens: int = 0
    num_receivers: int = 0  # of its KV, one after the other
    outcome: Outcome | None = None  # None while the core cares for it

    def planned(self, chunk: ChunkPlan) -> None:
        """Count tokens from the start of a chunk that is planned again as not computed."""
        if chunk.start < self.num_planned_tokens:
            self.num_done_tokens = min(self.num_done_tokens, chunk.start)
        self.num_planned_tokens = chunk.start + chunk.num_tokens


@dataclass(slots=True, eq=False)
class Life:
    """A request over all its epochs. Times are the core's clock, in seconds, each of the event that told of it."""

    request: Request  # as it first arrived
    first_arrival_s: float
    attempt: Attempt  # the newest
    prefill_id: InstanceId | None = None  # where it was placed last; of a group, its leader
    decode_id: InstanceId | None = None
    placed_s: float | None = None  # first
    granted_s: float | None = None  # its KV transfer, first
    landed_s: float | None = None  # last
    exposed_s: float | None = None  # how long its KV was waited for after its prompt was computed
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int | None = None  # of all epochs; known once it finished
    moves: set[TransferId] = field(default_factory=set[TransferId])  # of its decode, begun
    num_moved: int = 0  # of these, landed


class Chunk(NamedTuple):
    """A part of a request's prompt was computed: ``num_tokens`` (> 0) of them from ``start`` on."""

    instance_id: InstanceId
    plan_id: int
    start: int
    num_tokens: int
    is_last: bool  # the step sampled a token
    step_s: float  # device time of the whole step
    num_decodes: int = 0  # beside it in the step
    waited_s: float = 0.0  # that the step waited for KV which others compute
    in_parallel: bool = False  # others computed the tokens before or after it at the same time
    is_exclusive: bool = False  # the instance's residents waited for the step (exclusive batching)


class CrossedClass(NamedTuple):
    """A request was given to an instance of another arithmetic class: its tokens may come out otherwise from here on.

    ``how``: with its KV as its prompt is handed over ("hand_over") or while it decodes ("move"), or as it starts again
    from its transcript ("restart").
    """

    how: str
    instance_id: InstanceId
    before: str
    after: str

    @property
    def record_line(self) -> RecordLine:
        """What a record says of it."""
        classes = f"{self.before or 'an unknown one'} to {self.after or 'an unknown one'}"
        detail = f"{classes}: the same tokens are not promised from here on"
        return RecordLine("another arithmetic class", detail, self.instance_id)


class Fetched(NamedTuple):
    """Tokens of a waiting request's prompt were copied to an instance, where it will find their KV."""

    source_id: InstanceId
    instance_id: InstanceId
    num_tokens: int
    num_prompt_tokens: int

    @property
    def record_line(self) -> RecordLine:
        """What a record says of it."""
        detail = f"{self.num_tokens:,} of {self.num_prompt_tokens:,} tokens from {self.source_id}"
        return RecordLine("fetched", detail, self.instance_id)


class Forgotten(NamedTuple):
    """A life that ended is no longer kept, and no further milestone of it follows."""


#: Events that name one request which is known already.
RequestEvent = RequestCancelled | RequestReport

#: Commands of one request's life.
RequestCommand = ToInstanceOfRequest | ToGateway

#: What can happen to a request: the event or the command that names it, or its part of one that names several.
Happening = RequestArrived | RequestEvent | Chunk | CrossedClass | Fetched | RequestCommand | Forgotten


class Milestone(NamedTuple):
    """Something happened to a request. ``life`` and ``attempt`` are as the whole event has left them."""

    life: Life
    attempt: Attempt
    what: Happening

    @property
    def is_of_newest(self) -> bool:
        """Whether it is of the request's newest epoch."""
        return self.attempt is self.life.attempt


class Lives:
    """Keeps the life of every request that is under way, and of the last ``max_ended`` that ended (None: of all).

    A request that the core did not take, or knows from an instance alone, has none.
    """

    def __init__(self, max_ended: int | None = None) -> None:
        self._max_ended = max_ended
        self._active: dict[RequestId, Life] = {}
        self._ended: OrderedDict[RequestId, Life] = OrderedDict()
        self._superseded: dict[RequestKey, Attempt] = {}  # until the core says that they ended
        self._fetches: OrderedDict[RequestKey, ExpectCopy] = OrderedDict()  # under way, or failed of late
        self._arithmetic: dict[InstanceId, str] = {}  # class of each instance that is there

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> Sequence[Milestone]:
        """What an event and the core's answer to it mean for requests, in this order."""
        found: list[Milestone] = []
        match event:
            case RequestArrived():
                self._arrived(event, commands, now_s, found)
            case StepDone():
                self._step_done(event, now_s, found)
            case InstanceJoined():
                self._arithmetic[event.profile.instance_id] = event.profile.arithmetic
            case InstanceLost():
                self._arithmetic.pop(event.instance_id, None)
            case RequestCancelled() | RequestReport():
                self._told(event, now_s, found)
            case _:
                pass
        for command in commands:
            match command:
                case RunStep(instance_id=instance_id, plan=plan):
                    for chunk in plan.chunks:
                        if (known := self._find(chunk.request_id, chunk.epoch)) is not None:
                            known[1].in_flight[instance_id, plan.plan_id] = (
                                chunk.start,
                                plan.in_parallel,
                                plan.holds_decodes,
                            )
                            known[1].planned(chunk)
                case ExpectCopy() if command.transfer.then is Then.KEEP:
                    self._fetches[command.request_id, command.epoch] = command
                    if len(self._fetches) > MAX_FETCHES:
                        self._fetches.popitem(last=False)
                case Hold(decodes=False):
                    pass
                case ToInstanceOfRequest() | ToGateway():
                    self._commanded(command, now_s, found)
                case _:
                    pass
        return found

    def _arrived(
        self, event: RequestArrived, commands: Sequence[Command], now_s: float, found: list[Milestone]
    ) -> None:
        request, request_id = event.request, event.request.request_id
        life = self._active.get(request_id)
        if life is not None and life.attempt.request.epoch >= request.epoch:
            return  # sent again
        if _not_taken(request, commands):
            return
        attempt = Attempt(request, now_s)
        if life is not None:
            self._superseded[request_id, life.attempt.request.epoch] = life.attempt
        else:
            ended = self._ended.pop(request_id, None)
            life = ended if request.epoch > 0 else None
        if life is None:
            life = Life(request, now_s, attempt)
        life.attempt = attempt
        life.num_output_tokens = life.last_token_s = None
        self._active[request_id] = life
        found.append(Milestone(life, attempt, event))

    def _step_done(self, event: StepDone, now_s: float, found: list[Milestone]) -> None:
        for done in event.chunks:
            known = self._find(done.request_id, done.epoch)
            if known is None or done.num_tokens == 0:
                continue
            life, attempt = known
            unknown = attempt.num_done_tokens, False, False
            start, in_parallel, is_exclusive = attempt.in_flight.pop((event.instance_id, event.plan_id), unknown)
            attempt.num_done_tokens += done.num_tokens
            if done.is_last and life.first_token_s is None:
                life.first_token_s = now_s
            chunk = Chunk(
                event.instance_id,
                event.plan_id,
                start,
                done.num_tokens,
                done.is_last,
                event.duration_s,
                event.num_decodes,
                event.waited_s,
                in_parallel,
                is_exclusive,
            )
            found.append(Milestone(life, attempt, chunk))

    def _told(
        self,
        event: RequestEvent,
        now_s: float,
        found: list[Milestone],
    ) -> None:
        known = self._find(event.request_id, event.epoch)
        if known is None:
            if isinstance(event, TransferLanded):
                self._fetched(event, found)
            return
        life, attempt = known
        match event:
            case RequestCancelled():
                if attempt.outcome is not None or attempt.request.gateway_id != event.gateway_id:
                    return  # too late, or of another gateway's request
            case TransferLanded() if event.transfer_id in life.moves:
                life.decode_id, life.num_moved = event.instance_id, life.num_moved + 1
            case TransferLanded():
                life.landed_s = now_s
            case TransferSent(was_decoding=False):
                life.exposed_s = event.exposed_s
            case RequestFinished():
                life.num_output_tokens, life.last_token_s = event.num_output_tokens, now_s
            case _:
                pass
        found.append(Milestone(life, attempt, event))

    def _fetched(self, event: TransferLanded, found: list[Milestone]) -> None:
        """Note what a fetch has brought, if that is what landed."""
        command = self._fetches.pop((event.request_id, event.epoch), None)
        known = None if command is None or command.wanted_by is None else self._find(*command.wanted_by)
        if command is not None and known is not None:
            life, attempt = known
            source_id, num_prompt_tokens = command.transfer.source_ids[0], attempt.request.num_prompt_tokens
            num_tokens = (len(command.chain) - command.transfer.num_reused_granules) * GRANULE_TOKENS
            fetched = Fetched(source_id, event.instance_id, num_tokens, num_prompt_tokens)
            found.append(Milestone(life, attempt, fetched))

    def _commanded(
        self,
        command: RequestCommand,
        now_s: float,
        found: list[Milestone],
    ) -> None:
        known = self._find(command.request_id, command.epoch)
        if known is None:
            return
        life, attempt = known
        match command:
            case Reject() | Restart() if command.gateway_id != attempt.request.gateway_id:
                return  # another gateway asked under the same id
            case _:
                found.append(Milestone(life, attempt, command))
        match command:
            case AdmitPrefill() if command.leads and attempt.request.arithmetic:
                self._note_class(life, "restart", attempt.request.arithmetic, command.instance_id, found)
            case ExpectCopy(transfer=transfer):
                before = self._arithmetic.get(transfer.source_ids[0], "")
                self._note_class(life, "move" if transfer.is_move else "hand_over", before, command.instance_id, found)
            case _:
                pass
        match command:
            case AdmitPrefill() if command.leads:
                attempt.placed_s = now_s
                attempt.num_reused_tokens = command.num_reused_granules * GRANULE_TOKENS
                attempt.num_done_tokens = attempt.num_planned_tokens = attempt.num_reused_tokens
                life.placed_s = now_s if life.placed_s is None else life.placed_s
                life.prefill_id = command.instance_id
                life.decode_id = command.decode_instance_id
                if not command.moves_on:
                    life.decode_id = command.instance_id
            case ExpectCopy() if command.transfer.is_move:
                life.moves.add(command.transfer.transfer_id)
            case ExpectCopy() if command.receives_prompt:
                attempt.num_receivers += 1
                life.decode_id = command.instance_id
            case Hold():
                life.decode_id = command.instance_id
            case SendCopy() if life.granted_s is None:  # it may be granted again after a pause
                life.granted_s = now_s
            case ForgetRequest():
                attempt.outcome = command.outcome
                self._end(life, attempt, found)
            case _:
                pass

    def _note_class(self, life: Life, how: str, before: str, instance_id: InstanceId, found: list[Milestone]) -> None:
        """Its newest attempt goes on at an instance, perhaps of another arithmetic class than ``before``."""
        after = self._arithmetic.get(instance_id, "")
        if after != before:
            found.append(Milestone(life, life.attempt, CrossedClass(how, instance_id, before, after)))

    def _end(self, life: Life, attempt: Attempt, found: list[Milestone]) -> None:
        request_id, epoch = attempt.request.request_id, attempt.request.epoch
        if attempt is not life.attempt:
            del self._superseded[request_id, epoch]
            return
        if self._active.pop(request_id, None) is None:
            return
        self._ended[request_id] = life
        while self._max_ended is not None and len(self._ended) > self._max_ended:
            _, forgotten = self._ended.popitem(last=False)
            found.append(Milestone(forgotten, forgotten.attempt, Forgotten()))

    def _find(self, request_id: RequestId, epoch: Epoch) -> tuple[Life, Attempt] | None:
        life = self._active.get(request_id) or self._ended.get(request_id)
        if life is None:
            return None
        if life.attempt.request.epoch == epoch:
            return life, life.attempt
        attempt = self._superseded.get((request_id, epoch))
        return None if attempt is None else (life, attempt)


def _not_taken(request: Request, commands: Sequence[Command]) -> bool:
    """Whether the core refused a request without opening it: its id is another gateway's.

    What was opened is also forgotten where it is rejected.
    """
    refused = False
    for command in commands:
        if isinstance(command, Reject | ForgetRequest) and (command.request_id, command.epoch) == (
            request.request_id,
            request.epoch,
        ):
            if isinstance(command, ForgetRequest):
                return False
            refused = True
    return refused
