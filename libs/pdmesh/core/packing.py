"""Placing requests and packing steps: late, when an instance has room for a plan, and strictly in order.

An instance's running prompts and the first in line compete for its next plan. So a more urgent request takes the step
after the ones in flight, and a prompt that it overtakes is preempted at a chunk boundary: its KV stays where it is.
Where the bundle lets it, it takes a step *before* the ones in flight (`pdmesh.core.interrupting`).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from pdmesh.core.books import Books
from pdmesh.core.commands import AdmitPrefill, PlaceDecode, RunStep
from pdmesh.core.interrupting import can_be_interrupted, may_interrupt
from pdmesh.core.placing import Placement, could_place, place
from pdmesh.core.queue import in_order
from pdmesh.core.state import HoldKind, Instance, Phase, RequestState
from pdmesh.model import ChunkPlan, InstanceId, Role, StepPlan
from pdmesh.policy.base import Bundle, Draft


class _Bench(NamedTuple):
    """An instance whose next step is being packed, and the running prompts that have not had their turn at it."""

    instance: Instance
    draft: Draft
    running: list[RequestState]
    urgent: bool = False  # it has its plans; what may interrupt them can be added


class Packer:
    """Turns room into step plans. A request is placed only when its first chunk is packed."""

    def __init__(self, books: Books, plans_in_flight: int, rng: random.Random) -> None:
        self._books = books
        self._plans_in_flight = plans_in_flight
        self._rng = rng

    def pack(self, bundle: Bundle, now_s: float) -> None:
        """Give every instance with room for a plan something to do."""
        instances = list(self._books.instances.values())
        while instances:
            benches = {
                instance.instance_id: bench
                for instance in instances
                if (bench := self._bench(bundle, instance, now_s)) is not None
            }
            if not benches:
                return
            self._place_waiting(bundle, benches, now_s)
            for bench in benches.values():
                self._plan_running(bundle, bench, in_order(bundle.order, bench.running, now_s))
            # Those that got nothing now get nothing in the next round either: room only shrinks.
            instances = [bench.instance for bench in benches.values() if self._run_step(bundle, bench)]

    def _bench(self, bundle: Bundle, instance: Instance, now_s: float) -> _Bench | None:
        """None if there is nothing that the instance could be given."""
        could_place = self._books.queue.has_line and instance.role.can_prefill
        if not instance.reachable or not (instance.prefills or could_place):
            return None
        if instance.num_regular_plans < self._plans_in_flight:
            return _Bench(instance, Draft(now_s), list(instance.prefills))
        if not can_be_interrupted(bundle, instance):
            return None
        urgent = [state for state in instance.prefills if may_interrupt(bundle, self._books, instance, state, now_s)]
        return _Bench(instance, Draft(now_s), urgent, urgent=True) if urgent or could_place else None

    def _place_waiting(self, bundle: Bundle, benches: dict[InstanceId, _Bench], now_s: float) -> None:
        """Place strictly in order: while the head cannot be placed, nobody is. Running prompts before it go first."""
        books = self._books
        while (head := books.queue.head(bundle.order, now_s)) is not None:
            offers: list[Instance] = []
            for bench in benches.values():
                if bench.running:
                    line = in_order(bundle.order, [*bench.running, head], now_s)
                    self._plan_running(bundle, bench, line[: line.index(head)])
                if bench.instance.takes_new and bench.instance.role.can_prefill and self._fits(bundle, bench, head):
                    offers.append(bench.instance)
            if not offers:
                return
            placement = place(head.request, offers, books.instances, bundle)
            if placement is not None:
                self._place(head, placement)
                self._plan_chunk(bundle, benches[placement.prefill.instance_id], head)
            elif could_place(head.request, books.instances.values()):
                return
            else:
                books.queue.park(head)

    def _plan_running(self, bundle: Bundle, bench: _Bench, line: list[RequestState]) -> None:
        for state in line:
            bench.running.remove(state)
            self._plan_chunk(bundle, bench, state)

    def _fits(self, bundle: Bundle, bench: _Bench, state: RequestState) -> bool:
        """Whether the step takes a first chunk of a waiting request; an empty one takes any."""
        if bench.urgent and not may_interrupt(bundle, self._books, bench.instance, state, bench.draft.now_s):
            return False
        return (
            not bench.draft.chunks or bundle.packing.num_tokens(bench.instance.view, bench.draft, state.request, 0) > 0
        )

    def _place(self, state: RequestState, placement: Placement) -> None:
        books, request, (prefill, decode) = self._books, state.request, placement
        stays = prefill is decode
        books.queue.remove(state)
        state.phase = Phase.PREFILLING
        state.prefill_id, state.decode_id = prefill.instance_id, decode.instance_id
        if not stays:
            state.capability = self._rng.getrandbits(64)
            num_blocks = decode.num_decode_blocks(request)
            decode.take(state.key, num_blocks, HoldKind.PROMISED)
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
        num_blocks = prefill.num_decode_blocks(request) if stays else prefill.num_prefill_blocks(request)
        prefill.take(state.key, num_blocks, HoldKind.LOCAL if stays else HoldKind.PREFILL)
        books.commands.append(
            AdmitPrefill(
                instance_id=prefill.instance_id,
                request_id=request.request_id,
                epoch=request.epoch,
                num_blocks=num_blocks,
                decode_instance_id=None if stays else decode.instance_id,
            )
        )
        prefill.add_prefill(state)

    def _plan_chunk(self, bundle: Bundle, bench: _Bench, state: RequestState) -> None:
        instance, draft = bench.instance, bench.draft
        request, start = state.request, state.num_planned_tokens
        draft.shared = len(instance.prefills) > 1 or self._books.queue.has_line
        num_tokens = bundle.packing.num_tokens(instance.view, draft, request, start)
        if num_tokens <= 0:
            return
        state.num_planned_tokens = start + num_tokens
        state.num_chunks_in_flight += 1
        if state.num_chunks_in_flight == 1 and start > 0:
            self._books.offer_again(state)
        draft.add(
            ChunkPlan(
                request_id=request.request_id,
                epoch=request.epoch,
                start=start,
                num_tokens=num_tokens,
                is_last=state.is_planned,
            ),
            request,
        )
        if state.is_planned:
            instance.prefills.remove(state)
        else:
            state.rank_by(bundle.order)

    def _run_step(self, bundle: Bundle, bench: _Bench) -> bool:
        """Send what was drafted for the instance; False if that is nothing."""
        instance, draft = bench.instance, bench.draft
        if not draft.chunks:
            return False
        urgent = bench.urgent or all(
            may_interrupt(bundle, self._books, instance, self._books.requests[chunk.request_id], draft.now_s)
            for chunk in draft.chunks
        )
        plan = StepPlan(
            plan_id=instance.next_plan_id,
            chunks=tuple(draft.chunks),
            with_decodes=not urgent and (instance.role is not Role.PREFILL or instance.num_seats_taken > 0),
            urgent=urgent,
        )
        instance.begin_plan(plan)
        self._books.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
        return True
