"""Ends of sequences on an instance. Each end is reported before the blocks are released."""

from __future__ import annotations

from pdmesh.core.commands import FreeKv
from pdmesh.core.events import KvReleased, RequestDropped, RequestFinished
from pdmesh.instance.effects import Forget
from pdmesh.instance.floor import Floor
from pdmesh.instance.sequence import Sequence
from pdmesh.model import Epoch, FinishReason, RequestId


class Endings:
    """The ends of one instance's sequences."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._effects = floor.effects
        self._instance_id = floor.instance_id

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_output_tokens: int,
        num_drafted_tokens: int = 0,
        num_accepted_tokens: int = 0,
    ) -> None:
        """End a generation whose last token is drawn."""
        self._effects.append(Forget(sequence))
        self._effects.append(
            RequestFinished(
                self._instance_id,
                *sequence.key,
                reason,
                num_output_tokens,
                self._floor.own.take(),
                num_drafted_tokens,
                num_accepted_tokens,
            )
        )
        self._floor.end(sequence)

    def drop(self, sequence: Sequence, reason: str) -> None:
        """Drop a sequence that cannot continue here, and report why."""
        self._effects.append(RequestDropped(self._instance_id, *sequence.key, reason))
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """End a sequence without reporting its end. `KvReleased` follows once its blocks are free."""
        self._effects.append(Forget(sequence))
        self._floor.end(sequence)

    def free(self, command: FreeKv) -> None:
        """Free a request in this epoch and older ones. If this epoch has no blocks here, report its release at once."""
        key = (command.request_id, command.epoch)
        if key not in self._floor.sequences and not self._floor.is_leaving(key):
            self._effects.append(KvReleased(self._instance_id, *key, command.transfer_id))
        self.free_up_to(*key)

    def free_up_to(self, request_id: RequestId, epoch: int) -> None:
        """Free a request in an epoch and in older ones: now, or when a running step has ended.

        All sequences are searched only for resumed requests, which are rare.
        """
        sequences = self._floor.sequences
        if epoch > 0:
            keys = [each for each in sequences if each[0] == request_id and each[1] <= epoch]
        else:
            keys = [(request_id, Epoch(epoch))]
        for key in keys:
            if (sequence := sequences.get(key)) is not None:
                self._effects.append(Forget(sequence))
                self._floor.release(sequence)
