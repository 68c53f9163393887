"""Formats of calls, and helpers that build their grammars."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh_gateway.tools.answer_reader import Reader, Script

#: Limit of the calls of one answer.
MAX_CALLS = 16

#: Style of schemas' JSON, equal to `json.dumps`, because templates show models tools and calls in this style.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that an answer may call: its name, and the schema that its arguments must fit."""

    name: str
    schema: Mapping[str, Any]


class ToolFormat(ABC):
    """A model family's format of calls."""

    #: Value of the setting ``gateway.tool_format``.
    name: str
    #: Texts that may be special tokens of the model, and are shown to the reader in any case.
    markers: tuple[str, ...]

    @abstractmethod
    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        """Return Lark rules. The rule ``answer`` is an answer with at least one call and at most ``most``.

        ``free`` also allows no call, and text before and after, of the terminal ``TEXT``. ``marker`` writes a text that
        may be a special token.
        """

    @abstractmethod
    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        """Read an answer's text, and its calls of tools with these ``schemas`` by name."""

    def template_call_id(self, call_id: str) -> str:
        """Return a call's id in the form that the family's templates accept."""
        return call_id


def literal(text: str) -> str:
    """Return a text as a Lark string; empty for no text."""
    return json.dumps(text) if text else ""


def json_value(schema: Any) -> str:
    """Return a Lark expression of JSON that fits ``schema``, spaced as in `JSON_STYLE` if the schema is an object."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_STYLE}
    return "%json " + json.dumps(schema)


def is_special(marker: str) -> bool:
    """Return whether a marker, as a Lark expression, is a special token's number."""
    return marker.startswith("<[")


def without(*texts: str) -> str:
    """Return a regular expression, in Lark, of an answer's text that contains none of ``texts``."""
    return " & ".join(["TEXT", *(f"~/(?s:.*{regex(text)}.*)/" for text in texts)])


def regex(text: str) -> str:
    """Return the regular expression that matches only ``text``."""
    return "".join(char if char.isalnum() else f"\\x{ord(char):02x}" if ord(char) < 128 else char for char in text)


def repeated(call: str, between: str, most: int) -> str:
    """Return a Lark expression of 1 to ``most`` times ``call``."""
    return call if most == 1 else f"{call} ({between} {call}){{0,{most - 1}}}"
