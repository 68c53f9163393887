"""Items as Anthropic's content blocks, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.generation_endpoint import ItemRendering
from pdmesh_gateway.http.messages.anthropic_errors import error_body
from pdmesh_gateway.http.messages.messages_protocol import (
    MessagesResponse,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokensDetails,
    ToolUseBlock,
)
from pdmesh_gateway.items import (
    AnswerEnded,
    ArgumentsAdded,
    ChoiceItems,
    Item,
    ItemBegun,
    ItemEnded,
    ItemEvent,
    ItemKind,
    TextAdded,
)
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.partial_json import whole_object
from pdmesh_gateway.text_stream import TextStream

_encode = msgspec.json.Encoder().encode

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)


def event(name: bytes, data: bytes) -> bytes:
    """Return a server-sent event; ``data`` is a JSON object to which its type is added."""
    return b'event: %b\ndata: {"type":"%b",%b\n\n' % (name, name, data[1:])


@dataclass(frozen=True, slots=True)
class _End:
    """Reason why an answer ended, in Anthropic's words."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessagesRendering(ItemRendering):
    """Rendering of one answer to ``POST /v1/messages``.

    ``is_clamped``: the context has less room than the request asked for.
    """

    keep_alive = event(b"ping", b"{}").replace(b",}", b"}")

    def __init__(self, answers: Sequence[ChoiceItems], *, model: str, job: GenerationJob, is_clamped: bool) -> None:
        super().__init__(answers)
        self._id = f"msg_{job.request_id}"
        self._model = model
        self._is_clamped = is_clamped
        #: Kinds of the items that have begun.
        self._kinds: list[ItemKind] = []
        self._end: _End | None = None

    def head(self, generation: TextStream) -> bytes:
        message = MessagesResponse(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(generation, num_output_tokens=0),
        )
        return event(b"message_start", _encode({"message": message}))

    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        return b"".join([self._event(each) for each in events])

    def tail(self, generation: TextStream) -> bytes:
        end = self._end or _End("end_turn")
        reason = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
        data = _encode({"delta": reason, "usage": self._usage(generation, generation.num_output_tokens)})
        return event(b"message_delta", data) + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def failure(self, error: RequestRejected) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._id) + b"\n\n"

    def response(self, choices: Sequence[Delta], generation: TextStream) -> MessagesResponse:
        [answer] = self.answers(choices)
        end = self._end_of(answer.finish_reason or "stop", answer.stop_reason, len(answer.calls))
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=[self._block(item) for item in answer.items],
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=self._usage(generation, generation.num_output_tokens),
        )

    def _event(self, news: ItemEvent) -> bytes:
        match news:
            case TextAdded(item=item, kind=kind, text=text):
                name = (b"thinking_delta", b"thinking") if kind is ItemKind.REASONING else (b"text_delta", b"text")
                return _DELTA % (item, *name, _encode(text))
            case ArgumentsAdded(item=item, text=text):
                return _DELTA % (item, b"input_json_delta", b"partial_json", _encode(text))
            case ItemBegun(item=item, kind=kind, id=id, name=name):
                self._kinds.append(kind)
                block = self._block(Item(kind, id, name), signature="")
                return event(b"content_block_start", _encode({"index": item, "content_block": block}))
            case ItemEnded(item=item):
                signature = b""
                if self._kinds[item] is ItemKind.REASONING:
                    signature = _DELTA % (item, b"signature_delta", b"signature", _encode(self._id))
                return signature + event(b"content_block_stop", b'{"index":%d}' % item)
            case AnswerEnded(finish_reason=finish_reason, stop_reason=stop_reason, num_calls=num_calls):
                self._end = self._end_of(finish_reason, stop_reason, num_calls)
                return b""

    def _block(self, item: Item, *, signature: str | None = None) -> TextBlock | ThinkingBlock | ToolUseBlock:
        match item.kind:
            case ItemKind.TEXT:
                return TextBlock(text=item.text)
            case ItemKind.REASONING:
                return ThinkingBlock(thinking=item.text, signature=self._id if signature is None else signature)
            case ItemKind.CALL:
                return ToolUseBlock(id=item.id, name=item.name, input=msgspec.Raw(whole_object(item.text)))

    def _end_of(self, finish_reason: str, stop_reason: int | str | None, num_calls: int) -> _End:
        if finish_reason == "length":
            return _End("model_context_window_exceeded" if self._is_clamped else "max_tokens")
        if isinstance(stop_reason, str):
            return _End("stop_sequence", stop_reason)
        return _End("tool_use" if num_calls else "end_turn")

    def _usage(self, generation: TextStream, num_output_tokens: int) -> MessageUsage:
        num_cached = generation.num_cached_tokens
        return MessageUsage(
            input_tokens=generation.job.num_prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=num_output_tokens,
            output_tokens_details=TokensDetails(thinking_tokens=self.num_reasoning_tokens),
        )
