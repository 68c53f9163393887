"""Limits for pieces of KV that come damaged, or cannot be read where they lie, and are asked for again.

The receiver forgets that it took the piece, and says AGAIN with the piece's blocks and layers. The sender, which has
them until the receiver has everything, sends them like any other piece. If they come damaged again, they are asked for
again.
"""

from __future__ import annotations

#: So many may be damaged of the first ones.
FREE_PIECES = 16

#: And of more than that one for so many that were sound.
SOUND_PIECES_EACH = 4


class DamageLimit:
    """Tolerates occasional damage on the way; gives up on a peer whose memory is broken, or that asks for ever.

    The receiver of pieces counts, and gives up beyond the limit. The sender counts too, from when it sends them, and
    answers no more beyond it; it allows twice as many at first.
    """

    def __init__(self, *, sends: bool) -> None:
        self.num_damaged = 0
        self._num_sound = 0
        self._num_free = FREE_PIECES * (2 if sends else 1)

    def add_sound(self, num_pieces: int = 1) -> None:
        """Count pieces that were sent, or taken, undamaged."""
        self._num_sound += num_pieces

    def add_damaged(self) -> bool:
        """Count a damaged piece; False if it is one too many."""
        if self.num_damaged >= self._num_free + self._num_sound // SOUND_PIECES_EACH:
            return False
        self.num_damaged += 1
        return True


class RefusalLimit:
    """Bounds refusals of peer reads: each page once, and once more if its sender was forgotten meanwhile.

    Nothing is wrong with the sender, so this is no damage; but a sender does not offer for ever what is never taken.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_left = 2 * num_pages

    def add(self, num_pages: int) -> bool:
        """Count refused pages; False if there are too many."""
        if num_pages > self._num_left:
            return False
        self._num_left -= num_pages
        return True
