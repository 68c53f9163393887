"""The interface by which an engine attends to the part of a sequence's KV that other instances hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RangeQuestion(NamedTuple):
    """Query rows that attend, in one layer, to ranges that other instances hold.

    ``start`` is the position of the first row; the other rows follow. Ranges before ``first_range`` are not asked,
    because the rows see none of their tokens.
    """

    layer: int
    start: int
    query: bytes  # (num_rows, num_heads, head_dim)
    first_range: int = 0


class RemoteKv(Protocol):
    """The first tokens of a sequence, in ranges that one instance each holds. Called on the engine's thread."""

    @property
    def num_tokens(self) -> int: ...

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        """Send a question to the holders of range ``question.first_range`` and of all later ranges.

        ``more`` says that the step asks about another context next, so that questions to one instance may go together.
        """
        ...

    def answers(self) -> Sequence[bytes]:
        """Wait, and return each asked instance's answer to the last question, in the order of the context.

        `Engine.attend_part` makes the answers. Raises RemoteKvLost if one is missing.
        """
        ...


class RemoteKvLost(Exception):
    """A holder of the sequence's first tokens gave no answer, so the sequence cannot continue here."""

    def __init__(self, elsewhere: RemoteKv, reason: str) -> None:
        super().__init__(reason)
        self.elsewhere = elsewhere
