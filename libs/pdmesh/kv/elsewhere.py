"""The first part of a sequence's KV, where other instances hold it: what an engine asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class KvElsewhere(Protocol):
    """Whole ranges of a sequence's first tokens, which others hold, a range each. Called on the engine's thread."""

    @property
    def num_tokens(self) -> int: ...

    def ask(self, layer: int, query: bytes) -> None:
        """Send query rows (num_rows, num_heads, head_dim) to all of them."""
        ...

    def answers(self) -> Sequence[bytes]:
        """Return what each made of the rows last asked, in the order of the context: `Engine.attend_part`.

        Waits. Raises KvElsewhereLost.
        """
        ...


class KvElsewhereLost(Exception):
    """Who holds the first part of a sequence's KV gave no answer: nothing more is computed of the sequence here."""

    def __init__(self, elsewhere: KvElsewhere, reason: str) -> None:
        super().__init__(reason)
        self.elsewhere = elsewhere
