"""Choice of receivers for prompts whose KV cannot stay where it is computed.

Some prompts are computed ahead of room to decode (`pdmesh.policy.handover`). Others lost their receiver: it died,
refused or timed out. The computed KV stays where it is, at the rank of its first offer, and goes to the next instance
with room. Or the request decodes where it is, if that instance may decode. The prompt is computed again only if its own
instance fails, if its receivers fail too often, or if none was found in time. While such a request needs room, no
waiting request gets room to decode.

KV that waits to move is bounded on each instance, and that bound holds back new prompts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pdmesh.core.batching.step_slots import StepSlots
from pdmesh.core.copies.receivers import keep, receive
from pdmesh.core.instances.decoding import DecodingSums
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.ranking import Decoders
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.awaiting_decode import Wanted
from pdmesh.model import InstanceId, Request, Role
from pdmesh.policy.bundle import Bundle


class HandOvers:
    """Choice of receivers. A request that finds none for ``limit_s`` starts again."""

    def __init__(self, mesh: MeshState, limit_s: float) -> None:
        self._mesh = mesh
        self._limit_s = limit_s
        # KV groups where a request waits for room.
        self._closed: set[str] = set()
        # Prefill instances where a computed prompt waits for room to decode on the same instance.
        self._full: set[InstanceId] = set()

    @property
    def closed_groups(self) -> set[str]:
        """KV groups where a request found no room to decode at the last `find_receivers`: free room is kept for it."""
        return self._closed

    @property
    def next_deadline_s(self) -> float:
        """Earliest time limit of a waiting request; infinite if there is none."""
        return self._mesh.awaiting_decode.next_due_s

    def find_receivers(self, step_slots: StepSlots, bundle: Bundle, now_s: float) -> None:
        """Give free room to the requests that need it now, strictly in the order of their first offers."""
        mesh, awaiting_decode, sums = self._mesh, self._mesh.awaiting_decode, step_slots.decoders.sums
        self._closed.clear()
        self._full.clear()
        awaiting_decode.set_limits(now_s + self._limit_s)
        # Demand in each KV group of the requests that continue without room.
        before: dict[str, Wanted] = {}
        for _, state, kv_group, num_blocks in awaiting_decode.in_turn():
            if len(self._closed) == awaiting_decode.num_kv_groups:
                return
            if kv_group in self._closed:
                continue
            source = mesh.instances[state.prefill_ids[0]]
            members: Sequence[InstanceState] = ()
            if source.num_parts(state.request):
                cut = mesh.cut.of(state.request.gateway_id)
                receiver, members = step_slots.decoders.spread(source, state.request, cut)
            else:
                receiver = self._receiver(state, source, step_slots.decoders)
            wanted = before.get(kv_group, Wanted()).plus(num_blocks)
            if self._may_yet_wait(state, bundle) and not self._needs_room(
                state, source, wanted, None if receiver is not None else sums, bundle
            ):
                before[kv_group] = wanted
                continue
            if receiver is not None:
                receive(mesh, state, receiver, members)
            elif source.can_keep(state.request) or self._keeps_locally(state.request, source, sums, bundle):
                keep(mesh, state)
            else:
                if source.decodes_locally and source.could_finish(state.request):
                    self._full.add(source.instance_id)
                # Without decode instances there is no room to keep for it.
                if bundle.local_decode is None or sums.decoding(kv_group, mesh.growth.mean_tokens, state.request):
                    self._closed.add(kv_group)
                continue
            step_slots.refresh([source] if receiver is None else [source, receiver, *members])

    def _receiver(self, state: RequestState, source: InstanceState, decoders: Decoders) -> InstanceState | None:
        """Return the first receiver with room, reachable and over a fast link if possible; None if there is none."""
        mesh, request = self._mesh, state.request
        cut = mesh.cut.of(source.instance_id) | mesh.cut.of(request.gateway_id)
        if cut and any(
            each.is_usable
            and each.role_decodes
            and each.arithmetic_class == source.arithmetic_class
            and each.instance_id not in cut
            for each in mesh.instances.values()
        ):
            return decoders.first_in(source.arithmetic_class, request, mesh.depths(request), cut)
        firsts = decoders.firsts(request, mesh.depths(request))
        receiver = firsts.get(source.arithmetic_class)
        if receiver is not None and mesh.links.are_uneven:
            slow = mesh.slow_from(source, source.num_prefill_blocks(request))
            if receiver.instance_id in slow:
                return decoders.first_in(source.arithmetic_class, request, mesh.depths(request), slow) or receiver
        if receiver is None and firsts and not source.can_keep(request):
            return decoders.across(firsts, source)
        return receiver

    def expire(self, now_s: float) -> None:
        """Restart the requests that found no receiver in time."""
        for state in self._mesh.awaiting_decode.overdue(now_s):
            self._mesh.restart(state, f"no instance received its KV within {self._limit_s:g} s")

    # --- ahead of room to decode ---

    def holds_back(self, prefill: InstanceState, bundle: Bundle) -> bool:
        """Return whether more KV waits on the instance than is allowed, so that no prompt may begin there."""
        return not prefill.may_add_waiting(0, bundle.waiting_kv_share)

    def begins_ahead(
        self,
        request: Request,
        prefill: InstanceState,
        num_reused_tokens: int,
        sums: DecodingSums,
        bundle: Bundle,
        now_s: float,
    ) -> bool:
        """Whether to compute a prompt on ``prefill`` now although no instance has room to decode the request.

        True if room is predicted by the end of the prompt, or if the first token would be late after a wait for room.
        False without run-ahead, without a suitable decode instance, and if ``prefill`` also decodes or has too much
        waiting KV.
        """
        ahead = bundle.run_ahead
        if ahead is None or not self._may_wait(request, prefill, bundle):
            return False
        decoding = sums.decoding(prefill.kv_group, self._mesh.growth.mean_tokens, request)
        if decoding is None:
            return False
        wanted = self._mesh.awaiting_decode.wanted(prefill.kv_group).plus(prefill.num_first_blocks(request))
        room_s = decoding.room_s(*wanted)
        return ahead.begins(request, prefill.view, num_reused_tokens, room_s=room_s, now_s=now_s)

    def decodes_locally(self, request: Request, prefill: InstanceState, sums: DecodingSums, bundle: Bundle) -> bool:
        """Whether a prefill instance should compute and decode a prompt that no instance has room to decode.

        The request overtakes no computed prompt that will have room, there or elsewhere.
        """
        if prefill.instance_id in self._full:
            return False
        if bundle.local_decode is None or not prefill.can_decode_locally(request):
            return False
        wanted = self._mesh.awaiting_decode.wanted(prefill.kv_group)
        room_s = self._room_s(request, prefill.kv_group, wanted.plus(prefill.num_first_blocks(request)), sums)
        if wanted.num_requests and room_s < inf:
            return False
        return bundle.local_decode.pays(prefill.view, request.num_prompt_tokens, self._mesh.growth.mean_tokens, room_s)

    def _keeps_locally(self, request: Request, source: InstanceState, sums: DecodingSums, bundle: Bundle) -> bool:
        """Whether the first computed prompt that waits for room should decode on its prefill instance.

        Each waiting request then has room one place earlier. Together they save the time until the last has room. False
        without a policy of local decodes, or without room there.
        """
        if bundle.local_decode is None or source.instance_id in self._full or not source.can_keep_locally(request):
            return False
        room_s = self._room_s(request, source.kv_group, self._mesh.awaiting_decode.wanted(source.kv_group), sums)
        return bundle.local_decode.pays(source.view, request.num_prompt_tokens, self._mesh.growth.mean_tokens, room_s)

    def _room_s(self, request: Request, kv_group: str, wanted: Wanted, sums: DecodingSums) -> float:
        """Predict when all that is ``wanted`` has room on decode instances; infinite if none could take the request."""
        decoding = sums.decoding(kv_group, self._mesh.growth.mean_tokens, request)
        return inf if decoding is None else decoding.room_s(*wanted)

    def promises_later(self, request: Request, prefill: InstanceState, num_reused_tokens: int, bundle: Bundle) -> bool:
        """Whether to place a prompt without a decode instance, so that requests behind it may use the room to decode.

        True for a long prompt on a prefill instance, while others wait, if computing takes longer than moving the KV.
        False if too much KV would wait on ``prefill``.
        """
        ahead = bundle.run_ahead
        if ahead is None or not bundle.is_long(request, num_reused_tokens) or len(self._mesh.queue) < 2:
            return False
        if not self._may_wait(request, prefill, bundle):
            return False
        return not ahead.needs_room(request, prefill.view, num_reused_tokens, _kv_bytes(request, prefill), 0.0)

    def _may_wait(self, request: Request, prefill: InstanceState, bundle: Bundle) -> bool:
        return prefill.role is Role.PREFILL and prefill.may_add_waiting(
            prefill.num_prefill_blocks(request), bundle.waiting_kv_share
        )

    def _may_yet_wait(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether a request may leave room to others while its prompt is computed.

        True if the policy runs ahead (`Bundle.run_ahead`), the prompt is long and not all planned, and others wait.
        """
        is_open = bundle.run_ahead is not None and not state.is_planned
        is_long = bundle.is_long(state.request, state.num_reused_tokens)
        return is_open and is_long and bool(len(self._mesh.queue))

    def _needs_room(
        self,
        state: RequestState,
        source: InstanceState,
        wanted: Wanted,
        sums: DecodingSums | None,
        bundle: Bundle,
    ) -> bool:
        """Whether to promise a request room to decode now, because its prompt ends before room and KV can be there.

        True if computing the rest takes no longer than freeing ``wanted`` and moving the KV. ``wanted`` is the demand
        of this request and of the earlier ones. With ``sums`` None the room is free already.
        """
        ahead, request = bundle.run_ahead, state.request
        assert ahead is not None
        decoding = None if sums is None else sums.decoding(source.kv_group, self._mesh.growth.mean_tokens)
        room_s = 0.0 if decoding is None else decoding.room_s(*wanted)
        return ahead.needs_room(request, source.view, state.num_planned_tokens, _kv_bytes(request, source), room_s)


def _kv_bytes(request: Request, instance: InstanceState) -> int:
    """Return the size of a prompt's KV in bytes."""
    return request.num_prompt_tokens * instance.profile.kv_layout.token_bytes
