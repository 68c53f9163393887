"""Moves of running decodes to another instance with their KV, in the same epoch: nothing is computed again.

The target reserves room and a backend. The source decodes on while it sends the KV, pauses for the last part, and
commits. Before the commit it may continue at any time; after the commit only when told. The order of the target's
reports decides which side continues:

* *Landed*: the target continues.
* *Released* without landed: the target never began, and the source resumes.
* *Landed*, then *released*, or a lost target: the request starts again in the next epoch.

The table is in `docs/architecture/moves.md`. The gateway accepts tokens from the target because the source's last token
names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdmesh.core.commands import Stop
from pdmesh.core.events import TransferFailed, TransferSent
from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import InstanceId, RequestKey, Then, short_weights
from pdmesh.policy.on_demand import granted_blocks
from pdmesh.policy.seams import DecodePlacement

#: Largest number of moves from one instance, or to one, at once: two are sent, and the next are ready.
MAX_AT_ONCE = 4

#: A request stays where it is after this many failed moves.
MAX_FAILED = 3


class Moves:
    """Moves of decoding requests, from their beginning to their end."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        # Instances that reported that they are about to stop.
        self._stopping: dict[InstanceId, None] = {}

    # --- beginning ---

    def why_not(self, state: RequestState, target: InstanceState, spare_blocks: int | None = None) -> str | None:
        """Return why a request cannot move to an instance now; None if it can.

        The text completes a sentence that begins with the request's name. ``spare_blocks`` as for
        `InstanceState.can_take_over`.
        """
        if state.move is not None:
            return f"is already moving to {state.move.target_id}"
        if state.phase is not Phase.DECODING:
            return f"is {state.phase.replace('_', ' ')}: only decoding requests can move"
        if state.outgoing is not None or state.lost_range is not None:
            return "has a range of its context in transfer"
        source, allocation = self._where(state)
        if source is target:
            return f"already decodes on {target.instance_id}"
        if source.weights != target.weights:
            return (
                f"has an answer of other weights ({short_weights(source.weights)}) than {target.instance_id} has "
                f"({short_weights(target.weights)})"
            )
        if source.kv_group != target.kv_group:
            return f"has KV of another model or layout than {target.instance_id}"
        if state.members and source.arithmetic_class != target.arithmetic_class:
            return f"has its context on instances of another arithmetic class than {target.instance_id}"
        if allocation.kind is not AllocationKind.RESIDENT or allocation.freeing:
            return "is about to end"
        request = state.request
        if (
            not target.can_take_over(
                state.key, self._num_blocks(source, allocation), allocation.max_blocks, spare_blocks
            )
            or request.num_prompt_tokens + request.max_tokens > target.max_model_len
        ):
            return f"has no room on {target.instance_id}"
        return None

    def begin(self, state: RequestState, target: InstanceState) -> Copy:
        """Begin a request's move to an instance, for which `why_not` returned None."""
        source, allocation = self._where(state)
        num_blocks = self._num_blocks(source, allocation)
        mesh, chain = self._mesh, () if state.members else state.request.chain
        num_reused = target.num_reusable_granules(state.request) if chain else 0
        first_block = allocation.num_remote_tokens // source.block_size
        move = mesh.begin_copy(
            state,
            source.shard(allocation.num_blocks, first_block),
            target.shard(num_blocks, first_block),
            then=Then.DECODE,
            num_reused_granules=num_reused,
            chain=chain,
        )
        target.take(
            state.key,
            Allocation(
                AllocationKind.PROMISED,
                num_blocks,
                max_blocks=allocation.max_blocks,
                num_tokens=allocation.num_tokens,
                long_tokens=allocation.long_tokens,
                slo_tpot_s=allocation.slo_tpot_s,
                transfer_id=move.plan.transfer_id,
                tenant=state.request.tenant,
                share=state.request.share,
                num_remote_tokens=allocation.num_remote_tokens,
            ),
            chain,
            num_reused,
        )
        for member in state.members:
            mesh.set_places(member.instance_id, state.key, target.instance_id)
        mesh.expect_kv(target, move, members=state.members)
        mesh.grant(mesh.broker.offer(move))
        return move

    def cancel(self, state: RequestState) -> None:
        """Cancel a request's move, which may still have landed."""
        if state.move is not None:
            self._mesh.stop(state.move, Stop.CANCEL)

    def _where(self, state: RequestState) -> tuple[InstanceState, Allocation]:
        assert state.decode_id is not None
        source = self._mesh.instances[state.decode_id]
        return source, source.allocations[state.key]

    @staticmethod
    def _num_blocks(source: InstanceState, allocation: Allocation) -> int:
        """Return the number of blocks to reserve, with room for tokens drawn during the move."""
        return granted_blocks(allocation.num_blocks * source.block_size, allocation.max_blocks, source.block_size)

    # --- instances' reports ---

    def sent(self, event: TransferSent) -> None:
        """Let the request decode at its target, which has acknowledged all KV."""
        state = self._of(event)
        if state is not None and state.move is not None:
            self._mesh.land_move(state)

    def failed(self, event: TransferFailed, now_s: float) -> None:
        """Handle a source that stopped sending.

        If the target holds room, it is told to free it, and its report decides how the request continues. Otherwise a
        committed request starts again, and an uncommitted one stays at its source.
        """
        state = self._of(event)
        if state is None:
            self._mesh.free(event.instance_id, (event.request_id, event.epoch))
            return
        move = state.move
        if move is None or move.plan.transfer_id != event.transfer_id:
            return
        if not move.given_up:
            self._mesh.cut.note(move.source_id, move.target_id, now_s)
        if self._mesh.allocation_of(move.target_id, state.key) is not None:
            move.given_up, move.committed = True, event.committed
            self._mesh.free(move.target_id, state.key)
        elif event.committed:
            self._mesh.restart(state, f"its KV was lost on the way to {move.target_id}: {event.reason}")
        else:
            self._mesh.end_copy(state, failed=True)

    def released(self, instance_id: InstanceId, key: RequestKey) -> None:
        """Resume the request at its source if its target released the room: the request never began there."""
        state = self._mesh.find(key)
        if state is not None and state.move is not None and state.move.target_id == instance_id:
            self._resume(state, state.move)

    def _of(self, event: TransferSent | TransferFailed) -> RequestState | None:
        """Return the request if it still needs the reporting source, else None."""
        state = self._mesh.find((event.request_id, event.epoch))
        return state if state is not None and state.needs(event.instance_id) else None

    def _resume(self, state: RequestState, move: Copy) -> None:
        self._mesh.end_copy(state, failed=True)
        self._mesh.hold(self._where(state)[0], state.key, decodes=True, move_id=move.plan.transfer_id)

    # --- membership ---

    def _of_instance(self, instance_id: InstanceId) -> list[tuple[RequestState, Copy]]:
        return [(state, copy) for state, copy in self._mesh.copies_of(instance_id) if copy.plan.is_move]

    def lost(self, instance_id: InstanceId) -> None:
        """Forget a lost instance; the sources of moves to it report how far they were."""
        self._stopping.pop(instance_id, None)
        for state, move in self._of_instance(instance_id):
            if move.target_id == instance_id:
                self._target_is_gone(state, move)

    def _target_is_gone(self, state: RequestState, move: Copy) -> None:
        """Handle a lost target: only the source knows whether the request may have begun there."""
        move.given_up = True
        if move.committed is None:
            self._mesh.stop(move, Stop.CANCEL)
        elif move.committed:
            self._mesh.restart(state, f"instance {move.target_id}, which may already decode it, was lost")
        else:
            self._mesh.end_copy(state, failed=True)

    def suspected(self, instance_id: InstanceId) -> None:
        """Cancel the moves to a silent instance, so that their requests continue where they are, if they can."""
        for _, move in self._of_instance(instance_id):
            if move.target_id == instance_id:
                self._mesh.stop(move, Stop.CANCEL)

    def joined(self, instance_id: InstanceId, *, stopping: bool, is_another: bool) -> None:
        """End the moves of an instance that registered, perhaps again.

        A move from the instance has ended, so its target frees the room. A move to it that is not among its residents
        never landed there, and the source resumes. If the instance ``is_another`` process under the name, or was told
        to free the room, the target counts as lost instead.
        """
        self.stops(instance_id, stopping)
        for state, move in self._of_instance(instance_id):
            if move.source_id == instance_id:
                move.given_up = True
                self._mesh.free(move.target_id, state.key)
            elif self._mesh.allocation_of(instance_id, state.key) is None:
                if is_another or move.given_up:
                    self._target_is_gone(state, move)
                else:
                    self._resume(state, move)

    # --- evacuation ---

    def stops(self, instance_id: InstanceId, stopping: bool = True) -> None:
        """Note that an instance is about to stop, so that its decodes move away; ``stopping=False`` cancels that."""
        self._stopping.pop(instance_id, None)
        if stopping:
            self._stopping[instance_id] = None

    def leaving(self, leaving: Sequence[InstanceId]) -> Sequence[InstanceId]:
        """Return the instances that stop, then the instances in ``leaving``, each once."""
        return list(dict.fromkeys((*self._stopping, *leaving)))

    def evacuate(self, leaving: Sequence[InstanceId], placement: DecodePlacement) -> None:
        """Move decodes from instances that stop, and from ``leaving``, to others with room; after any event."""
        for instance_id in self.leaving(leaving):
            instance = self._mesh.instances.get(instance_id)
            if (
                instance is not None
                and instance.allocated.num_decoding
                and instance.reachable
                and not instance.suspected
            ):
                self._empty(instance, placement)

    def _empty(self, source: InstanceState, placement: DecodePlacement) -> None:
        mesh = self._mesh
        targets = [other for other in mesh.instances.values() if other is not source and other.num_decode_tokens]
        under_way = [state.move for state in mesh.copying.values() if state.move is not None]
        num_free = MAX_AT_ONCE - sum(move.source_id == source.instance_id for move in under_way)
        num_coming = Counter([move.target_id for move in under_way])
        for key, allocation in source.allocations.items():
            if num_free <= 0 or all(num_coming[each.instance_id] >= MAX_AT_ONCE for each in targets):
                return
            state = mesh.find(key)
            if (
                allocation.kind is not AllocationKind.RESIDENT
                or state is None
                or state.move is not None
                or state.request.ends_with_prompt
                or state.num_failed_moves >= MAX_FAILED
            ):
                continue
            able = [each for each in targets if self.why_not(state, each) is None]
            exact = [each for each in able if each.arithmetic_class == source.arithmetic_class]
            found = [each for each in exact or able if num_coming[each.instance_id] < MAX_AT_ONCE]
            cut = mesh.cut.of(source.instance_id) | mesh.cut.of(state.request.gateway_id)
            target = mesh.nearest(source, allocation.num_blocks, found, cut, placement)
            if target is not None:
                self.begin(state, target)
                num_free -= 1
                num_coming[target.instance_id] += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the copies under way are inconsistent."""
        for key, state in self._mesh.copying.items():
            assert self._mesh.find(key) is state, f"{key} is on its way elsewhere, and is over"
            assert state.outgoing is not None, f"{key} is not on its way elsewhere, and is recorded"
        num_copying = sum(state.outgoing is not None for state in self._mesh.requests.values())
        assert num_copying == len(self._mesh.copying), f"{num_copying} copies, recorded: {len(self._mesh.copying)}"
        gone = self._stopping.keys() - self._mesh.instances.keys()
        assert not gone, f"{gone} stop, and are gone"
