"""Ranges of contexts whose holder was lost while their requests decode: each is computed again, and nothing else is.

The request is paused where it decodes. An instance with room for the range gets the range's tokens from there, asks
the holders of earlier ranges, as a decode would, and computes the range's KV. Then it is the range's next holder
(`pdmesh.core.copies.context_ranges`), and the request continues in the same epoch. A request that finds no room in
time, or whose context loses ranges again and again, starts again from its transcript.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pdmesh.core.copies.decode_moves import MAX_FAILED
from pdmesh.core.copies.receivers import do_without
from pdmesh.core.events import PartLost
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import RequestKey

#: So long a request stands still for an instance with room for its lost range. One that died is mostly started again
#: by then; a request that started again elsewhere would need as many instances.
FIND_ROOM_S = 30.0

#: Begins to have a range of a request computed, which decodes on the instance; False if nobody has room for it.
Begin = Callable[[RequestState, InstanceState, int], bool]


class LostParts:
    """Those that no instance computes yet."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._until_s: dict[RequestKey, float] = {}

    @property
    def next_deadline_s(self) -> float:
        """Infinite if there is none."""
        return min(self._until_s.values(), default=inf)

    def heard(self, event: PartLost) -> None:
        """Where a context decodes, one that holds a range of it gave no answer."""
        state = self._mesh.find((event.request_id, event.epoch))
        if state is None or state.decode_id != event.instance_id or event.number >= len(state.members):
            self._mesh.ignore("PartLost")
            return
        member_id = state.members[event.number].instance_id
        if state.needs(member_id):
            do_without(self._mesh, state, member_id, f"instance {member_id} does not answer, which holds KV of it")

    def serve(self, begin: Begin, now_s: float) -> None:
        """Have others compute what was lost, as soon as one has room; after any event."""
        lost = self._mesh.parts_lost
        for key, state in list(lost.items()):
            if self._mesh.find(key) is not state or state.lost_part is None:
                del lost[key]
                self._until_s.pop(key, None)
            elif state.outgoing is None:
                self._serve(state, state.lost_part, begin, now_s)

    def _serve(self, state: RequestState, number: int, begin: Begin, now_s: float) -> None:
        assert state.phase is Phase.DECODING, f"{state.key} lacks a range, and is {state.phase}"
        home = None if state.decode_id is None else self._mesh.instances.get(state.decode_id)
        until_s = self._until_s.setdefault(state.key, now_s + FIND_ROOM_S)
        can_begin = home is not None and home.reachable and not home.suspected and state.num_failed_moves < MAX_FAILED
        if can_begin and home is not None and begin(state, home, number):
            del self._until_s[state.key]
        elif now_s >= until_s or state.num_failed_moves >= MAX_FAILED:
            self._mesh.restart(state, f"range {number} of its KV was lost, and no instance computes it again")
