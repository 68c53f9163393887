"""Sequences that begin with a copy: to this instance, or of its cached blocks to another one."""

from __future__ import annotations

from pdmesh.core.commands import ExpectCopy, SendCopy
from pdmesh.core.events import KvExpected
from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import range_at
from pdmesh.instance.effects import Expect, SendKv
from pdmesh.instance.floor import Floor
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import LeavingState, SeqPhase
from pdmesh.model import PartMember, Then
from pdmesh.plans import TransferPlan


class NewCopies:
    """Sequences that begin with a copy."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._effects = floor.effects
        self._instance_id = floor.instance_id

    def expect(self, command: ExpectCopy) -> None:
        """Reserve blocks for KV that comes from another instance, or from the offload tier."""
        key, transfer = (command.request_id, command.epoch), command.transfer
        part, members = range_at(transfer, self._instance_id), command.members or _members_of(transfer)
        chain = () if members or part is not None else command.chain or self._floor.chain_of(key)
        sequence = Sequence(
            key,
            SeqPhase.EXPECTED,
            command.num_blocks,
            prefix=CachedPrefix(chain, command.num_loaded_granules),
            leads=part is None and transfer.then is Then.DECODE,
            incoming=transfer,
            part=part,
            members=members if part is None else (),
        )
        if self._floor.take(sequence, command, command.num_reused_granules):
            self._effects.append(Expect(sequence, command))
            self._effects.append(KvExpected(self._instance_id, *sequence.key, transfer.transfer_id))

    def send_cached(self, command: SendCopy) -> None:
        """Send cached blocks."""
        key, transfer = (command.request_id, command.epoch), command.transfer
        prefix = CachedPrefix(command.chain)
        num_blocks = transfer.sources[0].num_blocks
        sequence = Sequence(key, SeqPhase.COMPUTED, num_blocks, prefix=prefix, leads=False, incoming=transfer)
        sequence.send_on(transfer, Then.KEEP, LeavingState.SENDING)
        if self._floor.take(sequence, command, len(command.chain)):
            self._effects.append(SendKv(sequence, transfer))


def _members_of(transfer: TransferPlan) -> tuple[PartMember, ...]:
    """Return the holders of the first ranges after a hand-over."""
    return tuple(
        [
            PartMember(instance_id=instance_id, capability=transfer.capability)
            for instance_id in transfer.destination_ids[1:]
        ]
    )
