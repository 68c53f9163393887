"""Modelled instances together: commands find theirs, and what two of them have to do with each other is chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdmesh.core.commands import Command, ToInstance
from pdmesh.model import InstanceProfile, RequestKey, TransferPurpose
from pdmesh.plans import TransferPlan
from pdmesh_testing.modelled import ModelledInstance
from pdmesh_testing.modelled_groups import ModelledPieces


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
            for key, held in sender.held.items():
                if held.is_granted and (receiver := self._expecting(key, held.transfer)) is not None:
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
            target = None if receiver is None else receiver.held.get(key)
            if target is None or target.transfer != plan or (target.num_tokens and not target.is_part):
                return None
        return self.instances[plan.destination_ids[0]]

    def land(self, sender: ModelledInstance, receiver: ModelledInstance, key: RequestKey) -> None:
        """All KV has arrived: a prompt's decodes, a fetch's is kept; and the sender frees its side."""
        held = sender.held[key]
        if held.transfer is not None and held.transfer.purpose is TransferPurpose.FETCH:
            receiver.untimed.land_kept(receiver.held[key], 1, 0.0)
        else:
            others = [] if held.transfer is None else held.transfer.destination_ids[1:]
            for instance in [*(self.instances[instance_id] for instance_id in others), receiver]:
                if not instance.held[key].num_tokens:  # else it landed before
                    instance.untimed.land(instance.held[key], held.num_tokens, 1, 0.0)
        sender.untimed.send(held, 1, 0.0, 0.0)

    def ranges(self) -> list[tuple[ModelledInstance, RequestKey]]:
        """Return ranges of prompts longer than their instances' room that may land, as (destination, request)."""
        found: list[tuple[ModelledInstance, RequestKey]] = []
        for sender, _, key in self.transfers():
            held = sender.held[key]
            if not held.num_blocks_at_once or held.transfer is None:
                continue
            for number, instance_id in enumerate(held.transfer.destination_ids[1:], 1):
                is_computed = number * sender.profile.max_kv_tokens <= held.num_computed_tokens
                if is_computed and not self.instances[instance_id].held[key].num_tokens:
                    found.append((self.instances[instance_id], key))
        return found

    @staticmethod
    def land_range(receiver: ModelledInstance, key: RequestKey) -> None:
        """A range of a prompt is where it goes, which its sender does not know yet."""
        receiver.untimed.land(receiver.held[key], 1, 1, 0.0)

    def moves(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Running decodes on their way, as (source, target that expects it, request)."""
        return [
            (source, target, key)
            for source in self.instances.values()
            for key, held in source.held.items()
            if held.leaving is not None and (target := self._expecting(key, held.leaving)) is not None
        ]

    @staticmethod
    def commit_move(source: ModelledInstance, key: RequestKey) -> None:
        """Commit a move: the source stands still from here on."""
        held = source.held[key]
        if not held.is_frozen:
            source.untimed.freeze(held)
            source.untimed.turn()  # a step that runs ends without it
        source.untimed.commit_move(held)

    def land_move(self, source: ModelledInstance, target: ModelledInstance, key: RequestKey) -> None:
        """Let the target decode a moved request, which the source does not know yet."""
        held = source.held[key]
        if not held.is_committed:
            self.commit_move(source, key)
        source.landed.add(key)
        target.untimed.land(target.held[key], held.num_tokens, 1, 0.0)

    @staticmethod
    def acknowledge_move(source: ModelledInstance, key: RequestKey) -> None:
        """The source hears of it, and frees its side."""
        source.landed.remove(key)
        source.untimed.end_move(source.held[key], 1, 0.0, 0.0)

    def landed_moves(self) -> list[tuple[ModelledInstance, RequestKey]]:
        """What sources will soon be told has landed."""
        return [
            (source, key)
            for source in self.instances.values()
            for key, held in source.held.items()
            if key in source.landed and not held.is_given_up
        ]

    def part_moves(self) -> list[tuple[ModelledInstance, ModelledInstance, RequestKey]]:
        """Ranges of contexts on their way, as (source, target that expects it, request)."""
        return [
            (source, target, key)
            for source in self.instances.values()
            for key, held in source.held.items()
            if held.handing is not None and (target := self._expecting(key, held.handing)) is not None
        ]

    @staticmethod
    def land_part(source: ModelledInstance, target: ModelledInstance, key: RequestKey) -> None:
        """A range is where it goes, and its source has the acknowledgement."""
        target.untimed.land(target.held[key], 1, 1, 0.0)
        source.untimed.hand_on(source.held[key], 1, 0.0)

    @staticmethod
    def fail_part(source: ModelledInstance, key: RequestKey) -> None:
        """A range is not sent."""
        source.untimed.fail_to_hand_on(source.held[key], "modelled")

    @staticmethod
    def fail(at: ModelledInstance, key: RequestKey) -> None:
        """One side gives a transfer up: a receiver with what it has of it, a sender keeps all."""
        at.untimed.fail_transfer(at.held[key], "modelled")
