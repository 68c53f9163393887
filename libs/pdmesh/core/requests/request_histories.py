"""History of each request from arrival to end, reduced from the core's events and commands alone.

Observers of requests (records, spans, metrics, recorded runs) follow the milestones that `RequestHistories` finds. The
core itself does not use them.
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
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, Request, RequestId, RequestKey, Then, TransferId
from pdmesh.plans import ChunkPlan

#: Largest number of fetches whose landing is reported to the waiting request; the oldest are forgotten.
MAX_FETCHES = 4096


@dataclass(slots=True, eq=False)
class Attempt:
    """A request in one epoch. Times are in seconds of the core's clock.

    `placed_s` is when it left the queue. `num_done_tokens` counts prompt tokens computed or reused, `num_reused_tokens`
    the ones cached where it was placed. `num_receivers` counts the successive receivers of its KV. `outcome` is None
    until the core forgets the request.
    """

    request: Request
    arrived_s: float
    placed_s: float | None = None
    num_done_tokens: int = 0
    num_reused_tokens: int = 0
    #: Chunks in flight by instance and plan: the start, whether in a parallel step, whether decodes wait for the step.
    #: They end in any order.
    in_flight: dict[tuple[InstanceId, int], tuple[int, bool, bool]] = field(
        default_factory=dict[tuple[InstanceId, int], tuple[int, bool, bool]]
    )
    num_planned_tokens: int = 0
    num_receivers: int = 0
    outcome: Outcome | None = None

    def planned(self, chunk: ChunkPlan) -> None:
        """Note a planned chunk. Tokens from the start of a chunk that is planned again count as not computed."""
        if chunk.start < self.num_planned_tokens:
            self.num_done_tokens = min(self.num_done_tokens, chunk.start)
        self.num_planned_tokens = chunk.start + chunk.num_tokens


@dataclass(slots=True, eq=False)
class Life:
    """A request over all its epochs. Times are in seconds of the core's clock, at the events that reported them.

    - `request` is the request as it first arrived, `attempt` its newest epoch.
    - `prefill_id` is the instance where it was last placed; of a group, the leader.
    - `placed_s` and `granted_s` are the first times of placement and of a granted KV transfer.
    - `landed_s` is when KV last landed, and `exposed_s` how long it was waited for after the prompt was computed.
    - `num_output_tokens` counts all epochs, and is known once the request finished.
    - `moves` are the moves of the decoding request that began, and `num_moved` counts the landed ones.
    """

    request: Request
    first_arrival_s: float
    attempt: Attempt
    prefill_id: InstanceId | None = None
    decode_id: InstanceId | None = None
    placed_s: float | None = None
    granted_s: float | None = None
    landed_s: float | None = None
    exposed_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int | None = None
    moves: set[TransferId] = field(default_factory=set[TransferId])
    num_moved: int = 0


class Chunk(NamedTuple):
    """Part of a prompt that a step computed: ``num_tokens`` (> 0) from ``start`` on.

    - `is_last`: the step computed the end of the prompt and sampled a token.
    - `step_s` is the device time of the whole step, `waited_s` how long the step waited for others' KV.
    - `num_decodes` counts the decodes in the same step.
    - `in_parallel`: other instances computed neighbouring tokens at the same time.
    - `is_exclusive`: the instance's residents waited for the step (exclusive batching).
    """

    instance_id: InstanceId
    plan_id: int
    start: int
    num_tokens: int
    is_last: bool
    step_s: float
    num_decodes: int = 0
    waited_s: float = 0.0
    in_parallel: bool = False
    is_exclusive: bool = False


class CrossedClass(NamedTuple):
    """Change of a request to an instance of another arithmetic class: later tokens may differ.

    ``how`` is "hand_over" if its KV changed the instance after the prompt, and "move" if it did while decoding. The
    third value is "restart": the request started again from its transcript.
    """

    how: str
    instance_id: InstanceId
    before: str
    after: str

    @property
    def record_line(self) -> RecordLine:
        """Line for the request's record."""
        classes = f"{self.before or 'unknown'} to {self.after or 'unknown'}"
        detail = f"{classes}: later tokens may differ"
        return RecordLine("another arithmetic class", detail, self.instance_id)


class Fetched(NamedTuple):
    """Copy of a waiting request's prompt tokens to an instance, where it will find their KV."""

    source_id: InstanceId
    instance_id: InstanceId
    num_tokens: int
    num_prompt_tokens: int

    @property
    def record_line(self) -> RecordLine:
        """Line for the request's record."""
        detail = f"{self.num_tokens:,} of {self.num_prompt_tokens:,} tokens from {self.source_id}"
        return RecordLine("fetched", detail, self.instance_id)


class Forgotten(NamedTuple):
    """Removal of a life that ended; no milestone of it follows."""


#: Events that name one known request.
RequestEvent = RequestCancelled | RequestReport

#: Commands that belong to one request's life.
RequestCommand = ToInstanceOfRequest | ToGateway

#: Event or command that names a request, or its part of one that names several.
Happening = RequestArrived | RequestEvent | Chunk | CrossedClass | Fetched | RequestCommand | Forgotten


class Milestone(NamedTuple):
    """Something that happened to a request. ``life`` and ``attempt`` are as the whole event has left them."""

    life: Life
    attempt: Attempt
    what: Happening

    @property
    def is_of_newest(self) -> bool:
        """Whether it belongs to the request's newest epoch."""
        return self.attempt is self.life.attempt


class RequestHistories:
    """Histories of every active request, and of the last ``max_ended`` that ended (None: of all).

    Requests that the core refused unopened, or knows from an instance alone, have no history.
    """

    def __init__(self, max_ended: int | None = None) -> None:
        self._max_ended = max_ended
        self._active: dict[RequestId, Life] = {}
        self._ended: OrderedDict[RequestId, Life] = OrderedDict()
        # Older epochs that the core has not yet reported as ended.
        self._superseded: dict[RequestKey, Attempt] = {}
        # Fetches under way, or recently failed.
        self._fetches: OrderedDict[RequestKey, ExpectCopy] = OrderedDict()
        # Arithmetic class of each present instance.
        self._arithmetic: dict[InstanceId, str] = {}

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> Sequence[Milestone]:
        """Note an event and the core's commands in answer; return their milestones, in this order."""
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
            return
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
                    return
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
        """Add a milestone for the waiting request if a fetch has landed."""
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
                return
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
            case SendCopy() if life.granted_s is None:
                life.granted_s = now_s
            case ForgetRequest():
                attempt.outcome = command.outcome
                self._end(life, attempt, found)
            case _:
                pass

    def _note_class(self, life: Life, how: str, before: str, instance_id: InstanceId, found: list[Milestone]) -> None:
        """Add a `CrossedClass` milestone to ``found`` if an instance's arithmetic class differs from ``before``.

        ``how`` says how the request came to the instance. The class of an unknown instance is empty.
        """
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
    """Whether the core refused a request without opening it, because its id belongs to another gateway.

    A request that was opened and then rejected is also forgotten.
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
