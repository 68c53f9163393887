"""Ends of requests as instances report them: an answer is complete, a request is refused, or KV is released."""

from __future__ import annotations

from pdmesh.core.batching.modes import Modes
from pdmesh.core.commands import SHARED_BLAME, Outcome
from pdmesh.core.copies.context_ranges import ContextRanges
from pdmesh.core.copies.decode_moves import Moves
from pdmesh.core.copies.on_demand import OnDemandKv
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.copies.receivers import replace_receiver
from pdmesh.core.events import KvReleased, RequestDropped, RequestFinished
from pdmesh.core.instances.allocations import HAVE_SEATS, AllocationKind
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operators.bundle_choice import BundleChoice
from pdmesh.core.recovery.reconcile import Reconciler
from pdmesh.core.steps.step_reports import StepReports
from pdmesh.model import NO_TRANSFER


class RequestEnds:
    """Handlers of the reports that end a request on an instance, or take its KV away."""

    def __init__(
        self,
        mesh: MeshState,
        choice: BundleChoice,
        modes: Modes,
        steps: StepReports,
        fetches: Fetches,
        parts: ContextRanges,
        moves: Moves,
        on_demand: OnDemandKv,
        reconciler: Reconciler,
    ) -> None:
        self._mesh = mesh
        self._choice = choice
        self._modes = modes
        self._steps = steps
        self._fetches = fetches
        self._parts = parts
        self._moves = moves
        self._on_demand = on_demand
        self._reconciler = reconciler

    def finished(self, event: RequestFinished, now_s: float) -> None:
        """End a request that drew its last token. Another instance's report is counted as ignored."""
        if event.instance_id in self._mesh.instances:
            self._steps.own_steps(event)
        state = self._mesh.find((event.request_id, event.epoch))
        if state is None or not state.needs(event.instance_id):
            self._mesh.ignore("RequestFinished")
            return
        self._modes.finished(state, event.num_output_tokens)
        self._on_demand.ended(state, event.instance_id, event.num_output_tokens)
        # The reporting instance frees its own KV; after the landing so do the sources, when they get the
        # acknowledgement.
        spare = (event.instance_id, *(state.prefill_ids if state.decodes and state.incoming else ()))
        # Other holders of its context, and the target of a copy, are told to free. A move may return to an earlier
        # holder.
        holders = state.decode_ids[1:] + ((state.outgoing.target_id,) if state.outgoing else ())
        spare = tuple([name for name in spare if name not in holders])
        self._mesh.end(state, Outcome.FINISHED, num_output_tokens=event.num_output_tokens, spare=spare)

    def dropped(self, event: RequestDropped) -> None:
        """Replace the instance that refuses a request, or restart the request.

        If the instance was the destination of a fetch or of a range, that copy fails. If it had no part in the request,
        the report is counted as ignored.
        """
        state = self._mesh.find((event.request_id, event.epoch))
        if state is not None and state.needs(event.instance_id):
            reason = f"instance {event.instance_id} dropped it: {event.reason}"
            replace_receiver(self._mesh, state, event.instance_id, reason, blame=SHARED_BLAME)
        elif (state is None or state.move is None or state.move.target_id != event.instance_id) and not (
            self._fetches.failed((event.request_id, event.epoch))
            or self._parts.failed((event.request_id, event.epoch), event.instance_id)
        ):
            self._mesh.ignore("RequestDropped")

    def released(self, event: KvReleased) -> None:
        """Free the blocks that an instance has released for a request. Ignored if no such blocks are known.

        Copies that wait for the request's transfer backends at the instance are granted. If the request still needs KV
        there, another instance takes over or the request starts again (`replace_receiver`).
        """
        key = (event.request_id, event.epoch)
        instance = self._mesh.instance_of(event)
        if instance is None:
            return
        allocation = instance.give_back(key, event.transfer_id, event.granules, event.num_known, event.states)
        if allocation is None:
            self._mesh.ignore("KvReleased")
            return
        if allocation.kind in HAVE_SEATS:
            self._modes.released(
                instance,
                self._choice.bundle,
                self._choice.learner.estimate(instance.device_class),
                was_computed_here=allocation.transfer_id == NO_TRANSFER,
            )
        self._reconciler.released(event.instance_id, key)
        self._moves.released(event.instance_id, key)
        if allocation.kind is AllocationKind.PART:
            self._parts.released(event.instance_id, key)
        state = self._mesh.find(key)
        for member in allocation.last_sent_members if state is None else ():
            self._mesh.free(member.instance_id, key)
        # A source frees when the acknowledgement reaches it, perhaps before we hear of the landing. Any other release
        # without a `FreeKv` leaves a request without its KV.
        if (
            state is not None
            and state.needs(event.instance_id)
            and not (state.incoming is not None and state.incoming.was_sent_by(event.instance_id))
        ):
            replace_receiver(
                self._mesh, state, event.instance_id, f"instance {event.instance_id} dropped its KV", blame=SHARED_BLAME
            )
        self._mesh.grant(self._mesh.broker.release_of(key, event.instance_id))
