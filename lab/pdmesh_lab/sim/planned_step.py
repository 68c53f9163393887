"""A planned step of a simulated instance, in time."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.instance.planned_steps import RunningStep
from pdmesh.plans import StepPlan
from pdmesh_lab.sim.agenda import Timer
from pdmesh_lab.sim.result import StepSpan


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A planned step that is running, or was interrupted.

    `nested_s` is the time of urgent steps inside it. While `waits`, all is computed but KV of other members is missing.
    `has_met` says that the wait for the other members of a parallel step has been scheduled.
    """

    running: RunningStep
    started_s: float
    duration_s: float
    end_s: float
    end: Timer | None = None
    interruption: Timer | None = None
    nested_s: float = 0.0
    waits: bool = False
    has_met: bool = False

    @property
    def plan(self) -> StepPlan:
        return self.running.plan

    def span(self, now_s: float) -> StepSpan:
        """Return the step's span, which ends now."""
        waited_s = max(0.0, now_s - self.started_s - self.nested_s - self.computed_s(now_s))
        return StepSpan(
            self.started_s,
            now_s,
            self.plan.chunks,
            self.running.num_decodes,
            nested_s=self.nested_s,
            waited_s=waited_s,
        )

    def first_stage_span(self, num_stages: int) -> StepSpan:
        """Return the span in the first of ``num_stages``. Such spans of several steps do not overlap."""
        end_s = self.started_s + self.duration_s / num_stages
        return StepSpan(self.started_s, end_s, self.plan.chunks, self.running.num_decodes)

    def computed_s(self, now_s: float) -> float:
        """Return the seconds of computing, without waits for KV and urgent steps inside."""
        return self.duration_s if self.waits else now_s - self.started_s - self.nested_s
