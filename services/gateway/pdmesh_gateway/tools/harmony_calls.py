"""``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``: the format of gpt-oss.

An answer is a sequence of messages. Each has a header that names its channel and, for a call, the function. Messages of
``analysis`` are reasoning; other text is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pdmesh_gateway.reasoning import ReasoningMarkers
from pdmesh_gateway.tools.answer_reader import MAX_NAME_CHARS, NAME_CHARS, SPACE, Reader, Script
from pdmesh_gateway.tools.format import CallableTool, ToolFormat, json_value, literal

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"

#: Beginning of the answer proper; beginning and end of reasoning, and the text that follows it.
FINAL = f"{CHANNEL}final{MESSAGE}"
ANALYSIS = ReasoningMarkers(f"{CHANNEL}analysis{MESSAGE}", END, f"{START}assistant")

_ENDS = (END, CALL, RETURN)
_CHANNEL = re.compile(f"{re.escape(CHANNEL)}\\s*(\\w+)")
_FUNCTION = re.compile(f"to=functions\\.([{NAME_CHARS}]{{1,{MAX_NAME_CHARS}}})")


class _Header(NamedTuple):
    channel: str
    function: str


class Harmony(ToolFormat):
    """Calls as messages. An answer makes at most one call, which ends it."""

    name = "harmony"
    markers = (CHANNEL, MESSAGE, CONSTRAIN, START, *_ENDS)

    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        to = [f"{literal(f'commentary to=functions.{tool.name} ')} head {json_value(tool.schema)}" for tool in tools]
        rules = f"call: {marker(CHANNEL)} ({' | '.join(to)})\nhead: {marker(f'{CONSTRAIN}json{MESSAGE}')}\n"
        return (f"answer: call | {marker(FINAL)} TEXT\n" if free else "answer: call\n") + rules

    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        yield from self.read_messages(reader, schemas, thinks=False)

    def read_messages(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]], *, thinks: bool) -> Script[None]:
        """Read a whole answer, which begins within reasoning if it ``thinks``. An answer without a header is text."""
        header = _Header("analysis", "") if thinks else (yield from _header(reader))
        while header is not None:
            if header.channel == "analysis" and not header.function:
                found = yield from reader.until(_ENDS, reader.writer.reasoning, is_inside=True)
            else:
                _end_reasoning(reader)
                if header.function in schemas and (yield from reader.follows(SPACE, "{")):
                    yield from reader.spaces()
                    reader.writer.begin_call(header.function)
                    yield from reader.json_object()
                    reader.writer.end_item()
                found = yield from reader.until(_ENDS, reader.writer.text, is_inside=True)
            if found:
                reader.mark(next(len(end) for end in _ENDS if reader.buffer.startswith(end)))
                header = yield from _header(reader)
            else:
                reader.mark(len(reader.buffer))
                header = None
        _end_reasoning(reader)


def _end_reasoning(reader: Reader) -> None:
    """Record the beginning of the answer proper, if it is not known yet."""
    if reader.reasoning_chars is None:
        reader.reasoning_chars = reader.writer.num_chars


def _header(reader: Reader) -> Script[_Header | None]:
    """Take and return a message's header; None if there is none, or if it does not end."""
    begun = yield from reader.match(SPACE, (START, CHANNEL, "to="))
    if begun is None or not begun.is_whole:
        if begun is not None and reader.is_cut:
            reader.mark(len(reader.buffer))
        return None
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        reader.writer.marker(piece)

    if not (yield from reader.until([MESSAGE], take, is_inside=True)):
        reader.mark(len(reader.buffer))
        return None
    reader.mark(len(MESSAGE))
    words = "".join(pieces)
    channel, function = _CHANNEL.search(words), _FUNCTION.search(words)
    return _Header(channel[1] if channel else "", function[1] if function else "")
