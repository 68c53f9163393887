"""Base of the endpoints that generate: turn a body into a job, and a generation into a response or a stream.

A dialect has a `GenerationEndpoint`, which reads requests, and a `Rendering`. A dialect whose answers are items uses
`ItemRendering`, and prepares jobs with `GenerationEndpoint.conversation_job`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.conversations import Conversation, prepare
from pdmesh_gateway.http.computing_endpoint import ComputingEndpoint
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.openai_errors import error_event
from pdmesh_gateway.http.sse import KEEP_ALIVE
from pdmesh_gateway.items import ChoiceItems, ItemEvent, WholeAnswer, collect
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.request_jobs import generation_job
from pdmesh_gateway.text_stream import TextStream


class _Streamable(Protocol):
    @property
    def stream(self) -> bool | None: ...


StreamableT = TypeVar("StreamableT", bound=_Streamable)


class Rendering(ABC):
    """Rendering of one request's deltas in its dialect of the API."""

    #: Sent when a stream has been idle for a while.
    keep_alive: bytes = KEEP_ALIVE

    def head(self, generation: TextStream) -> bytes:
        """Return the events before all others."""
        return b""

    @abstractmethod
    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        """Return the events of a choice's delta; empty if nothing shows."""

    @abstractmethod
    def tail(self, generation: TextStream) -> bytes:
        """Return the events after the last choice has ended."""

    def failure(self, error: RequestRejected) -> bytes:
        """Return the last events of a stream that fails."""
        return error_event(error)

    @abstractmethod
    def response(self, choices: Sequence[Delta], generation: TextStream) -> msgspec.Struct:
        """Return the whole response."""


class ItemRendering(Rendering):
    """Rendering of one request's items in its dialect of the API."""

    def __init__(self, answers: Sequence[ChoiceItems]) -> None:
        self._answers = answers

    @abstractmethod
    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        """Return the server-sent events of a choice's ``events``, which were made of ``delta`` and may be empty."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens of all choices so far."""
        return sum(answer.num_reasoning_tokens for answer in self._answers)

    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        return self.events(self._answers[delta.index].advance(delta), delta, generation)

    def answers(self, choices: Sequence[Delta]) -> list[WholeAnswer]:
        """Return the items of each choice of a response that is not streamed."""
        return [collect(answer.advance(choice)) for answer, choice in zip(self._answers, choices, strict=True)]


class GenerationEndpoint(ComputingEndpoint[StreamableT]):
    """``POST`` endpoint whose requests ask for a generation."""

    @abstractmethod
    async def prepare(self, request: StreamableT, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        """Check a request and turn it into a job. Raises RequestRejected."""

    async def answer(self, request: StreamableT, exchange: Exchange) -> None:
        job, rendering = await self.prepare(request, exchange)
        async with self._serving.generation(exchange.known_client, job) as generation:
            if request.stream:
                idle_s = self._serving.config.sse_keep_alive_s or math.inf
                await _stream(exchange, generation, rendering, idle_s=idle_s)
            else:
                await _respond(exchange, generation, rendering)

    async def conversation_job(
        self,
        conversation: Conversation,
        fields: SamplingFields,
        exchange: Exchange,
        *,
        max_tokens: int | None,
        clamps: bool = False,
        logprobs: int | None = None,
        n: int = 1,
    ) -> tuple[GenerationJob, list[ChoiceItems]]:
        """Return the job of a conversation, and each choice's converter to items. Raises RequestRejected.

        ``n`` is the number of choices. ``clamps``: an answer may be shorter than ``max_tokens`` if the context has no
        room.
        """
        serving = self._serving
        prepared = await prepare(serving, conversation, fields)
        job = await generation_job(
            serving,
            fields,
            self.caller(fields, exchange),
            [prepared.prompt],
            what="messages",
            max_tokens=None if clamps else max_tokens,
            default_tokens=max_tokens if clamps else serving.config.default_max_tokens,
            logprobs=logprobs,
            grammar=prepared.grammar,
            n=n,
            shown_ids=prepared.shown_ids,
            call_parser=prepared.call_parser,
        )
        exchange.warn(*prepared.warnings)
        return job, [prepared.answer(job, index) for index in range(n)]


async def _stream(exchange: Exchange, generation: TextStream, rendering: Rendering, *, idle_s: float) -> None:
    # The response begins with the first token or keep-alive. An error before that has a status of its own.
    async for batch in generation.deltas(idle_s=idle_s):
        head = b""
        if not exchange.started:
            await exchange.start_events(rendering.failure)
            head = rendering.head(generation)
        events = head + b"".join([rendering.chunk(delta, generation) for delta in batch])
        if events or not batch:
            await exchange.send_events(events or rendering.keep_alive)
    await exchange.send_events(rendering.tail(generation), more=False)


async def _respond(exchange: Exchange, generation: TextStream, rendering: Rendering) -> None:
    choices = [Delta(index=index) for index in range(generation.job.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async for batch in generation.deltas():
        for delta in batch:
            choices[delta.index].extend(delta)
            texts[delta.index].append(delta.text)
    for choice, pieces in zip(choices, texts, strict=True):
        choice.text = "".join(pieces)
    await exchange.respond_json(rendering.response(choices, generation))
