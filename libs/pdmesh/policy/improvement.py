"""The improvement rate: how much earlier a larger group must give the first token. A table made by simulation.

While few requests arrive, no request misses the instances that a large group takes. Under load, later requests do. So
the best *improvement rate* depends on the arrivals (Tetris, §5.1). A simulation finds it in advance, and the planner
looks it up for the arrivals that it sees.

Tetris finds a table for one mesh and the lengths that are usual there, by requests a second
(`pdmesh_lab.studies.first_tokens`). For a pipelined prefill the load stands for both: the seconds of work that come in
a second, for each instance that prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: Arrivals are counted for so long, and the rate is kept for as long (Tetris, §7.1).
LOOK_EVERY_S = 30.0


def _one() -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class ImprovementTable:
    """Rows of (load a second, best improvement rate), in ascending order. Raises ValueError if there is no row.

    So many requests, or so much work for each instance.
    """

    rows: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a table of improvement rates has no row")

    def nearest(self, per_s: float) -> float:
        """Return the rate of the nearest row; between two equally near, that of the lower load."""
        return min(self.rows, key=lambda row: abs(row[0] - per_s))[1]


@dataclass(slots=True)
class ImprovementInForce:
    """Looks up the improvement rate for the arrivals seen; before any are counted, the rate of the lowest load."""

    table: ImprovementTable
    every_s: float = LOOK_EVERY_S
    rate: float = field(init=False)
    _since_s: float | None = None
    _arrived: float = 0.0

    def __post_init__(self) -> None:
        self.rate = self.table.rows[0][1]

    def arrived(self, now_s: float, amount: float = 1.0, share_of: Callable[[], float] = _one) -> float:
        """A request comes, with so much of what the table counts; the rate that it is planned with.

        ``share_of`` tells how many share what comes, when that is looked up.
        """
        if self._since_s is None:
            self._since_s = now_s
        passed_s = now_s - self._since_s
        if passed_s >= self.every_s:
            self.rate = self.table.nearest(self._arrived / passed_s / share_of())
            self._since_s, self._arrived = now_s, 0.0
        self._arrived += amount
        return self.rate


#: Of pipelined groups, by load: a compromise between prompts of 4 to 95K tokens on 8 instances and mixed ones on 4. At
#: loads of 0.2 to 0.65 and at 0.95 within 1 % of the mean TTFT of the best of six rates for either, at 0.8 equal to it
#: for the long prompts and within 4 % for the mixed ones (`benchmarks/policies/group_rates.py`, 2026-11-23, 3 seeds of
#: 250 requests). Helpers give way to new requests, so the load has to be high before it is better not to ask them. A
#: price of their time (`pdmesh_lab.studies.price`) is too high here: it made mixed prompts 18 to 63 % later.
RATES_BY_LOAD = ImprovementTable(((0.2, 0.02), (0.65, 0.05), (0.8, 0.2), (0.95, 0.3)))
