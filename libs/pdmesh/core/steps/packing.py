"""Packing rounds: requests are placed late, when an instance has room for a plan, and strictly in order.

An instance's running prompts and the first waiting request compete for the instance's next plan. So a more urgent
request takes the step after the ones in flight. A prompt that is overtaken is preempted at a chunk boundary, and its KV
stays in place. If the bundle allows interruption, the request takes a step *before* the ones in flight
(`pdmesh.core.batching.step_slots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from pdmesh.core.batching.modes import Modes
from pdmesh.core.batching.step_slots import StepSlots
from pdmesh.core.commands import RunStep
from pdmesh.core.copies.handover import HandOvers
from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.groups.prefill_groups import GroupPlanner
from pdmesh.core.instances.feasibility import as_placed, could_place, is_held_whole
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.revisions import have_pair
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.core.steps.one_step import StepSlot, next_chunk
from pdmesh.core.steps.placing import Placement, Wait, place, place_locally
from pdmesh.core.steps.reusing import PrefillCandidate, Reusing
from pdmesh.core.waiting.queue import in_order
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, Request, Role
from pdmesh.plans import StepPlan
from pdmesh.policy.batching import Mode
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.latency import ChunkShape
from pdmesh.policy.reuse import ReuseCost
from pdmesh.policy.views import PartialStep

#: Most tokens of a chunk of a spread context, whose shard holders compute parts of its attention. They answer for all
#: rows of the chunk at once, in fp32: 128 rows of 32 heads of 128 are 2 MiB.
SPREAD_CHUNK_TOKENS = 128

#: Most requests that one round skips, because they wait for cheaper instances or older weights.
MAX_SKIPPED = 64


class Round:
    """Packing round: at most one new plan for each of ``instances``.

    With ``for_waiting``, also for other instances that a waiting request is placed on.
    """

    def __init__(
        self,
        mesh: MeshState,
        step_slots: StepSlots,
        modes: Modes,
        prefill_groups: GroupPlanner,
        handovers: HandOvers,
        fetches: Fetches,
        bundle: Bundle,
        now_s: float,
        instances: Iterable[InstanceState],
        for_waiting: bool,
    ) -> None:
        self._mesh = mesh
        self._known = step_slots
        self._modes = modes
        self._prefill_groups = prefill_groups
        self._handovers = handovers
        self._bundle = bundle
        self._now_s = now_s
        self._for_waiting = for_waiting
        self._reusing = Reusing(mesh, fetches, now_s)
        self._least_work_tokens = mesh.queue.least_work_tokens
        self._step_slots: dict[InstanceId, StepSlot] = {}
        #: Whether some instance could hold the whole prompt of the head.
        self._is_held_whole = True
        self._new_weights = mesh.new_weights
        #: Weights identity that the head is placed on; None for any.
        self._weights: str | None = None
        for instance in instances:
            self._open(instance)

    def pack(self) -> list[InstanceState]:
        """Place waiting requests, pack and send plans. Return the instances that were given one."""
        if not self._step_slots and not self._for_waiting:
            return []
        self._place_waiting()
        for step_slot in list(self._step_slots.values()):
            self._plan_running(step_slot, self._in_order(step_slot.running))
        return [step_slot.instance for step_slot in self._step_slots.values() if self._send(step_slot)]

    def _open(self, instance: InstanceState) -> None:
        """Open a step slot for an instance, unless no prompt could go into its plan."""
        may_take = self._mesh.queue.has_line and (instance.role_prefills or self._is_in_phase(instance))
        if not instance.reachable or not (instance.prefills or may_take):
            return
        urgent = not self._known.has_room(instance)
        if urgent and not self._known.is_interruptible(instance):
            return
        running = [state for state in instance.prefills if not urgent or self._may_interrupt(instance, state)]
        if running or may_take or not urgent:
            self._step_slots[instance.instance_id] = StepSlot(instance, PartialStep(self._now_s), running, urgent)

    def _is_in_phase(self, instance: InstanceState) -> bool:
        """Whether a decode instance is in a prefill phase of its own, in which it takes prompt after prompt."""
        return instance.prefills_locally and instance.batching.holds_decodes

    # --- requests that wait ---

    def _place_waiting(self) -> None:
        """Place waiting requests strictly in order: if there is no room for the head, no later request is placed."""
        self._mesh.queue.call_all()
        self._place_in_order()
        self._mesh.queue.restore_skipped()

    def _place_in_order(self) -> None:
        queue, num_skipped = self._mesh.queue, 0
        while (head := queue.head(self._bundle.order, self._now_s)) is not None:
            match self._place_for(head):
                case Placement() as placement:
                    self._place(head, placement)
                    self._plan_chunk(self._step_slot_of(placement.prefill), head)
                case Wait.FOR_TURN:
                    queue.defer(head, as_long=self._bundle.is_long(head.request, head.num_reused_tokens))
                case Wait.FOR_INSTANCE:
                    queue.park(head)
                case Wait.FOR_KEPT | Wait.FOR_WEIGHTS:
                    queue.skip(head)
                    num_skipped += 1
                    if num_skipped == MAX_SKIPPED:
                        return
                case Wait.FOR_ROOM | Wait.FOR_STEP_SLOT:
                    return

    def _place_for(self, head: RequestState) -> Placement | Wait:
        """Place the head, or name the reason to wait, by four questions in order."""
        self._weights = head.request.weights or self._new_weights
        if self._weights is not None:
            head.use_weights(self._weights)
        if self._has_older_weights and not have_pair(self._usable_of(head.request.weights)):
            return self._place_to_finish(head.request)
        wait = self._wait_to_begin(head)
        if wait is not None:
            return wait
        self._plan_before(head)
        depths, computing = self._look_up_cached(head)
        found = self._find_taker(head, depths, computing)
        return self._other_way(head, depths, found) if isinstance(found, Wait) else found

    def _wait_to_begin(self, head: RequestState) -> Wait | None:
        """Ask whether the head may begin at all. Return a reason to wait; None if the head may begin.

        A prompt for a group of a fixed size waits for enough free members. Where contexts are spread, a request begins
        only if the mesh could also resume it.
        """
        if self._prefill_groups.awaits_members(head, self._bundle):
            return Wait.FOR_TURN
        if self._mesh.spreads_contexts:
            kinds = self._mesh.kinds
            if not could_place(head.request, kinds):
                return Wait.FOR_INSTANCE
            head.place_as(as_placed(head.request, kinds))
            self._is_held_whole = is_held_whole(head.request, kinds)
        return None

    def _plan_before(self, head: RequestState) -> None:
        """Plan the running prompts that come before the head: their chunks go into each step first."""
        for step_slot in list(self._step_slots.values()):
            if step_slot.running:
                line = self._in_order([*step_slot.running, head])
                self._plan_running(step_slot, line[: line.index(head)])

    def _look_up_cached(self, head: RequestState) -> tuple[Mapping[int, int], list[RequestState]]:
        """Return the cached granules of the head by instance number, and the running prompts that share some.

        Instances that the head's gateway could not reach lately are left out. A prompt that no instance holds whole
        reuses nothing.
        """
        mesh, request = self._mesh, head.request
        depths = self._reusing.look_at(head, self._bundle.reuse if self._is_held_whole else None)
        if not self._is_held_whole:
            return {}, []
        computing = mesh.computing.shared_with(request)
        if unreachable := mesh.cut.of(request.gateway_id):
            reachable = [number for number in depths if mesh.by_number[number].instance_id not in unreachable]
            depths = {number: depths[number] for number in reachable}
            computing = [state for state in computing if state.prefill_ids[0] not in unreachable]
        return depths, computing

    def _find_taker(
        self, head: RequestState, depths: Mapping[int, int], computing: list[RequestState]
    ) -> Placement | Wait:
        """Ask which instance takes the head. Return the placement, or the reason to wait.

        If some of the prompt is cached, costs decide: the head goes beside the decodes of a holder, goes to the
        cheapest offer, or waits for a cheaper instance. Otherwise the first offer in the policy's order takes it.
        """
        offers: Iterable[InstanceState] = self._offers(head)
        reuse = self._bundle.reuse
        if reuse is not None and (depths or computing):
            if (local := self._place_beside_decodes(head, depths, reuse)) is not None:
                return local
            cheapest = self._reusing.cheapest(head, depths, computing, self._bundle, offers, self._may_begin)
            if isinstance(cheapest, PrefillCandidate):
                self._reusing.wait_for(head, cheapest, reuse)
                return Wait.FOR_KEPT
            offers = cheapest
        return self._place_on(head, offers, depths)

    def _place_on(
        self, head: RequestState, offers: Iterable[InstanceState], depths: Mapping[int, int]
    ) -> Placement | Wait:
        """Choose the head's placement, with the prompt on one of ``offers``, or return the reason to wait.

        ``offers`` are in the policy's order. ``depths``: cached granules of the head by instance number.
        """
        mesh = self._mesh
        return place(
            head.request,
            offers,
            self._known.decoders,
            self._bundle,
            self._handovers,
            self._now_s,
            spans_classes=mesh.spans_classes,
            depths=depths,
            cut=mesh.cut,
            instances=[each for each in mesh.instances.values() if self._has_weights(each)] if mesh.cut else (),
            slow_from=mesh.slow_from if mesh.links.are_uneven else None,
        )

    def _other_way(self, head: RequestState, depths: Mapping[int, int], wait: Wait) -> Placement | Wait:
        """Find a local placement that saves the wait for room or a step slot, or return the exact reason to wait.

        A request with older weights waits for instances with these weights, and others may overtake it. Without room
        the head waits for room, for its turn, or for an instance that could ever take it. Without a step slot a short
        prompt may be computed where it decodes; a long one waits for its turn behind other long ones.
        """
        if wait is not Wait.FOR_ROOM and wait is not Wait.FOR_STEP_SLOT:
            return wait
        if self._has_older_weights:
            return Wait.FOR_WEIGHTS
        is_long = self._bundle.is_long(head.request, head.num_reused_tokens)
        if wait is Wait.FOR_ROOM:
            if is_long and self._known.any_long:
                return Wait.FOR_TURN
            return Wait.FOR_ROOM if could_place(head.request, self._mesh.kinds) else Wait.FOR_INSTANCE
        local = None if is_long else self._place_locally(head, depths)
        if local is not None:
            return local
        return Wait.FOR_TURN if is_long and self._others_are_long() else Wait.FOR_STEP_SLOT

    def _place_locally(self, head: RequestState, depths: Mapping[int, int]) -> Placement | None:
        """Place the head on a decode instance that also computes the prompt; None if this is not allowed or no gain."""
        return place_locally(
            head.request,
            self._local_offers(head),
            self._known.least_queued,
            self._bundle,
            self._handovers,
            self._modes.beside,
            depths,
        )

    def _others_are_long(self) -> bool:
        """Whether a long prompt must queue behind others: for a group, or for a step that has a long prompt."""
        group_policy, least = self._bundle.group_policy, self._bundle.long_prompt_tokens
        in_group = group_policy is not None and group_policy.group_size > 1
        return in_group or any(step_slot.step.longest_tokens >= least for step_slot in self._step_slots.values())

    @property
    def _has_older_weights(self) -> bool:
        """Whether the head was begun with other weights than new requests are placed on."""
        return self._weights != self._new_weights

    def _place_beside_decodes(
        self, head: RequestState, depths: Mapping[int, int], reuse: ReuseCost
    ) -> Placement | None:
        """Place the head where its last turn decoded, on an instance that only decodes; None if none fits or pays."""
        if not self._for_waiting or self._bundle.local_prefill is None:
            return None
        spare = [
            holder
            for holder in self._reusing.holders(depths)
            if self._known.is_spare(holder)
            and self._has_weights(holder)
            and holder.instance_id not in self._step_slots
            and self._fits(holder, head)
            and holder.kv_group not in self._handovers.closed_groups
            and holder.can_stay(head.request)
        ]
        if not spare:
            return None
        found = self._reusing.cheapest_local(
            head, depths, spare, self._known.least_queued, self._bundle, reuse, self._modes.beside
        )
        return None if found is None else Placement(found, found)

    def _offers(self, head: RequestState) -> Iterator[InstanceState]:
        """Yield the instances whose next step takes a first chunk of the head, in the order of the placement."""
        opened = [step_slot.instance for step_slot in self._step_slots.values()]
        for instance in self._known.for_prompts(opened, others=self._for_waiting):
            if instance.takes_prompts and self._has_weights(instance) and self._fits(instance, head):
                yield instance

    def _local_offers(self, head: RequestState) -> Iterator[InstanceState]:
        """Yield decode instances whose next step takes a first chunk of the head: ones in a prefill phase first."""
        unreachable = self._mesh.cut.of(head.request.gateway_id)
        in_phase = [
            each.instance
            for each in self._step_slots.values()
            if each.instance.prefills_locally and self._modes.mode_of(each.instance) is Mode.EXCLUSIVE
        ]
        spare = self._known.spare() if self._for_waiting else ()
        others = (instance for instance in spare if instance.instance_id not in self._step_slots)
        for instance in chain(in_phase, others):
            if instance.instance_id not in unreachable and self._has_weights(instance) and self._fits(instance, head):
                yield instance

    def _may_begin(self, instance: InstanceState, head: RequestState) -> bool:
        """Whether an instance may have a step slot, and its next step takes a first chunk of the head."""
        has_slot = instance.instance_id in self._step_slots or (self._for_waiting and self._known.is_taker(instance))
        return has_slot and instance.takes_prompts and self._has_weights(instance) and self._fits(instance, head)

    def _has_weights(self, instance: InstanceState) -> bool:
        """Whether an instance has the weights that the head is placed on."""
        return self._weights is None or instance.weights == self._weights

    def _usable_of(self, weights: str) -> list[InstanceState]:
        return [each for each in self._mesh.instances.values() if each.weights == weights and each.is_usable]

    def _place_to_finish(self, request: Request) -> Placement | Wait:
        """Place a request with older weights, that have no usable pair, on one instance that computes and decodes it.

        Instances that an operator is emptying take it, too, until the operation's time is up.
        """
        able = [each for each in self._mesh.instances.values() if each.could_finish(request)]
        unreachable = self._mesh.cut.of(request.gateway_id)
        for instance in able:
            has_slot = instance.instance_id in self._step_slots or self._known.has_room(instance)
            if has_slot and instance.instance_id not in unreachable and instance.can_finish(request):
                return Placement(instance, instance)
        return Wait.FOR_WEIGHTS if able else Wait.FOR_INSTANCE

    def _fits(self, instance: InstanceState, head: RequestState) -> bool:
        """Whether the next step of an instance takes a first chunk of the head.

        A step without chunks takes any head that may begin. If some instance holds the whole prompt, one that would
        have to stream it out does not take it.
        """
        if self._mesh.spreads_contexts and self._is_held_whole and instance.streams_out(head.request):
            return False
        step_slot = self._step_slots.get(instance.instance_id)
        has_begun = step_slot is not None and bool(step_slot.step.chunks)
        if not self._modes.may_begin(instance, head, self._bundle, self._now_s, has_begun=has_begun):
            return False
        if step_slot is None:
            return self._known.has_room(instance) or self._may_interrupt(instance, head)
        if step_slot.urgent and not self._may_interrupt(instance, head):
            return False
        if not step_slot.step.chunks:
            return True
        start = self._num_reused_granules(instance, head) * GRANULE_TOKENS
        step_slot.fits = head, self._num_tokens(step_slot, head, start, num_reused=start)
        return step_slot.fits[1] > 0

    def _num_reused_granules(self, instance: InstanceState, head: RequestState) -> int:
        """Return how many granules of the head are not computed on an instance: cached ones, and loaded ones."""
        return instance.num_reusable_granules(head.request) + self._reusing.num_loaded(instance)

    def _place(self, state: RequestState, placement: Placement) -> None:
        prefill, num_prompt_tokens = placement.prefill, state.request.num_prompt_tokens
        num_work_tokens = num_prompt_tokens - self._num_reused_granules(prefill, state) * GRANULE_TOKENS
        self._mesh.place(
            state,
            prefill,
            placement.decode,
            members=placement.members,
            long_tokens=num_work_tokens if num_work_tokens >= self._bundle.long_prompt_tokens else 0,
            num_loaded=self._reusing.num_loaded(prefill),
            now_s=self._now_s,
        )
        helpers = self._prefill_groups.placed(state, self._bundle)
        self._known.refresh([*placement.instances, *helpers])

    def _step_slot_of(self, instance: InstanceState) -> StepSlot:
        """Return the step slot of an instance, opened if necessary; instances that were idle come last."""
        step_slot = self._step_slots.get(instance.instance_id)
        if step_slot is None:
            is_late = not self._known.is_interruptible(instance, self._least_work_tokens)
            urgent = not self._known.has_room(instance)
            step_slot = StepSlot(instance, PartialStep(self._now_s), urgent=urgent, is_late=is_late)
            self._step_slots[instance.instance_id] = step_slot
            if not is_late:
                self._step_slots = dict(sorted(self._step_slots.items(), key=lambda item: item[1].place))
        return step_slot

    # --- prompts that are being computed ---

    def _plan_running(self, step_slot: StepSlot, line: list[RequestState]) -> None:
        for state in line:
            if not self._modes.may_go_on(step_slot.instance, self._now_s, has_begun=bool(step_slot.step.chunks)):
                return
            step_slot.running.remove(state)
            self._plan_chunk(step_slot, state)

    def _num_tokens(self, step_slot: StepSlot, state: RequestState, start: int, *, num_reused: int) -> int:
        """Return how many tokens of the request go into the step, from ``start`` on; 0 for none.

        The first ``num_reused`` tokens of the prompt are reused, not computed.
        """
        beside = self._modes.beside(step_slot.instance)
        most = self._bundle.packing.num_tokens(
            beside,
            step_slot.step,
            state.request,
            start,
            num_reused_tokens=num_reused,
            least_other_tokens=self._least_other_tokens(step_slot.instance, state),
        )
        if most > 0:
            most = self._modes.within_phase(step_slot.instance, step_slot.step.shapes, ChunkShape(most, start))
        if step_slot.instance.streams_out(state.request):
            most = min(most, self._num_tokens_with_room(step_slot.instance, state, start))
        if state.group is None:
            return self._prefill_groups.first_tokens(step_slot.instance, state, most, self._known.idle(), self._bundle)
        return self._prefill_groups.leader_tokens(step_slot.instance, step_slot.step, state, most, self._bundle)

    def _least_other_tokens(self, instance: InstanceState, state: RequestState) -> int:
        """Return the tokens to compute of a short prompt in the queue, else of the shortest other one; 0 for none."""
        waiting = self._mesh.queue.least_work_tokens if self._mesh.queue.has_line else 0
        if 0 < waiting < self._bundle.long_prompt_tokens:
            return waiting
        others = [other.num_work_tokens for other in instance.prefills if other is not state]
        return min(others, default=waiting)

    @staticmethod
    def _num_tokens_with_room(instance: InstanceState, state: RequestState, start: int) -> int:
        """Return how many tokens may be computed now of a prompt that the instance cannot hold whole.

        At most a chunk, within the ranges that the instance holds at once.
        """
        num_held_tokens = instance.num_prompt_blocks(state.request) * instance.block_size
        end = state.num_ranges_away * instance.max_kv_tokens + (state.held_tokens or num_held_tokens)
        return max(0, min(SPREAD_CHUNK_TOKENS, end - start))

    def _plan_chunk(self, step_slot: StepSlot, state: RequestState) -> None:
        instance, start = step_slot.instance, state.num_planned_tokens
        if step_slot.fits is not None and step_slot.fits[0] is state:
            num_tokens = step_slot.fits[1]
        else:
            num_tokens = self._num_tokens(step_slot, state, start, num_reused=state.num_reused_tokens)
        step_slot.fits = None
        if num_tokens <= 0:
            return
        step_slot.step.add(next_chunk(state, num_tokens), state.num_work_tokens)
        state.plan_chunk(instance.instance_id, instance.next_plan_id, num_tokens)
        if state.is_planned:
            instance.prefills.remove(state)
        else:
            state.rank_by(self._bundle.order)
        if len(state.chunks_in_flight) == 1 and start > state.num_reused_tokens:
            self._mesh.offer_again(state)

    # --- steps ---

    def _send(self, step_slot: StepSlot) -> bool:
        """Send the packed plan to the instance; return False if the step has no chunks."""
        instance, step = step_slot.instance, step_slot.step
        if not step.chunks:
            return False
        urgent = step_slot.urgent or all(
            self._may_interrupt(instance, self._mesh.requests[chunk.request_id]) for chunk in step.chunks
        )
        holds = not urgent and self._modes.mode_of(instance) is Mode.EXCLUSIVE
        plan = StepPlan(
            plan_id=instance.next_plan_id,
            chunks=tuple(step.chunks),
            with_decodes=not (urgent or holds or self._holds_decodes_up(step))
            and self._bundle.batching.carries_decodes(step.longest_tokens)
            and (instance.role is not Role.PREFILL or instance.allocated.num_seats_taken > 0),
            urgent=urgent,
            holds_decodes=holds,
        )
        instance.begin_plan(plan, self._now_s)
        self._modes.sent(instance, plan, self._now_s)
        self._mesh.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
        return True

    def _holds_decodes_up(self, step: PartialStep) -> bool:
        """Whether a chunk in the step waits for other members of its group: decodes beside it would wait, too."""
        states = (self._mesh.requests[chunk.request_id] for chunk in step.chunks)
        return any(self._prefill_groups.holds_decodes_up(state, self._bundle) for state in states)

    def _in_order(self, states: Sequence[RequestState]) -> list[RequestState]:
        return in_order(self._bundle.order, states, self._now_s)

    def _may_interrupt(self, instance: InstanceState, state: RequestState) -> bool:
        return self._known.may_interrupt(instance, state, self._now_s)
