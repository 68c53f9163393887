"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio.to_thread
import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.chat_tools import chat_tool_choice, chat_tools
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.generation import Collected, GenerationEndpoint, ItemRendering, Rendering
from pdmesh_gateway.http.logprobs import chat_logprobs, prompt_logprobs
from pdmesh_gateway.http.sse import ChunkWriter, content_body, delta_body, usage_of
from pdmesh_gateway.items import (
    AnswerEnded,
    ArgumentsAdded,
    ChoiceItems,
    ItemBegun,
    ItemEnded,
    ItemEvent,
    ItemKind,
    TextAdded,
    WholeAnswer,
)
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol.chat import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)
from pdmesh_gateway.protocol.prompt_logprobs import PromptLogprobList
from pdmesh_gateway.protocol.tokens import TokenizeRequest
from pdmesh_gateway.protocol.usage import Usage
from pdmesh_gateway.sampling import MAX_LOGPROBS, check_stream_options, num_choices, number, truncation_of
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
        n = num_choices(request, best_of=request.best_of, max_n=serving.config.max_n)
        number("max_tokens", request.max_tokens, low=1)
        number("max_completion_tokens", request.max_completion_tokens, low=1)
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        conversation = await conversation_of(request, self._serving)
        job, answers = await self.conversation_job(
            conversation, request, exchange, max_tokens=asked, logprobs=_num_top_logprobs(request), n=n
        )
        model = request.model or serving.model
        is_named = conversation.tool_choice.is_named
        return job, _ChatRendering(request, serving.tokenizer, answers, model=model, job=job, is_named=is_named)


async def conversation_of(request: ChatRequest | TokenizeRequest, serving: Serving) -> Conversation:
    """Return a chat's request as a conversation, but for its tool choice and its limits. Raises RequestRejected."""
    variables = dict(request.chat_template_kwargs or {})
    conversation = Conversation(
        messages=await template_messages(request.messages or (), most=serving.config.max_messages),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        template=request.chat_template,
    )
    tools, warnings = chat_tools(request.tools)
    if isinstance(request, TokenizeRequest):
        return replace(conversation, tools=tools, variables=variables)
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return replace(
        conversation,
        tools=tools,
        tool_choice=chat_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        variables=variables,
        truncation=truncation_of(request.truncate_prompt_tokens, request.truncation_side),
        warnings=tuple(warnings),
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
    reasoning = result.pop("reasoning", None)
    if reasoning is not None:
        result.setdefault("reasoning_content", reasoning)
    for call in result.get("tool_calls", []):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = msgspec.json.decode(function["arguments"] or "{}")
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
        is_named: bool,
    ) -> None:
        super().__init__(answers)
        self._is_named = is_named
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
        usage = self._usage_of(delta.index, generation) if self._writer.continuous_usage else None
        head = b""
        if not self._begun[delta.index]:
            self._begun[delta.index] = True
            prompt = list(job.prompts[0]) if request.return_token_ids else None
            so_far = usage and usage_of(
                job.num_prompt_tokens, 0, num_cached_tokens=generation.num_cached_tokens_of(delta.index)
            )
            head = self._writer.role(delta.index, prompt_token_ids=prompt, usage=so_far)
        if delta.text and not _has_news(events) and not (usage or request.return_token_ids or request.logprobs):
            return head  # a marker of a family's calls or reasoning, or what may become one
        return head + self._writer.delta(
            delta.index,
            _body(events),
            finish_reason=self._finish_reason(events) if delta.finish_reason is not None else None,
            stop_reason=delta.stop_reason,
            logprobs=self._logprobs(delta) if request.logprobs else None,
            token_ids=delta.token_ids if request.return_token_ids else None,
            usage=usage,
        )

    def _usage_of(self, index: int, generation: TextStream) -> Usage:
        """One choice's usage so far."""
        return usage_of(
            generation.job.num_prompt_tokens,
            generation.num_tokens_of(index),
            self._answers[index].num_reasoning_tokens,
            num_cached_tokens=generation.num_cached_tokens_of(index),
        )

    def tail(self, generation: TextStream) -> bytes:
        return self._writer.tail(self._usage(generation))

    def response(self, choices: Sequence[Collected], generation: TextStream) -> ChatResponse:
        with_ids = bool(self._request.return_token_ids)
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=_message(answer),
                    logprobs=self._logprobs(choice),
                    finish_reason=self._finished(answer.finish_reason, len(answer.calls)),
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if with_ids else None,
                )
                for index, (answer, choice) in enumerate(zip(self.answers(choices), choices, strict=True))
            ],
            usage=self._usage(generation),
            prompt_token_ids=list(generation.job.prompts[0]) if with_ids else None,
            prompt_logprobs=self._prompt_logprobs(generation),
        )

    def _usage(self, generation: TextStream) -> Usage:
        return usage_of(
            generation.job.num_prompt_tokens,
            generation.num_output_tokens,
            self.num_reasoning_tokens,
            num_cached_tokens=generation.num_cached_tokens,
        )

    def _finish_reason(self, events: Sequence[ItemEvent]) -> str | None:
        end = events[-1] if events else None
        return self._finished(end.finish_reason, end.num_calls) if isinstance(end, AnswerEnded) else None

    def _finished(self, finish_reason: str | None, num_calls: int) -> str | None:
        """The reason in OpenAI's words: a call that was asked for by name is how the answer was to end."""
        return "tool_calls" if finish_reason == "stop" and num_calls and not self._is_named else finish_reason

    def _logprobs(self, of: Delta | Collected) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return chat_logprobs(self._tokenizer, of.token_ids, of.logprobs, as_ids=as_ids)

    def _prompt_logprobs(self, generation: TextStream) -> PromptLogprobList | None:
        if self._request.prompt_logprobs is None:
            return None
        as_ids = bool(self._request.return_tokens_as_token_ids)
        prompt = generation.job.prompts[0]
        return prompt_logprobs(self._tokenizer, prompt, generation.prompt_logprobs(0), as_ids=as_ids)


def _has_news(events: Sequence[ItemEvent]) -> bool:
    """Whether any of these shows in a chunk."""
    if not events:
        return False
    return not isinstance(events[0], ItemEnded) or any(not isinstance(event, ItemEnded) for event in events)


def _body(events: Sequence[ItemEvent]) -> bytes:
    """What is new, in one delta. Calls are numbered by themselves; `ChatDelta` has no empty text but where all is."""
    if len(events) == 1 and isinstance(event := events[0], TextAdded) and event.kind is ItemKind.TEXT:
        return content_body(event.text)  # as most are
    texts = {ItemKind.TEXT: "", ItemKind.REASONING: ""}
    calls: list[ToolCallDelta] = []
    for event in events:
        match event:
            case TextAdded(_, kind, text):
                texts[kind] += text
            case ItemBegun(_, ItemKind.CALL, id, name, number):
                function = FunctionCall(name=name, arguments="")
                calls.append(ToolCallDelta(index=number, id=id, type="function", function=function))
            case ArgumentsAdded(_, text, number):
                if not calls or calls[-1].index != number:
                    calls.append(ToolCallDelta(index=number, function=FunctionCall(arguments="")))
                calls[-1].function.arguments = (calls[-1].function.arguments or "") + text
            case ItemBegun() | ItemEnded() | AnswerEnded():
                pass
    reasoning = texts[ItemKind.REASONING] or None
    content = texts[ItemKind.TEXT] or (None if calls or reasoning else "")
    return delta_body(
        ChatDelta(content=content, reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or None)
    )


def _message(answer: WholeAnswer) -> ResponseMessage:
    """Return an answer's items as a message: content is null where there are calls and no text."""
    content, reasoning = answer.text_of(ItemKind.TEXT), answer.text_of(ItemKind.REASONING)
    calls = [ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.text)) for call in answer.calls]
    return ResponseMessage(
        content=content or (None if calls else ""),
        reasoning_content=reasoning or None,
        reasoning=reasoning or None,
        tool_calls=calls or msgspec.UNSET,
    )
