"""A planned step of a simulated instance, in time."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.instance.planned_steps import RunningStep
from pdmesh.plans import StepPlan
from pdmesh_lab.sim.agenda import Appointment
from pdmesh_lab.sim.result import StepSpan


@dataclass(slots=True, eq=False)
class PlannedStep:
    """One that is running, or was interrupted."""

    running: RunningStep
    started_s: float
    duration_s: float
    end_s: float
    end: Appointment | None = None
    interruption: Appointment | None = None
    nested_s: float = 0.0  # of the urgent steps that ran inside it
    waits: bool = False  # computed but for KV that others send
    has_met: bool = False  # what its layers wait for the others of its parallel step has passed

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
        """Return the span in which the step had the first of so many stages: those of several steps do not overlap."""
        end_s = self.started_s + self.duration_s / num_stages
        return StepSpan(self.started_s, end_s, self.plan.chunks, self.running.num_decodes)

    def computed_s(self, now_s: float) -> float:
        """Return the seconds that the step computed, without those it waited for KV."""
        return self.duration_s if self.waits else now_s - self.started_s - self.nested_s
