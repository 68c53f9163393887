"""Packing of step plans for the instances with step slots, round by round."""

from __future__ import annotations

from pdmesh.core.batching.local_work import LocalWork
from pdmesh.core.batching.modes import Modes
from pdmesh.core.batching.step_slots import StepSlots
from pdmesh.core.commands import RunStep
from pdmesh.core.copies.handover import HandOvers
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.groups.prefill_groups import GroupPlanner
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.steps.packing import Round
from pdmesh.plans import StepPlan
from pdmesh.policy.bundle import Bundle


class Packer:
    """Packs step plans in rounds. A request is placed only when its first chunk is packed."""

    def __init__(
        self,
        mesh: MeshState,
        plans_in_flight: int,
        bundle: Bundle,
        modes: Modes,
        handovers: HandOvers,
        fetches: Fetches,
        local_work: LocalWork,
    ) -> None:
        self._mesh = mesh
        self._modes = modes
        self._local_work = local_work
        self._handovers = handovers
        self._fetches = fetches
        self._step_slots = StepSlots(mesh, plans_in_flight, bundle, modes)
        self.prefill_groups = GroupPlanner(mesh, modes)

    def pack(self, bundle: Bundle, now_s: float) -> None:
        """Plan steps until no instance with room for a plan has work, and end prefill phases without prompts."""
        step_slots = self._step_slots
        self._local_work.look_at(bundle)
        self._modes.look_at(bundle)
        if self._mesh.recovering:
            self.prefill_groups.recover(bundle, now_s)
        step_slots.update(bundle)
        self._handovers.find_receivers(step_slots, bundle, now_s)
        step_slots.update(bundle)
        instances, for_waiting = step_slots.computing(), step_slots.for_waiting()
        has_helped = not for_waiting and self._help(bundle, now_s)
        while has_helped or instances or for_waiting:
            if instances or for_waiting:
                # An instance without a plan in this round has none in the next one either: room only shrinks.
                packed = Round(
                    self._mesh,
                    step_slots,
                    self._modes,
                    self.prefill_groups,
                    self._handovers,
                    self._fetches,
                    bundle,
                    now_s,
                    instances,
                    for_waiting,
                )
                instances, for_waiting = packed.pack(), False
                step_slots.update(bundle)
            has_helped = self._help(bundle, now_s)
            if has_helped:
                instances = step_slots.computing()
        if self._mesh.in_prefill_phase:
            self._end_prefill_phases(now_s)
            step_slots.update(bundle)

    def _help(self, bundle: Bundle, now_s: float) -> bool:
        """Ask instances for help, and let helpers compute chunks of other instances' prompts.

        Return whether a chunk was planned.
        """
        has_helped = self.prefill_groups.help(self._step_slots, bundle, now_s)
        if has_helped:
            self._step_slots.update(bundle)
        return has_helped

    def _end_prefill_phases(self, now_s: float) -> None:
        """End the prefill phases of instances with room for a plan and no prompt: plan a step of decodes only."""
        for instance in list(self._mesh.in_prefill_phase.values()):
            if not (instance.reachable and self._step_slots.has_room(instance) and self._modes.ends_phase(instance)):
                continue
            plan = StepPlan(plan_id=instance.next_plan_id, chunks=(), with_decodes=True)
            instance.begin_plan(plan, now_s)
            self._modes.sent(instance, plan, now_s)
            self._mesh.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
