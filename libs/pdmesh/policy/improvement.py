"""By how much a larger group must bring a first token forward: a table made by simulation, and what is looked up in it.

While few requests come, instances that a large group takes are missed by nobody. Under load they are: then a group may
only be as large as is worth it to those who come next. So the best *improvement rate* depends on how many come (Tetris,
§5.1). It is found before by simulation (`pdmesh.sim.first_tokens`) for the lengths that are usual, and looked up for
the arrivals that are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Arrivals are counted for so long, and the rate is kept for as long (Tetris, §7.1).
LOOK_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class ImprovementTable:
    """For requests a second, in ascending order, the best improvement rate. Raises ValueError if it has no row."""

    rows: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a table of improvement rates has no row")

    def nearest(self, requests_per_s: float) -> float:
        """The rate of the row that is nearest; of two as near, of the one for fewer requests."""
        return min(self.rows, key=lambda row: abs(row[0] - requests_per_s))[1]


@dataclass(slots=True)
class ImprovementInForce:
    """What a table says of the arrivals that are seen. Until any were counted it is what it says of the fewest."""

    table: ImprovementTable
    every_s: float = LOOK_EVERY_S
    _since_s: float | None = None
    _num_arrived: int = 0
    _rate: float = field(init=False)

    def __post_init__(self) -> None:
        self._rate = self.table.rows[0][1]

    def arrived(self, now_s: float) -> float:
        """A request comes; the rate that it is planned with."""
        if self._since_s is None:
            self._since_s = now_s
        passed_s = now_s - self._since_s
        if passed_s >= self.every_s:
            self._rate = self.table.nearest(self._num_arrived / passed_s)
            self._since_s, self._num_arrived = now_s, 0
        self._num_arrived += 1
        return self._rate
