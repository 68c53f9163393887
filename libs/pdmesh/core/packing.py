"""Placing requests and packing steps: late, when an instance has room for a plan, and strictly in order."""

from __future__ import annotations

import random

from pdmesh.core.books import Books
from pdmesh.core.commands import AdmitPrefill, PlaceDecode, RunStep
from pdmesh.core.placing import Placement, could_place, place
from pdmesh.core.state import HoldKind, Instance, Phase, RequestState
from pdmesh.model import ChunkPlan, InstanceId, Role, StepPlan
from pdmesh.policy.base import Bundle, Draft


class Packer:
    """Turns room into step plans. A request is placed only when its first chunk is packed."""

    def __init__(self, books: Books, plans_in_flight: int, rng: random.Random) -> None:
        self._books = books
        self._plans_in_flight = plans_in_flight
        self._rng = rng

    def pack(self, bundle: Bundle) -> None:
        """Give every instance with room for a plan something to do, running prompts before waiting ones."""
        instances = list(self._books.instances.values())
        while instances:
            drafts: dict[InstanceId, Draft] = {}
            someone_waits = self._books.queue.head is not None
            for instance in instances:
                if (
                    (instance.prefills or (someone_waits and instance.role.can_prefill))
                    and instance.reachable
                    and len(instance.plans) < self._plans_in_flight
                ):
                    draft = drafts[instance.instance_id] = Draft()
                    for state in list(instance.prefills):
                        self._plan_chunk(bundle, instance, draft, state)
            self._place_waiting(bundle, drafts)
            # Those that got nothing now get nothing in the next round either: room only shrinks.
            instances = [instance for instance in instances if self._run_step(instance, drafts)]

    def _place_waiting(self, bundle: Bundle, drafts: dict[InstanceId, Draft]) -> None:
        """Place strictly in order: while the head cannot be placed, nobody is."""
        books = self._books
        while (head := books.queue.head) is not None:
            offers = [
                instance
                for instance_id, draft in drafts.items()
                if (instance := books.instances[instance_id]).takes_new
                and instance.role.can_prefill
                and bundle.packing.num_tokens(instance.view, draft, head.request, 0) > 0
            ]
            if not offers:
                return
            placement = place(head.request, offers, books.instances, bundle)
            if placement is not None:
                self._place(head, placement)
                self._plan_chunk(bundle, placement.prefill, drafts[placement.prefill.instance_id], head)
            elif could_place(head.request, books.instances.values()):
                return
            else:
                books.queue.park(head)

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

    def _plan_chunk(self, bundle: Bundle, instance: Instance, draft: Draft, state: RequestState) -> None:
        request, start = state.request, state.num_planned_tokens
        num_tokens = bundle.packing.num_tokens(instance.view, draft, request, start)
        if num_tokens <= 0:
            return
        state.num_planned_tokens = start + num_tokens
        draft.add(
            ChunkPlan(
                request_id=request.request_id,
                epoch=request.epoch,
                start=start,
                num_tokens=num_tokens,
                is_last=state.is_planned,
            )
        )
        if state.is_planned:
            instance.prefills.remove(state)

    def _run_step(self, instance: Instance, drafts: dict[InstanceId, Draft]) -> bool:
        """Send what was drafted for the instance; False if that is nothing."""
        draft = drafts.get(instance.instance_id)
        if draft is None or not draft.chunks:
            return False
        plan = StepPlan(
            plan_id=instance.next_plan_id,
            chunks=tuple(draft.chunks),
            with_decodes=instance.role is not Role.PREFILL or instance.num_seats_taken > 0,
        )
        instance.next_plan_id += 1
        instance.plans[plan.plan_id] = plan
        self._books.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
        return True
