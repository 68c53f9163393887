"""``/v1/responses``: generating, and what is kept of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import anyio
import msgspec
from anyio.abc import TaskStatus

from pdmesh.errors import RequestRejected
from pdmesh.model import RequestId
from pdmesh_gateway.auth import Client
from pdmesh_gateway.conversations import Conversation, prompt_of
from pdmesh_gateway.failures import UNFORESEEN, failure_of
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.generation import GenerationEndpoint
from pdmesh_gateway.http.intake import decode_request, read_body
from pdmesh_gateway.http.responses.background import BackgroundResponse, BackgroundResponses
from pdmesh_gateway.http.responses.kept import KeptResponse, KeptResponses
from pdmesh_gateway.http.responses.logprobs import TextLogprobs
from pdmesh_gateway.http.responses.protocol import (
    InputItemList,
    InputTokenCount,
    InputTokensRequest,
    RawMessage,
    Reasoning,
    ResponseDeleted,
    ResponseObject,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from pdmesh_gateway.http.responses.rendering import ResponsesRendering
from pdmesh_gateway.http.responses.requests import (
    KNOWN_ITEMS,
    ItemObject,
    conversation_of,
    fields_of,
    items_of,
    kind_of,
    num_top_logprobs_of,
)
from pdmesh_gateway.http.sse import KEEP_ALIVE
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.sampling import invalid, number
from pdmesh_gateway.serving import Serving
from pdmesh_gateway.turns import built

#: Kinds of items and tools that are named when they are skipped.
MAX_WARNINGS = 8

#: Items of one page of ``input_items``.
MAX_PAGE = 100

_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_item = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class _Input:
    """What a request says: its own items, and all with those before, both as JSON."""

    conversation: Conversation
    own: bytes
    every: bytes


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    """``POST /v1/responses``: one answer to a conversation of items."""

    operation = "chat"

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, ResponsesRequest)
        self._runs = BackgroundResponses()
        self._count_decoder = msgspec.json.Decoder(InputTokensRequest)
        self._kept = KeptResponses(serving.config.kept_responses_bytes, time.monotonic)

    async def answer(self, request: ResponsesRequest, exchange: Exchange) -> None:
        if not request.background:
            await super().answer(request, exchange)
            return
        if request.store is False or not self._kept.keeps:
            raise invalid("background", "`background` needs `store`: the response is kept to be asked for.")
        job, rendering = await self.prepare(request, exchange)
        run = BackgroundResponse(rendering)
        await self._serving.tasks.start(self._answer, exchange.known_client, job, run)
        self._runs.add(exchange.known_client.name, rendering.begun.id, run)
        if request.stream:
            await self._tell(exchange, run, 0)
        else:
            await exchange.respond_json(rendering.begun)

    async def _answer(
        self,
        client: Client,
        job: GenerationJob,
        run: BackgroundResponse,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer a request whose client may go away. Raises RequestRejected if it cannot begin."""
        rendering = run.rendering
        has_begun = False
        try:
            with run.scope:
                async with self._serving.generation(client, job) as generation:
                    run.add(rendering.head(generation))
                    has_begun = True
                    task_status.started()
                    async for batch in generation.deltas():
                        run.add(b"".join([rendering.chunk(delta, generation) for delta in batch]))
                    run.add(rendering.tail(generation))
            if run.scope.cancelled_caught:
                rendering.keep(rendering.cancelled())
        except UNFORESEEN as error:
            where = "background response"
            failure = failure_of(error, self._serving.metrics, where=where, request_id=job.request_id, label=job.label)
            if not has_begun:
                raise failure from error
            run.add(rendering.failure(failure))
            rendering.keep(rendering.failed(failure))
        finally:
            run.end()

    async def prepare(self, request: ResponsesRequest, exchange: Exchange) -> tuple[GenerationJob, ResponsesRendering]:
        serving = self._serving
        serving.check_model(request.model)
        number("max_output_tokens", request.max_output_tokens, low=1)
        asked = await self._input(request, exchange)
        num_top = num_top_logprobs_of(request)
        job, items = await self.conversation_job(
            [asked.conversation], fields_of(request), exchange, max_tokens=request.max_output_tokens, logprobs=num_top
        )
        tenant = exchange.known_client.name
        keeps = request.store is not False and self._kept.keeps

        def keep(response: ResponseObject) -> None:
            if keeps:
                self._kept.put(tenant, _kept(response, asked))

        begun = _begun(request, job, model=request.model or serving.model, store=keeps)
        if request.enable_response_messages:
            [prompt] = job.prompts
            text = await serving.tokenizer.decode(prompt, skip_special_tokens=False)
            begun.input_messages = [RawMessage(message=text, tokens=list(prompt))]
            begun.output_messages = []
        return job, ResponsesRendering(items, begun, keep, None if num_top is None else TextLogprobs(serving.tokenizer))

    async def count(self, exchange: Exchange) -> None:
        """``POST /v1/responses/input_tokens``."""
        serving = self._serving
        body = await read_body(exchange, serving)
        with serving.admission.hold(num_bytes=len(body)):
            request = await decode_request(exchange, serving, self._count_decoder, body)
            serving.check_model(request.model)
            asked = await self._input(request, exchange)
            token_ids = await prompt_of(serving, asked.conversation)
        await exchange.respond_json(InputTokenCount(input_tokens=len(token_ids)))

    async def one(self, exchange: Exchange) -> None:
        """``GET`` and ``DELETE /v1/responses/{response_id}``."""
        tenant, response_id = exchange.known_client.name, exchange.scope["path_params"]["response_id"]
        run = self._runs.get(tenant, response_id)
        if exchange.scope["method"] == "DELETE":
            if run is None or run.has_ended:
                self._of(exchange)
            self._runs.remove(tenant, response_id)
            self._kept.delete(tenant, response_id)
            await exchange.respond_json(ResponseDeleted(id=response_id))
        elif _query(exchange, "stream") == "true":
            if run is None:
                self._of(exchange)
                raise invalid("stream", "Only a response that was made with `background` can be streamed again.")
            number = _number_after(exchange)
            await exchange.run_until_gone(lambda: self._tell(exchange, run, number))
        elif run is not None and not run.has_ended:
            await exchange.respond_json(run.rendering.begun)
        else:
            await exchange.respond(self._of(exchange).response)

    async def cancel(self, exchange: Exchange) -> None:
        """``POST /v1/responses/{response_id}/cancel``: of one in the background; one that has ended stays as it is."""
        run = self._runs.get(exchange.known_client.name, exchange.scope["path_params"]["response_id"])
        if run is None:
            self._of(exchange)
            raise invalid("response_id", "Only a response that was made with `background` can be cancelled.")
        run.scope.cancel()
        await run.ended()
        await exchange.respond(self._of(exchange).response)

    async def _tell(self, exchange: Exchange, run: BackgroundResponse, number: int) -> None:
        """Send a run's events from a number on. Raises RequestRejected if these are no longer there."""
        idle_s = self._serving.config.sse_keep_alive_s or math.inf
        async for events in run.events(number, idle_s=idle_s):
            if not exchange.started:
                await exchange.start_events()
            await exchange.send_events(events or KEEP_ALIVE)
        await exchange.send_events(b"", more=False)

    async def input_items(self, exchange: Exchange) -> None:
        """``GET /v1/responses/{response_id}/input_items``, page by page."""
        kept = self._of(exchange)
        items = [_listed(item, kept.response_id, i) for i, item in enumerate(_decode_items(kept.input_items))]
        if _query(exchange, "order") != "asc":
            items.reverse()
        after = _query(exchange, "after")
        begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        limit = _query(exchange, "limit") or "20"
        most = int(limit) if limit.isdecimal() and len(limit) < 4 else 0
        if not 1 <= most <= MAX_PAGE:
            raise invalid("limit", f"`limit` must be from 1 to {MAX_PAGE}.")
        page = items[begin : begin + most]
        await exchange.respond_json(
            InputItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=begin + most < len(items),
            )
        )

    async def _input(self, request: InputTokensRequest, exchange: Exchange) -> _Input:
        own = items_of(request.input)
        before: list[ItemObject] = []
        tenant = exchange.known_client.name
        if request.previous_response_id is not None:
            kept = self._kept.get(tenant, request.previous_response_id)
            if kept is None:
                raise self._gone(request.previous_response_id, status=400)
            before = [*_decode_items(kept.conversation)]
        every = [*before, *own]
        kinds = {kind_of(item) for item in every} - KNOWN_ITEMS
        tools = {str(tool.get("type")) for tool in request.tools or []} - {"function"}
        exchange.warn(
            *(f"items of type {kind[:64]} are skipped" for kind in sorted(kinds)[:MAX_WARNINGS]),
            *(f"tools of type {kind[:64]} are skipped" for kind in sorted(tools)[:MAX_WARNINGS]),
        )

        def item_of(item_id: str) -> ItemObject | None:
            item = self._kept.item(tenant, item_id)
            return None if item is None else _decode_item(item)

        encoded: list[bytes] = []

        def convert() -> Conversation:
            conversation = conversation_of(request, every, item_of)
            encoded.extend(msgspec.json.encode(items) for items in (own, every))
            return conversation

        num_parts = sum(len(item["content"]) if isinstance(item.get("content"), list) else 1 for item in every)
        conversation = await built(convert, num_parts=num_parts, most=self._serving.config.max_messages, param="input")
        return _Input(conversation, *encoded)

    def _of(self, exchange: Exchange) -> KeptResponse:
        """The response that a path names. Raises RequestRejected (404)."""
        response_id = exchange.scope["path_params"]["response_id"]
        kept = self._kept.get(exchange.known_client.name, response_id)
        if kept is None:
            raise self._gone(response_id, status=404)
        return kept

    def _gone(self, response_id: str, *, status: int) -> RequestRejected:
        """What to do about a response that is not here."""
        why = "Responses are kept for an hour at most, where there is room (gateway.kept_responses_bytes)"
        if not self._kept.keeps:
            why = "This server keeps no responses (gateway.kept_responses_bytes is 0)"
        elif not self._serving.generator.owns(RequestId(response_id.removeprefix("resp_"))):
            why = "It is not one of this gateway's: each keeps its own, so let clients stay with one"
        message = f"Response with id '{response_id[:100]}' not found. {why}. Send the whole conversation as `input`."
        param, code = None, "not_found"
        if status == 400:
            param, code = "previous_response_id", "previous_response_not_found"
        return RequestRejected(message, status=status, param=param, code=code)


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


def _kept(response: ResponseObject, asked: _Input) -> KeptResponse:
    items = {item.id: msgspec.json.encode(item) for item in response.output}
    conversation = b",".join(filter(None, (asked.every[1:-1], *items.values())))
    return KeptResponse(
        response_id=response.id,
        response=msgspec.json.encode(response),
        input_items=asked.own,
        conversation=b"[" + conversation + b"]",
        output_items=items,
    )


def _listed(item: ItemObject, response_id: str, index: int) -> dict[str, Any]:
    """An input item as it is listed: with an id and a type, and a message's text as parts."""
    kind = kind_of(item)
    listed = {"id": f"{kind}_{response_id.removeprefix('resp_')}-in{index}", **item, "type": kind}
    if kind == "message":
        listed.setdefault("status", "completed")
        if isinstance(content := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            listed["content"] = [{"type": part, "text": content}]
    return listed


def _number_after(exchange: Exchange) -> int:
    """The number of the first event that a client asks for. Raises RequestRejected."""
    after = _query(exchange, "starting_after") or ""
    if after and not (after.isdecimal() and len(after) < 10):
        raise invalid("starting_after", "`starting_after` must be an event's `sequence_number`.")
    return int(after) + 1 if after else 0


def _query(exchange: Exchange, name: str) -> str | None:
    values: Sequence[str] = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1")).get(name, [])
    return values[-1] if values else None
