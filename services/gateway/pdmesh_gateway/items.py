"""An answer as items: reasoning, text and calls of tools, as a stream of events that every dialect renders.

`ChoiceItems` converts a choice's deltas to `ItemEvent`s. Items of a choice are numbered from 0 and follow each other:
one ends before the next begins. The items do not depend on how the text is cut into deltas.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from pdmesh_gateway.choices import Delta


class ItemKind(StrEnum):
    """Kind of an item."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class ItemBegun(msgspec.Struct, frozen=True, gc=False):
    """Event: the item numbered ``item`` begins.

    A call has an ``id``, its tool's ``name``, and its number among calls.
    """

    item: int
    kind: ItemKind
    id: str = ""
    name: str = ""
    call: int = 0


class TextAdded(msgspec.Struct, frozen=True, gc=False):
    """Event: a piece of text or reasoning (``kind``), never empty.

    ``start``: characters of the answer before the piece.
    """

    item: int
    kind: ItemKind
    text: str
    start: int = 0


class ArgumentsAdded(msgspec.Struct, frozen=True, gc=False):
    """Event: a piece of a call's arguments, which are a JSON object; never empty.

    ``call``: the call's number among calls.
    """

    item: int
    text: str
    call: int = 0


class ItemEnded(msgspec.Struct, frozen=True, gc=False):
    """Event: the item is complete."""

    item: int


class AnswerEnded(msgspec.Struct, frozen=True, gc=False):
    """Event: the choice has ended, by ``stop`` or ``length``. Calls do not change this reason.

    With ``length`` the last item may be cut. An answer that ended within a call always ended by ``length``.
    """

    finish_reason: str
    stop_reason: int | str | None
    num_calls: int


ItemEvent = ItemBegun | TextAdded | ArgumentsAdded | ItemEnded | AnswerEnded


class ItemWriter:
    """Collector of item events: an item ends where another kind begins. `take` returns the collected events."""

    def __init__(self, call_seed: str = "", *, shows_reasoning: bool = True) -> None:
        self._call_seed = call_seed
        self._shows_reasoning = shows_reasoning
        self._events: list[ItemEvent] = []
        self._open: ItemKind | None = None
        self._num_items = 0
        #: Pieces of the last item if it is a call.
        self._arguments: list[str] | None = None
        self.num_calls = 0
        #: Number of characters of the answer as drawn, in items or not.
        self.num_chars = 0

    def text(self, piece: str) -> None:
        self._add(ItemKind.TEXT, piece)

    def reasoning(self, piece: str) -> None:
        if self._shows_reasoning:
            self._add(ItemKind.REASONING, piece)
        else:
            self.marker(piece)

    def begin_call(self, name: str) -> None:
        self.end_item()
        id = call_id(self._call_seed, self.num_calls)
        self._begin(ItemBegun(self._num_items, ItemKind.CALL, id, name, self.num_calls))
        self._arguments = []
        self.num_calls += 1

    def arguments(self, piece: str, drawn: str | None = None) -> None:
        """Add arguments to the open call. ``drawn`` is the text that they were made of, if different."""
        if piece:
            self._events.append(ArgumentsAdded(self._num_items - 1, piece, self.num_calls - 1))
            if self._arguments is not None:
                self._arguments.append(piece)
        self.num_chars += len(piece if drawn is None else drawn)

    def marker(self, drawn: str) -> None:
        """Count text that is part of no item."""
        self.num_chars += len(drawn)

    def end_item(self) -> None:
        """End the open item, if any, with an `ItemEnded` event."""
        if self._open is not None:
            self._open = None
            self._events.append(ItemEnded(self._num_items - 1))

    @property
    def ends_within_call(self) -> bool:
        """Whether the last item is a call with incomplete arguments."""
        return self._arguments is not None and not is_json_object("".join(self._arguments))

    def take(self) -> list[ItemEvent]:
        events, self._events = self._events, []
        return events

    def _add(self, kind: ItemKind, piece: str) -> None:
        if not piece:
            return
        if self._open is not kind:
            self.end_item()
            self._begin(ItemBegun(self._num_items, kind))
        self._events.append(TextAdded(self._num_items - 1, kind, piece, self.num_chars))
        self.num_chars += len(piece)

    def _begin(self, begun: ItemBegun) -> None:
        self._open = begun.kind
        self._arguments = None
        self._num_items += 1
        self._events.append(begun)


def call_id(seed: str, number: int) -> str:
    """Return the id of a choice's call. The same ``seed``, which is unique to the choice, gives the same id."""
    return "call_" + hashlib.blake2b(f"{seed}-{number}".encode(), digest_size=12).hexdigest()


class ItemParser(Protocol):
    """Parser of a choice's text, piece by piece, into items. Any text is accepted without an error."""

    @property
    def reasoning_chars(self) -> int | None:
        """Number of characters before the answer proper; None until the answer proper begins."""

    def push(self, text: str) -> None:
        """Add a piece of text. Text that may become a marker is held back."""

    def end(self, *, is_cut: bool = False) -> None:
        """Write all text that was held back. ``is_cut``: a limit or a stop token ended the answer."""


class PlainText:
    """An `ItemParser` for answers that are only text."""

    reasoning_chars = 0

    def __init__(self, writer: ItemWriter) -> None:
        self._writer = writer

    def push(self, text: str) -> None:
        self._writer.text(text)

    def end(self, *, is_cut: bool = False) -> None:
        """Do nothing: no text is held back."""


class ChoiceItems:
    """Converter of one choice's deltas into item events, which also counts the reasoning tokens."""

    def __init__(
        self, parser: Callable[[ItemWriter], ItemParser] = PlainText, writer: ItemWriter | None = None
    ) -> None:
        self._writer = writer or ItemWriter()
        self._parser = parser(self._writer)
        #: Text offsets of the tokens so far, while the answer may still be reasoning.
        self._offsets: list[int] = []
        self._num_reasoning_tokens = 0

    def advance(self, delta: Delta) -> list[ItemEvent]:
        """Return the events of ``delta``. The last delta of a choice ends all its items."""
        parser = self._parser
        was_reasoning = parser.reasoning_chars is None
        if delta.text:
            parser.push(delta.text)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            # A stop token may occur anywhere. Stop strings do not apply within calls (`pdmesh_gateway.call_stops`).
            parser.end(is_cut=finish_reason == "length" or isinstance(delta.stop_reason, int))
            self._writer.end_item()
            if self._writer.ends_within_call:
                finish_reason = "length"
        if was_reasoning:
            self._count(delta)
        events = self._writer.take()
        if finish_reason is not None:
            events.append(AnswerEnded(finish_reason, delta.stop_reason, self._writer.num_calls))
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._num_reasoning_tokens

    def _count(self, delta: Delta) -> None:
        self._offsets += delta.text_offsets
        end = self._parser.reasoning_chars
        self._num_reasoning_tokens = len(self._offsets) if end is None else bisect_left(self._offsets, end)


@dataclass(slots=True)
class Item:
    """A whole item: its text, or a call's arguments as the JSON text that was drawn."""

    kind: ItemKind
    id: str = ""
    name: str = ""
    text: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """All items of a choice."""

    items: list[Item] = field(default_factory=list[Item])
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def text_of(self, kind: ItemKind) -> str:
        return "".join(item.text for item in self.items if item.kind is kind)

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.items if item.kind is ItemKind.CALL]


def collect(events: Iterable[ItemEvent]) -> WholeAnswer:
    """Return the answer that is made of all events of a choice."""
    answer = WholeAnswer()
    pieces: list[list[str]] = []
    for event in events:
        match event:
            case ItemBegun(_, kind, id, name):
                answer.items.append(Item(kind, id, name))
                pieces.append([])
            case TextAdded(item=number, text=text) | ArgumentsAdded(item=number, text=text):
                pieces[number].append(text)
            case AnswerEnded(finish_reason, stop_reason):
                answer.finish_reason, answer.stop_reason = finish_reason, stop_reason
            case ItemEnded():
                pass
    for item, texts in zip(answer.items, pieces, strict=True):
        item.text = "".join(texts)
    return answer


def is_json_object(text: str) -> bool:
    """Return whether a text is a whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
