"""What instances report of their steps: how long they took, and which chunks of prompts they computed."""

from __future__ import annotations

from pdmesh.core.admission import Admission
from pdmesh.core.books import Books
from pdmesh.core.bundle_choice import BundleChoice
from pdmesh.core.events import DecodeStepsDone, RequestFinished, StepDone
from pdmesh.core.sharing import Sharing
from pdmesh.core.state import InstanceBooks


class StepReports:
    """Takes note of them; what does not fit the books is counted, and changes nothing."""

    def __init__(self, books: Books, choice: BundleChoice, admission: Admission, sharing: Sharing) -> None:
        self._books = books
        self._choice = choice
        self._admission = admission
        self._sharing = sharing

    def own_steps(self, event: DecodeStepsDone | RequestFinished) -> bool:
        """Learn from decode steps that an instance made by itself. Whether that changes what is decided."""
        own_steps, instance = event.own_steps, self._books.instances.get(event.instance_id)
        if own_steps is None:
            return False
        if instance is None:
            self._books.ignore(type(event).__name__)
            return False
        moved = self._choice.learner.own_steps(instance, own_steps)
        if moved:
            self._choice.rebuild()
        return moved

    def done(self, instance: InstanceBooks, event: StepDone, now_s: float) -> None:
        """A planned step has ended: its chunks are computed, or were dropped."""
        plan = instance.end_plan(event.plan_id)
        if plan is None:
            self._books.ignore("StepDone")
            return
        if self._choice.learner.step_done(instance, plan, event):
            self._choice.rebuild()
        done = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        for chunk in plan.chunks:
            state = self._books.find((chunk.request_id, chunk.epoch))
            if state is None:
                continue
            state.end_chunk(event.instance_id, event.plan_id)
            if not state.is_in_prefill:
                continue
            is_computed = done.get(state.key) == chunk.num_tokens
            if chunk.is_last and is_computed:
                state.draw_first_token(now_s)
                self._admission.first_token(state, now_s)
            if is_computed and state.group is not None:
                state.group.compute(event.instance_id, chunk.start, chunk.start + chunk.num_tokens)
                if chunk.is_last:
                    self._sharing.ended(state.group, now_s)
            if not is_computed and not state.is_healing:
                if state.needs(event.instance_id):  # not one that was freed in the last layer of its last chunk
                    self._books.restart(state, f"instance {event.instance_id} dropped a chunk")
            elif not is_computed:
                self._books.note_preemption(state)
            elif chunk.is_last and state.decode_id == event.instance_id:
                self._books.land(state)
            elif chunk.is_last:
                self._books.computed(state)
            else:
                self._books.note_preemption(state)
