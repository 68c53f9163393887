"""Modelled instances together: commands find theirs, and what two of them have to do with each other is chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdmesh.core.commands import (
    Command,
    ToInstance,
)
from pdmesh.core.events import MoveSent, TransferFailed, TransferLanded, TransferSent
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh.testing.modelled import ModelledInstance
from pdmesh.testing.modelled_groups import ModelledPieces


class ModelledMesh:
    """Instances by id, and what concerns two of them."""

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
        """Granted transfers whose receiver expects them, as (sender, receiver, request)."""
        found: list[tuple[ModelledInstance, ModelledInstance, RequestKey]] = []
        for sender in self.instances.values():
            for key, hold in sender.holds.items():
                peer_id = hold.transfer.destination_ids[0] if hold.transfer is not None and hold.sends else None
                receiver = None if peer_id is None else self.instances.get(peer_id)
                target = None if receiver is None else receiver.holds.get(key)
                expects = target is not None and not target.decoding and target.transfer == hold.transfer
                if hold.granted and receiver is not None and expects:
                    found.append((sender, receiver, key))
        moves = self.moves()
        for receiver in self.instances.values():
            num_transfers = sum(to is receiver for _, to, _ in (*found, *moves))
            assert num_transfers <= receiver.profile.num_transfer_backends, f"{receiver.instance_id}: no backend"
        return found

    def land(self, sender: ModelledInstance, receiver: ModelledInstance, key: RequestKey) -> None:
        """All KV of a computed prompt has arrived: it decodes, and the sender frees its side."""
        assert sender.holds[key].computed, f"{key} landed before it was computed"
        plan = sender.holds[key].transfer
        assert plan is not None, f"{key} landed without a transfer"
        receiver.holds[key].decoding = True
        receiver.holds[key].num_computed_tokens = sender.holds[key].num_computed_tokens
        receiver.events.append(TransferLanded(receiver.instance_id, *key, plan.transfer_id, 1, 0.0))
        sender.events.append(TransferSent(sender.instance_id, *key, plan.transfer_id, 1, 0.0, 0.0))
        sender.release(key)

    def moves(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Running decodes on their way, as (source, target that expects it, request)."""
        found: list[tuple[ModelledInstance, ModelledInstance, RequestKey]] = []
        for source in self.instances.values():
            for key, hold in source.holds.items():
                plan = hold.leaving
                target = None if plan is None else self.instances.get(plan.destination_ids[0])
                expected = None if target is None else target.holds.get(key)
                if target is not None and expected is not None and expected.transfer == plan and not expected.decoding:
                    found.append((source, target, key))
        return found

    @staticmethod
    def commit_move(source: ModelledInstance, key: RequestKey) -> None:
        """Commit a move: the source stands still from here on."""
        hold = source.holds[key]
        hold.committed, hold.decoding, hold.seated = True, False, False

    def land_move(self, source: ModelledInstance, target: ModelledInstance, key: RequestKey) -> None:
        """Let the target decode a moved request, which the source does not know yet."""
        hold, there = source.holds[key], target.holds[key]
        if not hold.committed:
            self.commit_move(source, key)
        assert hold.leaving is not None
        hold.landed = there.decoding = True
        there.num_computed_tokens = hold.num_computed_tokens
        target.events.append(TransferLanded(target.instance_id, *key, hold.leaving.transfer_id, 1, 0.0))

    @staticmethod
    def acknowledge_move(source: ModelledInstance, key: RequestKey) -> None:
        """The source hears of it, and frees its side."""
        plan = source.holds[key].leaving
        assert plan is not None, f"{key} is acknowledged and did not move"
        source.events.append(MoveSent(source.instance_id, *key, plan.transfer_id, 1, 0.0, 0.0))
        source.release(key)

    def landed_moves(self) -> list[tuple[ModelledInstance, RequestKey]]:
        """What sources will soon be told has landed."""
        return [
            (source, key)
            for source in self.instances.values()
            for key, hold in source.holds.items()
            if hold.landed and not hold.given_up
        ]

    def fail(self, at: ModelledInstance, key: RequestKey) -> None:
        """One side gives a transfer up: a receiver with what it has of it, a sender keeps all."""
        hold = at.holds[key]
        assert hold.transfer is not None, f"{key} has no transfer to fail"
        at.events.append(TransferFailed(at.instance_id, *key, hold.transfer.transfer_id, "modelled"))
        if hold.sends:
            hold.lose_receiver()
        else:
            at.release(key)
