"""When a step ran, and for how long."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Begin and end of a step on this process's own clock, and the time that the device took.

    ``duration_s`` leaves out urgent steps inside the step, and waiting.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    duration_s: float = 0.0
    waited_s: float = 0.0  # of the time between, for KV of other members of a group
    num_lent_cores: float = 0.0  # mean over the layers
    num_own_cores: int = 1

    @property
    def lent_share(self) -> float:
        """Mean number of lent cores, relative to the own ones."""
        return self.num_lent_cores / self.num_own_cores
