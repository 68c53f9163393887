"""A planned step of a modelled instance."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.events import StepDone
from pdmesh.model import InstanceId, OwnDecodeSteps
from pdmesh.plans import ChunkDone, ChunkPlan, StepPlan
from pdmesh.sim.agenda import Appointment
from pdmesh.sim.result import StepSpan


@dataclass(slots=True, eq=False)
class PlannedStep:
    """One that is running, or was interrupted."""

    plan: StepPlan
    num_decodes: int
    num_context_tokens: int  # of the decodes
    started_s: float
    duration_s: float
    end_s: float
    end: Appointment | None = None
    interruption: Appointment | None = None
    nested_s: float = 0.0  # of the urgent steps that ran inside it
    waits: bool = False  # computed but for KV that others send
    has_met: bool = False  # what its layers wait for the others of its parallel step has passed
    gives_up: bool = False  # a member was lost since it was planned: it waits for nobody
    undone: tuple[ChunkPlan, ...] = ()  # of its chunks: given up, or freed before they began

    def span(self, now_s: float) -> StepSpan:
        """Return the step's span, which ends now."""
        waited_s = max(0.0, now_s - self.started_s - self.nested_s - self._computed_s(now_s))
        return StepSpan(
            self.started_s, now_s, self.plan.chunks, self.num_decodes, nested_s=self.nested_s, waited_s=waited_s
        )

    def done(self, instance_id: InstanceId, own_steps: OwnDecodeSteps | None, now_s: float) -> StepDone:
        """What a worker reports of it."""
        done = tuple(
            [
                ChunkDone(
                    request_id=c.request_id,
                    epoch=c.epoch,
                    num_tokens=0 if c in self.undone else c.num_tokens,
                    is_last=c.is_last,
                )
                for c in self.plan.chunks
            ]
        )
        return StepDone(
            instance_id,
            self.plan.plan_id,
            self._computed_s(now_s),
            done,
            self.num_decodes,
            self.num_context_tokens,
            own_steps,
            self.started_s,
            now_s,
        )

    def _computed_s(self, now_s: float) -> float:
        """Return the seconds that the step computed, without those it waited for KV."""
        return self.duration_s if self.waits else now_s - self.started_s - self.nested_s
