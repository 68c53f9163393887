"""State of the whole core, and the changes that touch several of its parts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence, Set

from pdmesh.core.commands import (
    AdmitPrefill,
    ForgetRequest,
    Outcome,
    Stop,
)
from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.cut_pairs import CutPairs
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.instances.revisions import NewRequestShares
from pdmesh.core.outbox import CommandOutbox
from pdmesh.core.requests.broker import TransferBroker
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.request import RequestState
from pdmesh.core.sessions.session_state import Member
from pdmesh.core.sessions.sessions import Sessions
from pdmesh.core.waiting.awaiting_decode import AwaitingDecode
from pdmesh.core.waiting.computing import Computing
from pdmesh.core.waiting.queue import WaitingQueue
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import GatewayId, InstanceId, PrefixHashes, RejectReason, Request, RequestId, RequestKey, Then
from pdmesh.plans import KvShard
from pdmesh.policy.seams import DecodePlacement
from pdmesh.policy.views import Rank


class MeshState(CommandOutbox):
    """The instances, requests by id and by gateway, the queue, the broker, and the commands under way."""

    def __init__(
        self, rng: random.Random, growth: Growth, max_lost_receivers: int = 0, cut_memory_s: float = 0.0
    ) -> None:
        super().__init__()
        self.growth = growth
        self.sessions = Sessions(self.cache_index.leased)
        self.max_lost_receivers = max_lost_receivers
        self.requests: dict[RequestId, RequestState] = {}
        self.of_gateway: dict[GatewayId, dict[RequestId, None]] = {}
        self.computing = Computing()
        self.cut = CutPairs(cut_memory_s)
        self.shares = NewRequestShares()
        self.queue = WaitingQueue()
        self.awaiting_decode = AwaitingDecode()
        #: Requests whose group lost a helper, until the core knows what the other members computed.
        self.recovering: dict[RequestKey, RequestState] = {}
        #: Decoding requests that lack a range of their contexts.
        self.lost_ranges: dict[RequestKey, RequestState] = {}
        self.broker = TransferBroker(self._is_interrupted, self._is_computed, rng)
        #: Decoding requests with a copy of themselves, or of a range of their contexts, under way.
        self.copying: dict[RequestKey, RequestState] = {}

    def find(self, key: RequestKey) -> RequestState | None:
        state = self.requests.get(key[0])
        return state if state is not None and state.request.epoch == key[1] else None

    def pass_time(self, now_s: float) -> None:
        """Set the time of the sessions. End leases that are over, and forget old cuts and rates of links."""
        self.sessions.now_s = now_s
        self.cut.expire(now_s)
        self.links.expire(now_s)
        if ended := self.sessions.leases.expire(now_s):
            for instance in self.instances.values():
                instance.kept.end_leases(ended)

    # --- beginnings ---

    def open(
        self, request: Request, rank: Rank, work_us: int = 0, num_reused_tokens: int = 0, *, is_adopted: bool = False
    ) -> RequestState:
        """Add a request. ``num_reused_tokens`` of its prompt are cached on some instance, or it runs on one already."""
        session = None
        if request.session is not None:
            session = self.sessions.begin(request, num_reused_tokens, is_adopted=is_adopted)
        state = RequestState(request, rank, work_us, num_reused_tokens=num_reused_tokens, session=session)
        self.requests[request.request_id] = state
        self.of_gateway.setdefault(request.gateway_id, {})[request.request_id] = None
        return state

    def adopt(self, state: RequestState, instance_id: InstanceId) -> None:
        """Take over a request that an instance already decodes."""
        if state.key in self.queue:
            self.come_back(state)
            self.queue.remove(state)
        instance = self.instances[instance_id]
        state.use_weights(instance.weights)
        allocation = instance.allocations[state.key]
        allocation.tenant, allocation.share = state.request.tenant, state.request.share
        instance.kept.claim(allocation.granules, state.request.tenant, state.request.share)
        size = instance.part_blocks
        parts = [
            self.instances[member.instance_id].shard(size, number * size)
            for number, member in enumerate(allocation.last_sent_members)
        ]
        shard = instance.shard(allocation.num_blocks, len(parts) * size)
        state.adopt(shard, tuple(parts), allocation.last_sent_members)
        if parts:
            # A report that a holder is lost may not have arrived: let the instance ask the holders again.
            self.set_places(instance_id, state.key, allocation.last_sent_members)
        allocation.last_sent_members = ()

    # --- turns aside ---

    def set_aside(self, state: RequestState, member: Member) -> None:
        """Let a waiting turn wait until its whole session has room. Its wait began at its arrival at any scheduler."""
        since_s = min(self.sessions.now_s, state.request.arrival_s)
        self.queue.set_aside(state, since_s)
        self.sessions.working_set.set_aside(member, since_s)

    def come_back(self, state: RequestState) -> None:
        """Put a turn into its line if it was set aside."""
        if state.key in self.queue.turns_aside:
            waited_s = self.sessions.now_s - self.queue.come_back(state)
            if state.session is not None and state.session.member is not None:
                self.sessions.working_set.come_back(state.session.member, waited_s)

    # --- placement ---

    def place(
        self,
        state: RequestState,
        prefill: InstanceState,
        decode: InstanceState | None,
        *,
        members: Sequence[InstanceState] = (),
        long_tokens: int,
        now_s: float,
        num_loaded: int = 0,
    ) -> None:
        """Place a waiting request: reserve room on ``prefill``, which computes its prompt, and on ``decode``.

        If both are one instance, the request stays there. Without ``decode``, it gets that room later. ``long_tokens``
        are the prompt's tokens if it is long, else 0. Behind the cached granules, ``num_loaded`` granules are loaded
        from the tier. ``members`` hold the first ranges of a spread context.
        """
        request, (request_id, epoch) = state.use_weights(prefill.weights), state.key
        self.queue.remove(state)
        if not request.weights:
            self.shares.placed(prefill.weights)
        stays, awaits_receiver = decode is prefill, decode is None
        num_blocks = prefill.num_first_blocks(request) if stays else prefill.num_prefill_blocks(request)
        num_held_blocks, streams_out = num_blocks, prefill.streams_out(request)
        num_cached = prefill.num_reusable_granules(request)
        if streams_out:
            assert len(members) == prefill.num_parts(request), f"{state.key} cannot leave {prefill.instance_id}"
            num_held_blocks, num_loaded = prefill.num_prompt_blocks(request), 0
        num_reused = num_cached + num_loaded
        self.queue.counters.placed(request, num_reused * GRANULE_TOKENS)
        state.place(
            prefill.shard(num_blocks),
            now_s,
            stays=stays,
            num_reused_tokens=num_reused * GRANULE_TOKENS,
            held_tokens=num_held_blocks * prefill.block_size if streams_out else None,
        )
        plan = None
        if decode is None:
            self.awaiting_decode.add(state, prefill.kv_group, prefill.num_first_blocks(request))
        elif not stays:
            plan = self.promise(state, decode, long_tokens, members).plan
        prefill.take(
            state.key,
            Allocation(
                AllocationKind.LOCAL if stays else AllocationKind.LEAVING,
                num_held_blocks,
                max_blocks=prefill.num_decode_blocks(request) if stays else 0,
                long_tokens=long_tokens,
                slo_tpot_s=request.slo_tpot_s,
                tenant=request.tenant,
                share=request.share,
            ),
            () if streams_out else request.chain,
            num_cached,
        )
        prefill.defer(state.key, awaits_receiver)
        states = self._ask_for_states(state, prefill)
        self.commands.append(
            AdmitPrefill(
                instance_id=prefill.instance_id,
                request_id=request_id,
                epoch=epoch,
                shards=state.prefill_shards,
                transfer=plan,
                awaits_receiver=awaits_receiver,
                num_reused_granules=num_reused,
                num_loaded_granules=num_loaded,
                room=prefill.make_room(),
                num_blocks_at_once=num_held_blocks if streams_out else 0,
                states=states,
            )
        )
        prefill.add_prefill(state)
        # None of the prompt is cached if its ranges are freed.
        if not streams_out:
            self.computing.begin(state)

    def _ask_for_states(self, state: RequestState, prefill: InstanceState) -> tuple[int, ...]:
        """Choose the states that a prompt computes, by where its KV ends on the instances that have some."""
        if prefill.kept.states is None:
            return ()
        num_seen = max(self.depths(state.request).values(), default=0)
        return prefill.kept.ask_for_states(prefill.allocations[state.key].granules, num_seen)

    def promise(
        self, state: RequestState, decode: InstanceState, long_tokens: int, members: Sequence[InstanceState] = ()
    ) -> Copy:
        """Reserve room on ``decode`` for a request whose prompt is computed elsewhere, and return the copy of its KV.

        ``members`` get room for the first ranges of its context. In this case no cached granules are reused.
        """
        request, size = state.request, decode.part_blocks
        shard = decode.shard(decode.num_first_blocks(request), len(members) * size)
        parts = tuple([member.shard(size, number * size) for number, member in enumerate(members)])
        chain = () if members else request.chain
        num_reused = decode.num_received_granules(request) if chain else 0
        copy = self.broker.open(
            state.key,
            state.prefill_shards,
            (shard, *parts),
            rank=state.rank_of_offer,
            num_reused_granules=num_reused,
        )
        state.receive(copy)
        decode.take(
            state.key,
            Allocation(
                AllocationKind.PROMISED,
                shard.num_blocks,
                max_blocks=decode.num_decode_blocks(request),
                long_tokens=long_tokens,
                slo_tpot_s=request.slo_tpot_s,
                transfer_id=copy.plan.transfer_id,
                tenant=request.tenant,
                share=request.share,
                num_remote_tokens=len(members) * decode.max_kv_tokens,
            ),
            chain,
            num_reused,
        )
        for member in members:
            member.take(state.key, Allocation(AllocationKind.PART, size, transfer_id=copy.plan.transfer_id))
        for receiver in (decode, *members):
            self.expect_kv(receiver, copy)
        return copy

    # --- handing over ---

    def offer(self, state: RequestState) -> None:
        """Offer the KV that the request's first chunk computes: to its receiver, or for a later one."""
        if state.incoming is not None:
            self.grant(self.broker.offer(state.incoming))
        elif state.rank_of_offer is None:
            state.offer(self.broker.new_rank())
            self.awaiting_decode.offered(state.key)

    def computed(self, state: RequestState) -> None:
        """End the prompt, whose KV is to move on, and free its helpers."""
        self._free_helpers(state)
        self.computing.end(state)
        state.end_prompt()
        self.awaiting_decode.is_ready(state.key)
        self.instances[state.prefill_ids[0]].defer(state.key, True)

    def withdraw(self, copy: Copy, *, told_by: InstanceId | None = None) -> None:
        """Let the KV of a copy stay at its sources, and free the room at its destinations.

        The source ``told_by`` reported the end itself.
        """
        self.broker.withdraw(copy)
        self.stop(copy, Stop.WITHDRAW, told_by=told_by)
        for destination_id in copy.destination_ids:
            self.free(destination_id, copy.key)

    def offer_again(self, state: RequestState) -> None:
        """Offer the copy of a preempted request that continues."""
        if state.incoming is not None:
            self.grant(self.broker.offer_again(state.incoming))

    def take_back_backends(self) -> None:
        """Grant copies whose turn has come, and ask preempted requests' sources for backends that others wait for."""
        self.grant(self.broker.unblock())
        for copy in self.broker.take_back():
            self.stop(copy, Stop.PAUSE)

    def _is_interrupted(self, key: RequestKey) -> bool:
        state = self.find(key)
        return state is not None and state.is_interrupted

    def _is_computed(self, key: RequestKey) -> bool:
        state = self.find(key)
        return state is not None and state.is_computed

    def land(self, state: RequestState) -> None:
        """Begin to decode the request, whose whole KV has landed; free its helpers."""
        self._free_helpers(state)
        self.computing.end(state)
        if not state.decodes:
            state.land()
        for instance_id in state.decode_ids:
            self.instances[instance_id].settle(state.key)
            if state.incoming is not None:
                self.grant(self.broker.land(state.incoming, instance_id))

    def _free_helpers(self, state: RequestState) -> None:
        """Free the helpers of a computed prompt."""
        self.recovering.pop(state.key, None)
        for helper_id in state.asked_ids:
            self.free(helper_id, state.key)

    # --- copies while decoding ---

    def begin_copy(
        self,
        state: RequestState,
        source: KvShard,
        target: KvShard,
        *,
        then: Then,
        computes: bool = False,
        num_reused_granules: int = 0,
        chain: PrefixHashes = (),
    ) -> Copy:
        """Begin to copy a decoding request, or a range of its context (`Then.HOLD`), to another instance."""
        copy = self.broker.open(
            state.key,
            (source,),
            (target,),
            then=then,
            decoding=then is Then.DECODE,
            computes=computes,
            num_reused_granules=num_reused_granules,
            chain=chain,
        )
        state.begin_copy(copy)
        self.copying[state.key] = state
        return copy

    def end_copy(self, state: RequestState, *, failed: bool = False) -> None:
        """End the copy of a decoding request, if there is one, without effect."""
        if state.outgoing is not None:
            del self.copying[state.key]
            self.broker.withdraw(state.outgoing)
            state.end_copy(failed=failed)

    def copies_of(self, instance_id: InstanceId) -> list[tuple[RequestState, Copy]]:
        """Return the decoding requests with a copy from or to an instance, with that copy."""
        outgoing = [(state, state.outgoing) for state in self.copying.values()]
        return [
            (state, copy)
            for state, copy in outgoing
            if copy is not None and instance_id in (copy.source_id, copy.target_id)
        ]

    def nearest(
        self,
        source: InstanceState,
        num_blocks: int,
        able: Sequence[InstanceState],
        cut: Set[str],
        placement: DecodePlacement,
    ) -> InstanceState | None:
        """Return the best target for KV of ``source``: not ``cut`` off, over a fast link, then by ``placement``.

        None only if ``able`` is empty: a target that is cut off is better than none.
        """
        slow = self.slow_from(source, num_blocks, [each.instance_id for each in able])
        return min(
            able,
            default=None,
            key=lambda each: (
                each.instance_id in cut,
                each.instance_id in slow,
                placement.key(each.view),
                each.instance_id,
            ),
        )

    def land_move(self, state: RequestState) -> None:
        """Let a moved request decode at its target; restart it if the target was told to free it, or is gone."""
        move = state.move
        assert move is not None, f"{state.key} lands without a move"
        if move.given_up or state.key not in self.instances[move.target_id].allocations:
            self.restart(state, f"instance {move.target_id}, to which it had moved, lost it")
            return
        del self.copying[state.key]
        target = self.instances[move.target_id]
        if (source := self.instances.get(move.source_id)) is not None:
            if (before := source.allocations.get(state.key)) is not None:
                target.allocations[state.key].num_tokens = before.num_tokens
            source.leave(state.key)
        state.land_move()
        target.settle(state.key)

    def drop_plans(self, instance: InstanceState) -> None:
        """End the chunks in flight on an instance that was lost or restarted, because no report will follow."""
        for plan in instance.plans.values():
            for chunk in plan.chunks:
                if state := self.find((chunk.request_id, chunk.epoch)):
                    state.end_chunk(instance.instance_id, plan.plan_id)
                    self.note_interruption(state)

    def note_interruption(self, state: RequestState) -> None:
        """Offer the backends of a request without chunks in flight to others that wait for them."""
        if state.is_interrupted and state.incoming is not None:
            self.broker.interrupted(state.incoming)

    # --- ends ---

    def end(
        self,
        state: RequestState,
        outcome: Outcome,
        *,
        num_output_tokens: int | None = None,
        spare: Iterable[InstanceId] = (),
    ) -> None:
        """End a request: remove it from every table and free its KV, except on ``spare``, which free it unasked.

        Every request ends here. ``num_output_tokens`` counts all its epochs, if known. A request that starts again is
        charged for its tokens when it ends.
        """
        request_id, epoch = key = state.key
        del self.requests[request_id]
        self.come_back(state)
        if state.session is not None:
            self.sessions.end(state.session, state.request, _num_reused_tokens(state, outcome))
        self.of_gateway[state.request.gateway_id].pop(request_id, None)
        if key in self.queue:
            self.queue.remove(state)
        self.awaiting_decode.discard(key)
        self.recovering.pop(key, None)
        self.computing.end(state)
        if state.is_in_prefill or state.chunks_in_flight:
            for instance_id in state.prefill_ids:
                if instance_id in self.instances:
                    self.instances[instance_id].drop_prefill(state)
        if state.incoming is not None:
            self.broker.withdraw(state.incoming)
        held_by = state.prefill_ids + state.decode_ids + state.asked_ids
        if state.outgoing is not None:
            held_by += (state.outgoing.target_id,)
            self.end_copy(state)
        for instance_id in dict.fromkeys(held_by):
            if instance_id not in spare:
                self.free(instance_id, key)
        self.queue.counters.ended(state.request, 0 if outcome.goes_on else num_output_tokens)
        gateway_id = state.request.gateway_id
        self.commands.append(
            ForgetRequest(
                gateway_id=gateway_id, request_id=request_id, epoch=epoch, outcome=outcome, drawn_by=state.decode_id
            )
        )

    def reject(
        self,
        state: RequestState,
        reason: RejectReason,
        message: str,
        retry_after_s: float | None,
        *,
        reject_ttl_s: float = 0.0,
    ) -> None:
        self.refuse(state.request, message, retry_after_s, reason, reject_ttl_s)
        self.end(state, Outcome.REJECTED)

    def restart(self, state: RequestState, reason: str, *, retracted: bool = False, blame: float = 0.0) -> None:
        """Let the gateway resume the request, with ``blame`` if the request may be the cause (`Restart.blame`)."""
        gateway_id = state.request.gateway_id
        self.ask_to_resume(gateway_id, state.key, reason, retracted=retracted, blame=blame)
        self.end(state, Outcome.RETRACTED if retracted else Outcome.RESTARTED)


def _num_reused_tokens(state: RequestState, outcome: Outcome) -> int | None:
    """Return how many prompt tokens of an answered request were not computed; None if it was not answered.

    A request that is cancelled while it decodes may be complete: its gateway found a stop string.
    """
    is_answered = outcome is Outcome.FINISHED or (outcome is Outcome.CANCELLED and state.decodes)
    return state.num_reused_tokens if is_answered else None
