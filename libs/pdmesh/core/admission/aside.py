"""Sessions that wait as a whole while the contexts of all sessions exceed the room for KV.

A turn is fast only if its whole context is cached. So if the contexts of the working set (`pdmesh.core.sessions`) do
not fit into the instances' KV, some sessions are set aside, and the others keep their KV. New sessions wait first, then
the next turns of the youngest ones. The oldest one is served first. A turn waits at most `NUM_WAITS` times as long as
a request may wait in the queue. Then it joins its line as any other request does, and its session counts as the oldest
for a while, so that the next turns find its KV.

Room is dealt out to tenants by their shares: sessions within a tenant's share are never set aside for others. Requests
without a session are not set aside, nor ones with a target for the first token, nor ones that were begun before.
"""

from __future__ import annotations

from math import inf
from typing import Final

from pdmesh.core.config import CoreConfig
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.core.sessions.session_state import Member
from pdmesh.core.sessions.working_set import RECENT_S

#: Longest wait of a turn that is set aside, as a multiple of the longest wait in the queue. Each wait that reaches its
#: limit costs the computation of a whole context. A shorter limit brings back what the waiting avoids.
NUM_WAITS: Final = 4

#: Share of the instances' KV that contexts may fill. They grow during their turns.
FILL: Final = 0.95

#: Longest time between two looks at the turns that are set aside.
LOOK_S: Final = 1.0

#: Number of sessions in the working set up to which room is divided after each change, and the least time between two
#: divisions for each further one. Dividing takes 1 us a session, so 5 % of the time at most, however many names come.
MEMBERS_AT_ONCE: Final = 64
DIVIDE_S_PER_MEMBER: Final = 2e-5

#: Time in which no session has a turn in line or running. Then the turn that waited longest joins its line, because the
#: sessions with room may not come back soon.
IDLE_S: Final = 5.0

#: After a turn waited to its limit, its session counts as the oldest for this share of the limit.
GUARD_SHARE: Final = 0.25

#: Room is made for a session in the last part of its wait, which is this share of the limit.
LEAD_SHARE: Final = 0.125

#: Share of the queue's limits up to which turns are set aside: others must find room in the queue.
QUEUE_SHARE: Final = 0.5


class Aside:
    """Decision which sessions' turns wait. ``next_look_s`` is when to call `look` at the latest."""

    def __init__(self, mesh: MeshState, config: CoreConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._seen_changes = -1
        self._idle_from_s = inf
        self._divides_from_s = -inf
        self.next_look_s = inf

    def arrived(self, state: RequestState) -> None:
        """Set a turn aside that just joined the line, if contexts exceed the room. `look` finds out whether it fits.

        A context that exceeds the room alone is never set aside: no wait would help. Nor is the turn of a session that
        had room when room was last divided, if it is not divided again now.
        """
        member = None if state.session is None else state.session.member
        if member is None:
            return
        num_uncounted_tokens, room = 0 if member.num_tokens else state.num_work_tokens, self._room
        if self._mesh.sessions.working_set.num_tokens + num_uncounted_tokens <= room:
            member.is_out = False
        elif not member.is_out and self._mesh.sessions.now_s < self._divides_from_s:
            return
        elif member.num_own_tokens <= room and self._may_wait(state, member):
            self._mesh.set_aside(state, member)

    def look(self, now_s: float) -> None:
        """Return turns to their lines if their sessions have room now, and protect these sessions' KV from eviction."""
        mesh = self._mesh
        working_set = mesh.sessions.working_set
        if working_set.num_changes == self._seen_changes and now_s < self.next_look_s:
            return
        if now_s < self._divides_from_s:
            self.next_look_s = self._divides_from_s
            return
        mesh.queue.sort_turns_aside()
        turns, index = mesh.queue.turns_aside, mesh.cache_index
        working_set.expire(now_s)
        self._let_in_due(now_s)
        room = self._room
        if turns or (room and working_set.num_tokens > room):
            most_s = self._most_s
            may_run = list(working_set.divide(room, now_s - GUARD_SHARE * most_s, now_s - (1 - LEAD_SHARE) * most_s))
            self._divides_from_s = now_s + DIVIDE_S_PER_MEMBER * max(0, working_set.num_members - MEMBERS_AT_ONCE)
            index.protect({member.chain[-1]: member.chain for member in may_run if member.chain})
            keys = {member.session.key for member in may_run}
            for state, _ in list(turns.values()):
                if not room or state.session is None or state.session.key in keys:
                    self._come_back(state, now_s)
        elif index.protected:
            index.protected.clear()
        self._let_in_if_idle(now_s)
        self._seen_changes = working_set.num_changes
        self.next_look_s = now_s + RECENT_S if index.protected else inf
        if turns:
            _, since_s = next(iter(turns.values()))
            self.next_look_s = min(now_s + LOOK_S, since_s + self._most_s, self._idle_from_s + IDLE_S)

    def keeps_waiting(self, state: RequestState, now_s: float) -> bool:
        """Postpone a turn's limit in the queue if it is set aside; return False if it is not."""
        if state.key not in self._mesh.queue.turns_aside:
            return False
        self._mesh.queue.postpone(state, now_s + self._config.max_queue_s)
        return True

    def _let_in_due(self, now_s: float) -> None:
        """Return the turns that waited to their limit to their lines."""
        turns, working_set = self._mesh.queue.turns_aside, self._mesh.sessions.working_set
        for state, since_s in list(turns.values()):
            if since_s + self._most_s > now_s:
                return
            self._come_back(state, now_s)
            if state.session is not None and state.session.member is not None:
                state.session.member.let_in_s = now_s
                working_set.changed(state.session.member)

    def _let_in_if_idle(self, now_s: float) -> None:
        """Return the turn that waited longest to its line if no session had a turn in line or running for `IDLE_S`."""
        turns = self._mesh.queue.turns_aside
        if self._mesh.sessions.working_set.is_running:
            self._idle_from_s = inf
        elif self._idle_from_s == inf:
            self._idle_from_s = now_s
        elif turns and now_s >= self._idle_from_s + IDLE_S:
            state, _ = next(iter(turns.values()))
            self._come_back(state, now_s)
            self._idle_from_s = inf

    def _come_back(self, state: RequestState, now_s: float) -> None:
        """Return a turn to its line. The turn may wait there as long as one that just arrived."""
        _, since_s = self._mesh.queue.turns_aside[state.key]
        self._mesh.come_back(state)
        if since_s < now_s:
            self._mesh.queue.postpone(state, now_s + self._config.max_queue_s)

    @property
    def _most_s(self) -> float:
        return NUM_WAITS * self._config.max_queue_s

    @property
    def _room(self) -> int:
        """Number of tokens that contexts may fill on instances that compute prompts; 0 if none caches."""
        able = [each for each in self._mesh.instances.values() if each.takes_prompts and each.kept.granule_blocks]
        return int(FILL * sum([each.num_blocks * each.block_size for each in able]))

    def _may_wait(self, state: RequestState, member: Member) -> bool:
        """Whether a turn may be set aside: its context is cached for the next one, and no other request needs it now.

        A new session with most of its prompt in the cache continues another one, which may wait for it. So does a child
        whose parent has room.
        """
        request, queue, session = state.request, self._mesh.queue, member.session
        if request.epoch > 0 or request.slo_ttft_s is not None or not request.chain:
            return False
        if session.num_live - member.num_aside > 1:
            return False
        parent = None if session.parent is None else session.parent.member
        if parent is not None and not parent.is_out and not parent.session.num_live:
            return False
        if session.is_new and 2 * state.num_reused_tokens >= request.num_prompt_tokens:
            return False
        return (
            len(queue) <= QUEUE_SHARE * self._config.max_queue_entries
            and queue.num_tokens <= QUEUE_SHARE * self._config.max_queue_tokens
        )
