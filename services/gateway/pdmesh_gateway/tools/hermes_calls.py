"""``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdmesh_gateway.tools.answer_reader import NAME, SPACE, Lookahead, Part, Reader, Script
from pdmesh_gateway.tools.format import CallableTool, ToolFormat, is_special, json_value, literal, repeated, without

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def json_head(arguments: tuple[str, ...], *before: Part) -> tuple[Part, ...]:
    """Return the parts of a call that is an object, up to its arguments.

    ``arguments`` are possible names of the arguments.
    """
    keys = tuple(f'"{name}"' for name in arguments)
    colon = (SPACE, ":", SPACE)
    return (*before, "{", SPACE, '"name"', *colon, '"', NAME, '"', SPACE, ",", SPACE, keys, *colon, Lookahead("{"))


def json_call(tool: CallableTool, arguments: str) -> str:
    """Return a Lark expression of a call that is an object."""
    head = f'{{"name": "{tool.name}", "{arguments}": '
    return f'{literal(head)} {json_value(tool.schema)} "}}"'


class Hermes(ToolFormat):
    """Calls as objects between markers."""

    name = "hermes"
    markers = (OPEN, CLOSE)

    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        calls = " | ".join(json_call(tool, "arguments") for tool in tools)
        rules = f'call: "\\n" ({calls}) "\\n" {marker(CLOSE)}\n'
        opened = f"{marker(OPEN)} call"
        if not free:
            return f"answer: {repeated(opened, literal(chr(10)), most)}\n{rules}"
        return free_text(marker(OPEN), "call", most, OPEN) + rules

    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        head_parts = json_head(("arguments", "parameters"), OPEN, SPACE)
        while (yield from reader.until([OPEN], reader.writer.text)):
            head = yield from reader.call_head(*head_parts)
            if head is None:
                reader.text(len(OPEN))
                continue
            reader.begin_call(head)
            if (yield from reader.json_object()):
                yield from reader.skip(SPACE, "}", SPACE, CLOSE)
            reader.writer.end_item()
            yield from reader.spaces()


def free_text(trigger: str, call: str, most: int, *hidden: str) -> str:
    """Return the rule of an answer that is text with up to ``most`` calls. Each call begins with ``trigger``.

    The text around the calls contains none of ``hidden``, which would be read as the beginning of a call.
    """
    rest = f"REST: {without(*hidden)}\n"
    if is_special(trigger):
        return f"answer: (REST {trigger} {call}){{0,{most}}} REST\n{rest}"
    return f"answer: (trigger {call}){{0,{most}}} REST\ntrigger[lazy]: TEXT {trigger}\n{rest}"
