"""Placing requests and packing steps: late, when an instance has room for a plan, and strictly in order.

An instance's running prompts and the first in line compete for its next plan. So a more urgent request takes the step
after the ones in flight, and a prompt that it overtakes is preempted at a chunk boundary: its KV stays where it is.
Where the bundle lets it, it takes a step *before* the ones in flight (`pdmesh.core.openings`).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from pdmesh.core.books import Books
from pdmesh.core.commands import AdmitPrefill, PlaceDecode, RunStep
from pdmesh.core.openings import Openings
from pdmesh.core.placing import Placement, Wait, could_place, needs_group, place, place_in_group, place_locally
from pdmesh.core.queue import in_order
from pdmesh.core.state import HoldKind, Instance, Phase, RequestState
from pdmesh.model import ChunkPlan, GroupChunk, InstanceId, Role, StepPlan
from pdmesh.policy.base import Bundle, Draft


@dataclass(slots=True, eq=False)
class _Bench:
    """An instance whose next step is being packed, and the running prompts that have not had their turn at it."""

    instance: Instance
    draft: Draft
    running: list[RequestState]
    group: GroupChunk | None = None  # in the draft
    held: bool = False  # it takes no more: a group's chunk is next here, and waits for another member
    urgent: bool = False  # it has its plans; what may interrupt them can be added


class Packer:
    """Turns room into step plans. A request is placed only when its first chunk is packed.

    A group's chunk is packed when every member has room for a plan, and goes to all of them at once: so the plans of
    two groups come in the same order to every instance, and never wait for each other in a circle. Until then the
    members that have room take nothing that comes after it.
    """

    def __init__(self, books: Books, plans_in_flight: int, rng: random.Random) -> None:
        self._books = books
        self._openings = Openings(books, plans_in_flight)
        self._rng = rng

    def pack(self, bundle: Bundle, now_s: float) -> None:
        """Give every instance with room for a plan something to do."""
        self._openings.update(bundle)
        instances, idle = self._openings.instances(), self._openings.idle()
        while instances or idle:
            benches = {
                instance.instance_id: bench
                for instance in instances
                if (bench := self._bench(instance, now_s)) is not None
            }
            self._place_waiting(bundle, benches, idle, now_s)
            for bench in benches.values():
                self._plan_running(bundle, benches, bench, in_order(bundle.order, bench.running, now_s))
            # Those that got nothing now get nothing in the next round either: room only shrinks.
            instances, idle = [bench.instance for bench in benches.values() if self._run_step(bundle, bench)], {}
            self._openings.update(bundle)

    def _bench(self, instance: Instance, now_s: float) -> _Bench | None:
        """None if there is nothing that the instance could be given."""
        could_place = self._books.queue.has_line and instance.role.can_prefill
        if not instance.reachable or not (instance.prefills or could_place):
            return None
        if self._openings.has_room(instance):
            return _Bench(instance, Draft(now_s), list(instance.prefills))
        urgent = [state for state in instance.prefills if self._openings.may_interrupt(instance, state, now_s)]
        return _Bench(instance, Draft(now_s), urgent, urgent=True) if urgent or could_place else None

    def _place_waiting(
        self, bundle: Bundle, benches: dict[InstanceId, _Bench], idle: dict[InstanceId, Instance], now_s: float
    ) -> None:
        """Place strictly in order: while there is no room for the head, nobody is placed. Running prompts before it go
        first. If the policy lets the head wait though there is room, its lane waits, and the others go past it.

        An ``idle`` instance has its bench from when it gets something.
        """
        books = self._books
        waiting_lanes: set[float] = set()
        while (head := books.queue.head(bundle.order, now_s, waiting_lanes)) is not None:
            if needs_group(head.request, books.groups, bundle):
                placement = place_in_group(head.request, books.groups, bundle)
                if placement is Wait.FOR_ROOM:
                    return
                if placement is Wait.FOR_TURN:
                    waiting_lanes |= self._waits_with(bundle, head)
                    continue
                self._place(bundle, head, placement, now_s)
                for member in placement.members:
                    if idle.pop(member.instance_id, None) is not None:
                        benches[member.instance_id] = _Bench(member, Draft(now_s), [])
                for bench in benches.values():
                    if bench.instance in placement.members:
                        bench.running.append(head)
                continue
            offers = [instance for instance in idle.values() if instance.takes_new and instance.role.can_prefill]
            for bench in benches.values():
                if bench.running:
                    line = in_order(bundle.order, [*bench.running, head], now_s)
                    self._plan_running(bundle, benches, bench, line[: line.index(head)])
                if bench.instance.takes_new and bench.instance.role.can_prefill and self._fits(bundle, bench, head):
                    offers.append(bench.instance)
            if offers:
                placement = place(head.request, offers, books.decoders, books.instances.values(), bundle)
            elif (local := place_locally(head.request, idle.values(), bundle)) is not None:
                placement = local
            elif bundle.is_long(head.request) and any(
                bench.draft.longest_prompt_tokens >= bundle.long_prompt_tokens for bench in benches.values()
            ):
                placement = Wait.FOR_TURN  # of another long one: short ones need not
            else:
                return
            if placement is Wait.FOR_TURN:
                waiting_lanes |= self._waits_with(bundle, head)
            elif placement is not Wait.FOR_ROOM:
                self._place(bundle, head, placement, now_s)
                if idle.pop(placement.prefill.instance_id, None) is not None:
                    benches[placement.prefill.instance_id] = _Bench(placement.prefill, Draft(now_s), [])
                self._plan_chunk(bundle, benches[placement.prefill.instance_id], head)
            elif could_place(head.request, books.kinds, books.groups, bundle):
                return
            else:
                books.queue.park(head)

    def _waits_with(self, bundle: Bundle, head: RequestState) -> set[float]:
        """The lanes that wait if the head waits for its turn: its own; with a long one those of all as long."""
        lanes = {head.rank.lane}
        if bundle.is_long(head.request):
            lanes |= self._books.queue.lanes_from(head.request.num_prompt_tokens)
        return lanes

    def _plan_running(
        self, bundle: Bundle, benches: dict[InstanceId, _Bench], bench: _Bench, line: list[RequestState]
    ) -> None:
        for state in line:
            if bench.held:
                return
            if state in bench.running:  # unless another member had it planned
                bench.running.remove(state)
                if state.members:
                    self._plan_group(bundle, benches, state)
                else:
                    self._plan_chunk(bundle, bench, state)

    def _fits(self, bundle: Bundle, bench: _Bench, state: RequestState) -> bool:
        """Whether the step takes a first chunk of a waiting request; an empty one takes any."""
        if bench.urgent and not self._openings.may_interrupt(bench.instance, state, bench.draft.now_s):
            return False
        return not bench.held and (
            not bench.draft.chunks or bundle.packing.num_tokens(bench.instance.view, bench.draft, state.request, 0) > 0
        )

    def _place(self, bundle: Bundle, state: RequestState, placement: Placement, now_s: float) -> None:
        books, request, (prefill, decode, members) = self._books, state.request, placement
        stays = prefill is decode
        long_tokens = request.num_prompt_tokens if bundle.is_long(request) else 0
        books.queue.remove(state)
        state.phase, state.placed_s = Phase.PREFILLING, now_s
        state.prefill_id, state.decode_id = prefill.instance_id, decode.instance_id
        state.members = tuple([member.instance_id for member in members])
        if not stays:
            state.capability = self._rng.getrandbits(64)
            num_blocks = decode.num_decode_blocks(request)
            decode.take(
                state.key, num_blocks, HoldKind.PROMISED, long_tokens=long_tokens, slo_tpot_s=request.slo_tpot_s
            )
            books.commands.append(
                PlaceDecode(
                    instance_id=decode.instance_id,
                    request_id=request.request_id,
                    epoch=request.epoch,
                    num_blocks=num_blocks,
                    prefill_instance_id=prefill.instance_id,
                    capability=state.capability,
                )
            )
        if members:
            num_blocks = prefill.num_share_blocks(request, len(members))
        else:
            num_blocks = prefill.num_decode_blocks(request) if stays else prefill.num_prefill_blocks(request)
        for instance in members or (prefill,):
            kind = HoldKind.LOCAL if stays else HoldKind.PREFILL
            instance.take(state.key, num_blocks, kind, long_tokens=long_tokens, slo_tpot_s=request.slo_tpot_s)
            books.commands.append(
                AdmitPrefill(
                    instance_id=instance.instance_id,
                    request_id=request.request_id,
                    epoch=request.epoch,
                    num_blocks=num_blocks,
                    decode_instance_id=None if stays else decode.instance_id,
                    members=state.members,
                )
            )
            instance.add_prefill(state)

    def _plan_chunk(self, bundle: Bundle, bench: _Bench, state: RequestState) -> None:
        instance, draft = bench.instance, bench.draft
        request, start = state.request, state.num_planned_tokens
        draft.shared = len(instance.prefills) > 1 or self._books.queue.has_line
        num_tokens = bundle.packing.num_tokens(instance.view, draft, request, start)
        if num_tokens <= 0:
            return
        chunk = _chunk(state, num_tokens)
        draft.add(chunk, request)
        self._planned(bundle, (instance,), state)
        if state.num_chunks_in_flight == 1 and chunk.start > 0:
            self._books.offer_again(state)

    def _plan_group(self, bundle: Bundle, benches: dict[InstanceId, _Bench], state: RequestState) -> None:
        """A chunk for all members of a group at once, behind what goes first at each; or hold those with room."""
        members = [benches[instance_id] for instance_id in state.members if instance_id in benches]
        for member in members:
            if state in member.running:
                line = in_order(bundle.order, member.running, member.draft.now_s)
                member.running.remove(state)
                self._plan_running(bundle, benches, member, line[: line.index(state)])
        num_tokens, seconds = 0, 0.0
        if len(members) == len(state.members) and not any(m.held or m.urgent or m.group for m in members):
            shared = self._books.queue.has_line or any(len(member.instance.prefills) > 1 for member in members)
            for member in members:
                member.draft.shared = shared
            num_tokens, seconds = bundle.packing.group_chunk(
                [member.instance.view for member in members],
                [member.draft for member in members],
                state.request,
                state.num_planned_tokens,
            )
        if num_tokens <= 0:
            for member in members:
                member.held = True
            return
        chunk = _chunk(state, num_tokens)
        group = GroupChunk(
            request_id=chunk.request_id, members=state.members, leader_plan_id=members[0].instance.next_plan_id
        )
        for member in members:
            member.draft.add(chunk, state.request, seconds)
            member.group = group
        self._planned(bundle, [member.instance for member in members], state)

    def _planned(self, bundle: Bundle, instances: Collection[Instance], state: RequestState) -> None:
        state.num_chunks_in_flight += len(instances)
        if state.is_planned:
            for instance in instances:
                instance.prefills.remove(state)
        else:
            state.rank_by(bundle.order)

    def _run_step(self, bundle: Bundle, bench: _Bench) -> bool:
        """Send what was drafted for the instance; False if that is nothing."""
        instance, draft = bench.instance, bench.draft
        if not draft.chunks:
            return False
        urgent = bench.urgent or all(
            self._openings.may_interrupt(instance, self._books.requests[chunk.request_id], draft.now_s)
            for chunk in draft.chunks
        )
        plan = StepPlan(
            plan_id=instance.next_plan_id,
            chunks=tuple(draft.chunks),
            with_decodes=not urgent
            and bundle.mixes(draft)
            and (instance.role is not Role.PREFILL or instance.num_seats_taken > 0),
            urgent=urgent,
            group=bench.group,
        )
        instance.begin_plan(plan)
        self._books.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
        return True


def _chunk(state: RequestState, num_tokens: int) -> ChunkPlan:
    """The next ``num_tokens`` of its prompt, planned herewith."""
    start = state.num_planned_tokens
    state.num_planned_tokens = start + num_tokens
    return ChunkPlan(
        request_id=state.request.request_id,
        epoch=state.request.epoch,
        start=start,
        num_tokens=num_tokens,
        is_last=state.is_planned,
    )
