"""Prompts that modelled instances compute in turn: the KV on each member, and the pieces under way between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.model import InstanceId, RequestKey
from pdmesh.plans import ChunkPlan, PrefillGroup


class ModelledPiece(NamedTuple):
    """KV of some blocks, in all layers."""

    source_id: InstanceId
    destination_id: InstanceId
    key: RequestKey
    blocks: tuple[int, ...]
    #: Ids of the members that the source sent the piece to.
    told_ids: tuple[InstanceId, ...]


class ModelledPieces:
    """Pieces under way between the instances of a mesh. A piece is lost with its source or destination."""

    def __init__(self) -> None:
        self.under_way: list[ModelledPiece] = []

    def cut_off(self, instance_id: InstanceId) -> None:
        self.under_way = [p for p in self.under_way if instance_id not in (p.source_id, p.destination_id)]


@dataclass(slots=True)
class ModelledMember:
    """Member's side of a group, for one epoch of a request."""

    key: RequestKey
    group: PrefillGroup
    instance_id: InstanceId
    block_size: int
    pieces: ModelledPieces
    #: Present blocks, with the instance that computed each.
    pages: dict[int, InstanceId] = field(default_factory=dict[int, InstanceId])

    @property
    def leads(self) -> bool:
        return self.group.member_ids[0] == self.instance_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens present from the prompt's first on, without a gap."""
        block = 0
        while block in self.pages:
            block += 1
        return block * self.block_size

    def has_before(self, chunk: ChunkPlan) -> bool:
        """Whether all KV before a chunk is here."""
        return all(block in self.pages for block in range(chunk.start // self.block_size))

    def begin(self, num_computed_tokens: int) -> None:
        """Take part from now on. A leader brings the tokens that it has computed alone."""
        self._add_own(range(num_computed_tokens // self.block_size))

    def compute(self, chunk: ChunkPlan) -> None:
        """Compute a chunk here, and send the others the blocks that it fills."""
        end, size = chunk.start + chunk.num_tokens, self.block_size
        self._add_own(range(chunk.start // size, -(-end // size) if chunk.is_last else end // size))

    def _add_own(self, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self.pages.update(dict.fromkeys(blocks, self.instance_id))
        self._send(blocks, self.group.living_ids)

    def regroup(self, group: PrefillGroup) -> None:
        """Take over the group's membership.

        The leader sends all its blocks to new members, and blocks that lost members computed to all members.
        """
        known = self.group
        assert self.instance_id in group.living_ids, f"{group} without {self.instance_id}"
        assert known.capability == group.capability
        assert set(known.lost_ids) <= set(group.lost_ids), f"{group} after {known}"
        if known.member_ids[1:] != (self.instance_id,):
            assert group.member_ids[: len(known.member_ids)] == known.member_ids, f"{group} after {known}"
        self.group = group
        if self.leads:
            added = [name for name in group.living_ids if name not in known.member_ids]
            self._send(tuple(self.pages), added)
            lost = set(group.lost_ids) - set(known.lost_ids)
            self._send(tuple([block for block, origin in self.pages.items() if origin in lost]), group.living_ids)

    def take(self, piece: ModelledPiece) -> None:
        """Take a piece that has arrived. The leader passes it on to members that its source did not know."""
        blocks = tuple([block for block in piece.blocks if block not in self.pages])
        self.pages.update(dict.fromkeys(blocks, piece.source_id))
        if self.leads:
            self._send(blocks, [name for name in self.group.living_ids if name not in piece.told_ids])

    def _send(self, blocks: tuple[int, ...], to: Iterable[InstanceId]) -> None:
        others = [name for name in to if name != self.instance_id]
        told = (self.instance_id, *self.group.member_ids)
        if blocks:
            self.pieces.under_way += [ModelledPiece(self.instance_id, name, self.key, blocks, told) for name in others]
