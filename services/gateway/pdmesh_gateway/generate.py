"""Client requests at the scheduler: submit, resume and cancel them, and apply the scheduler's commands."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import structlog

from pdmesh.core.commands import SHARED_BLAME, ForgetRequest, GatewayCommand, Reject, Restart
from pdmesh.errors import RequestRejected
from pdmesh.model import Epoch, GatewayId, RejectReason, RequestId, is_request_of, request_id_of
from pdmesh.telemetry.tracing import Span, Tracing
from pdmesh.wire.messages import OtherChoice, Submit, pack_token_ids
from pdmesh_gateway.call_stops import CallStops
from pdmesh_gateway.choices import Choice
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.gateway_session import GatewaySession, Outlook
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.prompt_prefixes import Prefixes, PromptPrefix
from pdmesh_gateway.request_spans import REQUEST, request_attributes, response_attributes
from pdmesh_gateway.request_transcript import FIRST_EPOCH, Transcript
from pdmesh_gateway.stop import StopFinder
from pdmesh_gateway.text_stream import TextStream
from pdmesh_gateway.transcripts import Transcripts

log = structlog.get_logger()

#: Outcome of a generation whose client disconnected.
CANCELLED = "cancelled"

#: How long a new request waits for an unreachable scheduler. Running requests wait until their deadline.
CONNECT_GRACE_S = 60.0

#: Seconds that clients are told to wait if no instance is usable: about the start of an instance.
RETRY_AFTER_S = 5.0


class Generator:
    """Starter of generations and keeper of their transcripts; applies the scheduler's commands to them."""

    def __init__(
        self,
        *,
        gateway_id: GatewayId,
        token_address: str,
        tokenizer: ModelTokenizer,
        prefixes: Prefixes,
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
        self._prefixes = prefixes
        self._transcripts = transcripts
        self._link = link
        self._tracing = tracing
        self._model = model
        self._no_instance_grace_s = no_instance_grace_s
        self.metrics = metrics

    def new_request_id(self) -> RequestId:
        """Return a new id: this gateway's id and 128 random bits. The client's own id is the request's label."""
        return request_id_of(self._gateway_id, secrets.token_hex(16))

    def owns(self, request_id: RequestId) -> bool:
        """Return whether this gateway made a request's id."""
        return is_request_of(self._gateway_id, request_id)

    @asynccontextmanager
    async def open(self, job: GenerationJob) -> AsyncGenerator[TextStream]:
        """Submit a job and yield the stream of its text. Leaving the block cancels the choices that have not ended.

        Raises RequestRejected if the scheduler is unreachable or no instance is usable. Raises it, too, if no token
        comes, or the client reads nothing, for ``job.max_wait_s``.
        """
        mailbox: Mailbox[Transcript] = Mailbox()
        choices: list[Choice] = []
        span = self._span(job)
        # The outcome if the block is left without an error.
        outcome = CANCELLED
        is_failure = False
        try:
            await self._wait_ready(job.max_wait_s)
            num_tokens_before = 0
            for prompt_index, prompt in enumerate(job.prompts):
                packed = pack_token_ids(prompt if isinstance(prompt, list) else list(prompt))
                prefix = await self._prefixes.of(
                    packed, job.params, tenant=job.tenant, salt=job.cache_salt, weights=self._link.new_weights
                )
                of_prompt: list[Choice] = []
                for i in range(job.n):
                    index = prompt_index * job.n + i
                    choice = self._choice(job, index, i, prompt, packed, prefix, mailbox, span.traceparent)
                    choice.transcript.num_tokens_before = num_tokens_before
                    num_tokens_before += len(prompt)
                    self._transcripts.add(choice.transcript)
                    of_prompt.append(choice)
                choices += of_prompt
                self._submit_when_possible(*(choice.transcript for choice in of_prompt))
                # Many choices must not delay other clients.
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(job.max_wait_s) as scope:
                yield TextStream(self, job, choices, mailbox, span, scope)
            if scope.cancelled_caught:
                limit = f"{job.max_wait_s:g} s, this server's limit (`gateway.request_timeout_s`)"
                raise RequestRejected(
                    f"No token was generated or read by the client for {limit}.",
                    status=504,
                    code="deadline_exceeded",
                )
        except Exception as error:
            outcome = (error.code if isinstance(error, RequestRejected) else None) or type(error).__name__
            is_failure = not isinstance(error, RequestRejected) or error.status >= 500
            raise
        finally:
            mailbox.close()
            for choice in choices:
                if not choice.is_done:
                    self.finish(choice.transcript)
            self._ended(job, choices, span, outcome, is_failure=is_failure)

    async def _wait_ready(self, limit_s: float) -> None:
        """Wait until the mesh takes new requests, as long as an instance or a scheduler can be expected to start.

        Raises RequestRejected when neither is expected any more, or after ``limit_s``.
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
                f"The mesh cannot serve requests now: {reason}.",
                status=503,
                code="unavailable",
                retry_after_s=RETRY_AFTER_S,
            )

    def finish(self, transcript: Transcript) -> None:
        """Forget a request; cancel it at the scheduler if it has not ended."""
        if not transcript.finished:
            transcript.finished = True
            self._link.cancel(transcript.request_id, transcript.epoch, num_output_tokens=len(transcript.output))
        self._transcripts.remove(transcript)

    def resume_stalled(self, transcript: Transcript) -> None:
        """Cancel a request that lost a token on the way, and submit it again; fail it if it has too much blame.

        The request gets a share of the blame, because its tokens may be the cause. No blame is given if the scheduler
        changed or is unreachable, or if nothing could arrive from the instance.
        """
        # The request's last epoch reports the output tokens, so this one reports none.
        self._link.cancel(transcript.request_id, transcript.epoch, num_output_tokens=0)
        transcript.silent_source = transcript.source or transcript.silent_source
        is_same = self._link.is_connected and transcript.submitted_on == self._link.num_connections
        may_be_its_own = is_same and not self._transcripts.was_unreachable(transcript)
        self.resume(transcript, "a token was lost on the way", blame=SHARED_BLAME if may_be_its_own else 0.0)

    def resume(self, transcript: Transcript, reason: str, *, blame: float = 0.0, retracted: bool = False) -> None:
        """Submit a request again, from its transcript and under the next epoch.

        The request fails instead if it has too much blame (`Transcript.restart`). ``retracted``: the scheduler took its
        memory for other requests and nothing failed.
        """
        tell = log.debug if retracted else log.warning
        tell("resuming", request_id=transcript.request_id, epoch=transcript.epoch, reason=reason)
        if not transcript.restart(blame=blame):
            transcript.fail(
                RequestRejected(
                    f"The request was restarted too often. The last reason: {reason}.",
                    status=503,
                    code="restarted_too_often",
                    retry_after_s=1,
                )
            )
            return
        if retracted:
            transcript.num_preemptions += 1
            self.metrics.retractions.inc()
        else:
            self.metrics.restarts.inc()
        self._submit_when_possible(transcript)

    def _span(self, job: GenerationJob) -> Span:
        if not self._tracing.on:
            return Span(job.traceparent)
        return self._tracing.start(REQUEST, job.traceparent, job.received_at, request_attributes(job, self._model))

    def _ended(self, job: GenerationJob, choices: list[Choice], span: Span, outcome: str, *, is_failure: bool) -> None:
        """Record the end of a request in metrics, span and log.

        ``outcome`` is the finish reason of choices that did not finish.
        """
        num_output_tokens = sum(choice.num_tokens for choice in choices)
        if choices and all(choice.is_done for choice in choices):
            longest = max(choice.num_tokens for choice in choices)
            num_preemptions = sum(choice.transcript.num_preemptions for choice in choices)
            self.metrics.answered(
                max_tokens=job.params.max_tokens,
                n=job.n,
                num_longest_tokens=longest,
                num_preemptions=num_preemptions,
            )
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

    # Callbacks of the scheduler's stream (`pdmesh_gateway.gateway_session.Waiting`).

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
            self.resume(transcript, command.reason, blame=command.blame, retracted=command.retracted)

        self._tell(command, resumed)

    def on_finished(self, command: ForgetRequest) -> None:
        def drawn(transcript: Transcript) -> None:
            transcript.all_drawn, transcript.silent_source = True, command.drawn_by
            transcript.suspect(transcript.stall_grace_s)

        self._tell(command, drawn)

    def _tell(self, command: GatewayCommand, what: Callable[[Transcript], None]) -> None:
        """Call ``what`` with a command's transcript if that is current. An error fails this request alone."""
        transcript = self._transcripts.current(command.request_id, command.epoch)
        if transcript is not None:
            try:
                what(transcript)
            except Exception as error:
                # All requests share the scheduler's stream.
                transcript.break_off(error)

    def on_connected(self) -> None:
        """Submit to a new scheduler the requests that no instance has begun to stream.

        A request that was submitted to this scheduler in its present epoch is left alone. The scheduler knows its state
        or restarts it under the next epoch, also if the submission was lost (`unbegun`).
        """
        for transcript in self._transcripts.unopened():
            if transcript.submitted_to != self._link.scheduler_id:
                self._submit_when_possible(transcript)

    def _submit_when_possible(self, transcript: Transcript, *others: Transcript) -> None:
        """Submit a request now, or at the next connection.

        A running request waits for a scheduler until its deadline.
        """
        try:
            self._submit(transcript, *others)
        except RequestRejected:
            log.info("waiting for the scheduler", request_id=transcript.request_id, epoch=transcript.epoch)

    def _submit(self, transcript: Transcript, *others: Transcript) -> None:
        """Send a request to the scheduler, with ``others`` of the same prompt.

        Raises RequestRejected without a scheduler.
        """
        submit = Submit(
            generation=transcript.generation(self._transcripts.arithmetic_of(transcript)),
            priority=transcript.priority,
            slo_ttft_s=transcript.slo.ttft_s,
            slo_tpot_s=transcript.slo.tpot_s,
            tenant=transcript.tenant,
            share=transcript.share,
            num_tokens_before=transcript.num_tokens_before,
            age_s=transcript.age_s,
            silent_source_id=transcript.silent_source,
            session=transcript.session,
            others=tuple(OtherChoice(other.request_id, other.params.seed) for other in others),
        )
        self._link.submit(submit)
        for submitted in (transcript, *others):
            submitted.silent_source = None
            submitted.submitted_on = self._link.num_connections
            submitted.submitted_to = self._link.scheduler_id
            submitted.submitted_at_change = self._transcripts.num_changes

    def _choice(
        self,
        job: GenerationJob,
        index: int,
        i: int,
        prompt: Sequence[int],
        packed: bytes,
        prefix: PromptPrefix,
        mailbox: Mailbox[Transcript],
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
            prefix=prefix,
            tenant=job.tenant,
            share=job.share,
            priority=job.priority,
            slo=job.slo,
            traceparent=traceparent,
            label=job.label,
            session=job.session,
        )
        return Choice(
            index=index,
            transcript=transcript,
            detokenizer=self._tokenizer.detokenizer(
                prompt[-32:], skip_special_tokens=job.skip_special_tokens, shown_ids=job.shown_ids
            ),
            stop=_stops(job),
        )


def _stops(job: GenerationJob) -> StopFinder:
    """Return the finder of the job's stop strings."""
    if job.stop and job.call_parser is not None:
        return CallStops(job.stop, job.include_stop, job.call_parser)
    return StopFinder(job.stop, job.include_stop)


_WANT_OF_ROOM = (RejectReason.OVERLOADED, RejectReason.QUEUE_TIMEOUT)

_STATUS_OF_REASON = {
    RejectReason.OVERLOADED: 429,
    RejectReason.QUEUE_TIMEOUT: 503,
    RejectReason.NO_INSTANCE: 503,
    RejectReason.TOO_LONG: 400,
    RejectReason.INVALID: 400,
    RejectReason.WEIGHTS_GONE: 503,
}


def _rejection(command: Reject) -> RequestRejected:
    status = _STATUS_OF_REASON[command.reason]
    retry_after_s = command.retry_after_s if command.retry_after_s is not None else 1.0
    return RequestRejected(
        command.message,
        status=status,
        code=str(command.reason),
        retry_after_s=None if status == 400 else retry_after_s,
        reject_ttl_s=command.reject_ttl_s,
    )
