"""Spread contexts and prompts on the instance that decodes or computes them: ranges are on other instances."""

from __future__ import annotations

from collections.abc import Collection

from pdmesh.core.commands import SetPlaces
from pdmesh.core.events import MembersSet, RangeLost
from pdmesh.instance.copying import CopyRules
from pdmesh.instance.effects import Refused
from pdmesh.instance.endings import Endings
from pdmesh.instance.floor import Floor
from pdmesh.instance.sequence import Sequence
from pdmesh.model import PartMember

_NO_ANSWER = "shard holders with some of its KV do not answer"


class Spreading:
    """The spread contexts of one instance."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._endings = Endings(floor)
        self._copying = CopyRules(floor)

    def set_members(self, sequence: Sequence) -> None:
        """Set the shard holders that the scheduler named, if any. Call between two steps.

        The blocks of the holders' ranges are freed here. A context with a lost range continues if the range has another
        holder. It also continues if no holder changes, since then the scheduler does not know of the loss, and the next
        step reports it again. A context that does not fit the new holders is dropped.
        """
        before, members, floor = sequence.members, sequence.next_members, self._floor
        if members is None or sequence.is_freed:
            return
        num_more, num_tokens = len(members) - len(before), len(members) * floor.range_tokens
        if num_more < 0 or not members or num_tokens > floor.num_kv_tokens(sequence):
            reason = f"the context does not have {len(members)} ranges, or has more shard holders"
            key = sequence.key
            command = SetPlaces(instance_id=floor.instance_id, request_id=key[0], epoch=key[1], places=members)
            floor.effects.append(Refused(command, reason))
            self._endings.drop(sequence, reason)
            return
        self._copying.end_landed_range(sequence, members)
        member_ids = tuple([each.instance_id for each in members])
        streams_out = sequence.prompt.num_blocks_at_once > 0
        num_blocks = num_more * floor.range_tokens // floor.block_size
        done = MembersSet(floor.instance_id, *sequence.key, member_ids, streams_out)
        floor.spread(sequence, members, num_blocks, done)
        sequence.spread(members, num_blocks)
        if self._is_found(sequence, before, members):
            sequence.find_range()
            if sequence.is_decoding:
                floor.stay(sequence)
            else:
                floor.decode(sequence)

    def _is_found(self, sequence: Sequence, before: tuple[PartMember, ...], members: tuple[PartMember, ...]) -> bool:
        number = sequence.lost_range
        return number is not None and (members == before or members[number : number + 1] != before[number : number + 1])

    def lose_members(self, sequence: Sequence, numbers: Collection[int]) -> None:
        """Pause a decoding context if one holder of a range does not answer. Ignored if its range is lost already.

        Drop the context if several holders do not answer, or if it moves or does not decode.
        """
        if sequence.has_lost_range:
            # The loss was reported already.
            return
        if not sequence.is_decoding or len(numbers) != 1 or sequence.move is not None:
            self._endings.drop(sequence, _NO_ANSWER)
            return
        (number,) = numbers
        self._floor.lose_range(sequence, number)
        self._floor.effects.append(RangeLost(self._floor.instance_id, *sequence.key, number))
