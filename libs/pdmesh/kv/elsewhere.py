"""The first part of a sequence's KV, where other instances hold it: what an engine asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class PartQuestion(NamedTuple):
    """Query rows that attend, in a layer, to ranges that others hold."""

    layer: int
    start: int  # position of the first row; the others follow it
    query: bytes  # (num_rows, num_heads, head_dim)
    first_range: int = 0  # the rows see nothing of those before it, so these are not asked


class KvElsewhere(Protocol):
    """Whole ranges of a sequence's first tokens, which others hold, a range each. Called on the engine's thread."""

    @property
    def num_tokens(self) -> int: ...

    def ask(self, question: PartQuestion, *, more: bool = False) -> None:
        """Send a question to the instances that hold ``question.first_range`` and the ranges behind that.

        With ``more``, another context of the step is asked next, and the questions to one instance may go together.
        """
        ...

    def answers(self) -> Sequence[bytes]:
        """Return what each made of the last question, in the order of the context: `Engine.attend_part`.

        Waits. Raises KvElsewhereLost.
        """
        ...


class KvElsewhereLost(Exception):
    """Who holds the first part of a sequence's KV gave no answer: nothing more is computed of the sequence here."""

    def __init__(self, elsewhere: KvElsewhere, reason: str) -> None:
        super().__init__(reason)
        self.elsewhere = elsewhere
