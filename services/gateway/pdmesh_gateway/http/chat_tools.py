"""``tools``, ``tool_choice`` and ``response_format`` of chats: OpenAI's words for tools and for which are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdmesh_gateway.protocol.chat_protocol import FunctionDefinition
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice


def chat_tools(given: list[dict[str, Any]] | None) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the functions among a chat's tools, and warnings of those of other kinds. Raises RequestRejected."""
    tools: list[Tool] = []
    skipped: list[str] = []
    for i, each in enumerate(given or ()):
        if (kind := each.get("type", "function")) == "function":
            tools.append(_tool(each.get("function"), f"tools[{i}].function"))
        else:
            skipped.append(f"tool of type {str(kind)[:40]!r} is skipped.")
    return tuple(tools), skipped


def chat_tool_choice(given: Any) -> ToolChoice:
    """Return a chat's choice: by a word, of a function by name, or of allowed ones. Raises RequestRejected."""
    if given is None:
        return ToolChoice()
    if given in ("none", "auto", "required"):
        return ToolChoice(mode=given)
    if isinstance(given, Mapping):
        if given.get("type") == "function":
            return ToolChoice(mode="required", allowed=(_named(given),), is_named=True)
        if given.get("type") == "allowed_tools":
            allowed = given.get("allowed_tools", given)
            if isinstance(allowed, Mapping):
                mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
                if mode in ("auto", "required") and isinstance(tools, list):
                    return ToolChoice(mode=mode, allowed=tuple(_named(tool) for tool in tools))
    raise invalid(
        "tool_choice",
        '`tool_choice` must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.',
    )


def _tool(function: Any, where: str) -> Tool:
    try:
        tool = msgspec.convert(function, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise invalid("tools", f"`{where}` is not a valid function: {error}") from None
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
    )


def _named(of: Any) -> str:
    function = of.get("function", of) if isinstance(of, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", "`tool_choice` has a function without a name.")
    return name
