"""What requests have on an instance, and the sums over that.

The sums follow each change, so that asking costs the same however many requests there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Self

from pdmesh.core.instances.kept import NOTHING
from pdmesh.model import NO_TRANSFER, PartMember, TransferId


class AllocationKind(IntEnum):
    """What a request has on an instance."""

    LEAVING = auto()  # KV of a request that decodes elsewhere, or will
    LOCAL = auto()  # its prompt's KV, which stays; room for its output, a seat
    PROMISED = auto()  # room and a seat for KV on its way (virtual usage)
    RESIDENT = auto()  # its KV and its seat: it decodes here
    PART = auto()  # a range of its KV, or the room for that: it decodes elsewhere, with this
    FETCH = auto()  # of no request: granules on their way from one instance to another, on both


#: Kinds of what decodes where it is, or will.
HAVE_SEATS = frozenset({AllocationKind.LOCAL, AllocationKind.PROMISED, AllocationKind.RESIDENT})

#: Kinds of KV that is read for each token.
READ_BY_STEPS = frozenset({AllocationKind.RESIDENT, AllocationKind.PART})


class Allocation:
    """What one request has on an instance."""

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
        tenant: str | None = None,
        share: int = 1,
        num_elsewhere_tokens: int = 0,
        members: tuple[PartMember, ...] = (),
    ) -> None:
        self.kind = kind
        self.num_blocks = num_blocks
        self.long_tokens = long_tokens  # of the prompt, if it is long
        self.slo_tpot_s = slo_tpot_s
        self.max_blocks = max(num_blocks, max_blocks)  # upper limit of grants
        self.num_tokens = num_tokens  # that it was last heard to hold; 0: not yet
        self.transfer_id = transfer_id  # that is to bring its KV, or brought it
        self.granules = NOTHING  # granules of its prompt, cached as they are computed
        self.tenant, self.share = tenant, share  # whose it is, once it is known
        self.num_elsewhere_tokens = num_elsewhere_tokens  # of its context, whose KV others hold
        self.told_members = members  # that hold it, where an instance told of it
        self.is_open = False  # it may grow by more than requests do in the mean
        self.freeing = False  # FreeKv was sent
        self.waits = False  # to move away: it is computed, or has no room promised where it is to go

    @property
    def num_own_tokens(self) -> int:
        """Those of `num_tokens` whose KV no others hold."""
        return self.num_tokens - self.num_elsewhere_tokens


@dataclass(slots=True)
class AllocationSums:
    """Sums over the holds on one instance."""

    num_taken_blocks: int = 0
    num_promised_blocks: int = 0
    num_waiting_blocks: int = 0  # of KV that waits to move away
    num_resident_blocks: int = 0
    num_part_blocks: int = 0  # of contexts that decode elsewhere
    num_prefilling: int = 0  # prompts that are computed here, or whose KV waits to move away
    num_decoding: int = 0
    num_seats_taken: int = 0  # by those that decode here, or will
    num_long_decoding: int = 0
    long_prefill_tokens: Counter[int] = field(default_factory=Counter[int])  # long prompts in prefill, by their length
    num_with_tpot: Counter[float | None] = field(default_factory=Counter[float | None])  # residents by their own target
    slo_tpots_s: frozenset[float | None] = frozenset()  # of the above

    @classmethod
    def of(cls, allocations: Iterable[Allocation]) -> Self:
        """Counted anew."""
        sums = cls()
        for allocation in allocations:
            sums.count(allocation, 1)
            sums.num_waiting_blocks += allocation.num_blocks if allocation.waits else 0
        return sums

    def defer(self, allocation: Allocation, waits: bool) -> None:
        """Whether KV that is to move away waits for that, from now on."""
        allocation.waits = waits
        self.num_waiting_blocks += allocation.num_blocks if waits else -allocation.num_blocks

    def count(self, allocation: Allocation, sign: int) -> None:
        """A hold begins (1) or ends (-1)."""
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
            self.num_part_blocks += sign * num_blocks
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
