"""Conversion of requests of items to a conversation and sampling fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pdmesh.errors import RequestRejected
from pdmesh_gateway.conversation_turns import TurnBuilder, arguments_of, reasoning_variables
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.openai_tools import function_tool, tool_choice_of
from pdmesh_gateway.http.responses.responses_protocol import InputTokensRequest, ResponsesRequest, TextFormat
from pdmesh_gateway.message_parts import skip_warnings, text_of
from pdmesh_gateway.protocol.sampling_fields import JsonSchema, ResponseFormat, SamplingFields, sampling_fields_of
from pdmesh_gateway.sampling import MAX_LOGPROBS, invalid, number

ItemObject = Mapping[str, Any]

_ROLES = ("user", "assistant", "system", "developer")


def items_of(given: str | Sequence[ItemObject] | None) -> list[ItemObject]:
    """Return ``input`` as items: a text becomes a message of the user; None becomes no items."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def conversation_of(
    request: InputTokensRequest, items: Sequence[ItemObject], item_of: Callable[[str], ItemObject | None]
) -> Conversation:
    """Return the conversation of ``items``, in their order, after the request's instructions. Raises RequestRejected.

    ``item_of`` returns an item that is referenced by id; None if it is not stored.
    """
    turns = TurnBuilder()
    skipped: set[str] = set()
    if request.instructions:
        turns.text("system", request.instructions)
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if kind_of(item) == "item_reference":
            named = item_of(str(item.get("id")))
            if named is None:
                raise _not_found(str(item.get("id")))
            item = named
        _add_item(turns, item, where, skipped)
    effort = None if request.reasoning is None else request.reasoning.effort
    return Conversation(
        messages=turns.messages(),
        tools=tuple(
            function_tool(tool, f"tools[{i}]")
            for i, tool in enumerate(request.tools or ())
            if tool.get("type") == "function"
        ),
        tool_choice=tool_choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        variables=reasoning_variables(request.chat_template_kwargs, effort),
        warnings=skip_warnings(skipped, "parts"),
    )


def num_top_logprobs_of(request: ResponsesRequest) -> int | None:
    """Return the number of likeliest tokens to report at each drawn token; None without log-probabilities.

    Raise RequestRejected if ``top_logprobs`` is out of range.
    """
    number("top_logprobs", request.top_logprobs, low=0, high=MAX_LOGPROBS)
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or []):
        return request.top_logprobs or 0
    return None


def fields_of(request: ResponsesRequest) -> SamplingFields:
    """Return the sampling fields of a request, unchecked."""
    return sampling_fields_of(
        request, response_format=_response_format(None if request.text is None else request.text.format)
    )


def kind_of(item: ItemObject) -> str:
    """Return an item's type; messages may come without one."""
    return str(item.get("type") or "message")


#: Types of items that this server reads. Other types come from OpenAI's own tools and are skipped.
KNOWN_ITEMS = frozenset(
    {
        *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
        *("custom_tool_call", "custom_tool_call_output"),
    }
)


def _add_item(turns: TurnBuilder, item: ItemObject, where: str, skipped: set[str]) -> None:
    match kind_of(item):
        case "message":
            role = str(item.get("role"))
            if role not in _ROLES:
                raise invalid("input", f"`{where}.role` must be one of {', '.join(_ROLES)}.")
            told = skipped if role == "assistant" else None
            turns.text(role, text_of(item.get("content"), f"{where}.content", param="input", skipped=told))
        case "reasoning":
            given = item.get("content") or item.get("summary") or ""
            if text := text_of(given, where, param="input", skipped=skipped):
                turns.reasoning(text)
        case "function_call":
            call_id, name = (_string(item, key, where) for key in ("call_id", "name"))
            turns.call(call_id, name, arguments_of(item.get("arguments")))
        case "custom_tool_call":
            call_id, name, given = (_string(item, key, where) for key in ("call_id", "name", "input"))
            turns.call(call_id, name, {"input": given})
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(item.get("output"), f"{where}.output", param="input")
            turns.result(_string(item, "call_id", where), text)
        case _:
            pass


def _string(item: ItemObject, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid("input", f"`{where}.{key}` must be a string.")
    return value


def _response_format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return _TextFormat(type=wanted.type, json_schema=JsonSchema(schema=wanted.schema, strict=wanted.strict))


class _TextFormat(ResponseFormat, kw_only=True):
    """``text.format`` as a ``response_format``."""

    FIELD: ClassVar[str] = "text.format"
    SCHEMA: ClassVar[str] = "text.format.schema"


def _not_found(item_id: str) -> RequestRejected:
    return RequestRejected(
        f"Item with id '{item_id[:100]}' not found. Items are kept for an hour if responses are stored "
        "(gateway.kept_responses_bytes). Send the item itself.",
        status=404,
        param="input",
        code="item_not_found",
    )
