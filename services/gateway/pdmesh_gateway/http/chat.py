"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.generation import Collected, GenerationEndpoint, ItemRendering, Rendering
from pdmesh_gateway.http.logprobs import chat_logprobs
from pdmesh_gateway.http.sse import ChunkWriter, content_body, usage_of
from pdmesh_gateway.items import ChoiceItems, ItemEvent, ItemKind, TextAdded, WholeAnswer
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ResponseMessage,
    Usage,
)
from pdmesh_gateway.sampling import MAX_LOGPROBS, check_stream_options, num_choices, number
from pdmesh_gateway.serving import Serving
from pdmesh_gateway.templates import check_nesting, nested_too_deep
from pdmesh_gateway.text_stream import TextStream
from pdmesh_gateway.tokenizer import ModelTokenizer

#: Longer conversations are prepared on a thread.
INLINE_MESSAGES = 256


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """``POST /v1/chat/completions``: messages rendered by the model's template, and what follows them."""

    operation = "chat"

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, ChatRequest)

    async def prepare(self, request: ChatRequest, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        serving = self._serving
        serving.check_model(request.model)
        check_stream_options(request)
        _check_tools(request)
        n = num_choices(request, best_of=request.best_of, max_n=serving.config.max_n)
        number("max_tokens", request.max_tokens, low=1)
        number("max_completion_tokens", request.max_completion_tokens, low=1)
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        conversation = await self._conversation(request)
        job, answers = await self.conversation_job(
            conversation, request, exchange, max_tokens=asked, logprobs=_num_top_logprobs(request), n=n
        )
        model = request.model or serving.model
        return job, _ChatRendering(request, serving.tokenizer, answers, model=model, job=job)

    async def _conversation(self, request: ChatRequest) -> Conversation:
        return Conversation(
            messages=await template_messages(request.messages, most=self._serving.config.max_messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            template=request.chat_template,
            variables={**(request.chat_template_kwargs or {}), "documents": request.documents},
            truncate=request.truncate_prompt_tokens,
        )


def _check_tools(request: ChatRequest) -> None:
    if request.tools and request.tool_choice != "none":
        raise RequestRejected(
            'Tool calls are not supported by this server: set `tool_choice` to "none".',
            param="tools",
            code="unsupported_value",
        )


def _num_top_logprobs(request: ChatRequest) -> int | None:
    number("top_logprobs", request.top_logprobs, low=0, high=MAX_LOGPROBS)
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestRejected("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return None
    return request.top_logprobs or 0


async def template_messages(messages: Sequence[ChatMessage], *, most: int) -> list[dict[str, Any]]:
    """Messages as templates know them: text content, and tool arguments as objects. Raises RequestRejected."""
    if not messages:
        raise RequestRejected("`messages` must not be empty.", param="messages", code="invalid_value")
    if len(messages) > most:
        raise RequestRejected(
            f"`messages` has {len(messages)} messages; {most} are allowed.", param="messages", code="invalid_value"
        )

    def convert() -> list[dict[str, Any]]:
        try:
            built = [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        except RecursionError:
            raise nested_too_deep("messages") from None
        check_nesting(built, "messages")
        return built

    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if len(messages) + num_parts <= INLINE_MESSAGES:
        return convert()
    return await anyio.to_thread.run_sync(convert)


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(message)
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise RequestRejected(
                    f"`{where}.content` has a part of type {part.type[:40]!r}; this model accepts text only.",
                    param="messages",
                    code="unsupported_value",
                )
        content = "\n".join(part.text or "" for part in content)
    result["content"] = content or ""
    for call in result.get("tool_calls", []):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = msgspec.json.decode(function["arguments"])
            except (msgspec.DecodeError, ValueError) as error:
                raise RequestRejected(
                    f"`{where}.tool_calls` has arguments that are not valid JSON: {error}", param="messages"
                ) from None
    return result


class _ChatRendering(ItemRendering):
    def __init__(
        self,
        request: ChatRequest,
        tokenizer: ModelTokenizer,
        answers: Sequence[ChoiceItems],
        *,
        model: str,
        job: GenerationJob,
    ) -> None:
        super().__init__(answers)
        self._request = request
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{job.request_id}"
        self._created = int(time.time())
        self._model = model
        self._writer = ChunkWriter(
            kind="chat.completion.chunk",
            response_id=self._id,
            created=self._created,
            model=model,
            options=request.stream_options,
        )
        self._begun = [False] * job.num_choices

    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        request = self._request
        job = generation.job
        usage: Usage | None = None
        if self._writer.continuous_usage:
            reasoning = self._answers[delta.index].num_reasoning_tokens
            num_output_tokens = generation.num_tokens_of(delta.index)
            num_cached_tokens = generation.num_cached_tokens_of(delta.index)
            usage = usage_of(job.num_prompt_tokens, num_output_tokens, reasoning, num_cached_tokens=num_cached_tokens)
        head = b""
        if not self._begun[delta.index]:
            self._begun[delta.index] = True
            prompt = list(job.prompts[0]) if request.return_token_ids else None
            head = self._writer.role(delta.index, prompt_token_ids=prompt, usage=usage)
        return head + self._writer.delta(
            delta.index,
            _body(events),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=self._logprobs(delta),
            token_ids=delta.token_ids if request.return_token_ids else None,
            usage=usage,
        )

    def tail(self, generation: TextStream) -> bytes:
        return self._writer.tail(self._usage(generation))

    def whole(
        self, answers: Sequence[WholeAnswer], choices: Sequence[Collected], generation: TextStream
    ) -> msgspec.Struct:
        with_ids = bool(self._request.return_token_ids)
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=ResponseMessage(content=answer.text_of(ItemKind.TEXT)),
                    logprobs=self._logprobs(choice),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if with_ids else msgspec.UNSET,
                )
                for index, (answer, choice) in enumerate(zip(answers, choices, strict=True))
            ],
            usage=self._usage(generation),
            prompt_token_ids=list(generation.job.prompts[0]) if with_ids else msgspec.UNSET,
        )

    def _usage(self, generation: TextStream) -> Usage:
        return usage_of(
            generation.job.num_prompt_tokens,
            generation.num_output_tokens,
            self.num_reasoning_tokens,
            num_cached_tokens=generation.num_cached_tokens,
        )

    def _logprobs(self, of: Delta | Collected) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, of.token_ids, of.logprobs) if self._request.logprobs else None


def _body(events: Sequence[ItemEvent]) -> bytes:
    return content_body("".join([event.text for event in events if isinstance(event, TextAdded)]))
