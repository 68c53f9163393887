"""What the scheduler has heard of the room of a resident."""

from __future__ import annotations


class RoomReports:
    """The reports of one resident: little room, no room, or more KV than a range, each once."""

    __slots__ = ("_has_full", "_out_at_blocks", "low_at_blocks")

    def __init__(self) -> None:
        self.low_at_blocks = 0  # number of blocks with which little room was reported
        self._out_at_blocks = 0  # number of blocks with which no room was reported
        self._has_full = False

    def note(self, num_blocks: int, room: int, *, is_low: bool, is_full: bool) -> bool:
        """Return whether the scheduler has not heard of this room, in tokens, and note that it hears of it now.

        ``num_blocks``: blocks of the whole context. ``is_full``: the context has more KV here than a range.
        """
        is_news, self._has_full = is_full and not self._has_full, is_full
        if room < 0:
            is_news, self._out_at_blocks = is_news or self._out_at_blocks != num_blocks, num_blocks
        elif is_low:
            is_news, self.low_at_blocks = is_news or self.low_at_blocks != num_blocks, num_blocks
        return is_news

    def spread(self) -> None:
        """Note that another instance holds one more range of the context, or another one holds a range."""
        self._has_full = False
