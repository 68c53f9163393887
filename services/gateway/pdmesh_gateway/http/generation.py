"""What chat and completions have in common: from a body to a job, and from a generation to a response or a stream."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh.metrics import Slo
from pdmesh.model import RejectReason, SamplingParams
from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.body import INLINE_BYTES
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.intake import decode_request, read_body
from pdmesh_gateway.http.sse import DONE, KEEP_ALIVE, usage_of
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol import SamplingFields, Usage
from pdmesh_gateway.reject_cache import RequestKind
from pdmesh_gateway.sampling import stop_strings, target_s
from pdmesh_gateway.serving import Serving, check_label, check_traceparent
from pdmesh_gateway.text_stream import TextStream

RequestT = TypeVar("RequestT", bound=SamplingFields)


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


class Rendering(ABC):
    """How one request's deltas look in its dialect of the API."""

    @abstractmethod
    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        """One or more events for a choice's news."""

    @abstractmethod
    def response(self, choices: Sequence[Collected], generation: TextStream, usage: Usage) -> msgspec.Struct:
        """The whole response."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the usage, after the last choice has ended."""

    def num_output_tokens(self, generation: TextStream) -> int:
        return generation.num_output_tokens


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
        options = request.stream_options
        if options is not None and not request.stream:
            raise RequestRejected(
                "`stream_options` is only allowed when `stream` is true.", param="stream_options", code="invalid_value"
            )
        job, rendering = await self.prepare(request, exchange)
        async with serving.generation(exchange.known_client, job) as generation:
            if request.stream:
                with_usage = options is not None and bool(options.include_usage)
                await _stream(
                    exchange,
                    generation,
                    rendering,
                    with_usage=with_usage,
                    keep_alive_s=serving.config.sse_keep_alive_s or math.inf,
                )
            else:
                await _respond(exchange, generation, rendering)

    def job(
        self,
        request: SamplingFields,
        exchange: Exchange,
        *,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
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
            request_id=exchange.request_id,
            label=exchange.label,
            prompts=prompts,
            params=params,
            n=n,
            stop=stop_strings(request),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
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


async def _stream(
    exchange: Exchange, generation: TextStream, rendering: Rendering, *, with_usage: bool, keep_alive_s: float
) -> None:
    # The response begins with its first token, or the first keep-alive: until then an error has a status of its own.
    async for batch in generation.deltas(idle_s=keep_alive_s):
        if not exchange.started:
            await exchange.start_events()
        events = b"".join([rendering.chunk(delta, generation) for delta in batch])
        await exchange.send_events(events or KEEP_ALIVE)
    tail = rendering.usage_chunk(_usage(generation, rendering)) if with_usage else b""
    await exchange.send_events(tail + DONE, more=False)


async def _respond(exchange: Exchange, generation: TextStream, rendering: Rendering) -> None:
    choices = [Collected() for _ in range(generation.job.num_choices)]
    async for batch in generation.deltas():
        for delta in batch:
            choices[delta.index].add(delta)
    await exchange.respond_json(rendering.response(choices, generation, _usage(generation, rendering)))


def _usage(generation: TextStream, rendering: Rendering) -> Usage:
    return usage_of(generation.job.num_prompt_tokens, rendering.num_output_tokens(generation))
