"""``/v1/responses``: generation and storage of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskStatus

from pdmesh_gateway.auth import Client
from pdmesh_gateway.conversation_turns import built
from pdmesh_gateway.conversations import Conversation, prompt_of
from pdmesh_gateway.dialects import RESPONSES
from pdmesh_gateway.http.generation_endpoint import GenerationEndpoint
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.request_intake import read_request
from pdmesh_gateway.http.responses.background_responses import MAX_EVENT_BYTES, BackgroundResponse
from pdmesh_gateway.http.responses.response_store import StoredResponse
from pdmesh_gateway.http.responses.responses_logprobs import TextLogprobs
from pdmesh_gateway.http.responses.responses_protocol import (
    InputTokenCount,
    InputTokensRequest,
    RawMessage,
    Reasoning,
    ResponseObject,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from pdmesh_gateway.http.responses.responses_rendering import ResponsesRendering
from pdmesh_gateway.http.responses.responses_requests import (
    KNOWN_ITEMS,
    ItemObject,
    conversation_of,
    fields_of,
    items_of,
    kind_of,
    num_top_logprobs_of,
)
from pdmesh_gateway.http.responses.stored_responses import StoredResponses, items_in
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.message_parts import skip_warnings
from pdmesh_gateway.request_failures import UNFORESEEN, failure_of
from pdmesh_gateway.sampling import invalid, number
from pdmesh_gateway.serving import Serving

_decode_item = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class _Input:
    """Input of a request: its own items, and every item including earlier ones, both as JSON."""

    conversation: Conversation
    own: bytes
    every: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.own) + len(self.every)


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    """``POST /v1/responses``: one answer to a conversation of items."""

    dialect = RESPONSES

    def __init__(self, serving: Serving, stored: StoredResponses) -> None:
        super().__init__(serving, ResponsesRequest)
        self._stored = stored

    async def answer(self, request: ResponsesRequest, exchange: Exchange) -> None:
        with self._serving.admission.hold(num_bytes=self._num_bytes_before(request, exchange)):
            if request.background:
                await self._begin(request, exchange)
            else:
                await super().answer(request, exchange)

    async def _begin(self, request: ResponsesRequest, exchange: Exchange) -> None:
        """Begin an answer in the background, and send its events or its first state.

        Raise RequestRejected if responses are not stored, or the answer cannot begin.
        """
        if request.store is False or not self._stored.kept.keeps:
            raise invalid("background", "`background` requires `store`: the response is retrieved later.")
        job, rendering, asked = await self._prepared(request, exchange)
        run = BackgroundResponse(rendering.begun)
        await self._serving.tasks.start(self._answer, exchange.known_client, job, rendering, asked.num_bytes, run)
        if request.stream:
            await self._stored.tell(exchange, run.log, 0)
        else:
            await exchange.respond_json(run.begun)

    async def _answer(
        self,
        client: Client,
        job: GenerationJob,
        rendering: ResponsesRendering,
        num_asked_bytes: int,
        run: BackgroundResponse,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Generate and store an answer whose client may disconnect. Raises RequestRejected if it cannot begin."""
        serving, stored, log, key = self._serving, self._stored, run.log, (client.name, run.begun.id)
        try:
            with serving.admission.hold(num_bytes=num_asked_bytes + MAX_EVENT_BYTES), run.scope:
                async with serving.generation(client, job) as generation:
                    log.add(rendering.head(generation))
                    stored.runs[key] = run
                    task_status.started()
                    async for batch in generation.deltas():
                        log.add(b"".join([rendering.chunk(delta, generation) for delta in batch]))
                    log.add(rendering.tail(generation))
            if run.scope.cancelled_caught:
                rendering.keep(rendering.cancelled())
        except UNFORESEEN as error:
            where = "background response"
            failure = failure_of(error, serving.metrics, where=where, request_id=job.request_id, label=job.label)
            if key not in stored.runs:
                raise failure from error
            log.add(rendering.failure(failure))
            rendering.keep(rendering.failed(failure))
        finally:
            log.end()
            stored.runs.pop(key, None)
            stored.kept.put_events(*key, log)

    async def prepare(self, request: ResponsesRequest, exchange: Exchange) -> tuple[GenerationJob, ResponsesRendering]:
        job, rendering, _asked = await self._prepared(request, exchange)
        return job, rendering

    async def _prepared(
        self, request: ResponsesRequest, exchange: Exchange
    ) -> tuple[GenerationJob, ResponsesRendering, _Input]:
        serving = self._serving
        serving.check_model(request.model)
        number("max_output_tokens", request.max_output_tokens, low=1)
        asked = await self._input(request, exchange)
        num_top = num_top_logprobs_of(request)
        job, items = await self.conversation_job(
            asked.conversation, fields_of(request), exchange, max_tokens=request.max_output_tokens, logprobs=num_top
        )
        tenant = exchange.known_client.name
        keeps = request.store is not False and self._stored.kept.keeps

        def keep(response: ResponseObject) -> None:
            if keeps:
                self._stored.kept.put(tenant, _kept(response, asked, exchange.thread))

        begun = _begun(request, job, model=request.model or serving.model, store=keeps)
        if request.enable_response_messages:
            [prompt] = job.prompts
            text = await serving.tokenizer.decode(prompt, skip_special_tokens=False)
            begun.input_messages = [RawMessage(message=text, tokens=list(prompt))]
            begun.output_messages = []
        logprobs = None if num_top is None else TextLogprobs(serving.tokenizer)
        return job, ResponsesRendering(items, begun, keep, logprobs), asked

    async def count(self, exchange: Exchange) -> None:
        """Answer ``POST /v1/responses/input_tokens``."""
        serving = self._serving
        async with read_request(exchange, serving, InputTokensRequest) as request:
            serving.check_model(request.model)
            with serving.admission.hold(num_bytes=self._num_bytes_before(request, exchange)):
                asked = await self._input(request, exchange)
            token_ids = await prompt_of(serving, asked.conversation)
        await exchange.respond_json(InputTokenCount(input_tokens=len(token_ids)))

    async def _input(self, request: InputTokensRequest, exchange: Exchange) -> _Input:
        own = items_of(request.input)
        before: list[ItemObject] = []
        tenant, most_bytes = exchange.known_client.name, self._serving.config.max_body_bytes
        if request.previous_response_id is not None:
            kept = self._stored.get(tenant, request.previous_response_id, status=400)
            if len(kept.conversation) > most_bytes:
                raise invalid("previous_response_id", "This conversation has become too long. Start a new one.")
            before = await items_in(kept.conversation)
            exchange.thread = kept.thread
        every = [*before, *own]
        kinds = {kind_of(item) for item in every} - KNOWN_ITEMS
        tools = {str(tool.get("type")) for tool in request.tools or []} - {"function"}
        exchange.warn(*skip_warnings(kinds, "items"), *skip_warnings(tools, "tools"))

        num_named_bytes = 0

        def item_of(item_id: str) -> ItemObject | None:
            nonlocal num_named_bytes
            item = self._stored.kept.item(tenant, item_id)
            num_named_bytes += 0 if item is None else len(item)
            if num_named_bytes > most_bytes:
                # One item may be named often.
                raise invalid("input", f"The items that `input` refers to have more than {most_bytes} bytes.")
            return None if item is None else _decode_item(item)

        encoded: list[bytes] = []

        def convert() -> Conversation:
            conversation = conversation_of(request, every, item_of)
            encoded.extend(msgspec.json.encode(items) for items in (own, every))
            return conversation

        num_parts = sum(len(item["content"]) if isinstance(item.get("content"), list) else 1 for item in every)
        conversation = await built(convert, num_parts=num_parts, most=self._serving.config.max_messages, param="input")
        return _Input(conversation, *encoded)

    def _num_bytes_before(self, request: InputTokensRequest, exchange: Exchange) -> int:
        """Return the size of the stored conversation that a request continues; 0 if there is none."""
        if request.previous_response_id is None:
            return 0
        kept = self._stored.kept.get(exchange.known_client.name, request.previous_response_id)
        return 0 if kept is None else len(kept.conversation)


def _begun(request: ResponsesRequest, job: GenerationJob, *, model: str, store: bool) -> ResponseObject:
    text = request.text or TextOptions()
    return ResponseObject(
        id=f"resp_{job.request_id}",
        created_at=int(job.received_at),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or Reasoning(),
        safety_identifier=request.safety_identifier,
        store=store,
        background=bool(request.background),
        temperature=job.params.temperature,
        text=TextOptions(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=job.params.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _kept(response: ResponseObject, asked: _Input, thread: str) -> StoredResponse:
    items = {item.id: msgspec.json.encode(item) for item in response.output}
    conversation = b",".join(filter(None, (asked.every[1:-1], *items.values())))
    return StoredResponse(
        response_id=response.id,
        thread=thread or response.id,
        response=msgspec.json.encode(response),
        input_items=asked.own,
        conversation=b"[" + conversation + b"]",
        output_items=items,
    )
