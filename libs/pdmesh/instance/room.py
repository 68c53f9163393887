"""Reports to the scheduler about the room of a resident."""

from __future__ import annotations


class RoomReports:
    """The reports of one resident: little room, no room, or more KV than a range, each once.

    ``low_at_blocks`` and ``_out_at_blocks``: numbers of blocks at the last report of little room and of no room.
    """

    __slots__ = ("_has_full", "_out_at_blocks", "low_at_blocks")

    def __init__(self) -> None:
        self.low_at_blocks = 0
        self._out_at_blocks = 0
        self._has_full = False

    def note(self, num_blocks: int, room: int, *, is_low: bool, is_full: bool) -> bool:
        """Return whether ``room``, in tokens, must be reported, and count it as reported.

        ``num_blocks``: blocks of the whole context. ``is_full``: the context has more KV here than a range.
        """
        is_news, self._has_full = is_full and not self._has_full, is_full
        if room < 0:
            is_news, self._out_at_blocks = is_news or self._out_at_blocks != num_blocks, num_blocks
        elif is_low:
            is_news, self.low_at_blocks = is_news or self.low_at_blocks != num_blocks, num_blocks
        return is_news

    def spread(self) -> None:
        """Record that the holders of ranges have changed, so that a full range is worth a new report."""
        self._has_full = False
