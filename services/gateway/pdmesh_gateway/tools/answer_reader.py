"""Reads an answer by its markers, however it is cut into pieces.

What reads a format is a *script*: a generator that takes from a `Reader` and waits, by yielding, for more text. All of
the text goes to the writer: as text, as reasoning, as arguments or as markers. What looks like a call at first, and is
none, is text.
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

#: Names of tools, as many characters at most.
NAME_CHARS = r"A-Za-z0-9_.:/-"
MAX_NAME_CHARS = 128

#: More blanks than this between the parts of a call's head are no call's.
MAX_SPACES = 64


@dataclass(frozen=True, slots=True)
class Maybe:
    """Text that may be there."""

    text: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """Text that must follow, and is not taken."""

    text: str


@dataclass(frozen=True, slots=True)
class Capture:
    """Characters that are remembered: at least one of ``pattern``, a regular expression of one character."""

    pattern: str


SPACE = Capture(r"\s")  # which may be missing, and is not remembered
NAME = Capture(f"[{NAME_CHARS}]")

#: One after another: text, one of several texts, and the above.
Part: TypeAlias = str | tuple[str, ...] | Maybe | Ahead | Capture


@dataclass(frozen=True, slots=True)
class Head:
    """What `Reader.match` found: so many characters, with what was captured. Not ``is_whole`` if the text ended."""

    num_chars: int
    captured: tuple[str, ...]
    is_whole: bool = True


class Reader:
    """The text of a choice that was not taken yet, and where what is taken goes to."""

    def __init__(self, writer: ItemWriter) -> None:
        self.writer = writer
        self.buffer = ""
        self.is_over = False  # nothing comes any more
        self.is_cut = False  # a limit or a stop token ended the text, and not the model
        self.reasoning_chars: int | None = None

    def take(self, num_chars: int) -> str:
        taken, self.buffer = self.buffer[:num_chars], self.buffer[num_chars:]
        return taken

    def text(self, num_chars: int | None = None) -> None:
        """Take as text so many characters, or all there are."""
        self.writer.text(self.take(len(self.buffer) if num_chars is None else num_chars))

    def begin_call(self, head: Head) -> None:
        """Take the head of a call, which is of the tool whose name was captured first."""
        self.writer.begin_call(head.captured[0])
        self.mark(head.num_chars)

    def mark(self, num_chars: int) -> None:
        """Take what is part of no item."""
        self.writer.marker(self.take(num_chars))

    def until(self, markers: Sequence[str], sink: Callable[[str], None], *, is_inside: bool = False) -> Script[bool]:
        """Give ``sink`` all that comes before one of ``markers``, which is not taken; False if there is none.

        Where the text is over within a marker, that is text too, unless it was cut there, or ``is_inside`` what only a
        marker can end.
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
        """Return what of the text ``parts`` are, and take nothing; None if it begins otherwise.

        Where the text is over before, it is a head that is not whole.
        """
        while True:
            head = _match(self.buffer, parts, is_over=self.is_over)
            if head is None or head.is_whole or self.is_over:
                return head
            yield

    def call_head(self, *parts: Part) -> Script[Head | None]:
        """Return the head of a call as `match` does; None, too, if the text is over before the tool's name is whole.

        A head that was cut becomes a marker, and not text.
        """
        head = yield from self.match(*parts)
        if head is None or head.captured:
            return head
        if self.is_cut:
            self.mark(len(self.buffer))
        return None

    def follows(self, *parts: Part) -> Script[bool]:
        """Whether ``parts`` follow, all of them."""
        head = yield from self.match(*parts)
        return head is not None and head.is_whole

    def skip(self, *parts: Part) -> Script[bool]:
        """Take ``parts`` as markers if they follow, or begin to where the text is over. False if they do not."""
        head = yield from self.match(*parts)
        if head is None:
            return False
        self.mark(head.num_chars)
        return head.is_whole

    def spaces(self) -> Script[None]:
        """Take blanks as markers."""
        while True:
            self.mark(len(self.buffer) - len(self.buffer.lstrip()))
            if self.buffer or self.is_over:
                return
            yield

    def rest(self) -> Script[None]:
        """Take all that comes as text."""
        while True:
            self.text()
            if self.is_over:
                return
            yield

    def json_object(self) -> Script[bool]:
        """Take an object as the arguments of the call that has begun; False if it is not whole."""
        depth, in_string, escaped = 0, False, False
        while True:
            end: int | None = None
            # The character after a backslash that came before is none of them.
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
    """An `ItemParser` by a script."""

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
            at += 0 if isinstance(part, Ahead) else len(whole)
        elif any(option.startswith(left) for option in options) and not (is_over and isinstance(part, Maybe)):
            return Head(len(text), tuple(captured), is_whole=False)
        elif not isinstance(part, Maybe):
            return None
    return Head(at, tuple(captured))


_JSON_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _ends_escaped(text: str, escaped: bool) -> bool:
    """Whether the character that follows ``text`` is escaped, where the first one of it was or was not."""
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if escaped and num_backslashes == len(text):
        num_backslashes -= 1
    return num_backslashes % 2 == 1 if text else escaped
