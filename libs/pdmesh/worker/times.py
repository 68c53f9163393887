"""When a step ran, and for how long."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Begin and end of a step on this process's own clock, and the time on the device.

    ``duration_s`` leaves out waits and urgent steps inside the step. ``waited_s`` is the time spent waiting for KV.
    ``num_lent_cores`` is the mean over the layers.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    duration_s: float = 0.0
    waited_s: float = 0.0
    num_lent_cores: float = 0.0
    num_own_cores: int = 1

    @property
    def lent_share(self) -> float:
        """Mean number of lent cores, divided by the number of own cores."""
        return self.num_lent_cores / self.num_own_cores
