"""What a format of calls is, and how its grammars are put together."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh_gateway.tools.answer_reader import Reader, Script

#: Calls of one answer.
MAX_CALLS = 16

#: How schemas' JSON is written: as `json.dumps` does, which is how templates show models their tools and calls.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that an answer may call: its name, and the schema that its arguments are held to."""

    name: str
    schema: Mapping[str, Any]


class ToolFormat(ABC):
    """How a family of models writes calls."""

    #: Value of the setting ``gateway.tool_format``.
    name: str
    #: Texts that may be special tokens of the model's, and are shown to the reader even so.
    markers: tuple[str, ...]

    @abstractmethod
    def rules(self, tools: Sequence[CallableTool], marker: Callable[[str], str], *, most: int, free: bool) -> str:
        """Return Lark rules, of which ``answer`` is an answer with at least one call and at most ``most``.

        ``free``: with none too, and with text before and after, which is of the terminal ``TEXT``. ``marker`` writes a
        text that may be a special token.
        """

    @abstractmethod
    def read(self, reader: Reader, schemas: Mapping[str, Mapping[str, Any]]) -> Script[None]:
        """Read an answer's text and calls of tools that have these ``schemas`` by name."""

    def template_call_id(self, call_id: str) -> str:
        """Return the id of a call as the family's templates accept it."""
        return call_id


def literal(text: str) -> str:
    """Return a Lark string."""
    return json.dumps(text) if text else ""


def json_value(schema: Any) -> str:
    """Return what is JSON that fits ``schema``, in Lark."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_STYLE}
    return "%json " + json.dumps(schema)


def is_special(marker: str) -> bool:
    """Whether a marker as Lark is a special token's number."""
    return marker.startswith("<[")


def without(*texts: str) -> str:
    """Return a regular expression, in Lark, of the answer's text with none of ``texts`` in it."""
    return " & ".join(["TEXT", *(f"~/(?s:.*{regex(text)}.*)/" for text in texts)])


def regex(text: str) -> str:
    """Return the regular expression that is just ``text``."""
    return "".join(char if char.isalnum() else f"\\x{ord(char):02x}" if ord(char) < 128 else char for char in text)


def repeated(call: str, between: str, most: int) -> str:
    """Return what is 1 to ``most`` times ``call``, in Lark."""
    return call if most == 1 else f"{call} ({between} {call}){{0,{most - 1}}}"
