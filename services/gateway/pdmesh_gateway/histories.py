"""Adaptation of conversations of every dialect to the chat template.

Histories come from this server or another one. Calls may be cut, instructions may stand anywhere, and turns of one side
may follow each other. A template may refuse such messages or silently drop some. Trial renders find the dropped ones; a
refused conversation is rendered in plainer forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import msgspec

from pdmesh_gateway.partial_json import whole_object
from pdmesh_gateway.templates import TemplateFailed
from pdmesh_gateway.tools.writing import call_text, instructions, result_text, to_json

Message = dict[str, Any]

#: Properties of `ChatTemplate` that each further render of a refused conversation assumes to be false.
_PLAINER = (
    (
        "developers",
        "later_instructions",
        "neighbours",
        "leading_answer",
        "several_calls",
        "cut_arguments",
    ),
    ("calls",),
    ("instructions",),
)

_INSTRUCTIONS = ("system", "developer")

#: Separates the contents of merged messages.
_BETWEEN = "\n"

# Texts, names and a role of trials. Templates strip blanks around texts, and do not know this role.
_A, _B, _C, _D, _E, _F = (f"pdmesh-trial-{letter}" for letter in "abcdef")
_TOOL, _OTHER_TOOL, _VALUE = "pdmesh_trial_tool", "pdmesh_trial_other", "pdmesh-trial-value"
_BYSTANDER = "bystander"
_CUT = '{"what": "pdmesh-trial-cut'
# Nine characters each, because Mistral's templates require this.
_IDS = ("trialcall", "othercall")


class ChatTemplate:
    """A chat template.

    Each property tells whether the template shows one kind of message, by a trial render at first use.
    """

    def __init__(
        self, render: Callable[[Mapping[str, Any]], str], constants: Mapping[str, Any], *, is_for_tools: bool = False
    ) -> None:
        """``constants`` are variables of every render. ``is_for_tools``: trials pass a tool."""
        self._render = render
        self._constants = constants
        self._is_for_tools = is_for_tools

    def render(self, variables: Mapping[str, Any], *, tool_format: str, tells_tools: bool = False) -> str:
        """Return a conversation as text. Raises TemplateFailed if the template refuses every form of the conversation.

        ``variables`` include ``messages`` and ``tools``. The instructions list the tools, with calls written in
        ``tool_format``, if ``tells_tools`` or if the template does not show tools.
        """
        messages: Sequence[Message] = [message for group in _groups(variables["messages"]) for message in group]
        refused = frozenset[str]()
        tools = variables.get("tools")
        if isinstance(tools, list) and tools and (tells_tools or not self.tools):
            messages = _with_instructions(messages, instructions(tool_format, tools))
            variables = {**variables, "tools": None}
            refused = frozenset({"calls"})
        elif isinstance(tools, list) and tools and not self.bare_tools:
            variables = {**variables, "tools": list(map(_described, tools))}
        given: list[Message] | None = None
        failure: TemplateFailed | None = None
        for more in ((), *_PLAINER):
            refused = refused.union(more)
            plainer = _adapted(messages, partial(self._takes, refused), tool_format)
            if plainer == given:
                continue
            given = plainer
            try:
                return self._render({**self._constants, **variables, "messages": given})
            except TemplateFailed as failed:
                failure = failure or failed
        assert failure is not None
        raise failure

    def _takes(self, refused: frozenset[str], name: str) -> bool:
        return name not in refused and bool(getattr(self, name))

    @cached_property
    def tools(self) -> bool:
        """Whether the chat template shows tools. False if it cannot be rendered with them."""
        return self._shows([_user(_A)], _TOOL, tools=[_SOME_TOOL])

    @cached_property
    def bare_tools(self) -> bool:
        """Whether a tool without a description is shown."""
        bare = {key: value for key, value in _SOME_TOOL["function"].items() if key != "description"}
        return self._shows([_user(_A)], _TOOL, tools=[{**_SOME_TOOL, "function": bare}])

    @cached_property
    def calls(self) -> bool:
        """Whether an assistant's calls and their results are shown."""
        return self.object_arguments or self._shows_call({"what": _VALUE}, as_text=True)

    @cached_property
    def object_arguments(self) -> bool:
        """Whether calls with an object as arguments are shown. If not, only JSON text may be shown: see `calls`."""
        return self._shows_call({"what": _VALUE})

    @cached_property
    def several_calls(self) -> bool:
        """Whether a message may have several calls."""
        arguments: dict[str, Any] | str = {"what": _VALUE} if self.object_arguments else to_json({"what": _VALUE})
        messages = [_user(_A), _calling(arguments, num_calls=2), _result(0, _B), _result(1, _C), _says(_D)]
        return self._shows(messages, _TOOL, _OTHER_TOOL, _B, _C)

    @cached_property
    def cut_arguments(self) -> bool:
        """Whether a call's arguments may be text that is not JSON, shown unchanged."""
        return self._shows([_user(_A), _calling(_CUT), _result(0, _B), _says(_C)], _CUT, _B)

    @cached_property
    def instructions(self) -> bool:
        """Whether a system message at the start is shown."""
        return self._shows([_system(_A), _user(_B)], _A, _B)

    @cached_property
    def lone_instructions(self) -> bool:
        """Whether a system message without any other message is shown."""
        return self._shows([_system(_A)], _A)

    @cached_property
    def later_instructions(self) -> bool:
        """Whether system messages are shown at any position."""
        return self._shows_anywhere("system")

    @cached_property
    def developers(self) -> bool:
        """Whether a developer's message at the start is shown, and differently from a message of an unknown role."""
        messages = [_message("developer", _A), _user(_B)]
        text, other = self._trial(messages), self._trial([_message(_BYSTANDER, _A), _user(_B)])
        if text is None or _A not in text:
            return False
        return other is None or other.casefold().replace(_BYSTANDER, "developer") != text.casefold()

    @cached_property
    def later_developers(self) -> bool:
        """Whether developers' messages are shown at any position."""
        return self._shows_anywhere("developer")

    @cached_property
    def neighbours(self) -> bool:
        """Whether consecutive messages of one side are shown."""
        return self._shows([_user(_A), _user(_B), _says(_C), _says(_D), _user(_E)], _A, _B, _C, _D, _E)

    @cached_property
    def leading_answer(self) -> bool:
        """Whether a conversation may begin with the assistant."""
        return self._shows([_says(_A), _user(_B)], _A, _B)

    def _shows_call(self, arguments: dict[str, Any], *, as_text: bool = False) -> bool:
        call = _calling(to_json(arguments) if as_text else arguments)
        return self._shows([_user(_A), call, _result(0, _B), _says(_C)], _TOOL, _VALUE, _B)

    def _shows_anywhere(self, role: str) -> bool:
        within = [_system(_A), _message(role, _B), _user(_C), _says(_D), _message(role, _E), _user(_F)]
        return self._shows(within, _A, _B, _C, _D, _E, _F) and self._shows([_user(_A), _message(role, _B)], _A, _B)

    def _shows(self, messages: Sequence[Message], *texts: str, tools: list[dict[str, Any]] | None = None) -> bool:
        shown = self._trial(messages, tools)
        return shown is not None and all(text in shown for text in texts)

    def _trial(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return messages as text; None if the template refuses them."""
        tools = tools or ([_SOME_TOOL] if self._is_for_tools else None)
        variables = {"documents": None, "messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            return self._render({**self._constants, **variables})
        except TemplateFailed:
            return None


def _adapted(messages: Sequence[Message], takes: Callable[[str], bool], tool_format: str) -> list[Message]:
    """Return messages in forms that the template accepts. ``takes`` looks up a property of `ChatTemplate` by name."""
    adapted = _with_known_calls(messages, takes, tool_format)
    adapted = _with_leading_instructions(adapted, takes)
    if any(_is_neighbour(*pair) for pair in pairwise(adapted)) and not takes("neighbours"):
        adapted = _merged_neighbours(adapted)
    first = next((at for at, message in enumerate(adapted) if message.get("role") not in _INSTRUCTIONS), None)
    if first is not None and adapted[first].get("role") == "assistant" and not takes("leading_answer"):
        adapted = [*adapted[:first], _user(""), *adapted[first:]]
    return adapted


def _with_known_calls(messages: Sequence[Message], takes: Callable[[str], bool], tool_format: str) -> list[Message]:
    """Return messages with calls and results in the form that the template accepts, or as text if it accepts none."""
    has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    if not has_calls:
        return list(messages)
    if not takes("calls"):
        return [_with_text_calls(message, tool_format) for message in messages]
    adapted = list(messages)
    if not takes("object_arguments"):
        adapted = [_with_arguments(message, to_json) for message in adapted]
    elif any(isinstance(_arguments(call), str) for call in _calls_in(messages)) and not takes("cut_arguments"):
        adapted = [_with_arguments(message, _whole) for message in adapted]
    if any(len(message.get("tool_calls") or ()) > 1 for message in messages) and not takes("several_calls"):
        adapted = _with_single_calls(adapted)
    return adapted


def _with_text_calls(message: Message, tool_format: str) -> Message:
    if message.get("role") == "tool":
        return _user(result_text(str(message.get("content") or "")))
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [call_text(tool_format, str(_function(call).get("name", "")), _arguments(call)) for call in calls]
    content = "\n".join(filter(None, [message.get("content"), *written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message with each call's arguments replaced by ``convert(arguments)``."""
    if not (calls := message.get("tool_calls")):
        return message
    converted = [{**call, "function": {**_function(call), "arguments": convert(_arguments(call))}} for call in calls]
    return {**message, "tool_calls": converted}


def _whole(arguments: Any) -> Any:
    """Return arguments as an object; cut text is completed to an object of its whole parts."""
    return msgspec.json.decode(whole_object(arguments)) if isinstance(arguments, str) else arguments


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, followed by the call's results."""
    single: list[Message] = []
    for group in _groups(messages):
        calling, *results = group
        calls = calling.get("tool_calls") or ()
        if len(calls) < 2:
            single += group
            continue
        by_call: dict[Any, list[Message]] = {}
        for result in results:
            by_call.setdefault(result.get("tool_call_id"), []).append(result)
        for number, call in enumerate(calls):
            own = {**calling, "tool_calls": [call]} if number == 0 else {**_says(""), "tool_calls": [call]}
            single += [own, *by_call.pop(call.get("id"), ())]
        single += [result for others in by_call.values() for result in others]
    return single


def _with_leading_instructions(messages: list[Message], takes: Callable[[str], bool]) -> list[Message]:
    """Return messages with the instructions where the template shows them, in a role that the template knows."""
    if any(message.get("role") == "developer" for message in messages) and not takes("developers"):
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]
    later = {message["role"] for message in messages[1:] if message.get("role") in _INSTRUCTIONS}
    if ("system" in later and not takes("later_instructions")) or (
        "developer" in later and not (takes("later_instructions") and takes("later_developers"))
    ):
        told = [message for message in messages if message.get("role") in _INSTRUCTIONS]
        others = [message for message in messages if message.get("role") not in _INSTRUCTIONS]
        messages = [{**told[0], "content": _joined(told)}, *others]
    if messages and messages[0].get("role") == "system":
        if len(messages) == 1 and not takes("lone_instructions"):
            return [_user(messages[0].get("content") or "")]
        if len(messages) > 1 and not takes("instructions"):
            return _with_instructions_of_the_user(messages)
    return messages


def _with_instructions_of_the_user(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the leading system message merged into the next message if that is the user's.

    Otherwise the system message becomes a message of the user.
    """
    told, following, *others = messages
    if following.get("role") != "user":
        return [{**told, "role": "user"}, following, *others]
    return [{**following, "content": f"{told.get('content') or ''}\n\n{following.get('content') or ''}"}, *others]


def _with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with ``text`` appended to the instructions at the start, which are added if missing."""
    if messages and messages[0].get("role") in _INSTRUCTIONS:
        content = "\n\n".join(filter(None, [messages[0].get("content"), text]))
        return [{**messages[0], "content": content}, *messages[1:]]
    return [_system(text), *messages]


def _groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Return messages in groups: a message with calls and the results of these calls, or any other single message.

    Templates expect results directly after their calls.
    """
    groups: list[list[Message]] = []
    by_call: dict[str, list[Message]] = {}
    for message in messages:
        if message.get("role") == "tool" and (calling := by_call.get(str(message.get("tool_call_id")))) is not None:
            calling.append(message)
            continue
        groups.append([message])
        by_call.update({str(call.get("id")): groups[-1] for call in message.get("tool_calls") or ()})
    return groups


def _merged_neighbours(messages: Sequence[Message]) -> list[Message]:
    sides: list[list[Message]] = []
    for message in messages:
        if sides and _is_neighbour(sides[-1][-1], message):
            sides[-1].append(message)
        else:
            sides.append([message])
    return [side[0] if len(side) == 1 else _merged(side) for side in sides]


def _merged(messages: Sequence[Message]) -> Message:
    merged = {key: value for message in messages for key, value in message.items()} | {"content": _joined(messages)}
    return merged | {"tool_calls": calls} if (calls := _calls_in(messages)) else merged


def _is_neighbour(before: Message, message: Message) -> bool:
    return before.get("role") == message.get("role") and before.get("role") in ("user", "assistant")


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(content for message in messages if (content := message.get("content")))


def _calls_in(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    return [call for message in messages for call in message.get("tool_calls") or ()]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _arguments(call: Mapping[str, Any]) -> Any:
    return _function(call).get("arguments", {})


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with an empty name and description where they are missing."""
    return {**tool, "function": {"name": "", "description": "", **tool["function"]}}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(content: str) -> Message:
    return _message("system", content)


def _user(content: str) -> Message:
    return _message("user", content)


def _says(content: str) -> Message:
    return _message("assistant", content)


def _calling(arguments: dict[str, Any] | str, *, num_calls: int = 1) -> Message:
    """Return an assistant's message with calls, for trials."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name in zip(_IDS, (_TOOL, _OTHER_TOOL), strict=True)
    ]
    return {**_says(""), "tool_calls": calls[:num_calls]}


def _result(number: int, content: str) -> Message:
    name = (_TOOL, _OTHER_TOOL)[number]
    return {"role": "tool", "tool_call_id": _IDS[number], "name": name, "content": content}


_SOME_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
