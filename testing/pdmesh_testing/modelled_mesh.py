"""Modelled instances together: commands find theirs, and what two of them have to do with each other is chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdmesh.core.commands import Command, ToInstance
from pdmesh.instance.effects import CopyCaughtUp, CopyCommitted, CopyFailed, CopyLanded, CopySent
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.model import InstanceProfile, RequestKey, Then
from pdmesh.plans import TransferPlan
from pdmesh_testing.modelled import ModelledInstance
from pdmesh_testing.modelled_groups import ModelledPieces


class ModelledMesh:
    """Instances by id, and the events between two of them."""

    def __init__(
        self, profiles: Iterable[InstanceProfile], max_total_of: Mapping[RequestKey, int] | None = None
    ) -> None:
        self.pieces = ModelledPieces()
        self.instances = {
            profile.instance_id: ModelledInstance(profile, max_total_of, self.pieces) for profile in profiles
        }

    def send(self, command: Command) -> bool:
        """Put a command for an instance on its way; False if it is not for an instance that is there."""
        if not isinstance(command, ToInstance) or command.instance_id not in self.instances:
            return False
        self.instances[command.instance_id].commands.append(command)
        return True

    def transfers(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Return granted transfers whose receiver expects them, as (sender, receiver, request)."""
        found: list[tuple[ModelledInstance, ModelledInstance, RequestKey]] = []
        for sender in self.instances.values():
            for key, sequence in sender.sequences.items():
                if sequence.is_granted and (receiver := self._expecting(key, sequence.transfer)) is not None:
                    found.append((sender, receiver, key))
        moves = [*self.moves(), *self.part_moves()]
        for receiver in self.instances.values():
            num_transfers = sum(to is receiver for _, to, _ in (*found, *moves))
            assert num_transfers <= receiver.profile.num_transfer_backends, f"{receiver.instance_id}: no backend"
        return found

    def _expecting(self, key: RequestKey, plan: TransferPlan | None) -> ModelledInstance | None:
        """Return where a transfer goes, of several the first, if all wait for it."""
        if plan is None:
            return None
        for destination_id in plan.destination_ids:
            receiver = self.instances.get(destination_id)
            target = None if receiver is None else receiver.sequences.get(key)
            if target is None or target.incoming != plan or target.phase not in (SeqPhase.EXPECTED, SeqPhase.HOLDING):
                return None
        return self.instances[plan.destination_ids[0]]

    def land(self, sender: ModelledInstance, receiver: ModelledInstance, key: RequestKey) -> None:
        """Let all KV of a transfer arrive: a request decodes, a fetch is cached, and the sender frees its side."""
        sequence = sender.sequences[key]
        others = [] if sequence.transfer is None else sequence.transfer.destination_ids[1:]
        for instance in [*(self.instances[instance_id] for instance_id in others), receiver]:
            if instance.sequences[key].phase is SeqPhase.EXPECTED:
                # In phase HOLDING the range landed before.
                instance.hear(CopyLanded(key, sequence.num_tokens, 1, 0.0))
        then = Then.DECODE if Then.DECODE in sequence.outgoing else Then.KEEP
        sender.hear(CopySent(key, then, 1, 0.0))

    def ranges(self) -> list[tuple[ModelledInstance, RequestKey]]:
        """Return ranges of prompts longer than their instances' room that may land, as (destination, request)."""
        found: list[tuple[ModelledInstance, RequestKey]] = []
        for sender, _, key in self.transfers():
            sequence = sender.sequences[key]
            if not sequence.prompt.num_blocks_at_once or sequence.transfer is None:
                continue
            for number, instance_id in enumerate(sequence.transfer.destination_ids[1:], 1):
                is_computed = number * sender.profile.max_kv_tokens <= sequence.prompt.num_computed_tokens
                if is_computed and self.instances[instance_id].sequences[key].phase is SeqPhase.EXPECTED:
                    found.append((self.instances[instance_id], key))
        return found

    @staticmethod
    def land_range(receiver: ModelledInstance, key: RequestKey) -> None:
        """Let a range of a prompt arrive, before its sender knows."""
        receiver.hear(CopyLanded(key, 1, 1, 0.0))

    def moves(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Return running decodes on their way, as (source, target that expects it, request)."""
        return [
            (source, target, key)
            for source in self.instances.values()
            for key, sequence in source.sequences.items()
            if (move := sequence.move) is not None and (target := self._expecting(key, move.transfer)) is not None
        ]

    @staticmethod
    def commit_move(source: ModelledInstance, key: RequestKey) -> None:
        """Commit a move: the source no longer decodes the request."""
        move = source.sequences[key].move
        assert move is not None, f"{key} does not move"
        if not move.is_frozen:
            source.hear(CopyCaughtUp(key))
            # A running step ends without the request.
            source.do(source.machine.turn())
        if not move.may_have_begun:
            source.hear(CopyCommitted(key))

    def land_move(self, source: ModelledInstance, target: ModelledInstance, key: RequestKey) -> None:
        """Let the target decode a moved request, which the source does not know yet."""
        sequence = source.sequences[key]
        if sequence.move is not None and not sequence.move.may_have_begun:
            self.commit_move(source, key)
        source.landed.add(key)
        target.hear(CopyLanded(key, sequence.num_tokens, 1, 0.0))

    @staticmethod
    def acknowledge_move(source: ModelledInstance, key: RequestKey) -> None:
        """Report the arrival to the source, which frees its side."""
        source.landed.remove(key)
        source.hear(CopySent(key, Then.DECODE, 1, 0.0))

    def landed_moves(self) -> list[tuple[ModelledInstance, RequestKey]]:
        """Return the landed moves that their sources do not know yet, as (source, request)."""
        return [
            (source, key)
            for source in self.instances.values()
            for key, sequence in source.sequences.items()
            if key in source.landed and (sequence.move is None or not sequence.move.is_abandoned)
        ]

    def part_moves(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Return ranges of contexts on their way, as (source, target that expects it, request)."""
        return [
            (source, target, key)
            for source in self.instances.values()
            for key, sequence in source.sequences.items()
            if (copy := sequence.handing) is not None and (target := self._expecting(key, copy.transfer)) is not None
        ]

    @staticmethod
    def land_part(source: ModelledInstance, target: ModelledInstance, key: RequestKey) -> None:
        """Let a range arrive, and its source get the acknowledgement."""
        target.hear(CopyLanded(key, 1, 1, 0.0))
        source.hear(CopySent(key, Then.HOLD, 1, 0.0))

    @staticmethod
    def fail_part(source: ModelledInstance, key: RequestKey) -> None:
        """Let the transfer of a range fail."""
        source.hear(CopyFailed(key, Then.HOLD, "modelled"))

    @staticmethod
    def fail_move(source: ModelledInstance, key: RequestKey) -> None:
        """Let a move fail at the source."""
        source.hear(CopyFailed(key, Then.DECODE, "modelled"))

    @staticmethod
    def fail(at: ModelledInstance, key: RequestKey) -> None:
        """Let one side end a transfer as failed: a receiver drops its part, a sender keeps the whole request."""
        then = Then.DECODE if at.sequences[key].moves_on else None
        at.hear(CopyFailed(key, then, "modelled"))
