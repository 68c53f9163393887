"""What endpoints that generate have in common: from a body to a job, and from a generation to a response or a stream.

A dialect is a `GenerationEndpoint`, which reads its requests, and a `Rendering`. One whose answers are items renders
these (`ItemRendering`), and prepares its jobs with `GenerationEndpoint.conversation_job`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh.metrics import Slo
from pdmesh.model import RejectReason, SamplingParams
from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.conversations import Conversation, prepare
from pdmesh_gateway.http.body import INLINE_BYTES
from pdmesh_gateway.http.errors import error_event
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.intake import decode_request, read_body
from pdmesh_gateway.http.sse import KEEP_ALIVE
from pdmesh_gateway.items import ChoiceItems, ItemEvent, WholeAnswer, collect
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol import SamplingFields
from pdmesh_gateway.reject_cache import RequestKind
from pdmesh_gateway.sampling import cache_salt, fit_max_tokens, sampling_params, stop_strings, target_s
from pdmesh_gateway.serving import Serving, check_label, check_traceparent
from pdmesh_gateway.text_stream import TextStream


class _Request(Protocol):
    @property
    def stream(self) -> bool | None: ...


RequestT = TypeVar("RequestT", bound=_Request)


@dataclass(slots=True)
class Collected:
    """One choice of a response that is not streamed."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    text_offsets: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.text_offsets += delta.text_offsets
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def delta(self, index: int) -> Delta:
        """Return all of it as one delta."""
        return Delta(
            index=index,
            text=self.text,
            token_ids=self.token_ids,
            text_offsets=self.text_offsets,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Rendering(ABC):
    """How one request's deltas look in its dialect of the API."""

    #: Sent when nothing else was for a while.
    keep_alive: bytes = KEEP_ALIVE

    def head(self, generation: TextStream) -> bytes:
        """Events that come before all others."""
        return b""

    @abstractmethod
    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        """Events for a choice's news; none if there is nothing to tell."""

    @abstractmethod
    def tail(self, generation: TextStream) -> bytes:
        """Events that come after the last choice has ended."""

    def failure(self, error: RequestRejected) -> bytes:
        """The last events of a stream that cannot go on."""
        return error_event(error)

    @abstractmethod
    def response(self, choices: Sequence[Collected], generation: TextStream) -> msgspec.Struct:
        """The whole response."""


class ItemRendering(Rendering):
    """How one request's items look in its dialect of the API."""

    def __init__(self, answers: Sequence[ChoiceItems]) -> None:
        self._answers = answers

    @abstractmethod
    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        """Server-sent events for a choice's news: ``events`` are what came of ``delta``'s text, maybe none."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of all choices so far that were reasoning."""
        return sum(answer.num_reasoning_tokens for answer in self._answers)

    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        return self.events(self._answers[delta.index].advance(delta), delta, generation)

    def answers(self, choices: Sequence[Collected]) -> list[WholeAnswer]:
        """The items of each choice of a response that is not streamed."""
        return [
            collect(answer.advance(choice.delta(index)))
            for index, (answer, choice) in enumerate(zip(self._answers, choices, strict=True))
        ]


class _RequestHints(msgspec.Struct):
    """What of a body the reject cache goes by; all else is passed over."""

    n: int | None = None
    priority: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def has_several_prompts(self) -> bool:
        """Whether it is a list of texts, or of lists of token ids, and not of one. Raises MsgspecError."""
        prompt = bytes(self.prompt)
        if prompt[:1] != b"[" or prompt[1:].lstrip()[:1] not in (b'"', b"["):
            return False
        return len(_decode_list(prompt)) > 1


_decode_hints = msgspec.json.Decoder(_RequestHints).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class GenerationEndpoint(ABC, Generic[RequestT]):
    """``POST`` of a body that asks for a generation."""

    #: What spans call it (OpenTelemetry's `gen_ai.operation.name`).
    operation: ClassVar[str]

    def __init__(self, serving: Serving, request_type: type[RequestT]) -> None:
        self._serving = serving
        self._decoder = msgspec.json.Decoder(request_type)

    @abstractmethod
    async def prepare(self, request: RequestT, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        """Check a request and turn it into a job. Raises RequestRejected."""

    async def __call__(self, exchange: Exchange) -> None:
        admission = self._serving.admission
        body = await read_body(exchange, self._serving)
        reject_cache = self._serving.reject_cache
        try:
            if not reject_cache.is_open and (kind := self._kind(exchange, body)) is not None:
                reject_cache.check(kind)
            with admission.hold(num_bytes=len(body)):
                await exchange.run_until_gone(lambda: self._serve(exchange, body))
        except RequestRejected as error:
            if error.reject_ttl_s > 0 and (kind := self._kind(exchange, body)) is not None:
                reject_cache.refused(kind, error)
            if error.code == RejectReason.OVERLOADED:
                self._serving.metrics.refused(time.time() - exchange.received_at)
            raise

    def _kind(self, exchange: Exchange, body: bytes) -> RequestKind | None:
        """What the door takes a request for; None if it lets that pass in any case."""
        if len(body) > INLINE_BYTES:
            return None
        try:
            hints = _decode_hints(body)
            slo_ttft_s = _target_s(exchange, "x-slo-ttft-ms", "slo_ttft_ms", hints.slo_ttft_ms)
            slo_tpot_s = _target_s(exchange, "x-slo-tpot-ms", "slo_tpot_ms", hints.slo_tpot_ms)
            if hints.n not in (None, 1) or hints.has_several_prompts:
                return None  # the last of them wait for the first, which end with them
        except (RequestRejected, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # it will be told what is wrong with it
        return RequestKind(
            self.operation,
            exchange.known_client.name,
            hints.priority or 0,
            slo_ttft_s,
            slo_tpot_s,
            len(body).bit_length(),
        )

    async def _serve(self, exchange: Exchange, body: bytes) -> None:
        serving = self._serving
        request = await decode_request(exchange, serving, self._decoder, body)
        job, rendering = await self.prepare(request, exchange)
        async with serving.generation(exchange.known_client, job) as generation:
            if request.stream:
                idle_s = serving.config.sse_keep_alive_s or math.inf
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
        """Return the job of a conversation, and what makes items of each of its choices. Raises RequestRejected.

        ``clamps``: an answer may be shorter than ``max_tokens`` where the context has no room for more.
        """
        serving = self._serving
        prepared = await prepare(serving, conversation, fields)
        fitting = fit_max_tokens(
            None if clamps else max_tokens,
            num_prompt_tokens=len(prepared.prompt),
            max_model_len=serving.max_model_len,
            default=max_tokens if clamps else serving.config.default_max_tokens,
            what="messages",
        )
        params = sampling_params(
            fields,
            serving.info,
            max_tokens=fitting,
            logprobs=logprobs,
            grammar=prepared.grammar,
            bad_token_sequences=await serving.bad_token_sequences(fields.bad_words),
        )
        job = self.job(fields, exchange, prompts=[prepared.prompt], params=params, n=n, shown_ids=prepared.shown_ids)
        exchange.warn(*prepared.warnings)
        return job, prepared.answers(job)

    def job(
        self,
        request: SamplingFields,
        exchange: Exchange,
        *,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        shown_ids: frozenset[int] = frozenset(),
    ) -> GenerationJob:
        serving = self._serving
        serving.check_load(num_prompts=len(prompts), n=n, num_tokens=sum(map(len, prompts)))
        if request.request_id is not None and exchange.header("x-request-id") is None:
            exchange.label = check_label(request.request_id, param="request_id")
        slo = Slo(
            ttft_s=_target_s(exchange, "x-slo-ttft-ms", "slo_ttft_ms", request.slo_ttft_ms),
            tpot_s=_target_s(exchange, "x-slo-tpot-ms", "slo_tpot_ms", request.slo_tpot_ms),
        )
        client = exchange.known_client
        client.check_service_level(request.priority or 0, slo)
        return GenerationJob(
            tenant=client.name,
            share=client.share,
            cache_salt=cache_salt(request.cache_salt),
            request_id=exchange.request_id,
            label=exchange.label,
            prompts=prompts,
            params=params,
            n=n,
            stop=stop_strings(request),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            shown_ids=shown_ids,
            priority=request.priority or 0,
            slo=slo,
            traceparent=check_traceparent(exchange.header("traceparent")),
            deadline_s=serving.config.request_timeout_s,
            operation=self.operation,
            received_at=exchange.received_at,
        )


def _target_s(exchange: Exchange, header: str, name: str, field: float | None) -> float | None:
    """A target from its header, else from its field in the body. Raises RequestRejected if either is none."""
    own_s = target_s(name, field)
    given = exchange.header(header)
    return own_s if given is None else target_s(header, given)


async def _stream(exchange: Exchange, generation: TextStream, rendering: Rendering, *, idle_s: float) -> None:
    # The response begins with its first token, or the first keep-alive: until then an error has a status of its own.
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
    choices = [Collected() for _ in range(generation.job.num_choices)]
    async for batch in generation.deltas():
        for delta in batch:
            choices[delta.index].add(delta)
    await exchange.respond_json(rendering.response(choices, generation))
