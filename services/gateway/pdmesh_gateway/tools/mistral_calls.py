"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, and ``[TOOL_CALLS]name[ARGS]{…}`` of Mistral's later models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdmesh_gateway.tools.answer_reader import NAME, SPACE, Capture, Lookahead, Reader, Script
from pdmesh_gateway.tools.format import CallableTool, ToolFormat, json_value, literal, repeated
from pdmesh_gateway.tools.hermes_calls import free_text, json_call, json_head

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

#: What templates of the family accept as ids.
NUM_ID_CHARS = 9


class Mistral(ToolFormat):
    """Calls after a marker: a list of objects or, ``by_name``, each with the tool's name, in later models."""

    markers = (OPEN, ID, ARGUMENTS)

    def __init__(self, *, by_name: bool) -> None:
        self._by_name = by_name
        self.name = "mistral" if by_name else "mistral_list"

    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        opened = marker(OPEN)
        if self._by_name:
            calls = [f"{literal(tool.name)} {marker(ARGUMENTS)} {json_value(tool.schema)}" for tool in tools]
            rules = f"call: {' | '.join(calls)}\n"
            if free:
                return free_text(opened, "call", most, OPEN) + rules
            return f"answer: {repeated(f'{opened} call', '', most)}\n{rules}"
        calls = [json_call(tool, "arguments") for tool in tools]
        rules = f'call: {" | ".join(calls)}\nlist: "[" {repeated("call", literal(", "), most)} "]"\n'
        return (free_text(opened, "list", 1, OPEN) if free else f"answer: {opened} list\n") + rules

    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        while (yield from reader.until([OPEN], reader.writer.text)):
            for parts in _HEADS:
                head = yield from reader.call_head(*parts)
                if head is not None:
                    reader.begin_call(head)
                    yield from self._read_calls(reader, is_list=parts is _LIST)
                    break
            else:
                reader.text(len(OPEN))

    def _read_calls(self, reader: Reader, *, is_list: bool) -> Script[None]:
        """Read the rest of a call after its head, and the rest of the list that contains the call."""
        while (yield from reader.json_object()):
            if not is_list:
                break
            with_id = yield from reader.match(*_WITH_ID)
            if with_id is not None and (with_id.is_whole or reader.is_over):
                reader.mark(with_id.num_chars)
            elif not (yield from reader.skip(SPACE, "}")):
                break
            reader.writer.end_item()
            head = yield from reader.call_head(SPACE, *json_head(("arguments",), ",", SPACE))
            if head is None:
                yield from reader.skip(SPACE, "]")
                break
            reader.begin_call(head)
        reader.writer.end_item()
        yield from reader.spaces()

    def template_call_id(self, call_id: str) -> str:
        return "".join(char for char in call_id if char.isalnum())[-NUM_ID_CHARS:].rjust(NUM_ID_CHARS, "0")


_LIST = json_head(("arguments",), OPEN, SPACE, "[", SPACE)
_WITH_ID = (SPACE, ",", SPACE, '"id"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, "}")
_HEADS = (
    _LIST,
    (OPEN, SPACE, NAME, ARGUMENTS, SPACE, Lookahead("{")),
    (OPEN, SPACE, NAME, ID, Capture("[A-Za-z0-9]"), ARGUMENTS, SPACE, Lookahead("{")),
)
