"""The improvement rate: how much earlier a larger group must give the first token, by the load of the mesh.

While few requests arrive, no request misses the instances that a large group takes. Under load, later requests do. So
the best rate depends on the arrivals (Tetris, §5.1). A simulation found the rates, and the planner looks them up.
Tetris counts requests a second; here the load is the seconds of work that arrive in a second for each instance that
prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Seconds over which the load is measured, and for which a rate is used (Tetris, §7.1).
LOOK_EVERY_S = 30.0

#: Rows of (load, best rate) for pipelined groups: a compromise between prompts of 4 to 95K tokens on 8 instances and
#: mixed ones on 4. At loads of 0.2 to 0.65 and at 0.95 within 1 % of the mean TTFT of the best of six rates for either,
#: at 0.8 equal to it for the long prompts and within 4 % for the mixed ones (`benchmarks/policies/group_rates.py`,
#: 2026-11-23, 3 seeds of 250 requests). Helpers give way to new requests, so only a high load makes them costly.
RATES_BY_LOAD = ((0.2, 0.02), (0.65, 0.05), (0.8, 0.2), (0.95, 0.3))


class MinimumGain:
    """Improvement rate for the load of the last `LOOK_EVERY_S`; at first the rate of the lowest load."""

    def __init__(self, rates: Sequence[tuple[float, float]] = RATES_BY_LOAD) -> None:
        """``rates`` are rows of (load, rate) in ascending order."""
        self._rates = rates
        self.rate = rates[0][1]
        self._since_s: float | None = None
        self._work_s = 0.0

    def arrived(self, now_s: float, work_s: float, num_instances: Callable[[], float]) -> None:
        """Add a request's work. ``num_instances`` is called only when the next rate is looked up."""
        if self._since_s is None:
            self._since_s = now_s
        passed_s = now_s - self._since_s
        if passed_s >= LOOK_EVERY_S:
            load = self._work_s / passed_s / num_instances()
            self.rate = min(self._rates, key=lambda row: abs(row[0] - load))[1]
            self._since_s, self._work_s = now_s, 0.0
        self._work_s += work_s
