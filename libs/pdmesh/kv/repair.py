"""Limits on repeats of KV pieces that arrive damaged, or that cannot be read from the sender's cache.

The receiver releases the piece's pages, and sends AGAIN with the piece's blocks and layers. The sender keeps its pages
until the receiver has everything, and sends them like any other piece. Repeats that arrive damaged are requested again.
"""

from __future__ import annotations

#: Number of damaged pieces that a receiver always allows.
FREE_PIECES = 16

#: Number of sound pieces that allow one more damaged piece.
SOUND_PIECES_EACH = 4


class DamageLimit:
    """Limit on damaged pieces: occasional damage passes; broken memory, or a peer that asks for ever, does not.

    The receiver counts damaged pieces, and fails beyond the limit. The sender counts requests, and drops them beyond
    the limit, which allows twice as many at first.
    """

    def __init__(self, *, sends: bool) -> None:
        self.num_damaged = 0
        self._num_sound = 0
        self._num_free = FREE_PIECES * (2 if sends else 1)

    def add_sound(self, num_pieces: int = 1) -> None:
        """Count pieces that were sent, or received undamaged."""
        self._num_sound += num_pieces

    def add_damaged(self) -> bool:
        """Count a damaged piece. Return False, and do not count, beyond the limit."""
        if self.num_damaged >= self._num_free + self._num_sound // SOUND_PIECES_EACH:
            return False
        self.num_damaged += 1
        return True


class RefusalLimit:
    """Limit on refused peer reads: each page once, and once more if its sender was forgotten meanwhile.

    The sender is not at fault, so a refusal is no damage. The limit stops a sender that offers the same pages for ever.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_left = 2 * num_pages

    def add(self, num_pages: int) -> bool:
        """Count refused pages. Return False, and do not count, beyond the limit."""
        if num_pages > self._num_left:
            return False
        self._num_left -= num_pages
        return True
