"""What an instance has of one request: its blocks, and how far its KV has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.model import NO_TRANSFER, PartMember, PrefixHash, PrefixHashes, RequestKey, TransferId, TransferPurpose
from pdmesh.plans import PrefillGroup, TransferPlan
from pdmesh_lab.sim.residents import Length


@dataclass(slots=True, eq=False)
class Held:
    """One epoch of a request on an instance."""

    key: RequestKey
    num_blocks: int
    length: Length | None  # None: nothing of its generation is known here
    leads: bool = True  # samples the first token; of a group one member does
    group: PrefillGroup | None = None  # that computes its prompt, as the instance was told
    given_up: set[int] = field(default_factory=set[int])  # plans whose chunks wait for no member's KV any more
    is_again: bool = False  # plans wait that were sent for one of this name that was freed, and are taken for its own

    chain: PrefixHashes = ()  # granules of its prompt
    num_granules: int = 0  # of them, whose KV is here
    num_loaded_granules: int = 0  # that it was to load from the tier
    kept: list[PrefixHash] = field(default_factory=list[PrefixHash])  # in its blocks, for others, too

    num_computed_tokens: int = 0  # of its prompt
    is_computed: bool = False  # its whole prompt

    transfer: TransferPlan | None = None  # takes its KV on when it is computed, or brings it here
    moves_on: bool = False  # the first of these
    is_offered: bool = False
    is_granted: bool = False

    part: int | None = (
        None  # the number of the range of a context that this is, or the room for it; it decodes elsewhere
    )
    #: That hold the first ranges of its context, if it decodes here, or of a prompt that is longer than the room here.
    members: tuple[PartMember, ...] = ()
    num_blocks_at_once: int = 0  # of such a prompt
    handing: TransferPlan | None = None  # takes a range that is here on to another instance
    stands_still: bool = False  # a range of its context is lost, and another instance computes it again
    next_members: tuple[PartMember, ...] | None = None  # between two steps

    is_decoding: bool = False  # as a resident, between steps
    has_ended: bool = False  # its generation, here
    is_freed: bool = False  # its blocks are given back before the next step
    num_tokens: int = 0  # of prompt and output, when it began to decode, or stood still to move away

    leaving: TransferPlan | None = None  # moves it to another instance while it decodes
    is_frozen: bool = False  # it draws no more here, unless it stays after all
    is_committed: bool = False  # nobody goes on here before the scheduler says so
    is_given_up: bool = False  # no acknowledgement is waited for

    @property
    def is_part(self) -> bool:
        return self.part is not None

    @property
    def asks_others(self) -> bool:
        """Whether its prompt is computed here, and others hold ranges of it."""
        return self.num_blocks_at_once > 0 and len(self.members) > 0

    @property
    def received_by(self) -> TransferId:
        """The transfer that brings its KV here, or did."""
        return NO_TRANSFER if self.moves_on or self.transfer is None else self.transfer.transfer_id

    @property
    def takes_seat(self) -> bool:
        """Whether it decodes here, or will."""
        return self.leads and not self.moves_on and not self.is_committed

    @property
    def decodes_nowhere(self) -> bool:
        """Whether it is to decode, and cannot have begun to, here or where its KV goes."""
        if self.is_decoding or self.is_part or self.leaving is not None:
            return False
        if self.moves_on:
            return not (self.is_computed and self.is_granted)
        return self.transfer is None or self.transfer.purpose is TransferPurpose.HAND_OVER

    def is_leaving_by(self, transfer_id: TransferId) -> bool:
        return self.leaving is not None and self.leaving.transfer_id == transfer_id

    def lose_receiver(self) -> None:
        """Keep its KV for another one."""
        self.is_granted, self.transfer = False, None
