"""When a group loses a helper: the others have most of what it computed, and compute what they have not.

All members are told (`lose_helper`). Whatever they have in flight of the prompt then ends without waiting for
anybody: computed, or not at all. The leader says how much of the prompt it has from the first token on. When both are
known, the prompt goes on from the first token that neither the leader has, nor a member that is left has computed and
passes on. What came after it is computed again, with the same bits.
"""

from __future__ import annotations

from msgspec import structs

from pdmesh.core.books import Books
from pdmesh.core.commands import SetGroup
from pdmesh.core.events import GroupPrefix
from pdmesh.core.requests import ComputedPart, RequestState
from pdmesh.model import InstanceId
from pdmesh.plans import ChunkPlan
from pdmesh.policy.bundle import Bundle


def lose_helper(books: Books, state: RequestState, instance_id: InstanceId) -> None:
    """The rest of its group has most of what this one computed; what it has not is computed again."""
    assert state.group is not None, f"{state.key} has no helper to lose"
    state.group = structs.replace(state.group, lost_ids=(*state.group.lost_ids, instance_id))
    state.asked_ids = tuple([helper_id for helper_id in state.asked_ids if helper_id != instance_id])
    state.is_healing, state.prefix_tokens = True, None
    state.chunks_in_flight = {each for each in state.chunks_in_flight if each[0] != instance_id}
    books.note_preemption(state)
    books.healing[state.key] = state
    books.free(instance_id, state.key)
    tell_group(books, state)


def tell_group(books: Books, state: RequestState) -> None:
    """Tell all members who they are."""
    assert state.group is not None, f"{state.key} has no group to tell"
    request_id, epoch = state.key
    for member_id in state.group.living_ids:
        books.commands.append(SetGroup(instance_id=member_id, request_id=request_id, epoch=epoch, group=state.group))


class Healing:
    def __init__(self, books: Books) -> None:
        self._books = books

    def computed(self, state: RequestState, instance_id: InstanceId, chunk: ChunkPlan) -> None:
        """A member of its group has computed a chunk."""
        leader_id = state.prefill_ids[0]
        if instance_id == leader_id:  # it has all that the chunk attended to
            state.computed_parts = [ComputedPart(0, chunk.start, leader_id)]
        state.computed_parts.append(ComputedPart(chunk.start, chunk.start + chunk.num_tokens, instance_id))

    def told(self, event: GroupPrefix) -> None:
        """A leader says what it has."""
        state = self._books.healing.get((event.request_id, event.epoch))
        if (
            state is None
            or state.group is None
            or event.instance_id != state.prefill_ids[0]
            or event.num_lost != len(state.group.lost_ids)
        ):
            self._books.ignore("GroupPrefix")
            return
        state.prefix_tokens = event.num_tokens

    def heal(self, bundle: Bundle) -> list[RequestState]:
        """Take back what was planned and is not computed, of those of whom that is known. Returns those."""
        healed = [state for state in self._books.healing.values() if self._is_known(state)]
        for state in healed:
            del self._books.healing[state.key]
            state.is_healing = False
            self._take_back(state, bundle)
        return healed

    def _is_known(self, state: RequestState) -> bool:
        members = (self._books.instances[name] for name in state.prefill_ids)
        in_flight = (chunk for member in members for plan in member.plans.values() for chunk in plan.chunks)
        return state.prefix_tokens is not None and all(
            (chunk.request_id, chunk.epoch) != state.key for chunk in in_flight
        )

    def _take_back(self, state: RequestState, bundle: Bundle) -> None:
        leader = self._books.instances[state.prefill_ids[0]]
        last = (state.request.num_prompt_tokens - 1) // leader.block_size * leader.block_size  # it was not computed
        end = min(state.prefix_tokens or 0, last, state.num_planned_tokens)
        parts = [part for part in state.computed_parts if part.instance_id in state.prefill_ids]
        state.computed_parts = [ComputedPart(0, end, leader.instance_id)]
        for part in sorted(parts):
            if part.start <= end < part.end:
                end = part.end
                state.computed_parts.append(part)
        num_again = state.num_planned_tokens - end
        if num_again > 0:
            if state.is_planned:
                leader.prefills.append(state)
            state.num_planned_tokens = end
            leader.queue_tokens(num_again)
            state.rank_by(bundle.order)
            self._books.note_preemption(state)
