"""Conversations assembled from pieces into the messages that chat templates expect.

Dialects whose requests are blocks or items, rather than messages, pass the pieces in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
import msgspec

from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.templates import check_nesting, nested_too_deep

#: Largest number of parts that is assembled on the event loop; longer conversations use a thread.
INLINE_PARTS = 256


async def built(
    convert: Callable[[], Conversation], *, num_parts: int, most: int, param: str, num_messages: int | None = None
) -> Conversation:
    """Return the conversation that ``convert`` makes of ``num_parts`` parts, on a thread if there are many parts.

    Raises RequestRejected naming ``param`` if there is no message, if there are more than ``most``, or if values are
    nested too deep. ``num_messages`` is None where parts are counted instead.
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
    """Return the template's variables. An ``effort`` of reasoning adds defaults for variables that are not given."""
    variables = dict(given or {})
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


class TurnBuilder:
    """Builder of messages: consecutive pieces of one side become one message, as templates expect."""

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
        """Add text of ``role``, to the last message if that is of the same side."""
        last = self._messages[-1] if self._messages else None
        if last is None or _side_of(last["role"]) != _side_of(role):
            self._messages.append({"role": role, "content": text})
        else:
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text

    def reasoning(self, text: str) -> None:
        """Add reasoning of the assistant that precedes the next text or call."""
        answer = self._answer(fresh=True)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        """Add the assistant's call of a tool."""
        function = {"name": name, "arguments": arguments}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Add a tool's result."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages."""
        return self._messages

    def _answer(self, *, fresh: bool = False) -> dict[str, Any]:
        """Return the assistant's message to extend, and begin one if the last message is not the assistant's.

        ``fresh`` also begins one if the last message already has text or calls.
        """
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or (fresh and (last["content"] or "tool_calls" in last)):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last


def arguments_of(given: Any) -> dict[str, Any] | str:
    """Return a call's arguments as the object that templates expect; as text if they are not a JSON object.

    Missing arguments are an empty object. Raises RecursionError for an object that is nested too deep.
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
    """Return the side of a role: a system and a developer message are both instructions."""
    return "system" if role == "developer" else role
