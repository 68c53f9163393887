"""Rules for copies from and to an instance: hand-overs, moves, ranges of contexts, and cached blocks.

The rules know no blocks and no residents, which are in a `pdmesh.instance.floor.Floor`.
"""

from __future__ import annotations

from typing import assert_never

from pdmesh.core.commands import Hold, SendCopy, Stop, StopCopy
from pdmesh.core.events import TransferFailed, TransferLanded, TransferPaused, TransferSent
from pdmesh.instance.copy_state import range_at
from pdmesh.instance.effects import (
    CopyCaughtUp,
    CopyCommitted,
    CopyEvent,
    CopyFailed,
    CopyLanded,
    CopyPaused,
    CopySent,
    Froze,
    PauseSending,
    Refused,
    SendKv,
    StopSending,
)
from pdmesh.instance.floor import Floor
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import DECODES, SeqPhase
from pdmesh.model import PartMember, Then, TransferId
from pdmesh.plans import TransferPlan

#: Commands for copies of a sequence. `Hold` lets a sequence decode here.
CopyCommand = SendCopy | StopCopy | Hold

_UNWANTED = "the scheduler cancelled the copy"


class CopyRules:
    """Rules for the copies from and to one instance."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._effects = floor.effects
        self._instance_id = floor.instance_id

    # --- commands ---

    def obey(self, sequence: Sequence, command: CopyCommand) -> None:
        """Obey a command that concerns a copy of a sequence."""
        match command:
            case SendCopy():
                self._grant(sequence, command)
            case StopCopy(how=Stop.PAUSE):
                self._pause(sequence, command)
            case StopCopy(how=Stop.WITHDRAW):
                self._withdraw(sequence, command)
            case StopCopy(transfer_id=transfer_id):
                if sequence.moves_by(transfer_id):
                    self._fail_move(sequence, _UNWANTED)
                else:
                    # The move never began here, or has ended.
                    self._fail(sequence, transfer_id, _UNWANTED, committed=False)
            case Hold(ends_move=True):
                if sequence.moves_by(command.move_id):
                    self.stay(sequence)
            case Hold():
                self._keep(sequence, command)
            case _:
                assert_never(command)

    def _grant(self, sequence: Sequence, command: SendCopy) -> None:
        transfer, onward = command.transfer, sequence.onward
        is_renewed = False
        reason = self._floor.why_not_sent(sequence, transfer)
        if transfer.is_of_range:
            lost_range = self._lost_range(sequence, transfer)
            handed = None if sequence.handing is None else sequence.handing.transfer
            if lost_range is not None and handed is not None and handed.computes:
                # Another target replaces the first one.
                self._stop_handing(sequence)
            is_here = lost_range is not None or self._is_of_range(sequence, transfer)
            if reason or sequence.handing is not None or not is_here:
                reason = reason or "the range is not here, or is already in transfer"
                self._refuse(command, reason)
                self._fail(sequence, transfer.transfer_id, reason)
                return
            if lost_range is not None:
                self._floor.lose_range(sequence, lost_range)
            sequence.hand_range(transfer)
        elif transfer.is_move:
            if sequence.has_lost_range:
                # The scheduler may not know of the loss yet, so this is no disagreement.
                self._fail(sequence, transfer.transfer_id, "a range of its context was lost", committed=False)
                return
            if not reason and sequence.move is not None and not sequence.move.may_have_begun:
                # Another target replaces the first one.
                self.stay(sequence)
            if reason or not sequence.is_decoding or sequence.move is not None:
                reason = reason or "the request does not decode here, or the receiver may have begun"
                self._refuse(command, reason)
                self._fail(sequence, transfer.transfer_id, reason, committed=False)
                return
            sequence.begin_move(transfer)
        else:
            if onward is None or reason:
                self._refuse(command, reason or "its KV stays here")
                return
            if onward.transfer not in (transfer, None):
                onward.lose_receiver()
            if onward.is_sending:
                return
            is_renewed = onward.transfer is None
            onward.grant(transfer)
        self._effects.append(SendKv(sequence, transfer, is_renewed))

    def _is_of_range(self, sequence: Sequence, transfer: TransferPlan) -> bool:
        """Return whether a transfer is for a range whose KV is here."""
        has_kv = sequence.phase in DECODES or sequence.phase is SeqPhase.HOLDING
        return transfer.is_of_range and not transfer.computes and has_kv

    def _lost_range(self, sequence: Sequence, transfer: TransferPlan) -> int | None:
        """Return the number of the lost range for which a transfer is; None if no member held such a range."""
        if not transfer.computes or sequence.phase not in DECODES:
            return None
        number = range_at(transfer, transfer.destination_ids[0])
        return number if number is not None and number < len(sequence.members) else None

    def _pause(self, sequence: Sequence, command: StopCopy) -> None:
        onward = sequence.onward
        if onward is None or onward.transfer is None:
            # The transfer has failed here, too.
            return
        if not onward.is_sending or sequence.is_computed:
            self._refuse(command, "its KV is not being sent, or all of it is computed")
            return
        onward.stop()
        self._effects.append(PauseSending(sequence, onward.transfer))

    def _withdraw(self, sequence: Sequence, command: StopCopy) -> None:
        handing, onward = sequence.handing, sequence.onward
        if handing is not None:
            if handing.transfer_id == command.transfer_id:
                self._stop_handing(sequence)
        elif onward is not None and onward.transfer is not None:
            if onward.transfer_id != command.transfer_id:
                self._refuse(command, "its KV has another destination")
                return
            self._lose_receiver(sequence)

    def _keep(self, sequence: Sequence, command: Hold) -> None:
        onward = sequence.onward
        if onward is None:
            self._refuse(command, "its KV stays")
            return
        # The transfer may have been granted again before the scheduler heard of its failure.
        if onward.transfer is not None:
            self._lose_receiver(sequence)
        if not self._floor.keep(sequence, command):
            return
        sequence.keep()
        if sequence.is_computed:
            self._floor.decode(sequence)

    def _refuse(self, command: CopyCommand, reason: str) -> None:
        self._effects.append(Refused(command, reason))

    # --- events of copies ---

    def hear(self, sequence: Sequence, event: CopyEvent) -> None:
        """Handle an event of a copy."""
        match event:
            case CopyLanded():
                self._landed(sequence, event)
            case CopySent(then=Then.HOLD):
                self._handed(sequence, event)
            case CopySent():
                self._sent(sequence, event)
            case CopyPaused():
                self._effects.append(TransferPaused(self._instance_id, *sequence.key, event.transfer_id))
            case CopyFailed(then=Then.HOLD):
                assert sequence.handing is not None, f"{sequence.key} hands no range on"
                transfer_id = sequence.handing.transfer_id
                self._stop_handing(sequence)
                self._fail(sequence, transfer_id, event.reason)
            case CopyFailed(then=then) if then is not None and sequence.move is not None:
                self._fail_move(sequence, event.reason)
            case CopyFailed():
                self._failed(sequence, event)
            case CopyCaughtUp():
                assert sequence.move is not None, f"{sequence.key} does not move"
                self._floor.leave(sequence)
            case CopyCommitted():
                assert sequence.move is not None, f"{sequence.key} does not move"
                sequence.move.commit()
            case _:
                assert_never(event)

    def _landed(self, sequence: Sequence, event: CopyLanded) -> None:
        transfer = sequence.incoming
        assert transfer is not None, f"{sequence.key} landed without a transfer"
        landed = TransferLanded(
            self._instance_id, *sequence.key, transfer.transfer_id, event.num_bytes, event.duration_s
        )
        if sequence.is_range:
            sequence.land_range(event.num_tokens)
            self._effects.append(landed)
            return
        if transfer.then is Then.KEEP:
            self._floor.computed(sequence, len(sequence.chain))
            self._effects.append(landed)
            self._floor.release(sequence)
        else:
            self._floor.land(sequence, event.num_tokens)
            self._effects.append(landed)
            self._floor.decode(sequence)

    def _sent(self, sequence: Sequence, event: CopySent) -> None:
        move = sequence.move
        copy = sequence.onward if move is None else move
        assert copy is not None, f"{sequence.key} is acknowledged and was not sent"
        transfer = copy.transfer
        assert transfer is not None, f"{sequence.key} is acknowledged without a transfer"
        assert move is not None or sequence.is_computed, f"{sequence.key} landed before it was computed"
        self._acknowledged(sequence, transfer.transfer_id, event, was_decoding=move is not None)
        self._floor.release(sequence)

    def _failed(self, sequence: Sequence, event: CopyFailed) -> None:
        """Report a failed transfer. The source of a prompt keeps the KV; other ends of a copy release the sequence."""
        transfer = sequence.transfer
        assert transfer is not None, f"{sequence.key} has no transfer to fail"
        self._fail(sequence, transfer.transfer_id, event.reason)
        if Then.DECODE in sequence.outgoing:
            self._lose_receiver(sequence)
        else:
            self._floor.release(sequence)

    def _lose_receiver(self, sequence: Sequence) -> None:
        onward = sequence.onward
        assert onward is not None, f"{sequence.key} has no receiver"
        if onward.transfer is not None:
            self._effects.append(StopSending(sequence, onward.transfer))
        onward.lose_receiver()

    def _fail_move(self, sequence: Sequence, reason: str) -> None:
        """Stop a move and report it. The sequence continues here, unless the destination may have begun."""
        move = sequence.move
        assert move is not None, f"{sequence.key} does not move"
        transfer_id, may_have_begun = move.transfer_id, move.may_have_begun
        if may_have_begun:
            move.abandon()
        else:
            self.stay(sequence)
        self._fail(sequence, transfer_id, reason, committed=may_have_begun)

    def freeze(self, sequence: Sequence, num_tokens: int) -> None:
        """Pause a moving resident, which has ``num_tokens`` of prompt and output."""
        assert sequence.move is not None, f"{sequence.key} pauses without a reason"
        sequence.pause(num_tokens)
        sequence.move.freeze()
        self._effects.append(Froze(sequence))

    def stay(self, sequence: Sequence) -> None:
        """Cancel a move, and let the sequence continue here."""
        move = sequence.move
        assert move is not None, f"{sequence.key} does not move"
        assert move.transfer is not None, f"{sequence.key} moves nowhere"
        self._effects.append(StopSending(sequence, move.transfer))
        sequence.end_move()
        if move.is_frozen:
            self._floor.decode(sequence)
        else:
            self._floor.stay(sequence)

    # --- ranges of contexts ---

    def _handed(self, sequence: Sequence, event: CopySent) -> None:
        assert sequence.handing is not None, f"{sequence.key} hands no range on"
        transfer_id = sequence.handing.transfer_id
        sequence.end_hand_range()
        self._acknowledged(sequence, transfer_id, event)

    def end_landed_range(self, sequence: Sequence, members: tuple[PartMember, ...]) -> None:
        """End the copy of a range, if one of ``members`` holds it by now, although no acknowledgement has come yet."""
        handing = sequence.handing
        if handing is None or handing.transfer is None:
            return
        transfer = handing.transfer
        if transfer.capability in [each.capability for each in members]:
            self._stop_handing(sequence)
            event = CopySent(sequence.key, Then.HOLD, 0, 0.0, destination_id=transfer.destination_ids[0])
            self._acknowledged(sequence, transfer.transfer_id, event)

    def _acknowledged(
        self, sequence: Sequence, transfer_id: TransferId, event: CopySent, *, was_decoding: bool = False
    ) -> None:
        about = self._instance_id, *sequence.key, transfer_id, event.num_bytes, event.duration_s
        sent = TransferSent(*about, event.waited_s, event.sent_s, event.destination_id, event.carrier, was_decoding)
        self._effects.append(sent)

    def _fail(self, sequence: Sequence, transfer_id: TransferId, reason: str, *, committed: bool | None = None) -> None:
        self._effects.append(TransferFailed(self._instance_id, *sequence.key, transfer_id, reason, committed))

    def _stop_handing(self, sequence: Sequence) -> None:
        assert sequence.handing is not None, f"{sequence.key} hands no range on"
        if sequence.handing.transfer is not None:
            self._effects.append(StopSending(sequence, sequence.handing.transfer))
        sequence.end_hand_range()

    def forget_plans(self, sequence: Sequence) -> None:
        """Forget the plans of a lost scheduler for the ranges of a context."""
        if sequence.handing is not None:
            self._stop_handing(sequence)
        sequence.forget_plans()
