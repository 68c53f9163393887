"""Contexts and prompts with ranges on other instances, where they decode or are computed."""

from __future__ import annotations

from pdmesh.core.events import MembersSet, PartLost
from pdmesh.instance.holding import Holding
from pdmesh.instance.sequence import Sequence
from pdmesh.model import InstanceId, PartMember


class Spreading:
    """The spread contexts of one instance."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._range_tokens = holding.profile.max_kv_tokens

    def set_members(self, sequence: Sequence, members: tuple[PartMember, ...]) -> None:
        """Let other instances hold the first ranges of a context, and free the blocks of these here."""
        num_more, holding = len(members) - len(sequence.members), self._holding
        gives_back, num_blocks = sequence.prompt.num_blocks_at_once > 0, 0
        if gives_back:  # the blocks are used again for the next tokens
            num_away = len(members) * self._range_tokens
            assert num_away <= sequence.prompt.num_computed_tokens, f"{sequence.key} gives back what is not computed"
        elif num_more:
            num_blocks = num_more * self._range_tokens // holding.profile.kv_layout.block_size
            holding.give_back(sequence, num_blocks)
        sequence.spread(members, num_blocks)
        if sequence.has_lost_range:
            sequence.find_range()
            if sequence.is_decoding:
                holding.residents.stay(sequence.key)
            else:
                holding.decode(sequence)
        if sequence.key in holding.residents:
            num_saved_tokens = len(members) * self._range_tokens
            holding.residents.spread(sequence.key, num_saved_tokens, holding.full_at_tokens(sequence))
        member_ids = tuple([each.instance_id for each in members])
        self._holding.effects.append(MembersSet(self._holding.instance_id, *sequence.key, member_ids, gives_back))

    def lose_member(self, instance_id: InstanceId) -> None:
        """Pause contexts with a range on a lost instance, and drop prompts with a range there."""
        for sequence in list(self._holding.sequences.values()):
            member_ids = [member.instance_id for member in sequence.members]
            if instance_id not in member_ids:
                continue
            if sequence.prompt.num_blocks_at_once:
                self._holding.drop(sequence, "another instance that holds KV of it does not answer")
            elif sequence.is_decoding and not sequence.has_lost_range and sequence.move is None:
                number = member_ids.index(instance_id)
                self._holding.lose_range(sequence, number)
                self._holding.effects.append(PartLost(self._holding.instance_id, *sequence.key, number))
