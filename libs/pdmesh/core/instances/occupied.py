"""What requests have of an instance's blocks and seats, and what fits beside them.

It follows the core's own commands: blocks are taken at AdmitPrefill or ExpectCopy and given back only at
KvReleased, so they never promise blocks that a worker has not yet freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.core.instances.allocations import READ_BY_STEPS, Allocation, AllocationKind, AllocationSums
from pdmesh.core.instances.empty import EmptyInstance
from pdmesh.core.instances.kept import NOTHING, KeptHere
from pdmesh.core.instances.kept_where import KeptWhere
from pdmesh.core.instances.kv_growth import Growth, GrowthSums
from pdmesh.model import (
    GRANULE_TOKENS,
    NO_TRANSFER,
    IndexRange,
    InstanceId,
    InstanceProfile,
    KvPart,
    PrefixHash,
    Request,
    RequestKey,
    Role,
    TransferId,
    num_blocks_for,
)
from pdmesh.plans import Evictions, KvShard
from pdmesh.policy.on_demand import Room


class OccupiedInstance(EmptyInstance):
    """An instance with what its requests have, and whether it takes new ones."""

    def __init__(
        self,
        profile: InstanceProfile,
        growth: Growth,
        *,
        changed: dict[InstanceId, None],
        kept_where: KeptWhere,
        number: int,
        draining: bool,
    ) -> None:
        """``changed`` takes note of every change; ``number`` is the instance's place in the index ``kept_where``."""
        super().__init__(profile, growth)
        layout = profile.kv_layout
        self._layers, self._heads = IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads)
        self._granule_bytes = GRANULE_TOKENS * layout.token_bytes
        self.number = number
        self.draining = draining
        self.closed = False  # by an operator
        self.shut = False  # closed to requests that its weights began, too
        self.reachable = True
        self.suspected = False
        self.num_flights = 0  # changes of what is in flight, of the requests in it, and of the decodes beside it
        self.allocations: dict[RequestKey, Allocation] = {}
        self.low: dict[RequestKey, None] = {}  # have asked for more than there was
        self.allocated = AllocationSums()
        self._growing = GrowthSums()
        self.kept = KeptHere(kept_where, number, self.block_size, profile.num_offload_granules)
        self.num_quarantined_blocks = 0  # as reported; a worker cannot use them either
        self._room: Room | None = None
        self._decode_tokens = self._prompt_tokens = 0  # what there is room for, and whether that has been counted
        self._knows_room = False
        self._changed = changed

    def _change(self) -> None:
        self._knows_room = False
        self._changed[self.instance_id] = None

    # --- what requests take and give back ---

    def take(
        self, key: RequestKey, allocation: Allocation, chain: Sequence[PrefixHash] = (), num_reused: int = 0
    ) -> None:
        """Give a request its blocks.

        ``chain`` are granules of its prompt. The first ``num_reused`` are cached, and their blocks are shared, or they
        come from the tier.
        """
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
        """Let another instance hold the first range of what a resident has here.

        What is kept of its prompt is in that range, and this request's no longer.
        """
        allocation = self.allocations[key]
        self._count(allocation, -1)
        self.kept.end(allocation.granules)
        allocation.granules = NOTHING
        allocation.num_blocks -= self.part_blocks
        allocation.max_blocks = max(allocation.num_blocks, max_blocks)
        allocation.num_elsewhere_tokens += self.max_kv_tokens
        self._count(allocation, 1)

    def keep(self, key: RequestKey, num_blocks: int, max_blocks: int) -> None:
        """What was to move away stays, with room for its output and a seat."""
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
        """Whether KV that is to move away waits for that."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.kind is AllocationKind.LEAVING and allocation.waits != waits:
            self.allocated.defer(allocation, waits)
            self._change()

    def settle(self, key: RequestKey) -> None:
        """The KV is whole and in place: what was promised, or computed to stay, is a resident."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.kind in (AllocationKind.PROMISED, AllocationKind.LOCAL):
            self._count(allocation, -1)
            allocation.kind = AllocationKind.RESIDENT
            self._count(allocation, 1)

    def leave(self, key: RequestKey) -> None:
        """The request decodes elsewhere: what it still has here is soon given back."""
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
    ) -> Allocation | None:
        """Give back what a request holds for a transfer; None if that is nothing.

        ``drawn`` are granules that stay, of which the first ``num_known`` were kept before.
        """
        allocation = self.allocations.get(key)
        if drawn:
            tenant = None if allocation is None else allocation.tenant
            self.kept.drew(drawn, num_known, tenant, 1 if allocation is None else allocation.share)
        if allocation is not None and allocation.transfer_id != transfer_id:
            return None
        self.defer(key, False)
        self.allocations.pop(key, None)
        self.low.pop(key, None)
        if allocation is not None:
            self.kept.end(allocation.granules)
            self._count(allocation, -1)
        return allocation

    def num_freed_blocks(self, allocation: Allocation) -> int:
        """How many blocks are free once a request gives back what it has: all but those that others have, too."""
        return allocation.num_blocks - self.kept.num_shared_blocks(allocation.granules)

    # --- what is kept for other requests ---

    def num_kept_granules(self, request: Request) -> int:
        """How many granules of a request's prompt are kept here, and need not be computed."""
        if not request.prefix or self.kept.is_empty or self.gives_back(request):
            return 0
        chain = request.chain
        return self.kept.depth(chain, len(chain))

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """So many tokens of a prompt, from the first on, are computed here, or have landed."""
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.granules.chain:
            self.kept.computed(allocation.granules, num_tokens // GRANULE_TOKENS)

    def load_s(self, num_granules: int) -> float:
        """Return how long loading so many granules from the tier takes."""
        return num_granules * self._granule_bytes / self.profile.load_bytes_per_s

    def make_room(self) -> Evictions:
        """What is to be given up so that all that was taken finds free blocks: of what is kept and not used."""
        kept = self.kept
        num_short = kept.num_idle_blocks - self.num_free_blocks if kept.num_idle_blocks else 0
        return kept.make_room(num_blocks_for(num_short, kept.granule_blocks) if num_short > 0 else 0)

    def replace_kept(self, granules: Sequence[PrefixHash], offloaded: Sequence[PrefixHash] | None = None) -> None:
        """The instance says what it keeps, in its cache and, unless that is None, in its tier."""
        held = [allocation.granules for allocation in self.allocations.values()]
        self.kept.replace(granules, held, offloaded)
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
        """So many blocks of a request from a first one on, all layers and heads of them, as held here."""
        part = KvPart(IndexRange(first_block, first_block + num_blocks), self._layers, self._heads)
        return KvShard(instance_id=self.instance_id, part=part)

    # --- what fits ---

    @property
    def num_free_blocks(self) -> int:
        """What is kept and not used is among them."""
        return self.num_blocks - self.num_taken_blocks - self.num_quarantined_blocks

    @property
    def num_taken_blocks(self) -> int:
        """Number of blocks that requests have, those that they share counted once."""
        return self.allocated.num_taken_blocks - self.kept.num_saved_blocks

    def _count_room(self) -> None:
        """Count the room for one more request; only after a change, and when asked."""
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
        """Whether it has a seat for one more, whatever the memory."""
        return self.takes_new and self.role_decodes and self.has_seat

    @property
    def has_seat(self) -> bool:
        """Whether one more request can stay here to its end."""
        return self.allocated.num_seats_taken < self.max_num_seqs

    @property
    def room(self) -> Room:
        """Blocks for one more request, at an accepted risk for those that grow. An empty instance takes any."""
        free = max(0, self.num_free_blocks)
        if not self._growth.on_demand or not self.allocations:
            return Room(free, free)
        if self._room is None:
            num_blocks = self.num_blocks - self.num_quarantined_blocks + self.kept.num_saved_blocks
            safe = self._growing.room(num_blocks, self.block_size, self._growth)
            self._room = Room(max(0, min(free, safe.open)), max(0, min(free, safe.bounded)))
        return self._room

    def can_stay(self, request: Request) -> bool:
        """Whether the request fits now, its whole context, with a seat."""
        return not self.num_parts(request) and self.can_decode(request)

    def can_decode(self, request: Request) -> bool:
        """Whether the request fits now, with a seat: all of it, or on demand what it is admitted with.

        Of a context that is spread, its last range and its output do.
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
        """Whether the request, whose prompt is held here to move away, can decode here instead."""
        return self.role_decodes and self._has_room_to_keep(request)

    def can_keep_locally(self, request: Request) -> bool:
        """Whether a prefill instance can decode the request, whose prompt it holds to move away."""
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
        """Whether a request that these weights began fits here now, to be computed and decoded.

        Also while an operator empties the instance, and whether or not it prefills: no other instance may be left.
        """
        return self.is_open_to_begun and not self.suspected and self._has_room_to_finish(request)

    def can_decode_locally(self, request: Request) -> bool:
        """Whether a prefill instance can compute the request now, and decode it."""
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

        ``spare_blocks`` are to be free then, whatever those that are here will come to need; None: as for a new one.
        """
        if key in self.allocations or not self.takes_decodes or max_blocks > self.num_blocks:
            return False
        if spare_blocks is not None:
            return num_blocks + spare_blocks <= self.num_free_blocks
        is_open = self._growth.on_demand and (max_blocks - num_blocks) * self.block_size > self._growth.mean_tokens
        return num_blocks <= self.room.open if is_open else max_blocks <= self.room.bounded

    def may_add_waiting(self, num_blocks: int, share: float) -> bool:
        """Whether a prompt may begin of which so many blocks will wait, if ``share`` of all may. One may, of any size.

        A prompt with room promised is one of 0 blocks: it may while what waits is within the bound.
        """
        waiting = self.allocated.num_waiting_blocks
        return not waiting or waiting + num_blocks <= share * self.num_blocks

    def can_prefill(self, request: Request) -> bool:
        """Whether the prompt fits now: all of it, or as much as it holds at once."""
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
        """Whether prompts are placed on it, to compute them here."""
        return self.takes_new and self.role_prefills

    @property
    def has_long(self) -> bool:
        """Whether it computes or decodes a long request."""
        return self.allocated.num_long_decoding > 0 or bool(self.allocated.long_prefill_tokens)

    @property
    def longest_prefill_tokens(self) -> int:
        """Length of the longest long prompt computed here, or whose KV waits to move away; 0 without one."""
        return max(self.allocated.long_prefill_tokens, default=0)

    @property
    def is_usable(self) -> bool:
        """Whether requests may wait for it."""
        return self.reachable and not self.draining and not self.closed

    @property
    def is_open_to_begun(self) -> bool:
        """Whether requests may wait for it that were begun by its weights, as long as no operator's time is up."""
        return self.reachable and not self.draining and not self.shut

    @property
    def takes_new(self) -> bool:
        return self.is_usable and not self.suspected

    # --- whether it takes requests ---

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._change()

    def set_closed(self, closed: bool, *, shut: bool = False) -> None:
        """Let nothing new come here; if it is ``shut``, not even what its weights alone can finish."""
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
        """The mean that requests grow by is another one."""
        self._room = None
        self._change()

    def set_role(self, role: Role) -> None:
        self._take_role(role)
        self._change()

    def set_local_work(self, *, prefills: bool, decodes: bool) -> None:
        """Say whether a decode instance may prefill, and a prefill instance decode, what stays there."""
        self.prefills_locally, self.decodes_locally = prefills, decodes
        self._change()

    def check_occupied(self) -> None:
        """AssertionError names the numbers of blocks and seats that do not balance."""
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
