"""Blocks and seats that requests hold on an instance, and the room beside them.

The numbers follow the core's own commands. Blocks are taken at AdmitPrefill or ExpectCopy and freed only at KvReleased,
so the core never promises blocks that a worker has not yet freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.instances.allocations import READ_BY_STEPS, Allocation, AllocationKind, AllocationSums
from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.instance_capacity import InstanceCapacity
from pdmesh.core.instances.kv_growth import Growth, GrowthSums
from pdmesh.core.instances.prefix_cache import NO_LINES, NOTHING, Lines, PrefixCache
from pdmesh.core.instances.recent_prefixes import RecentPrefixes
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange, KvPart, num_blocks_for
from pdmesh.model import NO_TRANSFER, InstanceId, InstanceProfile, PrefixHash, Request, RequestKey, Role, TransferId
from pdmesh.plans import Evictions, KvShard
from pdmesh.policy.on_demand import Room


class InstanceLoad(InstanceCapacity):
    """An instance with the allocations of its requests, its cache, and its willingness to take new requests.

    ``draining``: the worker is leaving. ``closed``: an operator lets no new request in. ``shut``: not even requests
    that its weights began. ``num_flights`` counts changes of the plans in flight, of their requests, and of the
    decodes. ``low``: requests that asked for more blocks than there were. ``num_quarantined_blocks``: reported blocks
    that the worker cannot use either. ``recent``: chains of ended requests, whether still cached or not.
    """

    def __init__(
        self,
        profile: InstanceProfile,
        growth: Growth,
        *,
        changed: dict[InstanceId, None],
        cache_index: CacheIndex,
        number: int,
        draining: bool,
    ) -> None:
        """``changed`` takes note of every change; ``number`` is the instance's place in the index ``cache_index``."""
        super().__init__(profile, growth)
        layout = profile.kv_layout
        self._layers, self._heads = IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads)
        self._granule_bytes = GRANULE_TOKENS * layout.token_bytes
        self.number = number
        self.draining = draining
        self.closed = False
        self.shut = False
        self.reachable = True
        self.suspected = False
        self.num_flights = 0
        self.allocations: dict[RequestKey, Allocation] = {}
        self.low: dict[RequestKey, None] = {}
        self.allocated = AllocationSums()
        self._growing = GrowthSums()
        self.kept = PrefixCache(
            cache_index, number, self.block_size, profile.num_offload_granules, profile.num_cached_states
        )
        self.recent = RecentPrefixes(self.num_blocks // max(1, self.kept.granule_blocks))
        self.num_quarantined_blocks = 0
        self._room: Room | None = None
        #: Tokens of the largest request that could decode here, and of the largest prompt. Valid if `_knows_room`.
        self._decode_tokens = self._prompt_tokens = 0
        self._knows_room = False
        self._changed = changed

    def _change(self) -> None:
        self._knows_room = False
        self._changed[self.instance_id] = None

    # --- allocations ---

    def take(
        self, key: RequestKey, allocation: Allocation, chain: Sequence[PrefixHash] = (), num_reused: int = 0
    ) -> None:
        """Record the allocation of a request.

        ``chain`` are the granules of the request's prompt. The first ``num_reused`` are cached, and their blocks are
        shared.
        """
        if num_reused:
            # The request will leave a longer chain.
            self.recent.forget(chain[num_reused - 1])
        if self.kept.states is not None:
            self.kept.make_way(chain, num_reused, allocation.num_blocks, self.num_free_blocks)
        allocation.granules = self.kept.begin(chain, num_reused, allocation.tenant, allocation.share)
        self.allocations[key] = allocation
        self._count(allocation, 1)

    def grow(self, key: RequestKey, num_blocks: int) -> None:
        """Set the total number of blocks that a request holds."""
        allocation = self.allocations[key]
        self._count(allocation, -1)
        allocation.num_blocks = num_blocks
        self._count(allocation, 1)

    def hand_on(self, key: RequestKey, max_blocks: int) -> None:
        """Move the first range of a resident's context here to another instance.

        The cached granules of the prompt are in that range, so the request no longer uses them. ``max_blocks`` is the
        new upper limit of the request's blocks.
        """
        allocation = self.allocations[key]
        self._count(allocation, -1)
        self.kept.end(allocation.granules)
        allocation.granules = NOTHING
        allocation.num_blocks -= self.part_blocks
        allocation.max_blocks = max(allocation.num_blocks, max_blocks)
        allocation.num_remote_tokens += self.max_kv_tokens
        self._count(allocation, 1)

    def keep(self, key: RequestKey, num_blocks: int, max_blocks: int) -> None:
        """Let KV that should have moved away stay, with room for the output and a seat."""
        self.defer(key, False)
        allocation = self.allocations[key]
        self._count(allocation, -1)
        allocation.kind, allocation.num_blocks, allocation.max_blocks = (
            AllocationKind.LOCAL,
            num_blocks,
            max(num_blocks, max_blocks),
        )
        self._count(allocation, 1)

    def defer(self, key: RequestKey, waits: bool) -> None:
        """Mark (or unmark) an allocation as waiting for its receiver. Only leaving allocations can wait."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.kind is AllocationKind.LEAVING and allocation.waits != waits:
            self.allocated.defer(allocation, waits)
            self._change()

    def settle(self, key: RequestKey) -> None:
        """Make a promised or local allocation a resident: its KV is complete."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.kind in (AllocationKind.PROMISED, AllocationKind.LOCAL):
            self._count(allocation, -1)
            allocation.kind = AllocationKind.RESIDENT
            self._count(allocation, 1)

    def leave(self, key: RequestKey) -> None:
        """Make a resident leave: the request decodes elsewhere now, and its blocks here are freed soon."""
        allocation = self.allocations.get(key)
        self.low.pop(key, None)
        if allocation is not None and allocation.kind is AllocationKind.RESIDENT:
            self._count(allocation, -1)
            allocation.kind, allocation.long_tokens = AllocationKind.LEAVING, 0
            self._count(allocation, 1)

    def give_back(
        self,
        key: RequestKey,
        transfer_id: TransferId = NO_TRANSFER,
        drawn: Sequence[PrefixHash] = (),
        num_known: int = 0,
        states: Sequence[PrefixHash] = (),
    ) -> Allocation | None:
        """Remove and return the allocation of a request, or return None if it has none for this transfer.

        ``drawn`` are granules behind the chain, with output, that stay cached in any case. The first ``num_known`` of
        them were cached before. ``states`` are granules whose states the instance cached at the end.
        """
        allocation = self.allocations.get(key)
        if drawn:
            tenant = None if allocation is None else allocation.tenant
            self.kept.drew(drawn, num_known, tenant, 1 if allocation is None else allocation.share)
        if allocation is None or allocation.transfer_id != transfer_id:
            self.kept.end(NOTHING, states)
        if allocation is not None and allocation.transfer_id != transfer_id:
            return None
        self.defer(key, False)
        self.allocations.pop(key, None)
        self.low.pop(key, None)
        if allocation is not None:
            self.kept.end(allocation.granules, states)
            self._count(allocation, -1)
            # Without a chain, the beginning of the prefix is unknown.
            if allocation.granules.chain:
                self.recent.add((*allocation.granules.computed, *drawn))
        return allocation

    def num_freed_blocks(self, allocation: Allocation) -> int:
        """Return how many blocks become free with the allocation: all blocks that no other request shares."""
        return allocation.num_blocks - self.kept.num_shared_blocks(allocation.granules)

    # --- the cache ---

    def num_cached_granules(self, request: Request) -> int:
        """Return how many granules of a request's prompt are cached here; 0 for a prompt that is streamed out."""
        if not request.prefix or self.kept.is_empty or self.streams_out(request):
            return 0
        chain = request.chain
        return self.kept.depth(chain, len(chain))

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` of a request's prompt are computed here, or have landed."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.granules.chain:
            self.kept.computed(allocation.granules, num_tokens // GRANULE_TOKENS)

    def load_s(self, num_granules: int) -> float:
        """Return the predicted time to load ``num_granules`` from the tier."""
        return num_granules * self._granule_bytes / self.profile.load_bytes_per_s

    def num_short_granules(self, num_granules: int) -> int:
        """Return how many idle granules must go for ``num_granules`` more; not above 0 if there is unused room."""
        kept = self.kept
        num_blocks = num_granules * kept.granule_blocks - self.num_free_blocks + kept.num_idle_blocks
        return num_blocks_for(num_blocks, kept.granule_blocks)

    def has_room_for_copy(self, chain: Sequence[PrefixHash], num_there: int, last_use: int) -> bool:
        """Whether a copy of a prefix, except the first granules, fits into room that was unused since ``last_use``."""
        kept, num_granules = self.kept, len(chain) - num_there
        if num_granules * kept.granule_blocks + kept.num_idle_blocks_of(chain[:num_there]) > int(max(self.room)):
            return False
        num_short = self.num_short_granules(num_granules)
        return num_short <= 0 or kept.num_older(last_use, num_short) == num_short

    def make_room(self) -> Evictions:
        """Evict as many idle granules as the allocated blocks need, and return them for the next command."""
        kept = self.kept
        num_short = kept.num_idle_blocks - self.num_free_blocks if kept.num_idle_blocks else 0
        return kept.make_room(num_blocks_for(num_short, kept.granule_blocks) if num_short > 0 else 0)

    def replace_kept(
        self,
        granules: Sequence[PrefixHash],
        offloaded: Sequence[PrefixHash] | None = None,
        states: Sequence[PrefixHash] = (),
        lines: Lines = NO_LINES,
    ) -> None:
        """Replace the recorded cache and states by the report; also the recorded tier, unless ``offloaded`` is None."""
        self.kept.replace(granules, [each.granules for each in self.allocations.values()], offloaded, states, lines)
        self._room = None
        self._change()

    def _count(self, allocation: Allocation, sign: int) -> None:
        if self._growth.on_demand:
            if sign > 0:
                allocation.is_open = (
                    allocation.max_blocks - allocation.num_blocks
                ) * self.block_size > self._growth.mean_tokens
            self._growing.count(allocation.num_blocks, allocation.max_blocks, is_open=allocation.is_open, sign=sign)
            self._room = None
        self.allocated.count(allocation, sign)
        if allocation.kind in READ_BY_STEPS:
            self.num_flights += 1
        self._change()

    def shard(self, num_blocks: int, first_block: int = 0) -> KvShard:
        """Return the shard with ``num_blocks`` blocks of a request from ``first_block`` on, in all layers and heads."""
        part = KvPart(IndexRange(first_block, first_block + num_blocks), self._layers, self._heads)
        return KvShard(instance_id=self.instance_id, part=part)

    # --- room ---

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks, including idle cached ones. Negative if more are taken or quarantined than exist."""
        return self.num_blocks - self.num_taken_blocks - self.num_quarantined_blocks

    @property
    def num_taken_blocks(self) -> int:
        """Number of blocks that requests hold; shared blocks count once."""
        return self.allocated.num_taken_blocks - self.kept.num_saved_blocks

    def _count_room(self) -> None:
        """Count the room for one more request. Called on demand after a change."""
        self._knows_room = True
        self._decode_tokens = self._prompt_tokens = 0
        room = int(max(self.room)) * self.block_size
        if room > 0 and self.takes_new:
            if self.takes_decodes:
                longest = self.max_model_len - 1
                self._decode_tokens = room if room < longest else longest
            if self.role_prefills:
                self._prompt_tokens = room

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the largest request that could decode here now; 0 if it takes none."""
        if not self._knows_room:
            self._count_room()
        return self._decode_tokens

    @property
    def takes_decodes(self) -> bool:
        """Whether one more decode may come here, as far as role, state and seats decide. Memory is not considered."""
        return self.takes_new and self.role_decodes and self.has_seat

    @property
    def has_seat(self) -> bool:
        """Whether a seat is free."""
        return self.allocated.num_seats_taken < self.max_num_seqs

    @property
    def room(self) -> Room:
        """Blocks for one more request. On demand, the growth of the residents is counted, at the accepted risk.

        An instance without allocations offers all free blocks.
        """
        free = max(0, self.num_free_blocks)
        if not self._growth.on_demand or not self.allocations:
            return Room(free, free)
        if self._room is None:
            num_blocks = self.num_blocks - self.num_quarantined_blocks + self.kept.num_saved_blocks
            safe = self._growing.room(num_blocks, self.block_size, self._growth)
            self._room = Room(max(0, min(free, safe.open)), max(0, min(free, safe.bounded)))
        return self._room

    def can_stay(self, request: Request) -> bool:
        """Whether the instance `can_decode` the request, and its context needs no other shard holders."""
        return not self.num_parts(request) and self.can_decode(request)

    def can_decode(self, request: Request) -> bool:
        """Whether the request fits now, with a seat: its whole context, or on demand the tokens it is admitted with.

        Of a spread context only the last range and the output must fit. False if the request is here already, or if
        other weights began its answer.
        """
        if (request.request_id, request.epoch) in self.allocations or not self.may_serve(request):
            return False
        if not self._growth.on_demand:
            num_elsewhere = self.num_parts(request) * self.max_kv_tokens
            return request.max_total_tokens - num_elsewhere <= self.num_decode_tokens
        return self.num_decode_tokens > 0 and self.could_decode(request) and self._has_room_for(request)

    def _has_room_for(self, request: Request, num_held_blocks: int = 0) -> bool:
        wanted, is_open = self.wanted_blocks(request)
        return wanted - num_held_blocks <= (self.room.open if is_open else self.room.bounded)

    def can_keep(self, request: Request) -> bool:
        """Whether the request, whose computed prompt should move away from here, can decode here instead."""
        return self.role_decodes and self._has_room_to_keep(request)

    def can_keep_locally(self, request: Request) -> bool:
        """Whether a prefill instance that decodes locally can decode the request, whose prompt should move away."""
        return self.decodes_locally and self._has_room_to_keep(request)

    def _has_room_to_keep(self, request: Request) -> bool:
        allocation = self.allocations.get((request.request_id, request.epoch))
        if allocation is None or allocation.freeing or not (self.takes_new and self.has_seat):
            return False
        if self.num_parts(request) or not self.could_finish(request):
            return False
        if not self._growth.on_demand:
            return self.num_decode_blocks(request) - allocation.num_blocks <= self.num_free_blocks
        return self._has_room_for(request, allocation.num_blocks)

    def can_finish(self, request: Request) -> bool:
        """Whether a request that these weights began can be computed and decoded here now, without other instances.

        No other instance may be left. So the prefill role is ignored, and an instance that an operator empties counts
        until the operation's time is up.
        """
        return self.is_open_to_begun and not self.suspected and self._has_room_to_finish(request)

    def can_decode_locally(self, request: Request) -> bool:
        """Whether a prefill instance that also decodes takes new requests, and has room to finish this one."""
        return self.decodes_locally and self.takes_new and self._has_room_to_finish(request)

    def _has_room_to_finish(self, request: Request) -> bool:
        return (
            self.has_seat
            and not self.num_parts(request)
            and (request.request_id, request.epoch) not in self.allocations
            and self.could_finish(request)
            and (self._has_room_for(request) if self._growth.on_demand else self._has_room_for_all(request))
        )

    def _has_room_for_all(self, request: Request) -> bool:
        return self.num_decode_blocks(request) <= self.num_free_blocks

    def can_take_over(self, key: RequestKey, num_blocks: int, max_blocks: int, spare_blocks: int | None = None) -> bool:
        """Whether a request that decodes elsewhere fits now, with ``num_blocks`` of the ``max_blocks`` it may need.

        With ``spare_blocks``, that number must remain free, and the growth of the residents is not considered. With
        None the rules of a new request hold.
        """
        if key in self.allocations or not self.takes_decodes or max_blocks > self.num_blocks:
            return False
        if spare_blocks is not None:
            return num_blocks + spare_blocks <= self.num_free_blocks
        is_open = self._growth.on_demand and (max_blocks - num_blocks) * self.block_size > self._growth.mean_tokens
        return num_blocks <= self.room.open if is_open else max_blocks <= self.room.bounded

    def may_add_waiting(self, num_blocks: int, share: float) -> bool:
        """Whether a prompt may begin whose ``num_blocks`` will wait for a receiver, if at most ``share`` of all may.

        A prompt of any size may if no block waits yet. A prompt with promised room has 0 waiting blocks.
        """
        waiting = self.allocated.num_waiting_blocks
        return not waiting or waiting + num_blocks <= share * self.num_blocks

    def can_prefill(self, request: Request) -> bool:
        """Whether the prompt may be placed here now: by role, state, weights, length and room.

        Of a prompt that streams out, only the ranges held at once must fit. False if the request is here already.
        """
        if not self._knows_room:
            self._count_room()
        return (
            self.num_prompt_blocks(request) * self.block_size <= self._prompt_tokens
            and request.max_total_tokens < self.max_model_len
            and self.may_serve(request)
            and (request.request_id, request.epoch) not in self.allocations
        )

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts may be placed here by role and state."""
        return self.takes_new and self.role_prefills

    @property
    def has_long(self) -> bool:
        """Whether the instance computes a long prompt, still has its KV, or decodes a long request."""
        return self.allocated.num_long_decoding > 0 or bool(self.allocated.long_prefill_tokens)

    @property
    def longest_prefill_tokens(self) -> int:
        """Tokens of the longest long prompt that is computed here, or whose KV has not moved away; 0 without one."""
        return max(self.allocated.long_prefill_tokens, default=0)

    @property
    def is_usable(self) -> bool:
        """Whether requests may wait for this instance."""
        return self.reachable and not self.draining and not self.closed

    @property
    def is_open_to_begun(self) -> bool:
        """Whether requests that its weights began may wait for this instance, until an operation's time is up."""
        return self.reachable and not self.draining and not self.shut

    @property
    def sends_cached(self) -> bool:
        """Whether other instances may copy cached prefixes from here, also while an operator empties the instance."""
        return self.reachable and not self.suspected and not self.draining

    @property
    def takes_new(self) -> bool:
        """Whether new requests may come here now."""
        return self.is_usable and not self.suspected

    # --- states that decide whether requests come here ---

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._change()

    def set_closed(self, closed: bool, *, shut: bool = False) -> None:
        """Close (or open) the instance to new requests; if ``shut``, also to requests that its weights began."""
        self.closed, self.shut = closed, shut
        self._change()

    def set_reachable(self, reachable: bool) -> None:
        self.reachable = reachable
        self._change()

    def set_suspected(self, suspected: bool) -> None:
        self.suspected = suspected
        self._change()

    def set_quarantined(self, num_blocks: int) -> None:
        self.num_quarantined_blocks = num_blocks
        self._room = None
        self._change()

    def hear_of_growth(self) -> None:
        """Recount the room after a change of the mean growth of requests."""
        self._room = None
        self._change()

    def set_role(self, role: Role) -> None:
        self._take_role(role)
        self._change()

    def set_local_work(self, *, prefills: bool, decodes: bool) -> None:
        """Set whether a decode instance may prefill, and a prefill instance decode, requests that stay there."""
        self.prefills_locally, self.decodes_locally = prefills, decodes
        self._change()

    def check_occupied(self) -> None:
        """Check blocks, seats, growth sums and cache; AssertionError names the numbers that do not balance."""
        name = self.instance_id
        allocated, taken = AllocationSums.of(self.allocations.values()), self.num_taken_blocks
        assert allocated == self.allocated, f"{name}: the allocations hold {allocated}, recorded: {self.allocated}"
        num_lost = self.kept.granule_blocks * sum([each.granules.num_lost for each in self.allocations.values()])
        assert taken - num_lost <= self.num_blocks, f"{name}: {taken} of {self.num_blocks} blocks promised"
        self.kept.check_integrity(name, [allocation.granules for allocation in self.allocations.values()])
        assert self.low.keys() <= self.allocations.keys(), f"{name}: {self.low} ask for more, and hold nothing"
        assert not self.low or self.num_free_blocks <= 0, f"{name}: {self.low} wait for blocks that are free"
        sums = GrowthSums()
        for allocation in self.allocations.values():
            assert allocation.num_blocks <= allocation.max_blocks, (
                f"{name}: a request has {allocation.num_blocks} blocks, more than it ever needs"
            )
            if self._growth.on_demand:
                sums.count(allocation.num_blocks, allocation.max_blocks, is_open=allocation.is_open, sign=1)
        assert sums == self._growing, f"{name}: {sums} may grow, recorded: {self._growing}"
        assert allocated.num_seats_taken <= self.max_num_seqs, f"{name}: {allocated.num_seats_taken} seats taken"
