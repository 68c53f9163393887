"""Contexts of an instance that decode, are spread, are handed over and move, without the time that it takes."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.events import (
    InstanceEvent,
    MembersSet,
    MoveFailed,
    MoveSent,
    PartLost,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.model import InstanceId, InstanceProfile, PartMember, RequestKey
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.holding import Holding
from pdmesh_lab.sim.residents import Length
from pdmesh_lab.sim.surroundings import Surroundings


class Transferring(Holding):
    """``length_of`` says how long a request gets."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        report: Callable[[InstanceEvent], None],
        length_of: Callable[[RequestKey], Length],
        surroundings: Surroundings,
    ) -> None:
        super().__init__(profile, report=report, surroundings=surroundings)
        self._length_of = length_of

    def _decode(self, held: Held) -> None:
        """Decode a request from the next step on."""
        assert held.length is not None
        held.is_decoding = True
        self.residents.join(
            held.key,
            held.length,
            held.num_tokens,
            self._num_context_blocks(held),
            num_saved_tokens=len(held.members) * self.profile.max_kv_tokens,
            full_at_tokens=self._full_at_tokens(held),
        )
        self._surroundings.began_to_decode(held)
        self._surroundings.stirs()

    # --- contexts that are spread ---

    def _num_context_blocks(self, held: Held) -> int:
        """Return the blocks that a context has, here and elsewhere."""
        return held.num_blocks + self._num_elsewhere_blocks(held)

    def _full_at_tokens(self, held: Held) -> int:
        """Return with how many tokens more than a range of them has its KV here; 0: never. The last one has none."""
        limit = self.profile.max_kv_tokens
        return (len(held.members) + 1) * limit + 2 if limit else 0

    def _set_members(self, held: Held, members: tuple[PartMember, ...]) -> None:
        """Ask others for the first ranges of a context, and give back what was here of these."""
        num_more, held.next_members = len(members) - len(held.members), None
        held.members = members
        if held.num_blocks_at_once:  # as many blocks are for the tokens that follow
            limit = self.profile.max_kv_tokens
            assert len(members) * limit <= held.num_computed_tokens, f"{held.key} gives back what is not computed"
        elif num_more:
            num_blocks = num_more * self.profile.max_kv_tokens // self.profile.kv_layout.block_size
            held.num_blocks -= num_blocks
            self._num_own_blocks -= num_blocks - self.kept.end(held, ())
            held.chain = ()
        if held.stands_still:
            held.stands_still = False
            if held.is_decoding:
                self.residents.stay(held.key)
            else:
                self._decode(held)
        if held.key in self.residents:
            num_saved_tokens = len(members) * self.profile.max_kv_tokens
            self.residents.spread(held.key, num_saved_tokens, self._full_at_tokens(held))
        member_ids = tuple([each.instance_id for each in members])
        self._report(MembersSet(self.instance_id, *held.key, member_ids, held.num_blocks_at_once > 0))

    def lose_member(self, instance_id: InstanceId) -> None:
        """Stand still with all contexts of which that instance held a range: it is gone. A prompt is given up."""
        for held in list(self.held.values()):
            member_ids = [member.instance_id for member in held.members]
            if held.num_blocks_at_once and instance_id in member_ids:
                self.drop(held, "another instance that holds KV of it does not answer")
            if held.is_decoding and instance_id in member_ids and not held.stands_still and held.leaving is None:
                self._stand_still(held)
                self._report(PartLost(self.instance_id, *held.key, member_ids.index(instance_id)))

    def _stand_still(self, held: Held) -> None:
        """Draw no more from the next step on, until another instance has computed the range that was lost."""
        if held.is_decoding and not held.stands_still:
            held.stands_still = True
            self.residents.leave(held.key)
            self._surroundings.stirs()

    def hand_on(self, held: Held, num_bytes: int, duration_s: float) -> None:
        """A range that was here is where it goes, too."""
        assert held.handing is not None, f"{held.key} hands nothing on"
        transfer_id, held.handing = held.handing.transfer_id, None
        self._report(TransferSent(self.instance_id, *held.key, transfer_id, num_bytes, duration_s, 0.0))

    def fail_to_hand_on(self, held: Held, reason: str) -> None:
        """Give up sending a range."""
        assert held.handing is not None, f"{held.key} hands nothing on"
        self._surroundings.stops_sending(held)
        transfer_id, held.handing = held.handing.transfer_id, None
        self._report(TransferFailed(self.instance_id, *held.key, transfer_id, reason))

    # --- KV that moves on when the prompt is computed, and KV that comes ---

    def send(self, held: Held, num_bytes: int, duration_s: float, exposed_s: float, *, sent_s: float = 0.0) -> None:
        """All of a request's KV is where it goes, and acknowledged.

        It took ``sent_s`` on its way between hosts, if that is known.
        """
        assert held.is_computed, f"{held.key} landed before it was computed"
        assert held.transfer is not None, f"{held.key} landed without a transfer"
        transfer = held.transfer
        self._report(
            TransferSent(
                self.instance_id,
                *held.key,
                transfer.transfer_id,
                num_bytes,
                duration_s,
                exposed_s,
                destination_id=transfer.destination_ids[0] if sent_s else None,
                sent_s=sent_s,
            )
        )
        self.release(held)

    def land(self, held: Held, num_tokens: int, num_bytes: int, duration_s: float) -> None:
        """All that comes here of a request is here, with ``num_tokens`` of prompt and output.

        It decodes, unless this is a part of it.
        """
        assert held.transfer is not None, f"{held.key} landed without a transfer"
        if held.is_part:
            held.num_tokens = num_tokens
            self._report(TransferLanded(self.instance_id, *held.key, held.transfer.transfer_id, num_bytes, duration_s))
            return
        held.length, held.num_tokens = self._length_of(held.key), num_tokens
        self._keep(held, len(held.chain))
        self._report(TransferLanded(self.instance_id, *held.key, held.transfer.transfer_id, num_bytes, duration_s))
        self._decode(held)

    def land_kept(self, held: Held, num_bytes: int, duration_s: float) -> None:
        """All granules of a fetch are here, and stay."""
        assert held.transfer is not None, f"{held.key} landed without a transfer"
        self._keep(held, len(held.chain))
        self._report(TransferLanded(self.instance_id, *held.key, held.transfer.transfer_id, num_bytes, duration_s))
        self.release(held)

    def fail_transfer(self, held: Held, reason: str) -> None:
        """Give a transfer up: as a receiver with what has come of it; as a source of a request it keeps all."""
        assert held.transfer is not None, f"{held.key} has no transfer to fail"
        self._report(TransferFailed(self.instance_id, *held.key, held.transfer.transfer_id, reason))
        if held.moves_on:
            self._surroundings.stops_sending(held)
            held.lose_receiver()
        else:
            self.release(held)

    # --- running decodes that move away ---

    def freeze(self, held: Held) -> None:
        """Let a request that moves stand still from the next turn on: little of it is left to send."""
        assert held.leaving is not None, f"{held.key} does not move"
        self.residents.leave(held.key)
        self._surroundings.stirs()

    def commit_move(self, held: Held) -> None:
        """The last word is on its way: perhaps the target goes on."""
        assert held.is_frozen, f"{held.key} decodes yet"
        held.is_committed = True

    def end_move(self, held: Held, num_bytes: int, duration_s: float, frozen_s: float) -> None:
        """The target has acknowledged all, and goes on."""
        assert held.leaving is not None, f"{held.key} is acknowledged and did not move"
        transfer_id = held.leaving.transfer_id
        self._report(MoveSent(self.instance_id, *held.key, transfer_id, num_bytes, duration_s, frozen_s))
        self.release(held)

    def fail_move(self, held: Held, reason: str) -> None:
        """Send no more of a request that moves, and say whether it goes on here."""
        assert held.leaving is not None, f"{held.key} does not move"
        transfer_id, committed = held.leaving.transfer_id, held.is_committed
        if committed:
            held.is_given_up = True
        else:
            self._stay(held)
        self._report(MoveFailed(self.instance_id, *held.key, transfer_id, committed, reason))

    def _stay(self, held: Held) -> None:
        """Let a request go on here that was to leave."""
        self._surroundings.stops_sending(held)
        was_frozen = held.is_frozen
        held.leaving = None
        held.is_frozen = held.is_committed = held.is_given_up = False
        if was_frozen:
            self._decode(held)
        else:
            self.residents.stay(held.key)
