"""``tools`` and ``tool_choice`` of chats and of responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdmesh_gateway.protocol.chat_protocol import FunctionDefinition
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.tools.tool_choice import Tool, ToolChoice


def chat_tools(given: list[dict[str, Any]] | None) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the functions among a chat's tools, and a warning for each other tool; nothing for None.

    Raise RequestRejected if a function is malformed.
    """
    tools: list[Tool] = []
    skipped: list[str] = []
    for i, each in enumerate(given or ()):
        if (kind := each.get("type", "function")) == "function":
            tools.append(function_tool(each.get("function"), f"tools[{i}].function"))
        else:
            skipped.append(f"tool of type {str(kind)[:40]!r} is skipped.")
    return tuple(tools), skipped


def tool_choice_of(given: Any) -> ToolChoice:
    """Return a tool choice: a word, a function by name, or a list of allowed tools.

    Raise RequestRejected for any other choice.

    In chats, names and lists are in a nested object. Allowed tools of other types are dropped.
    """
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
                    return ToolChoice(mode=mode, allowed=tuple(map(_named, filter(_is_function, tools))))
    raise invalid(
        "tool_choice",
        '`tool_choice` must be "none", "auto", "required", a function by name, or {"type": "allowed_tools", …} with '
        "`mode` and `tools`.",
    )


def function_tool(function: Any, where: str) -> Tool:
    """Return a function as a tool. ``where`` names its place in error messages.

    Raise RequestRejected if it is invalid.
    """
    try:
        tool = msgspec.convert(function, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise invalid("tools", f"`{where}` is not a valid function: {error}") from None
    return Tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))


def _is_function(tool: Any) -> bool:
    return not isinstance(tool, Mapping) or tool.get("type", "function") == "function"


def _named(of: Any) -> str:
    function = of.get("function", of) if isinstance(of, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", "`tool_choice` has a function without a name.")
    return name
