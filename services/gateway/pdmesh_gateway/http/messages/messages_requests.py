"""Conversion of Anthropic's requests to a conversation and sampling fields."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from pdmesh_gateway.conversation_turns import TurnBuilder, arguments_of
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.messages.messages_protocol import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolChoiceField,
    ToolDefinition,
)
from pdmesh_gateway.message_parts import skip_warnings, text_of
from pdmesh_gateway.protocol.sampling_fields import ResponseFormat, SamplingFields, sampling_fields_of
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.session_names import lease_s
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice

_ROLES = ("user", "assistant", "system", "developer")


def conversation_of(request: CountTokensRequest) -> Conversation:
    """Return a request's conversation. Raise RequestRejected for an invalid message.

    A last message of the assistant is the beginning of the answer.
    """
    turns = TurnBuilder()
    skipped: set[str] = set()
    if request.system:
        turns.text("system", text_of(msgspec.to_builtins(request.system), "system", param="system"))
    for i, message in enumerate(request.messages):
        _add_message(turns, message, f"messages.{i}", skipped)
    is_begun = turns.ends_with_answer
    if is_begun and turns.ends_with_call:
        raise invalid("messages", "`messages` ends with a tool_use block. Add its tool_result.")
    choice = request.tool_choice
    return Conversation(
        messages=turns.messages(),
        tools=tuple(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=bool(tool.strict),
            )
            for tool in request.tools or []
            if not is_foreign(tool)
        ),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        variables={} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"},
        warnings=skip_warnings(skipped, "blocks"),
    )


def fields_of(request: MessagesRequest) -> SamplingFields:
    """Return the sampling fields of a request. Raise RequestRejected for a wrong stop sequence or format."""
    stops = [stop for stop in request.stop_sequences or [] if stop.strip()]
    if len(stops) < len(request.stop_sequences or []):
        raise invalid("stop_sequences", "`stop_sequences` must not contain blank strings.")
    return sampling_fields_of(
        request, stop=stops, response_format=_response_format(request), cache_control=_cache_control(request)
    )


def _cache_control(request: MessagesRequest) -> Any:
    """Return the cache control with the longest lease: of the request, a block or a tool."""
    contents = [request.system, *[message.content for message in request.messages]]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    given = [each.cache_control for each in (request, *blocks, *(request.tools or ()))]
    return max(given, key=lease_s, default=None)


def is_foreign(tool: ToolDefinition) -> bool:
    """Return whether a tool runs at Anthropic's servers or has no schema to call it by. Foreign tools are skipped."""
    return tool.type not in (None, "custom")


def _add_message(turns: TurnBuilder, message: InputMessage, where: str, skipped: set[str]) -> None:
    if message.role not in _ROLES:
        raise invalid("messages", f"`{where}.role` must be user or assistant, got {message.role[:40]!r}.")
    if isinstance(message.content, str):
        turns.text(message.role, message.content)
        return
    for block in message.content:
        match block.type:
            case "thinking" if message.role == "assistant":
                turns.reasoning(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use" if message.role == "assistant":
                if not block.id or not block.name:
                    raise invalid("messages", f"`{where}` has a tool_use block without `id` or `name`.")
                turns.call(block.id, block.name, arguments_of(block.input))
            case "tool_result" if message.role == "user":
                if not block.tool_use_id:
                    raise invalid("messages", f"`{where}` has a tool_result block without `tool_use_id`.")
                turns.result(block.tool_use_id, text_of(block.content or "", where, param="messages"))
            case _:
                text = text_of(
                    [msgspec.structs.asdict(block)],
                    where,
                    param="messages",
                    skipped=skipped if message.role == "assistant" else None,
                )
                if text or block.type == "text":
                    turns.text(message.role, text)


def _tool_choice(choice: ToolChoiceField | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "any":
        return ToolChoice(mode="required")
    if choice.type == "none":
        return ToolChoice(mode="none")
    if choice.type == "tool" and choice.name:
        return ToolChoice(mode="required", allowed=(choice.name,), is_named=True)
    raise invalid("tool_choice", f"`tool_choice` is {choice.type[:40]!r}: use auto, any, none, or tool with a `name`.")


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    wanted, format_type = request.output_format, _OutputFormat
    if request.output_config is not None and request.output_config.format is not None:
        wanted, format_type = request.output_config.format, _ConfiguredFormat
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        name = format_type.FIELD
        raise invalid(name, f"`{name}.type` is {wanted.type[:40]!r}: use json_schema.")
    return format_type(type="json_schema", schema=wanted.schema)


class _OutputFormat(ResponseFormat, kw_only=True):
    """``output_format`` as a ``response_format``."""

    FIELD: ClassVar[str] = "output_format"
    SCHEMA: ClassVar[str] = "output_format.schema"


class _ConfiguredFormat(_OutputFormat, kw_only=True):
    """``output_config.format`` as a ``response_format``."""

    FIELD: ClassVar[str] = "output_config.format"
    SCHEMA: ClassVar[str] = "output_config.format.schema"
