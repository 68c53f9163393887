"""Cost of switching an instance from decoding to prefill and back, from the begins and ends of its steps.

This is alpha_p of EB+ as the paper's measurements use it: the whole time of a prefill phase beyond its work, and not
the intercept of a fit (paper, Table 10 against its kernel fits).
"""

from __future__ import annotations

from pdmesh.policy.latency import LinearLatencyModel

#: Approximate number of phases over which the means are taken.
_MEMORY = 16


class SwitchTimes:
    """Means over the prefill phases of one instance, whose steps are given in order and on its clock.

    A phase is the prefill-only steps between two decode steps, while residents wait to decode. ``overhead_s`` is the
    mean time of a phase in which the device was idle: the switch there, the gaps between steps, and the switch back.
    ``num_steps`` is the mean number of steps of a phase.
    """

    def __init__(self) -> None:
        self.num_phases = 0
        self.overhead_s = 0.0
        self.num_steps = 0.0
        #: None if no resident was decoding.
        self._decoded_until_s: float | None = None
        self._device_s = 0.0
        self._steps = 0

    def decoded(self, began_s: float, ended_s: float) -> None:
        """Note a step in which residents decoded and no prompt was computed."""
        if self._steps and self._decoded_until_s is not None:
            self._note(max(0.0, began_s - self._decoded_until_s - self._device_s))
        self._decoded_until_s = ended_s
        self._device_s, self._steps = 0.0, 0

    def prefilled(self, duration_s: float) -> None:
        """Note a step with chunks and no decodes."""
        self._device_s += duration_s
        self._steps += 1

    def forget(self) -> None:
        """Note that neither phase runs: a step had both, or the instance has no residents."""
        self._decoded_until_s = None
        self._device_s, self._steps = 0.0, 0

    def _note(self, overhead_s: float) -> None:
        self.num_phases += 1
        weight = 1 / min(self.num_phases, _MEMORY)
        self.overhead_s += weight * (overhead_s - self.overhead_s)
        self.num_steps += weight * (self._steps - self.num_steps)

    def switch_s(self, model: LinearLatencyModel) -> float:
        """Return alpha_p, in seconds per phase; before the first phase, the constant of one step."""
        return self.overhead_s + (self.num_steps if self.num_phases else 1.0) * model.a_s
