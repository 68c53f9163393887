"""What requests that are given KV on demand will still need: of the mesh, and of one instance's.

Kept as sums that follow each change, so that asking costs the same however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.policy.on_demand import RemainingTokens, Room, risk_score, safe_room

#: Instances hear of another mean when it has moved by this share.
_NEWS = 0.05


class Growth:
    """What is known of remaining lengths. ``on_demand``: requests are admitted with room for a part of their output."""

    def __init__(self, *, on_demand: bool = False, risk: float = 0.01) -> None:
        self.on_demand = on_demand
        self.score = risk_score(risk)
        self._remaining = RemainingTokens()
        self.mean_tokens = self._remaining.mean

    def drew(self, num_tokens: int) -> bool:
        """A request drew so many tokens more. Whether the mean is another one now."""
        self._remaining.drew(num_tokens)
        return self._has_moved()

    def ended(self, num_tokens: int) -> bool:
        """A request ended, that drew so many tokens since it was heard of. Whether the mean is another one now."""
        self._remaining.drew(num_tokens)
        self._remaining.ended()
        return self._has_moved()

    def _has_moved(self) -> bool:
        mean = self._remaining.mean
        if abs(mean - self.mean_tokens) <= _NEWS * self.mean_tokens:
            return False
        self.mean_tokens = mean
        return True


@dataclass(slots=True)
class GrowthSums:
    """Sums over one instance's requests: those that may grow by more than the mean are *open*, others bounded.

    A bounded one counts with all that it may come to, an open one with what it has and is likely to need.
    """

    _num_open: int = 0
    _open_blocks: int = 0
    _open_squares: int = 0
    _bounded_blocks: int = 0

    def count(self, num_blocks: int, max_blocks: int, *, is_open: bool, sign: int) -> None:
        if is_open:
            self._num_open += sign
            self._open_blocks += sign * num_blocks
            self._open_squares += sign * num_blocks * num_blocks
        else:
            self._bounded_blocks += sign * max_blocks

    def room(self, num_blocks: int, block_size: int, growth: Growth) -> Room:
        """Blocks with which one more request may begin, of ``num_blocks`` in all."""
        return safe_room(
            num_blocks - self._bounded_blocks,
            self._num_open,
            self._open_blocks,
            self._open_squares,
            growth.mean_tokens / block_size,
            growth.score,
        )
