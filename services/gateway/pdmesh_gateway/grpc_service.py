"""The protobuf edge: `pdmesh.api.v1.Inference`, with the standard health and reflection services."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.config import SecurityConfig
from pdmesh.errors import RequestRejected
from pdmesh.metrics import Slo
from pdmesh.wire.endpoint import bind
from pdmesh.wire.link import GRPC_OPTIONS
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.conversation_turns import built
from pdmesh_gateway.conversations import Prepared, prepare
from pdmesh_gateway.dialects import GRPC, GRPC_EMBEDDINGS, Dialect
from pdmesh_gateway.embedding_vectors import EMBEDS, check_inputs, embeddings
from pdmesh_gateway.grpc_chat import add_events, conversation_of, structured_outputs_of
from pdmesh_gateway.grpc_guard import MAX_PROBES, Guard
from pdmesh_gateway.items import AnswerEnded
from pdmesh_gateway.prompt_inputs import prompt_ids
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.request_failures import UNFORESEEN, failure_of
from pdmesh_gateway.request_jobs import RequestCaller, generation_job, job_of
from pdmesh_gateway.sampling import number, target_s
from pdmesh_gateway.serving import Serving, check_label
from pdmesh_gateway.text_stream import TextStream

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
(GENERATE,), (EMBED,) = GRPC.paths, GRPC_EMBEDDINGS.paths

#: Limits of a message, which holds one prompt and its options: no client can use more than the model can read.
BYTES_PER_TOKEN = 16
SPARE_BYTES = 1024 * 1024

#: Seconds between two updates of the health service.
HEALTH_INTERVAL_S = 1.0

_STATUS_OF_HTTP = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


#: Limit of calls after SIGTERM. `drain_s` ends them earlier if it is set.
DRAIN_LIMIT_S = 30 * 86_400.0


@asynccontextmanager
async def serve_grpc(serving: Serving, security: SecurityConfig, stopping: anyio.Event) -> AsyncGenerator[int]:
    """Serve within the block; yields the port.

    Once ``stopping`` is set no call is accepted, and the end of the block waits for running calls. Leaving the block
    before that cancels them.
    """
    most_bytes = min(serving.config.max_body_bytes, SPARE_BYTES + BYTES_PER_TOKEN * serving.max_model_len)
    limits = [("grpc.max_receive_message_length", most_bytes)]
    # Gateways that share their HTTP port also share this one.
    limits.append(("grpc.so_reuseport", int(serving.config.listen_fd is not None)))
    given = {name for name, _ in limits}
    options = [option for option in GRPC_OPTIONS if option[0] not in given] + limits
    # Probes call two methods, Check and Watch.
    server = grpc.aio.server(
        options=options,
        maximum_concurrent_rpcs=serving.config.max_concurrent_requests + 2 * MAX_PROBES,
        interceptors=[Guard(serving.keys)],
    )
    calls = _Calls()
    pb_grpc.add_InferenceServicer_to_server(_Inference(serving, calls), server)  # type: ignore[no-untyped-call]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = bind(server, serving.config.host, serving.config.grpc_port, security, setting="gateway.grpc_port")
    await server.start()
    drained = anyio.Event()

    async def drain() -> None:
        await stopping.wait()
        async with anyio.create_task_group() as stop:
            stop.start_soon(partial(server.stop, grace=DRAIN_LIMIT_S))
            await calls.ended()
            # Ends calls that watch the health service.
            await server.stop(grace=None)
        drained.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_report_health, serving, health_servicer)
        tasks.start_soon(drain)
        try:
            yield port
            if stopping.is_set():
                await drained.wait()
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await server.stop(grace=None)


async def _report_health(serving: Serving, servicer: health.aio.HealthServicer) -> None:
    """Keep the health service's status equal to the answer of ``/ready``."""
    shown: Any = None
    while True:
        ready = serving.unready_reason is None
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        if status != shown:
            shown = status
            for name in ("", SERVICE):
                await servicer.set(name, status)
        await anyio.sleep(HEALTH_INTERVAL_S)


class _Calls:
    """Counter of running calls."""

    def __init__(self) -> None:
        self._number = 0
        self._ended = anyio.Event()

    @contextmanager
    def one(self) -> Generator[None]:
        self._number += 1
        try:
            yield
        finally:
            self._number -= 1
            self._ended.set()
            self._ended = anyio.Event()

    async def ended(self) -> None:
        """Wait until no call runs."""
        while self._number:
            await self._ended.wait()


class _Inference(pb_grpc.InferenceServicer):
    def __init__(self, serving: Serving, calls: _Calls) -> None:
        self._serving = serving
        self._calls = calls

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the answer to a prompt or chat. A client that disconnects cancels this coroutine and the generation."""
        received_at, request_id = time.time(), self._serving.generator.new_request_id()
        async with self._told(context, GENERATE, request_id, request.request_id):
            fields = _fields(request)
            caller = self._caller(context, GRPC, fields, request_id, received_at)
            prepared = await self._prepared(request, fields)
            sampling = request.sampling
            max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
            number("max_tokens", max_tokens, low=1)
            job = await generation_job(
                self._serving,
                fields,
                caller,
                [prepared.prompt],
                what="prompt",
                max_tokens=max_tokens,
                default_tokens=self._serving.config.default_max_tokens,
                logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
                grammar=prepared.grammar,
                shown_ids=prepared.shown_ids,
                call_parser=prepared.call_parser,
            )
            items = prepared.answer(job, 0) if request.HasField("chat") else None
            warnings = list(prepared.warnings)
            async with self._serving.generation(caller.client, job) as generation:
                async for batch in generation.deltas():
                    for delta in batch:
                        response = _response(delta, generation, with_logprobs=sampling.HasField("logprobs"))
                        if items is not None:
                            events = items.advance(delta)
                            add_events(response, events)
                            if events and isinstance(end := events[-1], AnswerEnded):
                                response.finish_reason = _FINISH[end.finish_reason]
                                response.usage.reasoning_tokens = items.num_reasoning_tokens
                        response.warnings.extend(warnings)
                        warnings.clear()
                        yield response

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        received_at, request_id = time.time(), self._serving.generator.new_request_id()
        response = pb.EmbedResponse(request_id=request.request_id or request_id)
        async with self._told(context, EMBED, request_id, request.request_id):
            serving = self._serving
            fields = SamplingFields(
                priority=request.priority,
                request_id=request.request_id or None,
                cache_salt=request.cache_salt or None,
            )
            caller = self._caller(context, GRPC_EMBEDDINGS, fields, request_id, received_at)
            serving.check_model(request.model or None)
            dimensions = request.dimensions if request.HasField("dimensions") else None
            serving.pooling.check(dimensions)
            check_inputs(len(request.inputs), what="inputs")
            prompts = [await _prompt(serving, each, what="inputs") for each in request.inputs]
            job = job_of(serving, fields, caller, prompts, EMBEDS)
            async for vector in embeddings(serving, caller.client, job, dimensions):
                response.embeddings.add(values=vector.tolist())
            response.usage.prompt_tokens = job.num_prompt_tokens
        return response

    def _caller(
        self, context: Any, dialect: Dialect, fields: SamplingFields, request_id: str, received_at: float
    ) -> RequestCaller:
        """Return the caller of a method. Raises RequestRejected if its key or one of its targets is not accepted."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        client = self._serving.keys.check(metadata.get("authorization"))
        client.check_scope("generate")
        return RequestCaller(
            client=client,
            dialect=dialect,
            request_id=request_id,
            label="" if fields.request_id is None else check_label(fields.request_id, param="request_id"),
            slo=Slo(
                ttft_s=target_s("slo_ttft_ms", fields.slo_ttft_ms), tpot_s=target_s("slo_tpot_ms", fields.slo_tpot_ms)
            ),
            traceparent=metadata.get("traceparent"),
            received_at=received_at,
            session=self._serving.session_names.find(client.name, metadata.get),
        )

    @asynccontextmanager
    async def _told(self, context: Any, where: str, request_id: str, label: str) -> AsyncGenerator[None]:
        """Count a running call; end it with a status if the block raises."""
        with self._calls.one():
            try:
                yield
            except RequestRejected as error:
                await _abort(context, error, request_id)
            except UNFORESEEN as error:
                failure = failure_of(error, self._serving.metrics, where=where, request_id=request_id, label=label)
                await _abort(context, failure, request_id)

    async def _prepared(self, request: pb.GenerateRequest, fields: SamplingFields) -> Prepared:
        """Return the prompt and the constraints of its answer. Raise RequestRejected if a field is invalid."""
        serving = self._serving
        serving.check_model(request.model or None)
        if request.HasField("chat"):
            conversation = await built(
                lambda: conversation_of(request.chat),
                num_parts=len(request.chat.messages),
                num_messages=len(request.chat.messages),
                most=serving.config.max_messages,
                param="messages",
            )
            return await prepare(serving, conversation, fields)
        prompt = await _prompt(serving, request, what="prompt")
        grammar, warnings = await serving.grammars.grammar(fields)
        return Prepared(prompt=prompt, grammar=grammar, warnings=tuple(warnings), answer_format=serving.answer_format)


async def _prompt(serving: Serving, given: pb.GenerateRequest | pb.EmbedInput, *, what: str) -> Sequence[int]:
    return await prompt_ids(serving, given.text or list(given.token_ids.ids), what=what)


def _fields(request: pb.GenerateRequest) -> SamplingFields:
    """Return a request's fields as HTTP requests have them, so that the same checks apply."""
    sampling = request.sampling

    def optional(of: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(of, name) for name in names if of.HasField(name)}

    return SamplingFields(
        **optional(sampling, "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
        **optional(sampling, "repetition_penalty", "presence_penalty", "frequency_penalty"),
        **optional(request, "slo_ttft_ms", "slo_tpot_ms", "skip_special_tokens"),
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop,
        ignore_eos=sampling.ignore_eos,
        logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        priority=request.priority,
        request_id=request.request_id or None,
        cache_salt=request.cache_salt or None,
        structured_outputs=structured_outputs_of(request),
    )


def _response(delta: Delta, generation: TextStream, *, with_logprobs: bool) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=generation.job.label or generation.job.request_id,
        text=delta.text,
        token_ids=[i % 2**32 for i in delta.token_ids],
    )
    if with_logprobs:
        for at in delta.logprobs:
            if at is not None:
                top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in at.top]
                response.logprobs.append(pb.TokenLogprobs(logprob=at.logprob, top=top))
    if delta.finish_reason is not None:
        response.finish_reason = _FINISH[delta.finish_reason]
        response.usage.prompt_tokens = generation.job.num_prompt_tokens
        response.usage.completion_tokens = generation.num_output_tokens
        response.usage.cached_tokens = generation.num_cached_tokens
        if isinstance(delta.stop_reason, str):
            response.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            response.stop_token_id = delta.stop_reason
    return response


async def _abort(context: Any, error: RequestRejected, request_id: str) -> None:
    """End the call with an error. The trailing metadata holds its type, as over HTTP, and the request's id."""
    metadata: tuple[tuple[str, str], ...] = (("x-request-id", request_id), ("error-type", error.type))
    if error.retry_after_s is not None:
        metadata += (("retry-after-ms", str(round(1000 * error.retry_after_s))),)
    code = _STATUS_OF_HTTP.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, error.message, trailing_metadata=metadata)
