"""A simulated instance of several stages: layer ranges that a step passes one after the other.

A step enters a stage once it has left the previous stage, and the step before it has left this one. So at most as many
steps are under way as there are stages, and they end in order. All stages take equally long. An urgent plan enters
before waiting ones.

Each step with decodes takes a stage's part of the residents, and the residents draw when all parts have passed. An
instance's own decode steps are modelled as one step with all parts; they begin when all stages are empty.
"""

from __future__ import annotations

from collections import deque

from pdmesh.model import InstanceProfile
from pdmesh.policy.latency import LatencyModel
from pdmesh_lab.sim.agenda import Timer
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.instance import SimInstance
from pdmesh_lab.sim.planned_step import PlannedStep


class StagedInstance(SimInstance):
    """Simulated instance whose latency model gives a step's time through all stages. Cannot join groups."""

    def __init__(self, profile: InstanceProfile, model: LatencyModel, context: SimContext) -> None:
        super().__init__(profile, model, context)
        assert not profile.joins_groups, f"{profile.instance_id} has stages, and cannot join groups"
        self._under_way: deque[PlannedStep] = deque()
        self._left_s = [0.0] * profile.num_stages  # time at which the latest step leaves each stage
        self._entrance: Timer | None = None

    def die(self) -> None:
        for step in self._under_way:
            if step.end is not None:
                step.end.cancel()
        if self._entrance is not None:
            self._entrance.cancel()
        self._under_way.clear()
        super().die()

    def begin(self) -> None:
        if self._steps.plans or not self._under_way:
            super().begin()

    def _begin_step(self) -> None:
        self._busy = True
        step = self._next_step()
        step.end_s = self._pass_stages(step.duration_s / len(self._left_s))
        step.end = self._agenda.at(step.end_s, self._end_step)
        self._under_way.append(step)
        self._entrance = self._agenda.at(self._left_s[0], self._enter)

    def _pass_stages(self, stage_s: float) -> float:
        """Return when a step that enters now leaves the last stage."""
        ready_s = self._agenda.now_s
        for stage, left_s in enumerate(self._left_s):
            ready_s = self._left_s[stage] = max(ready_s, left_s) + stage_s
        return ready_s

    def _enter(self) -> None:
        """Let the next step enter the first stage, which is empty."""
        self._entrance = None
        self._busy = False
        self._want_turn(self.instance_id)

    def _end_step(self) -> None:
        now_s = self._agenda.now_s
        while self._under_way:
            step = self._under_way[0]
            if step.end_s > now_s or self._loads.waits(step):
                return
            self._under_way.popleft()
            self.steps.append(step.first_stage_span(len(self._left_s)))
            if self._steps.draws_with(step.running):
                self._ends_s.append(now_s)
            self._do(self._machine.end_step(duration_s=step.duration_s, began_s=step.started_s, ended_s=now_s))
            self._want_turn(self.instance_id)
