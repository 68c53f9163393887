"""``{"name": …, "parameters": {…}}`` as the whole answer, separated by ``;``: Llama 3.1 and similar models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdmesh_gateway.tools.answer_reader import SPACE, OptionalText, Reader, Script
from pdmesh_gateway.tools.format import CallableTool, ToolFormat, is_special, literal, repeated
from pdmesh_gateway.tools.hermes_calls import json_call, json_head

TAG = "<|python_tag|>"


class Llama(ToolFormat):
    """Calls as objects that are the whole answer."""

    name = "llama"
    markers = (TAG,)

    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        calls = " | ".join(json_call(tool, "parameters") for tool in tools)
        tag = f"{marker(TAG)}?" if is_special(marker(TAG)) else ""
        rules = f"call: {calls}\ncalls: {tag} {repeated('call', literal('; '), most)}\n"
        if not free:
            return f"answer: calls\n{rules}"
        return f"answer: calls | NO_CALL\nNO_CALL: TEXT & ~{_LIKE_A_CALL}\n{rules}"

    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        head_parts = json_head(("parameters", "arguments"), SPACE)
        head = yield from reader.call_head(SPACE, OptionalText(TAG), *head_parts)
        while head is not None:
            reader.begin_call(head)
            if not (yield from reader.json_object()) or not (yield from reader.skip(SPACE, "}")):
                return
            reader.writer.end_item()
            head = yield from reader.call_head(SPACE, ";", *head_parts)
            if head is None:
                yield from reader.spaces()
        yield from reader.rest()


#: What a text must not begin with, because it would be read as a call.
_LIKE_A_CALL = r"/(?s:\s*(<\|python_tag\|>\s*)?\{\s*\"name\".*)/"
