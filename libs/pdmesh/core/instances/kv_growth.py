"""Predicted growth of requests that are given KV on demand, in the mesh and on one instance.

Sums follow each change, so the cost of a query does not depend on the number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.policy.on_demand import RemainingTokens, Room, risk_score, safe_room

#: Least relative change of the mean that is passed on to instances.
_NEWS = 0.05


class Growth:
    """Observed remaining lengths of requests.

    ``on_demand``: requests are admitted with room for only a part of their output. ``risk`` is the accepted risk that
    the residents of an instance outgrow its blocks.
    """

    def __init__(self, *, on_demand: bool = False, risk: float = 0.01) -> None:
        self.on_demand = on_demand
        self.score = risk_score(risk)
        self._remaining = RemainingTokens()
        self.mean_tokens = self._remaining.mean

    def drew(self, num_tokens: int) -> bool:
        """Count tokens that a request drew. Return whether the mean changed enough to tell the instances."""
        self._remaining.drew(num_tokens)
        return self._has_moved()

    def ended(self, num_tokens: int) -> bool:
        """Count a request that ended, and the tokens since its last report. Return whether the mean changed enough."""
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
    """Sums over one instance's requests. *Open* requests may grow by more than the mean, *bounded* ones may not.

    A bounded request counts with the most blocks it may need, an open one with its blocks and its likely growth.
    """

    _num_open: int = 0
    _open_blocks: int = 0
    _open_squares: int = 0
    _bounded_blocks: int = 0

    def count(self, num_blocks: int, max_blocks: int, *, is_open: bool, sign: int) -> None:
        """Add (``sign`` 1) or remove (-1) a request."""
        if is_open:
            self._num_open += sign
            self._open_blocks += sign * num_blocks
            self._open_squares += sign * num_blocks * num_blocks
        else:
            self._bounded_blocks += sign * max_blocks

    def room(self, num_blocks: int, block_size: int, growth: Growth) -> Room:
        """Return the blocks with which one more request may begin, of ``num_blocks`` in all; negative for none."""
        return safe_room(
            num_blocks - self._bounded_blocks,
            self._num_open,
            self._open_blocks,
            self._open_squares,
            growth.mean_tokens / block_size,
            growth.score,
        )
