"""Reading of an answer by its markers, however the text is cut into pieces.

A format is read by a *script*: a generator that takes text from a `Reader` and yields to wait for more. All text goes
to the writer, as text, reasoning, arguments or markers. Text that only looks like a call at first is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pdmesh_gateway.items import ItemWriter
from pdmesh_gateway.stop import overlap

T = TypeVar("T")
Script: TypeAlias = Generator[None, None, T]

#: Characters of a tool's name, and the limit of their number.
NAME_CHARS = r"A-Za-z0-9_.:/-"
MAX_NAME_CHARS = 128

#: Limit of blanks between the parts of a call's head.
MAX_SPACES = 64


@dataclass(frozen=True, slots=True)
class OptionalText:
    """Optional text."""

    text: str


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Text that must follow, and is not taken."""

    text: str


@dataclass(frozen=True, slots=True)
class Capture:
    """Characters that are captured: at least one of ``pattern``, a regular expression of one character."""

    pattern: str


#: Blanks, which are optional and not captured.
SPACE = Capture(r"\s")
NAME = Capture(f"[{NAME_CHARS}]")

#: Part of a sequence: text, one of several texts, or one of the above.
Part: TypeAlias = str | tuple[str, ...] | OptionalText | Lookahead | Capture


@dataclass(frozen=True, slots=True)
class Head:
    """Match of `Reader.match`:

    ``num_chars`` characters, and the captured ones. ``is_whole`` is false if the text ended early.
    """

    num_chars: int
    captured: tuple[str, ...]
    is_whole: bool = True


class Reader:
    """The text of a choice that was not taken yet, and the writer for text that is taken.

    ``is_over``: no more text comes. ``is_cut``: a limit or a stop token ended the text, not the model.
    ``reasoning_chars``: see `ItemParser.reasoning_chars`.
    """

    def __init__(self, writer: ItemWriter) -> None:
        self.writer = writer
        self.buffer = ""
        self.is_over = False
        self.is_cut = False
        self.reasoning_chars: int | None = None

    def take(self, num_chars: int) -> str:
        taken, self.buffer = self.buffer[:num_chars], self.buffer[num_chars:]
        return taken

    def text(self, num_chars: int | None = None) -> None:
        """Take ``num_chars`` characters as text; None takes all."""
        self.writer.text(self.take(len(self.buffer) if num_chars is None else num_chars))

    def begin_call(self, head: Head) -> None:
        """Take the head of a call. The first capture is the tool's name."""
        self.writer.begin_call(head.captured[0])
        self.mark(head.num_chars)

    def mark(self, num_chars: int) -> None:
        """Take ``num_chars`` characters that are part of no item."""
        self.writer.marker(self.take(num_chars))

    def until(self, markers: Sequence[str], sink: Callable[[str], None], *, is_inside: bool = False) -> Script[bool]:
        """Pass the text before the first of ``markers`` to ``sink``, and return True; False if the text ends without
        one.

        The marker is not taken. If the text ends within a marker, the beginning of the marker is text. Two cases
        differ: the text was cut there, or ``is_inside`` a part that only a marker can end.
        """
        while True:
            found = [at for marker in markers if (at := self.buffer.find(marker)) >= 0]
            if found:
                sink(self.take(min(found)))
                return True
            num_held = max(overlap(self.buffer, marker) for marker in markers)
            if self.is_over and not is_inside and not self.is_cut:
                num_held = 0
            sink(self.take(len(self.buffer) - num_held))
            if self.is_over:
                if not is_inside:
                    self.mark(len(self.buffer))
                return False
            yield

    def match(self, *parts: Part) -> Script[Head | None]:
        """Return the match of ``parts`` at the beginning of the text, without taking it; None if the text begins
        differently.

        If the text ends within ``parts``, the match is not whole.
        """
        while True:
            head = _match(self.buffer, parts, is_over=self.is_over)
            if head is None or head.is_whole or self.is_over:
                return head
            yield

    def call_head(self, *parts: Part) -> Script[Head | None]:
        """Return the head of a call as `match` does; also None if the text ends before the tool's name is whole.

        In this case a text that was cut is taken as a marker.
        """
        head = yield from self.match(*parts)
        if head is None or head.captured:
            return head
        if self.is_cut:
            self.mark(len(self.buffer))
        return None

    def follows(self, *parts: Part) -> Script[bool]:
        """Return whether ``parts`` follow completely."""
        head = yield from self.match(*parts)
        return head is not None and head.is_whole

    def skip(self, *parts: Part) -> Script[bool]:
        """Take ``parts`` as markers if all of them follow, and return whether they do.

        A text that begins differently is not taken. A text that ends within ``parts`` is taken, and False returned.
        """
        head = yield from self.match(*parts)
        if head is None:
            return False
        self.mark(head.num_chars)
        return head.is_whole

    def spaces(self) -> Script[None]:
        """Take blanks, which are part of no item, up to the next other character or the end of the text."""
        while True:
            self.mark(len(self.buffer) - len(self.buffer.lstrip()))
            if self.buffer or self.is_over:
                return
            yield

    def rest(self) -> Script[None]:
        """Take all further text as text."""
        while True:
            self.text()
            if self.is_over:
                return
            yield

    def json_object(self) -> Script[bool]:
        """Take an object as the arguments of the open call; return False if the text ends within it."""
        depth, in_string, escaped = 0, False, False
        while True:
            end: int | None = None
            # If the last piece ended with a backslash, the first character here is escaped.
            for found in _JSON_MARKS.finditer(self.buffer, int(escaped)):
                char = found[0][0]
                if char == '"':
                    in_string = not in_string
                elif in_string or char == "\\":
                    continue
                elif char in "{[":
                    depth += 1
                else:
                    depth -= 1
                    if depth == 0:
                        end = found.end()
                        break
            escaped = end is None and _ends_escaped(self.buffer, escaped)
            self.writer.arguments(self.take(len(self.buffer) if end is None else end))
            if end is not None:
                return True
            if self.is_over:
                return False
            yield


class ScriptParser:
    """An `ItemParser` that runs a script."""

    def __init__(self, script: Callable[[Reader], Script[None]], writer: ItemWriter) -> None:
        self._reader = Reader(writer)
        self._run = script(self._reader)
        self._has_ended = False

    @property
    def reasoning_chars(self) -> int | None:
        return self._reader.reasoning_chars

    def push(self, text: str) -> None:
        self._reader.buffer += text
        self._go_on()

    def end(self, *, is_cut: bool = False) -> None:
        self._reader.is_over = True
        self._reader.is_cut = is_cut
        self._go_on()

    def _go_on(self) -> None:
        if not self._has_ended:
            try:
                next(self._run)
                return
            except StopIteration:
                self._has_ended = True
        self._reader.text()


def _match(text: str, parts: Sequence[Part], *, is_over: bool) -> Head | None:
    at = 0
    captured: list[str] = []
    for part in parts:
        if isinstance(part, Capture):
            limit = MAX_SPACES if part is SPACE else MAX_NAME_CHARS
            found = re.compile(f"{part.pattern}{{0,{limit}}}").match(text, at)
            assert found is not None
            at = found.end()
            if at == len(text):
                return Head(len(text), tuple(captured), is_whole=False)
            if part is SPACE:
                continue
            if not found[0]:
                return None
            captured.append(found[0])
            continue
        options = (part,) if isinstance(part, str) else part if isinstance(part, tuple) else (part.text,)
        left = text[at:]
        whole = next((option for option in options if left.startswith(option)), None)
        if whole is not None:
            at += 0 if isinstance(part, Lookahead) else len(whole)
        elif any(option.startswith(left) for option in options) and not (is_over and isinstance(part, OptionalText)):
            return Head(len(text), tuple(captured), is_whole=False)
        elif not isinstance(part, OptionalText):
            return None
    return Head(at, tuple(captured))


_JSON_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _ends_escaped(text: str, escaped: bool) -> bool:
    """Return whether the character after ``text`` is escaped. ``escaped``: the first character of ``text`` is."""
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if escaped and num_backslashes == len(text):
        num_backslashes -= 1
    return num_backslashes % 2 == 1 if text else escaped
