"""What a second of an instance is worth, in seconds of other prompts' first tokens.

Who takes a second of one of ``n`` instances that share what comes delays everybody who comes after it, until there is
nothing to do for a moment, by ``1 / n`` s. Those are who waits already, and who comes until then: with ``q`` s of work
queued and a load of ``l`` that takes ``q / (n (1 - l))`` s. So the price is how many those are, over ``n``.

The sum of all first tokens is least if each group is chosen for its own end and, at this price, what it takes from
others. It takes the place of Tetris's improvement rate (§5.1), which is a share of the prompt's own time alone, and of
the table of it: there is nothing that was tuned, and every prompt has the price of its moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Arrivals count by how long ago they were: after so long for 1/e.
OVER_S = 30.0
#: What came in a shorter time says nothing of a rate.
_LEAST_S = 1.0
#: The share of the instances' time that what comes is taken to leave at the least, so that every price is finite. Loads
#: that are sustained change by 1 % between 0.02 and 0.2 (`benchmarks/tetris_table.py` at dbfd7179).
_LEAST_SPARE = 0.05


@dataclass(slots=True)
class Demand:
    """How many prompts come, with how much work: averages of the last `OVER_S`."""

    _since_s: float | None = None
    _last_s: float = 0.0
    _requests: float = 0.0
    _work_s: float = 0.0

    def arrived(self, now_s: float, work_s: float) -> None:
        """One came, that takes one instance so long."""
        if self._since_s is None:
            self._since_s = now_s
        faded = self._faded(now_s)
        self._requests, self._work_s, self._last_s = self._requests * faded + 1, self._work_s * faded + work_s, now_s

    def price(self, now_s: float, queued_s: float, num_waiting: int, num_instances: int) -> float:
        """Return the price of a second of one of so many instances, which have ``queued_s`` of work together.

        ``num_waiting`` prompts come after the one that asks for it, and are in ``queued_s`` as it is itself.
        """
        coming = 0.0
        passed_s = 0.0 if self._since_s is None else now_s - self._since_s
        if passed_s >= _LEAST_S:
            counted_s = OVER_S * (1 - math.exp(-passed_s / OVER_S))
            faded = self._faded(now_s)
            spare = max(1 - self._work_s * faded / counted_s / num_instances, _LEAST_SPARE)
            coming = self._requests * faded / counted_s * queued_s / (num_instances * spare)
        return (num_waiting + coming) / num_instances

    def _faded(self, now_s: float) -> float:
        return math.exp((self._last_s - now_s) / OVER_S)
