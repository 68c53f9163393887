"""Answers of the chat API: each choice's items become one message, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.generation_endpoint import ItemRendering
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
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.protocol.chat_protocol import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)
from pdmesh_gateway.protocol.usage import Usage
from pdmesh_gateway.text_stream import TextStream


class ChatRendering(ItemRendering):
    """Answers to a chat. ``echoed`` is the part of the answer that the request contains, shown first."""

    def __init__(
        self,
        request: ChatRequest,
        tokenizer: ModelTokenizer,
        answers: Sequence[ChoiceItems],
        *,
        model: str,
        job: GenerationJob,
        is_named: bool,
        echoed: str,
    ) -> None:
        super().__init__(answers)
        self._is_named = is_named
        self._echoed = echoed
        self._request = request
        self._tokenizer = tokenizer
        self._writer = ChunkWriter(
            kind="chat.completion.chunk",
            response_id=f"chatcmpl-{job.request_id}",
            model=model,
            options=request.stream_options,
        )
        self._begun = [False] * job.num_choices
        #: Whether chunks hold only new text, without logprobs, token ids or usage.
        self._is_plain = not (request.logprobs or request.return_token_ids or self._writer.continuous_usage)

    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        if self._is_plain and self._begun[delta.index] and (text := _text_of(events)) is not None:
            return self._writer.text(delta.index, text)
        request = self._request
        index = delta.index
        usage: Usage | None = None
        if self._writer.continuous_usage:
            num_reasoning_tokens = self._answers[index].num_reasoning_tokens
            usage = usage_of(generation, generation.num_tokens_of(index), num_reasoning_tokens, index=index)
        head = b""
        if not self._begun[index]:
            self._begun[index] = True
            prompt = list(generation.job.prompts[0]) if request.return_token_ids else None
            so_far = usage and usage_of(generation, 0, index=index)
            head = self._writer.role(index, prompt_token_ids=prompt, usage=so_far)
            if self._echoed:
                head += self._writer.delta(index, content_body(self._echoed), usage=so_far)
        if delta.text and not _has_news(events) and not (usage or request.return_token_ids or request.logprobs):
            # The text is a marker of calls or reasoning, or may become one.
            return head
        return head + self._writer.delta(
            index,
            _body(events),
            finish_reason=self._finish_reason(events) if delta.finish_reason is not None else None,
            stop_reason=delta.stop_reason,
            logprobs=self._logprobs(delta) if request.logprobs else None,
            token_ids=delta.token_ids if request.return_token_ids else None,
            usage=usage,
        )

    def tail(self, generation: TextStream) -> bytes:
        return self._writer.tail(self._usage(generation))

    def response(self, choices: Sequence[Delta], generation: TextStream) -> ChatResponse:
        with_ids = bool(self._request.return_token_ids)
        return ChatResponse(
            id=self._writer.response_id,
            created=self._writer.created,
            model=self._writer.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=_message(answer, self._echoed),
                    logprobs=self._logprobs(choice),
                    finish_reason=self._finished(answer.finish_reason, len(answer.calls)),
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if with_ids else None,
                )
                for index, (answer, choice) in enumerate(zip(self.answers(choices), choices, strict=True))
            ],
            usage=self._usage(generation),
            prompt_token_ids=list(generation.job.prompts[0]) if with_ids else None,
            prompt_logprobs=prompt_logprobs(self._tokenizer, self._request, generation),
        )

    def _usage(self, generation: TextStream) -> Usage:
        return usage_of(generation, generation.num_output_tokens, self.num_reasoning_tokens)

    def _finish_reason(self, events: Sequence[ItemEvent]) -> str | None:
        end = events[-1] if events else None
        return self._finished(end.finish_reason, end.num_calls) if isinstance(end, AnswerEnded) else None

    def _finished(self, finish_reason: str | None, num_calls: int) -> str | None:
        """Return the finish reason in OpenAI's words; None while the answer continues.

        "tool_calls" replaces "stop" after a call, unless the request named the tool.
        """
        return "tool_calls" if finish_reason == "stop" and num_calls and not self._is_named else finish_reason

    def _logprobs(self, of: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return chat_logprobs(self._tokenizer, of.token_ids, of.logprobs, as_ids=as_ids)


def _has_news(events: Sequence[ItemEvent]) -> bool:
    """Return whether any of these events shows in a chunk: False if all are ends of items, or there are none."""
    if not events:
        return False
    return not isinstance(events[0], ItemEnded) or any(not isinstance(event, ItemEnded) for event in events)


def _text_of(events: Sequence[ItemEvent]) -> str | None:
    """Return the text of a single event that adds answer text; None for any other events."""
    if len(events) == 1 and isinstance(event := events[0], TextAdded) and event.kind is ItemKind.TEXT:
        return event.text
    return None


def _body(events: Sequence[ItemEvent]) -> bytes:
    """Return the events as one delta. Calls have their own numbers; text is empty only if nothing else is new."""
    if (text := _text_of(events)) is not None:
        return content_body(text)
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


def _message(answer: WholeAnswer, echoed: str) -> ResponseMessage:
    """Return an answer's items as a message that begins with ``echoed``.

    Content is null if there are calls and no text.
    """
    content, reasoning = echoed + answer.text_of(ItemKind.TEXT), answer.text_of(ItemKind.REASONING)
    calls = [ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.text)) for call in answer.calls]
    return ResponseMessage(
        content=content or (None if calls else ""),
        reasoning_content=reasoning or None,
        reasoning=reasoning or None,
        tool_calls=calls or msgspec.UNSET,
    )
