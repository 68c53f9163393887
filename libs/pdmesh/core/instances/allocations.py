"""Allocations of requests on an instance, and sums over them.

The sums follow each change, so the cost of a query does not depend on the number of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Self

from pdmesh.core.instances.prefix_cache import NOTHING
from pdmesh.model import NO_TRANSFER, CacheUser, PartMember, TransferId


class AllocationKind(IntEnum):
    """Kind of an allocation."""

    #: KV of a request that decodes elsewhere, or will.
    LEAVING = auto()
    #: KV of a prompt that stays here, with room for the output, and a seat.
    LOCAL = auto()
    #: Room and a seat for KV on its way (virtual usage).
    PROMISED = auto()
    #: KV and seat of a request that decodes here.
    RESIDENT = auto()
    #: Shard of a spread context that decodes elsewhere, or the room for the shard.
    PART = auto()
    #: Granules on their way from one instance to another, on both; not of a request.
    FETCH = auto()


#: Kinds of requests that decode here, or will.
HAVE_SEATS = frozenset({AllocationKind.LOCAL, AllocationKind.PROMISED, AllocationKind.RESIDENT})

#: Kinds whose KV is read for each token.
READ_BY_STEPS = frozenset({AllocationKind.RESIDENT, AllocationKind.PART})


class Allocation:
    """Blocks and seat of one request on an instance.

    ``long_tokens``: length of the prompt if it is long, else 0. ``max_blocks``: upper limit of grants. ``num_tokens``:
    number of tokens in the last report; 0 before the first. ``transfer_id``: the transfer that brings the KV, or
    brought it. ``loads``: from the instance's own offload tier. ``granules``: granules of the prompt, cached as they
    are computed. ``tenant`` is None until it is known. ``num_remote_tokens``: tokens of the context whose KV shard
    holders have; ``last_sent_members`` are these holders, where an instance reported them, as it reported the ``user``.
    ``is_open``: the request may grow by more than the mean. ``freeing``: FreeKv was sent. ``waits``: the prompt is
    computed, or has no promised room at its receiver, and waits to move away.
    """

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(
        self,
        kind: AllocationKind,
        num_blocks: int,
        *,
        long_tokens: int = 0,
        slo_tpot_s: float | None = None,
        max_blocks: int = 0,
        num_tokens: int = 0,
        transfer_id: TransferId = NO_TRANSFER,
        loads: bool = False,
        tenant: str | None = None,
        share: int = 1,
        num_remote_tokens: int = 0,
        members: tuple[PartMember, ...] = (),
        user: CacheUser | None = None,
    ) -> None:
        self.kind = kind
        self.num_blocks = num_blocks
        self.long_tokens = long_tokens
        self.slo_tpot_s = slo_tpot_s
        self.max_blocks = max(num_blocks, max_blocks)
        self.num_tokens = num_tokens
        self.transfer_id = transfer_id
        self.loads = loads
        self.granules = NOTHING
        self.tenant, self.share = tenant, share
        self.num_remote_tokens = num_remote_tokens
        self.last_sent_members = members
        self.user = user
        self.is_open = False
        self.freeing = False
        self.waits = False

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens whose KV no shard holder has."""
        return self.num_tokens - self.num_remote_tokens


@dataclass(slots=True)
class AllocationSums:
    """Sums over the allocations on one instance.

    ``num_waiting_blocks`` hold KV that waits to move away, and ``num_range_blocks`` shards of contexts that decode
    elsewhere. ``num_prefilling`` counts prompts that are computed here, or whose KV has not moved away.
    ``num_seats_taken`` counts requests that decode here, or will. ``long_prefill_tokens`` counts long prompts in
    prefill by length, ``num_with_tpot`` residents by TPOT target, and ``slo_tpots_s`` are these targets.
    """

    num_taken_blocks: int = 0
    num_promised_blocks: int = 0
    num_waiting_blocks: int = 0
    num_resident_blocks: int = 0
    num_range_blocks: int = 0
    num_prefilling: int = 0
    num_decoding: int = 0
    num_seats_taken: int = 0
    num_long_decoding: int = 0
    long_prefill_tokens: Counter[int] = field(default_factory=Counter[int])
    num_with_tpot: Counter[float | None] = field(default_factory=Counter[float | None])
    slo_tpots_s: frozenset[float | None] = frozenset()

    @classmethod
    def of(cls, allocations: Iterable[Allocation]) -> Self:
        """Return the sums over ``allocations``, counted from scratch."""
        sums = cls()
        for allocation in allocations:
            sums.count(allocation, 1)
            sums.num_waiting_blocks += allocation.num_blocks if allocation.waits else 0
        return sums

    def defer(self, allocation: Allocation, waits: bool) -> None:
        """Mark (or unmark) an allocation as waiting to move away, and count its blocks."""
        allocation.waits = waits
        self.num_waiting_blocks += allocation.num_blocks if waits else -allocation.num_blocks

    def count(self, allocation: Allocation, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) an allocation. Its waiting blocks are counted by `defer` alone."""
        kind, num_blocks = allocation.kind, allocation.num_blocks
        if allocation.long_tokens and kind is AllocationKind.RESIDENT:
            self.num_long_decoding += sign
        elif allocation.long_tokens and kind is not AllocationKind.PROMISED:
            self.long_prefill_tokens[allocation.long_tokens] += sign
            if not self.long_prefill_tokens[allocation.long_tokens]:
                del self.long_prefill_tokens[allocation.long_tokens]
        self.num_taken_blocks += sign * num_blocks
        if kind is AllocationKind.FETCH:
            return
        if kind is AllocationKind.PART:
            self.num_range_blocks += sign * num_blocks
            return
        if kind is AllocationKind.PROMISED:
            self.num_seats_taken += sign
            self.num_promised_blocks += sign * num_blocks
        elif kind is AllocationKind.LEAVING:
            self.num_prefilling += sign
        elif kind is AllocationKind.LOCAL:
            self.num_seats_taken += sign
            self.num_prefilling += sign
        else:
            self.num_seats_taken += sign
            self.num_decoding += sign
            self.num_resident_blocks += sign * num_blocks
            self.num_with_tpot[allocation.slo_tpot_s] += sign
            if self.num_with_tpot[allocation.slo_tpot_s] == (sign > 0):
                self.slo_tpots_s = frozenset(slo_s for slo_s, number in self.num_with_tpot.items() if number)
