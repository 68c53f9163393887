"""Conversations put together from pieces, as messages that chat templates know.

Dialects that give a conversation as blocks or items, rather than as messages, say one piece after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
import msgspec

from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.templates import check_nesting, nested_too_deep

#: Longer conversations are put together on a thread.
INLINE_PARTS = 256


async def built(
    convert: Callable[[], Conversation], *, num_parts: int, most: int, param: str, num_messages: int | None = None
) -> Conversation:
    """Return the conversation that ``convert`` makes of ``num_parts`` parts, on a thread if these are many.

    Raises RequestRejected naming ``param`` for more than ``most`` messages, or parts where messages are not counted,
    and for values that are nested too deep.
    """
    number, what = (num_parts, "parts") if num_messages is None else (num_messages, "messages")
    if not number:
        raise invalid(param, f"`{param}` must not be empty.")
    if number > most:
        raise invalid(param, f"`{param}` has {number} {what}; {most} are allowed.")

    def checked() -> Conversation:
        try:
            conversation = convert()
        except RecursionError:
            raise nested_too_deep(param) from None
        check_nesting(conversation.messages, param)
        return conversation

    return checked() if num_parts <= INLINE_PARTS else await anyio.to_thread.run_sync(checked)


def reasoning_variables(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return a template's variables. An ``effort`` of reasoning sets some that are not given."""
    variables = dict(given or {})
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


class TurnBuilder:
    """Collects pieces into messages: what one side says in a row is one message, as templates expect."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    @property
    def ends_with_call(self) -> bool:
        """Whether the last message calls a tool."""
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last message is one of the assistant's."""
        return bool(self._messages) and self._messages[-1]["role"] == "assistant"

    def text(self, role: str, text: str) -> None:
        """Add what ``role`` says: to the message before, if that is its own."""
        last = self._messages[-1] if self._messages else None
        if last is None or _side_of(last["role"]) != _side_of(role):
            self._messages.append({"role": role, "content": text})
        else:
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text

    def reasoning(self, text: str) -> None:
        """Add what the assistant thought before it says or does what comes next."""
        answer = self._answer(fresh=True)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        """Add the assistant's call of a tool."""
        function = {"name": name, "arguments": arguments}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Add what a tool answered."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def messages(self) -> list[dict[str, Any]]:
        """Return all of it."""
        return self._messages

    def _answer(self, *, fresh: bool = False) -> dict[str, Any]:
        """The assistant's message that goes on here; ``fresh``: one that has said nothing yet."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or (fresh and (last["content"] or "tool_calls" in last)):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last


def arguments_of(given: Any) -> dict[str, Any] | str:
    """Return a call's arguments as the object that templates want; the text of it, if an answer was cut in it.

    No arguments are an empty object. Raises RecursionError for an object that is nested too deep.
    """
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        return {} if given is None else msgspec.json.encode(given).decode()
    try:
        arguments = msgspec.json.decode(given or "{}")
    except (msgspec.DecodeError, ValueError):
        return given
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else given


def _side_of(role: str) -> str:
    """Return whose turn a message is: a system and a developer message are both instructions."""
    return "system" if role == "developer" else role
