"""Step reports of instances: durations, and the computed chunks of prompts."""

from __future__ import annotations

from pdmesh.core.admission.admission import Admission
from pdmesh.core.commands import SHARED_BLAME
from pdmesh.core.events import DecodeStepsDone, RequestFinished, StepDone
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operators.bundle_choice import BundleChoice


class StepReports:
    """Handler of step reports. A report that does not fit the mesh state is counted as ignored, and changes nothing."""

    def __init__(self, mesh: MeshState, choice: BundleChoice, admission: Admission) -> None:
        self._mesh = mesh
        self._choice = choice
        self._admission = admission

    def own_steps(self, event: DecodeStepsDone | RequestFinished) -> bool:
        """Learn from decode steps that an instance made by itself. Return whether the latency model has changed.

        A changed model rebuilds the policies. The report of an unknown instance is counted as ignored.
        """
        own_steps, instance = event.own_steps, self._mesh.instances.get(event.instance_id)
        if own_steps is None:
            return False
        if instance is None:
            self._mesh.ignore(type(event).__name__)
            return False
        moved = self._choice.learner.own_steps(instance, own_steps)
        if moved:
            self._choice.rebuild()
        return moved

    def done(self, instance: InstanceState, event: StepDone, now_s: float) -> None:
        """End a planned step: record its computed chunks, and restart each request whose chunk was dropped.

        A request whose last chunk is computed has its first token, and becomes a resident there or its KV may move. A
        dropped chunk restarts nothing if the request's group is in recovery or no longer needs the instance. The
        latency models learn from the step, which may rebuild the bundle. An unknown plan is ignored.
        """
        plan = instance.end_plan(event.plan_id, now_s)
        if plan is None:
            self._mesh.ignore("StepDone")
            return
        if self._choice.learner.step_done(instance, plan, event):
            self._choice.rebuild()
        done = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        for chunk in plan.chunks:
            key = (chunk.request_id, chunk.epoch)
            if done.get(key) == chunk.num_tokens:
                # Cached even if the request has ended since.
                instance.computed(key, chunk.start + chunk.num_tokens)
            state = self._mesh.find(key)
            if state is None:
                continue
            state.end_chunk(event.instance_id, event.plan_id)
            if not state.is_in_prefill:
                continue
            is_computed = done.get(state.key) == chunk.num_tokens
            if chunk.is_last and is_computed:
                state.draw_first_token()
                self._admission.first_token(state, now_s)
            if is_computed and state.group is not None:
                state.group.compute(event.instance_id, chunk.start, chunk.start + chunk.num_tokens)
            if not is_computed and not state.is_recovering:
                # A helper that was freed in the last layer of its last chunk is not needed.
                if state.needs(event.instance_id):
                    self._mesh.restart(state, f"instance {event.instance_id} dropped a chunk", blame=SHARED_BLAME)
            elif not is_computed:
                self._mesh.note_interruption(state)
            elif chunk.is_last and state.decode_id == event.instance_id:
                self._mesh.land(state)
            elif chunk.is_last:
                self._mesh.computed(state)
            else:
                self._mesh.note_interruption(state)
