"""Conversations, grammars and items over gRPC: conversion between protobuf and the gateway's own types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pdmesh_gateway.conversation_turns import arguments_of
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.items import (
    AnswerEnded,
    ArgumentsAdded,
    ItemBegun,
    ItemEnded,
    ItemEvent,
    ItemKind,
    TextAdded,
)
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.protocol.sampling_fields import StructuredOutputs
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice

_MODES: dict[int, Literal["none", "auto", "required"]] = {
    pb.ToolChoice.AUTO: "auto",
    pb.ToolChoice.NONE: "none",
    pb.ToolChoice.REQUIRED: "required",
}

_KINDS = {
    ItemKind.REASONING: pb.ITEM_KIND_REASONING,
    ItemKind.TEXT: pb.ITEM_KIND_TEXT,
    ItemKind.CALL: pb.ITEM_KIND_CALL,
}


def conversation_of(chat: pb.Chat) -> Conversation:
    """Return a chat as a conversation. Raise RequestRejected if a part is invalid."""
    if (mode := _MODES.get(chat.tool_choice.mode)) is None:
        raise invalid("tool_choice", "`tool_choice.mode` is unknown.")
    return Conversation(
        messages=[_message(message) for message in chat.messages],
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(chat.tools)),
        tool_choice=ToolChoice(mode=mode, allowed=tuple(chat.tool_choice.allowed) or None),
        parallel_tool_calls=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        include_reasoning=not chat.HasField("include_reasoning") or chat.include_reasoning,
        variables=_json_object(chat.template_variables, "template_variables"),
    )


def structured_outputs_of(request: pb.GenerateRequest) -> StructuredOutputs | None:
    """Return the constraint of a request's answer; None without one."""
    if not request.HasField("grammar"):
        return None
    given = request.grammar
    match given.WhichOneof("kind"):
        case "json_schema":
            return StructuredOutputs(json=given.json_schema)
        case "regex":
            return StructuredOutputs(regex=given.regex)
        case "choice":
            return StructuredOutputs(choice=list(given.choice.texts))
        case "grammar":
            return StructuredOutputs(grammar=given.grammar)
        case _:
            return None


def add_events(response: pb.GenerateResponse, events: Sequence[ItemEvent]) -> None:
    """Add an answer's new events to a response, and set its text to the new text of text items."""
    response.text = "".join(
        event.text for event in events if isinstance(event, TextAdded) and event.kind is ItemKind.TEXT
    )
    for event in events:
        match event:
            case ItemBegun(item, kind, id, name):
                response.events.add(item=item, begun=pb.ItemBegun(kind=_KINDS[kind], id=id, name=name))
            case TextAdded(item, _, text):
                response.events.add(item=item, text=text)
            case ArgumentsAdded(item, text):
                response.events.add(item=item, arguments=text)
            case ItemEnded(item):
                response.events.add(item=item, ended=True)
            case AnswerEnded():
                pass


def _message(message: pb.Message) -> dict[str, Any]:
    built: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        built["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        built["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        built["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return built


def _tool(tool: pb.Tool, where: str) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description or None,
        parameters=_json_object(tool.parameters, f"{where}.parameters") if tool.parameters else None,
        strict=tool.strict,
    )


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(where, f"`{where}` is not a JSON object: {error}") from None
