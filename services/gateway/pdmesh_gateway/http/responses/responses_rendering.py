"""Answers of the responses API: items as one response object or as the API's sequence of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.http.generation_endpoint import ItemRendering
from pdmesh_gateway.http.responses.responses_logprobs import TextLogprobs
from pdmesh_gateway.http.responses.responses_protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    OutputTokensDetails,
    RawMessage,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
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
    is_json_object,
)
from pdmesh_gateway.protocol.chat_protocol import ChatTokenLogprob
from pdmesh_gateway.text_stream import TextStream

_encode = msgspec.json.Encoder().encode

_PREFIXES = {ItemKind.TEXT: "msg", ItemKind.REASONING: "rs", ItemKind.CALL: "fc"}
_TEXT_DELTA = b'"item_id":"%b","output_index":%d,"content_index":0,"delta":%b%b}'
_NO_LOGPROBS = b',"logprobs":[]'
_CALL_DELTA = b'"item_id":"%b","output_index":%d,"delta":%b}'

#: Error codes that clients of the API know.
_RATE_LIMIT, _SERVER_ERROR = "rate_limit_exceeded", "server_error"


class ResponsesRendering(ItemRendering):
    """Rendering of one answer to ``POST /v1/responses``.

    ``begun`` is the response before its answer; ``keep`` is called with the ended response. ``logprobs`` is set if the
    text has log-probabilities.
    """

    def __init__(
        self,
        items: Sequence[ChoiceItems],
        begun: ResponseObject,
        keep: Callable[[ResponseObject], None],
        logprobs: TextLogprobs | None = None,
    ) -> None:
        super().__init__(items)
        self._begun = begun
        self.keep = keep
        self._logprobs = logprobs
        self._name = begun.id.removeprefix("resp_")
        self._sequence_number = 0
        self._output: list[OutputItem] = []
        # The open item: its pieces of text or arguments, the log-probabilities of its text, and its id (empty before
        # the first item).
        self._item = Item(ItemKind.TEXT)
        self._pieces: list[str] = []
        self._item_logprobs: list[ChatTokenLogprob] = []
        self._item_id = b""
        self._finish_reason = "stop"
        self._raw = RawMessage(message="", tokens=[])

    def head(self, generation: TextStream) -> bytes:
        response = b'"response":' + _encode(self._begun) + b"}"
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def events(self, events: Sequence[ItemEvent], delta: Delta, generation: TextStream) -> bytes:
        if self._logprobs is not None:
            self._logprobs.add(delta)
        if self._begun.output_messages is not msgspec.UNSET:
            self._raw.message += delta.text
            self._raw.tokens += delta.token_ids
        return b"".join([self._news(each) for each in events])

    def tail(self, generation: TextStream) -> bytes:
        response = self.ended(generation)
        return self._event(b"response." + response.status.encode(), b'"response":' + _encode(response) + b"}")

    def failure(self, error: RequestRejected) -> bytes:
        """Return the error event, for clients that raise it, and the failed response, for clients that wait for the
        end.
        """
        shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        data = _encode({"code": error.code, "message": error.message, "param": error.param, "error": shape})
        told = self._event(b"error", data[1:])
        return told + self._event(b"response.failed", b'"response":' + _encode(self.failed(error)) + b"}")

    def failed(self, error: RequestRejected) -> ResponseObject:
        """Return the response as failed, with the items that had ended."""
        code = _RATE_LIMIT if error.status == 429 else _SERVER_ERROR
        failure = ResponseFailure(code=code, message=error.message)
        return msgspec.structs.replace(self._begun, status="failed", output=self._output, error=failure)

    def cancelled(self) -> ResponseObject:
        """Return the response as cancelled, with the items that had ended."""
        return msgspec.structs.replace(self._begun, status="cancelled", output=self._output)

    @property
    def begun(self) -> ResponseObject:
        """The response before its answer."""
        return self._begun

    def response(self, choices: Sequence[Delta], generation: TextStream) -> ResponseObject:
        [choice] = choices
        self.chunk(choice, generation)
        return self.ended(generation)

    def ended(self, generation: TextStream) -> ResponseObject:
        """Return the response after its last event, and pass it to ``keep``."""
        is_cut = self._finish_reason == "length"
        num_prompt_tokens = generation.job.num_prompt_tokens
        response = msgspec.structs.replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            output=self._output,
            output_messages=msgspec.UNSET if self._begun.output_messages is msgspec.UNSET else [self._raw],
            usage=ResponseUsage(
                input_tokens=num_prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=generation.num_cached_tokens),
                output_tokens=generation.num_output_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=self.num_reasoning_tokens),
                total_tokens=num_prompt_tokens + generation.num_output_tokens,
            ),
        )
        self.keep(response)
        return response

    def _news(self, news: ItemEvent) -> bytes:
        match news:
            case TextAdded(item=item, kind=kind, text=text, start=start):
                self._pieces.append(text)
                if kind is ItemKind.REASONING:
                    data = _TEXT_DELTA % (self._item_id, item, _encode(text), b"")
                    return self._event(b"response.reasoning_text.delta", data)
                logprobs = _NO_LOGPROBS
                if self._logprobs is not None:
                    tokens = self._logprobs.take(start, start + len(text))
                    self._item_logprobs += tokens
                    logprobs = b',"logprobs":' + _encode(tokens)
                data = _TEXT_DELTA % (self._item_id, item, _encode(text), logprobs)
                return self._event(b"response.output_text.delta", data)
            case ArgumentsAdded(item=item, text=text):
                self._pieces.append(text)
                data = _CALL_DELTA % (self._item_id, item, _encode(text))
                return self._event(b"response.function_call_arguments.delta", data)
            case ItemBegun(item=item, kind=kind, id=id, name=name):
                return self._last_item_ended(None) + self._item_begun(item, Item(kind, id, name))
            case ItemEnded():
                # Whether the item was cut depends on the next event.
                return b""
            case AnswerEnded(finish_reason=finish_reason):
                self._finish_reason = finish_reason
                return self._last_item_ended(finish_reason)

    def _item_begun(self, index: int, item: Item) -> bytes:
        self._item = item
        self._pieces = []
        self._item_logprobs = []
        self._item_id = self._id_of(item, index).encode()
        added = self._output_item(item, index, "in_progress")
        part = None if isinstance(added, OutputCall) else added.content.pop()
        begun = self._event(b"response.output_item.added", _item_data(index, added))
        return begun if part is None else begun + self._part(b"response.content_part.added", index, part)

    def _last_item_ended(self, finish_reason: str | None) -> bytes:
        """Return the events that end the last item; empty before the first.

        ``finish_reason`` is the answer's if the answer ended with this item, else None.
        """
        if not self._item_id:
            return b""
        index = len(self._output)
        self._item.text = "".join(self._pieces)
        ended = self._output_item(self._item, index, _status(self._item, finish_reason))
        self._output.append(ended)
        place = b'"item_id":"%b","output_index":%d,' % (self._item_id, index)
        text = _encode(self._item.text)
        match ended:
            case OutputMessage():
                data = place + b'"content_index":0,"text":%b,"logprobs":%b}' % (text, _encode(self._item_logprobs))
                done = self._event(b"response.output_text.done", data)
                done += self._part(b"response.content_part.done", index, ended.content[0])
            case OutputReasoning():
                done = self._event(b"response.reasoning_text.done", place + b'"content_index":0,"text":%b}' % text)
                done += self._part(b"response.content_part.done", index, ended.content[0])
            case OutputCall():
                data = place + b'"name":%b,"arguments":%b}' % (_encode(ended.name), text)
                done = self._event(b"response.function_call_arguments.done", data)
        return done + self._event(b"response.output_item.done", _item_data(index, ended))

    def _part(self, name: bytes, index: int, part: OutputText | OutputReasoningText) -> bytes:
        place = b'"item_id":"%b","output_index":%d,"content_index":0,"part":' % (self._item_id, index)
        return self._event(name, place + _encode(part) + b"}")

    def _event(self, name: bytes, data: bytes) -> bytes:
        """Return a server-sent event; ``data`` is the rest of its JSON object."""
        number = self._sequence_number
        self._sequence_number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, number, data)

    def _id_of(self, item: Item, index: int) -> str:
        return f"{_PREFIXES[item.kind]}_{self._name}-{index}"

    def _output_item(self, item: Item, index: int, status: Status) -> OutputItem:
        id = self._id_of(item, index)
        match item.kind:
            case ItemKind.TEXT:
                text = OutputText(text=item.text, logprobs=self._item_logprobs)
                return OutputMessage(id=id, status=status, content=[text])
            case ItemKind.REASONING:
                return OutputReasoning(id=id, status=status, content=[OutputReasoningText(text=item.text)])
            case ItemKind.CALL:
                return OutputCall(id=id, status=status, call_id=item.id, name=item.name, arguments=item.text)


def _status(item: Item, finish_reason: str | None) -> Status:
    """Return "incomplete" if the answer ended with this item at its length limit, else "completed".

    ``finish_reason`` is the answer's if it ended with this item, else None. A call whose arguments are a JSON object is
    complete in any case.
    """
    if finish_reason != "length" or (item.kind is ItemKind.CALL and is_json_object(item.text)):
        return "completed"
    return "incomplete"


def _item_data(index: int, item: OutputItem) -> bytes:
    return b'"output_index":%d,"item":%b}' % (index, _encode(item))
