"""What a modelled instance has of one request, and what becomes of that."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import NO_TRANSFER, TransferId
from pdmesh.plans import ChunkPlan, TransferPlan
from pdmesh.policy.on_demand import is_low
from pdmesh.testing.modelled_groups import ModelledMember


@dataclass(slots=True)
class ModelledHold:
    """What an instance has of a request."""

    num_blocks: int
    max_total_tokens: int  # whose KV it may come to hold here; 0: not known
    seated: bool  # it decodes here, or will
    leads: bool  # of a group that computes it together: the one that decodes
    transfer: TransferPlan | None  # that takes its KV away, or brings it
    sends: bool = False  # it is a source of the transfer
    num_computed_tokens: int = 0
    computed: bool = False  # its last chunk is done
    offered: bool = False
    granted: bool = False
    decoding: bool = False
    member: ModelledMember | None = None  # of the group that computes it in turn, as the instance was told
    leaving: TransferPlan | None = None  # while it decodes: that moves it to another instance
    committed: bool = False  # that: nobody goes on here before the core says so
    given_up: bool = False  # that: no acknowledgement is waited for
    landed: bool = False  # that: where it goes it is decoded
    asked: tuple[int, bool] = (0, False)  # for more than so many blocks, and whether it waited
    is_again: bool = False  # plans wait that were sent for one of this name that was freed, and are taken for its own

    @property
    def received_by(self) -> TransferId:
        """The transfer that brings its KV here, or did."""
        return NO_TRANSFER if self.sends or self.transfer is None else self.transfer.transfer_id

    def lose_receiver(self) -> None:
        """Keep its KV for another one."""
        self.granted, self.transfer = False, None

    def compute(self, plan_id: int, chunk: ChunkPlan) -> bool:
        """False if it would have to wait for KV that does not come."""
        member = self.member
        if member is None:
            assert chunk.start == self.num_computed_tokens, f"{chunk} after {self.num_computed_tokens} tokens"
        elif not member.has_before(chunk):
            assert plan_id in member.ended_plan_ids, f"{chunk} does not wait"
            return False
        else:
            member.compute(chunk)
        self.num_computed_tokens = chunk.start + chunk.num_tokens
        return True

    def draw(self, num_tokens: int, block_size: int) -> bool:
        """Draw at most so many tokens, as far as there is room. False if it waits for room, or for nothing."""
        before, most = self.num_computed_tokens, self.max_total_tokens + 1
        if not self.max_total_tokens:
            self.num_computed_tokens += num_tokens
            return True
        self.num_computed_tokens = max(before, min(before + num_tokens, most, self.num_blocks * block_size + 1))
        return self.num_computed_tokens > before

    def asks(self, block_size: int) -> bool:
        """Whether there is little room left, and that was not said yet; it is said now."""
        now, room = self.num_computed_tokens, self.num_blocks * block_size
        if not room < self.max_total_tokens or not is_low(now, self.num_blocks, block_size):
            return False
        before, self.asked = self.asked, (self.num_blocks, now > room)
        return self.asked != before
