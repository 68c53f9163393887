"""The text of one running job as a stream. Choices that lost a token on the way are resumed meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from typing import Protocol

import anyio

from pdmesh.telemetry.tracing import Span
from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Choice, Delta
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.request_spans import FIRST_TOKEN
from pdmesh_gateway.request_transcript import Transcript


class Requests(Protocol):
    """The part of a gateway that submitted the requests of a stream."""

    @property
    def metrics(self) -> GatewayMetrics: ...

    def finish(self, transcript: Transcript) -> None: ...

    def resume_stalled(self, transcript: Transcript) -> None: ...


class TextStream:
    """The choices of one running job. Iterate `deltas` once."""

    def __init__(
        self,
        requests: Requests,
        job: GenerationJob,
        choices: list[Choice],
        mailbox: Mailbox[Transcript],
        span: Span,
        scope: anyio.CancelScope,
    ) -> None:
        """``mailbox`` delivers the transcripts of ``choices`` that have new tokens.

        Each token moves the deadline of ``scope`` to ``job.max_wait_s`` from now. ``span`` records the first token.
        """
        self._requests = requests
        self._span = span
        self._scope = scope
        self._mailbox = mailbox
        self._choices = choices
        self._by_transcript = {choice.transcript.request_id: choice for choice in choices}
        self._num_left = len(choices)
        self._started_s = time.monotonic()
        self.job = job

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_cached_tokens(self) -> int:
        """Cached prompt tokens. Of several choices of a prompt only the first counts."""
        return sum(choice.transcript.num_cached_tokens for choice in self._choices[:: self.job.n])

    def num_tokens_of(self, index: int) -> int:
        return self._choices[index].num_tokens

    def num_cached_tokens_of(self, index: int) -> int:
        return self._choices[index].transcript.num_cached_tokens

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of a choice's prompt tokens; None for the first token and for missing ones.

        The list is complete at the choice's first output token.
        """
        transcript = self._choices[index].transcript
        return [transcript.prompt_logprobs.get(position) for position in range(transcript.num_prompt_tokens)]

    async def deltas(self, *, idle_s: float = math.inf) -> AsyncIterator[list[Delta]]:
        """Yield batches of deltas until every choice has ended; an empty batch after each ``idle_s`` without any.

        Raises RequestRejected if a choice fails.
        """
        metrics = self._requests.metrics
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
                    self._scope.deadline = anyio.current_time() + self.job.max_wait_s
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
                            num_cached_tokens=transcript.num_cached_tokens,
                            ttft_s=first_s[choice.index] - self._started_s,
                            e2e_s=now_s - self._started_s,
                            slo=self.job.slo,
                        )
                if choice.is_done:
                    self._num_left -= 1
                    self._requests.finish(transcript)
                elif transcript.failure is not None:
                    raise transcript.failure
            if batch or is_idle:
                yield batch

    async def _wait(self, idle_s: float) -> bool:
        """Wait for a delta, and resume choices that lost a token on the way.

        Return False after ``idle_s`` without one.
        """
        idle_at_s = time.monotonic() + idle_s
        while True:
            until_s = idle_at_s
            for choice in self._choices:
                resume_at_s = choice.transcript.resume_at_s
                if resume_at_s is not None and resume_at_s < until_s:
                    until_s = resume_at_s
            if await self._mailbox.wait(until_s):
                return True
            now_s = time.monotonic()
            for choice in self._choices:
                resume_at_s = choice.transcript.resume_at_s
                if resume_at_s is not None and resume_at_s <= now_s:
                    self._requests.resume_stalled(choice.transcript)
            if idle_at_s <= now_s:
                return False
