"""What it costs an instance to turn from decoding to prefill and back, from when its steps began and ended.

This is EB+'s alpha_p as its own measurements mean it: the whole time that a prefill phase takes beyond the work in it,
not the intercept of a fit (paper, Table 10 against its kernel fits).
"""

from __future__ import annotations

from pdmesh.policy.latency import LinearLatencyModel

#: Phases that the means are over, roughly.
_MEMORY = 16


class SwitchTimes:
    """Follows one instance's steps, in their order, on its own clock, and keeps means over its prefill phases.

    A phase is steps of prefill alone between two decode steps, while somebody waits to decode. ``overhead_s`` is the
    time in it in which the device did nothing: the switch there, between its steps, and back.
    """

    def __init__(self) -> None:
        self.num_phases = 0  # seen
        self.overhead_s = 0.0
        self.num_steps = 0.0
        self._decoded_until_s: float | None = None  # None: nobody was decoding
        self._device_s = 0.0  # of the phase so far
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
        """alpha_p, seconds a phase: of one step until a phase was seen."""
        return self.overhead_s + (self.num_steps if self.num_phases else 1.0) * model.a_s
