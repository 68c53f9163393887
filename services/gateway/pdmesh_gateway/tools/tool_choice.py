"""Tools of a request, and the choice of tools that its answer may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio
import anyio.to_thread

from pdmesh.errors import RequestRejected
from pdmesh_gateway.answer_format import Calls
from pdmesh_gateway.answer_grammars import COMPILE_LIMIT_S, MAX_WARNINGS, GrammarChecker, check_size, json_grammar
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.schemas import ANY_OBJECT, Dropped, arguments_schema
from pdmesh_gateway.templates import check_nesting
from pdmesh_gateway.tools.answer_reader import MAX_NAME_CHARS, NAME_CHARS
from pdmesh_gateway.tools.format import CallableTool

#: Limit of the tools of one request.
MAX_TOOLS = 256

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_NAME = re.compile(f"[{NAME_CHARS}]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an answer may call.

    The arguments are an object that fits ``parameters``, a JSON schema; None: no arguments. ``strict``: a schema that
    cannot be obeyed is an error instead of a warning.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it.

        Missing type and properties are added, because most templates need them.
        """
        given = self.parameters or {}
        missing = {key: value for key, value in _NO_PARAMETERS.items() if key not in given}
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": {**given, **missing}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether an answer calls tools, and which.

    ``allowed`` has names; None allows all. ``is_named``: exactly one call of the only allowed tool is required.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    is_named: bool = False


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise RequestRejected for tools that cannot be called, and for a choice that no tool meets."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"`tools` has {len(tools)} tools; {MAX_TOOLS} are allowed.")
    names: set[str] = set()
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise invalid(
                "tools",
                f"`tools` has the name {tool.name[:40]!r}; names have 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ . : / -",
            )
        if tool.name in names:
            raise invalid("tools", f"`tools` has two tools named {tool.name!r}.")
        check_nesting(tool.parameters, "tools")
        names.add(tool.name)
    if choice.mode == "required" and not tools:
        raise invalid("tool_choice", "`tool_choice` requires a call, but `tools` has no tool to call.")
    for name in choice.allowed or ():
        if name not in names:
            raise invalid("tool_choice", f"`tool_choice` names {name[:40]!r}, which is not in `tools`.")
    if choice.allowed is not None and not choice.allowed:
        raise invalid("tool_choice", "`tool_choice` allows no tools.")


async def calls_of(
    tools: Sequence[Tool], choice: ToolChoice, checker: GrammarChecker, *, most: int
) -> tuple[Calls, list[str]]:
    """Return the calls that an answer may make, at most ``most``, and warnings of constraints that are not obeyed.

    Raises RequestRejected for a strict tool whose schema cannot be obeyed, or if compiling takes too long.
    """
    allowed = [tool for tool in tools if choice.allowed is None or tool.name in choice.allowed]
    callables: list[CallableTool] = []
    warnings: list[str] = []
    with anyio.move_on_after(COMPILE_LIMIT_S) as limit:
        for tool in allowed:
            problem: str | None = None
            schema: Any = ANY_OBJECT
            dropped: Sequence[Dropped] = ()
            try:
                await anyio.to_thread.run_sync(check_size, tool.parameters, "parameters")
                found = await checker.obeyed(arguments_schema(tool.parameters), "parameters")
                schema, dropped = found.schema, found.dropped
                problem = await checker.problem(json_grammar(schema, "parameters"))
            except RequestRejected as error:
                problem = f"cannot be enforced: {error.message}"
            broken = [str(each) for each in dropped if not each.is_annotation]
            if problem is None and tool.strict and broken:
                problem = f"cannot be enforced: {'; '.join(broken[:4])}."
            elif problem is None:
                warnings += [f"tool {tool.name!r} is not checked against {each}" for each in dropped[:MAX_WARNINGS]]
            callables.append(CallableTool(name=tool.name, schema=ANY_OBJECT if problem is not None else schema))
            if problem is not None:
                if tool.strict:
                    raise invalid("tools", f"The strict tool {tool.name!r} {problem}")
                warnings.append(f"tool {tool.name!r} {problem} Its arguments may be any object.")
    if limit.cancelled_caught:
        raise invalid("tools", f"`tools` takes longer than {COMPILE_LIMIT_S:g} s to compile. Simplify the schemas.")
    most = 1 if choice.is_named else most
    return Calls(tools=tuple(callables), required=choice.mode == "required", most=most), warnings


def with_any_arguments(calls: Calls) -> Calls:
    """Return the same calls with any object allowed as arguments."""
    return replace(calls, tools=tuple(CallableTool(name=tool.name, schema=ANY_OBJECT) for tool in calls.tools))
