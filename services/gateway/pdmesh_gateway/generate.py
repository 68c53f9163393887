"""One client request as one stream of text: fan-out to transcripts, detokenizing, stop strings, cancelling."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio
import anyio.lowlevel
import structlog

from pdmesh.core.commands import ForgetRequest, GatewayCommand, Reject, Restart
from pdmesh.errors import RequestRejected
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import Epoch, GatewayId, RejectReason, RequestId, SamplingParams, request_id_of
from pdmesh.telemetry.tracing import NoSpan, Span, Tracing
from pdmesh.wire.messages import (
    OtherChoice,
    Submit,
    TokenLogprobs,
    TokenOut,
    pack_token_ids,
)
from pdmesh_gateway.detokenizer import Detokenizer
from pdmesh_gateway.metrics import GatewayMetrics
from pdmesh_gateway.scheduler_link import GatewaySession, Outlook
from pdmesh_gateway.spans import FIRST_TOKEN, REQUEST, request_attributes, response_attributes
from pdmesh_gateway.stop import StopFinder
from pdmesh_gateway.tokenizer import ModelTokenizer
from pdmesh_gateway.transcripts import FIRST_EPOCH, Mailbox, Transcript, Transcripts, finish_of

log = structlog.get_logger()

#: What became of a generation whose client went away.
CANCELLED = "cancelled"

#: How long a new request waits for a scheduler that is gone for a moment. Those under way wait until their deadline.
CONNECT_GRACE_S = 60.0

#: When to come again, where no instance is usable: about what one needs to start.
RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What a client asked for, checked and tokenized."""

    request_id: str  # ours: never a client's, never used again
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""  # the name of the client's key
    share: int = 1  # of that key
    traceparent: str | None = None
    deadline_s: float = 3600.0
    operation: str = "text_completion"
    label: str = ""  # what its client calls it
    received_at: float = field(default_factory=time.time)  # Unix time, seconds

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(slots=True, kw_only=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    text_offsets: list[int] = field(default_factory=list[int])  # of each token: the choice's characters before it
    logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerationFailed(RequestRejected):
    """An instance could not go on with a generation."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, type="server_error", code="generation_failed")


@dataclass(slots=True, kw_only=True)
class Choice:
    """One generation of a job, from tokens to text."""

    index: int
    transcript: Transcript
    detokenizer: Detokenizer
    stop: StopFinder
    num_tokens: int = 0
    num_characters: int = 0  # of the text so far, with what stop strings hold back
    finish_reason: str | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def advance(self, tokens: list[TokenOut]) -> Delta:
        """Turn delivered tokens into text. Raises GenerationFailed."""
        delta = Delta(index=self.index)
        min_tokens = self.transcript.params.min_tokens
        for token in tokens:
            finish = finish_of(token)
            if finish == "error":
                raise GenerationFailed(token.error or "The generation was aborted.")
            piece = ""
            if token.token_id is not None:
                self.num_tokens += 1
                delta.token_ids.append(token.token_id)
                delta.text_offsets.append(self.num_characters)
                delta.logprobs.append(token.logprobs)
                # The token that stopped the generation is no text, unless its text was asked for.
                if finish != "stop" or self.stop.include_stop:
                    piece = self.detokenizer.push(token.token_id)
            if finish is not None:
                piece += self.detokenizer.flush()
            self.num_characters += len(piece)
            shown, found = self.stop.push(piece, check=self.num_tokens > min_tokens)
            delta.text += shown
            if found is not None:
                finish, delta.stop_reason = "stop", found
            elif finish is not None:
                delta.text += self.stop.flush()
                delta.stop_reason = token.stop_token_id
            if finish is not None:
                delta.finish_reason = self.finish_reason = finish
                break
        return delta


class TextStream:
    """The choices of one job under way. Iterate `deltas` once."""

    def __init__(
        self, generator: Generator, job: GenerationJob, choices: list[Choice], mailbox: Mailbox, span: Span
    ) -> None:
        self._generator = generator
        self._span = span
        self._mailbox = mailbox
        self._choices = choices
        self._by_transcript = {choice.transcript.request_id: choice for choice in choices}
        self._num_left = len(choices)
        self._started_s = time.monotonic()
        self.job = job

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    def num_tokens_of(self, index: int) -> int:
        return self._choices[index].num_tokens

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs | None]:
        """Of all prompt tokens of a choice, complete when its first token is here. The first has none."""
        transcript = self._choices[index].transcript
        return [transcript.prompt_logprobs.get(position) for position in range(transcript.num_prompt_tokens)]

    async def deltas(self, *, idle_s: float = math.inf) -> AsyncIterator[list[Delta]]:
        """What is new, until every choice has ended; an empty list after each ``idle_s`` without news.

        Raises RequestRejected if a choice cannot go on.
        """
        metrics = self._generator.metrics
        first_s: dict[int, float] = {}
        last_s: dict[int, float] = {}
        while self._num_left:
            is_idle = not await self._wait(idle_s)
            now_s = time.monotonic()
            batch: list[Delta] = []
            while (transcript := self._mailbox.take()) is not None:
                choice = self._by_transcript[transcript.request_id]
                tokens = transcript.take()
                if choice.is_done:
                    continue
                if tokens:
                    delta = choice.advance(tokens)
                    if not first_s:
                        self._span.event(FIRST_TOKEN)
                    metrics.tokens_out(len(delta.token_ids), now_s, self._started_s, last_s.get(choice.index))
                    first_s.setdefault(choice.index, now_s)
                    last_s[choice.index] = now_s
                    batch.append(delta)
                    if delta.finish_reason is not None:
                        metrics.finished(
                            transcript.num_prompt_tokens,
                            choice.num_tokens,
                            delta.finish_reason,
                            ttft_s=first_s[choice.index] - self._started_s,
                            e2e_s=now_s - self._started_s,
                            slo=self.job.slo,
                        )
                if choice.is_done:
                    self._num_left -= 1
                    self._generator.finish(transcript)
                elif transcript.failure is not None:
                    raise transcript.failure
            if batch or is_idle:
                yield batch

    async def _wait(self, idle_s: float) -> bool:
        """Until there is news, resuming what lost a token on the way. False after ``idle_s`` without any."""
        idle_at_s = time.monotonic() + idle_s
        while True:
            stalled = [
                (resume_at_s, choice.transcript)
                for choice in self._choices
                if (resume_at_s := choice.transcript.resume_at_s) is not None
            ]
            until_s = min((resume_at_s for resume_at_s, _ in stalled), default=math.inf)
            with anyio.move_on_after(min(until_s, idle_at_s) - time.monotonic()):
                await self._mailbox.wait()
                return True
            now_s = time.monotonic()
            for resume_at_s, transcript in stalled:
                if resume_at_s <= now_s:
                    self._generator.resume(transcript, "a token was lost on the way", cancel=True)
            if idle_at_s <= now_s:
                return False


class Generator:
    """Starts generations and keeps their transcripts; answers the scheduler about them."""

    def __init__(
        self,
        *,
        gateway_id: GatewayId,
        token_address: str,
        tokenizer: ModelTokenizer,
        transcripts: Transcripts,
        link: GatewaySession,
        metrics: GatewayMetrics,
        tracing: Tracing,
        model: str,
        no_instance_grace_s: float,
    ) -> None:
        self._gateway_id = gateway_id
        self._token_address = token_address
        self._tokenizer = tokenizer
        self._transcripts = transcripts
        self._link = link
        self._tracing = tracing
        self._model = model
        self._no_instance_grace_s = no_instance_grace_s
        self.metrics = metrics

    def new_request_id(self) -> RequestId:
        """128 random bits, and whose it is: never used again. What its client calls it is its label."""
        return request_id_of(self._gateway_id, secrets.token_hex(16))

    @asynccontextmanager
    async def open(self, job: GenerationJob) -> AsyncGenerator[TextStream]:
        """Submit a job; whatever of it has not ended when the block is left is cancelled.

        Raises RequestRejected if the scheduler cannot be reached, no instance is usable, or the job takes longer than
        its deadline.
        """
        mailbox = Mailbox()
        choices: list[Choice] = []
        span = self._span(job)
        outcome = CANCELLED  # unless the block is left with an error
        is_failure = False
        try:
            await self._wait_ready(job.deadline_s)
            num_tokens_before = 0
            for prompt_index, prompt in enumerate(job.prompts):
                packed = pack_token_ids(prompt if isinstance(prompt, list) else list(prompt))
                of_prompt: list[Choice] = []
                for i in range(job.n):
                    choice = self._choice(job, prompt_index * job.n + i, i, prompt, packed, mailbox, span.traceparent)
                    choice.transcript.num_tokens_before = num_tokens_before
                    num_tokens_before += len(prompt)
                    self._transcripts.add(choice.transcript)
                    of_prompt.append(choice)
                choices += of_prompt
                self._submit_when_possible(*(choice.transcript for choice in of_prompt))
                await anyio.lowlevel.checkpoint()  # many choices must not hold up other clients
            with anyio.move_on_after(job.deadline_s) as scope:
                yield TextStream(self, job, choices, mailbox, span)
            if scope.cancelled_caught:
                raise RequestRejected(
                    f"The request took longer than {job.deadline_s:g} s.",
                    status=504,
                    type="server_error",
                    code="deadline_exceeded",
                )
        except Exception as error:
            outcome = (error.code if isinstance(error, RequestRejected) else None) or type(error).__name__
            is_failure = not isinstance(error, RequestRejected) or error.status >= 500
            raise
        finally:
            for choice in choices:
                if not choice.is_done:
                    self.finish(choice.transcript)
            self._ended(job, choices, span, outcome, is_failure=is_failure)

    async def _wait_ready(self, limit_s: float) -> None:
        """Until the mesh takes new requests, as long as somebody is coming who may make it.

        Raises RequestRejected if nobody is, or after ``limit_s``.
        """
        link = self._link
        grace_s = {Outlook.NO_SCHEDULER: CONNECT_GRACE_S, Outlook.NO_INSTANCE: self._no_instance_grace_s}
        with anyio.move_on_after(limit_s):
            while (outlook := link.outlook) is not Outlook.READY:
                with anyio.move_on_after(grace_s.get(outlook)):
                    await link.wait_changed(outlook)
                if link.outlook is outlook:
                    break
        if (reason := link.unready_reason) is not None:
            raise RequestRejected(
                f"The mesh cannot serve now: {reason}.",
                status=503,
                type="server_error",
                code="unavailable",
                retry_after_s=RETRY_AFTER_S,
            )

    def finish(self, transcript: Transcript) -> None:
        """Forget a request whose client has all it wants; cancel it where it still runs."""
        if not transcript.finished:
            transcript.finished = True
            self._link.cancel(transcript.request_id, transcript.epoch, num_output_tokens=len(transcript.output))
        self._transcripts.remove(transcript)

    def resume(self, transcript: Transcript, reason: str, *, cancel: bool = False, preempted: bool = False) -> None:
        """Submit a request again, from its transcript and under the next epoch. ``preempted``: nothing has failed."""
        tell = log.debug if preempted else log.warning
        tell("resuming", request_id=transcript.request_id, epoch=transcript.epoch, reason=reason)
        if cancel:  # what it drew is told when its last epoch ends
            self._link.cancel(transcript.request_id, transcript.epoch, num_output_tokens=0)
        # Where the scheduler is another one than it was, or gone, it is to blame.
        is_suspect = self._link.is_connected and transcript.submitted_on == self._link.num_connections
        if not transcript.restart(counts=is_suspect and not preempted):
            transcript.fail(
                RequestRejected(
                    f"The request was restarted too often; the last time: {reason}",
                    status=503,
                    type="server_error",
                    code="restarted_too_often",
                    retry_after_s=1,
                )
            )
            return
        if preempted:
            self.metrics.preempted()
        else:
            self.metrics.restarted()
        self._submit_when_possible(transcript)

    def _span(self, job: GenerationJob) -> Span:
        if not self._tracing.on:
            return NoSpan(job.traceparent)
        attributes = request_attributes(
            request_id=job.request_id,
            label=job.label,
            operation=job.operation,
            model=self._model,
            params=job.params,
            num_choices=job.num_choices,
            num_prompt_tokens=job.num_prompt_tokens,
        )
        return self._tracing.start(REQUEST, job.traceparent, job.received_at, attributes)

    def _ended(self, job: GenerationJob, choices: list[Choice], span: Span, outcome: str, *, is_failure: bool) -> None:
        """Tell span and log how a request ended; ``outcome`` is that of the choices that did not finish."""
        num_output_tokens = sum(choice.num_tokens for choice in choices)
        finish_reasons = [choice.finish_reason or outcome for choice in choices] or [outcome]
        epoch = max((choice.transcript.epoch for choice in choices), default=FIRST_EPOCH)
        num_restarts = sum(choice.transcript.num_restarts for choice in choices)
        span.end(
            response_attributes(
                num_output_tokens=num_output_tokens, finish_reasons=finish_reasons, num_restarts=num_restarts
            ),
            error=outcome if is_failure else None,
        )
        log.info(
            "request ended",
            request_id=job.request_id,
            label=job.label,
            epoch=epoch,
            finish_reasons=finish_reasons,
            num_prompt_tokens=job.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            duration_s=round(time.time() - job.received_at, 6),
        )

    # What the scheduler says (`pdmesh_gateway.scheduler_link.Waiting`).

    def waiting(self) -> tuple[tuple[RequestId, Epoch], ...]:
        return self._transcripts.waiting()

    def unbegun(self, scheduler_id: str) -> tuple[RequestId, ...]:
        return self._transcripts.unbegun(scheduler_id)

    def on_rejected(self, command: Reject) -> None:
        def refused(transcript: Transcript) -> None:
            if command.reason in _WANT_OF_ROOM and not transcript.may_be_refused:
                self.resume(transcript, command.message)
            else:
                transcript.fail(_rejection(command))

        self._tell(command, refused)

    def on_restarted(self, command: Restart) -> None:
        def resumed(transcript: Transcript) -> None:
            self.resume(transcript, command.reason, preempted=command.preempted)

        self._tell(command, resumed)

    def on_finished(self, command: ForgetRequest) -> None:
        def drawn(transcript: Transcript) -> None:
            transcript.all_drawn = True
            transcript.suspect(transcript.stall_grace_s)

        self._tell(command, drawn)

    def _tell(self, command: GatewayCommand, what: Callable[[Transcript], None]) -> None:
        """Do ``what`` with the request that the scheduler speaks of; if that fails, the request does, alone."""
        transcript = self._transcripts.current(command.request_id, command.epoch)
        if transcript is not None:
            try:
                what(transcript)
            except Exception as error:  # all requests share the scheduler's stream
                transcript.break_off(error)

    def on_connected(self) -> None:
        """Tell a scheduler that is new of all that nobody seems to work on.

        One that was sent a request in this epoch knows what became of it, or starts it again under the next: by now it
        may be freeing what it had of it, or never had it (`unbegun`).
        """
        for transcript in self._transcripts.unopened():
            if transcript.submitted_to != self._link.scheduler_id:
                self._submit_when_possible(transcript)

    def _submit_when_possible(self, transcript: Transcript, *others: Transcript) -> None:
        """Now, or when there is a scheduler: a request under way waits for one until its deadline."""
        try:
            self._submit(transcript, *others)
        except RequestRejected:
            log.info("waiting for a scheduler", request_id=transcript.request_id, epoch=transcript.epoch)

    def _submit(self, transcript: Transcript, *others: Transcript) -> None:
        """Send a request to the scheduler, with ``others`` of the same prompt. Raises RequestRejected."""
        submit = Submit(
            generation=transcript.generation(),
            priority=transcript.priority,
            slo_ttft_s=transcript.slo.ttft_s,
            slo_tpot_s=transcript.slo.tpot_s,
            tenant=transcript.tenant,
            share=transcript.share,
            num_tokens_before=transcript.num_tokens_before,
            age_s=transcript.age_s,
            others=tuple(OtherChoice(other.request_id, other.params.seed) for other in others),
        )
        self._link.submit(submit)
        for submitted in (transcript, *others):
            submitted.submitted_on = self._link.num_connections
            submitted.submitted_to = self._link.scheduler_id

    def _choice(
        self,
        job: GenerationJob,
        index: int,
        i: int,
        prompt: Sequence[int],
        packed: bytes,
        mailbox: Mailbox,
        traceparent: str | None,
    ) -> Choice:
        request_id = job.request_id if job.num_choices == 1 else f"{job.request_id}-{index}"
        transcript = Transcript(
            request_id=RequestId(request_id),
            gateway_id=self._gateway_id,
            token_address=self._token_address,
            prompt=packed,
            params=replace(job.params, seed=(job.params.seed + i) % 2**63),
            mailbox=mailbox,
            clock=time.monotonic,
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
            slo=job.slo,
            traceparent=traceparent,
            label=job.label,
        )
        return Choice(
            index=index,
            transcript=transcript,
            detokenizer=self._tokenizer.detokenizer(prompt[-32:], skip_special_tokens=job.skip_special_tokens),
            stop=StopFinder(job.stop, job.include_stop),
        )


_WANT_OF_ROOM = (RejectReason.OVERLOADED, RejectReason.QUEUE_TIMEOUT)

_STATUS_OF_REASON = {
    RejectReason.OVERLOADED: (429, "rate_limit_error"),
    RejectReason.QUEUE_TIMEOUT: (503, "server_error"),
    RejectReason.NO_INSTANCE: (503, "server_error"),
    RejectReason.TOO_LONG: (400, "invalid_request_error"),
    RejectReason.INVALID: (400, "invalid_request_error"),
}


def _rejection(command: Reject) -> RequestRejected:
    status, kind = _STATUS_OF_REASON[command.reason]
    retry_after_s = command.retry_after_s if command.retry_after_s is not None else 1.0
    return RequestRejected(
        command.message,
        status=status,
        type=kind,
        code=str(command.reason),
        retry_after_s=None if status == 400 else retry_after_s,
    )
