"""Agent sessions in a closed loop: turns with pauses, subagents that run beside their parent, and joins."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pdmesh_lab.sim.workload import Arrival, Clients


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """A request of a session, sent `pause_s` after the last of the turns `after` has ended.

    `after` are indexes of earlier turns of the session: the turn before, the one that started a subagent, or the last
    turns of subagents. `arrival.arrival_s` is the recorded time since the beginning of the session.
    """

    arrival: Arrival
    after: tuple[int, ...]
    pause_s: float


#: The turns of an agent and its subagents.
AgentSession = Sequence[AgentTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoop:
    """Sessions of which `num_lanes` are under way at a time. A lane whose session has ended takes the next one.

    With `duration_s`, no turn begins later, and the first session of each lane begins at a random instant, as if its
    earlier turns had been answered elsewhere. `seed` determines these instants.
    """

    sessions: Sequence[AgentSession]
    num_lanes: int
    duration_s: float | None = None
    seed: int = 0

    def clients(self, arrivals: Iterable[Arrival]) -> Clients:
        """Return the agents of a new simulation. Only the turns of the sessions are sent, and no ``arrivals``."""
        return _Agents(self)


class _Agents:
    def __init__(self, loop: AgentLoop) -> None:
        self._end_s = math.inf if loop.duration_s is None else loop.duration_s
        self._is_cut = loop.duration_s is not None
        self._num_lanes = loop.num_lanes
        self._rng = random.Random(loop.seed)
        self._sessions = iter(loop.sessions)
        self._num_sent = 0
        self._sent: dict[int, tuple[_Running, int]] = {}

    def begin(self) -> Sequence[Arrival]:
        sent: list[Arrival] = []
        for session in islice(self._sessions, self._num_lanes):
            last_s = max(turn.arrival.arrival_s for turn in session)
            sent += self._start(session, self._rng.uniform(0.0, last_s) if self._is_cut else 0.0, 0.0)
        return sent

    def ended(self, index: int, now_s: float) -> Sequence[Arrival]:
        running, turn = self._sent.pop(index)
        sent = self._send(running, running.ended(turn), now_s)
        if not running.num_left:
            for session in islice(self._sessions, 1):
                sent += self._start(session, 0.0, now_s)
        return sent

    def _start(self, session: AgentSession, instant_s: float, now_s: float) -> list[Arrival]:
        running = _Running(session)
        return self._send(running, running.begin(instant_s), now_s)

    def _send(self, running: _Running, turns: Iterable[tuple[int, float]], now_s: float) -> list[Arrival]:
        sent: list[Arrival] = []
        for index, pause_s in turns:
            if now_s + pause_s <= self._end_s:
                sent.append(replace(running.session[index].arrival, arrival_s=now_s + pause_s))
                self._sent[self._num_sent] = running, index
                self._num_sent += 1
        return sent


class _Running:
    """A session under way."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        self._left = set(range(len(session)))
        self._num_awaited = [len(turn.after) for turn in session]
        self._followers: list[list[int]] = [[] for _ in session]
        for index, turn in enumerate(session):
            for earlier in turn.after:
                self._followers[earlier].append(index)

    @property
    def num_left(self) -> int:
        """Number of turns that have not ended."""
        return len(self._left)

    def begin(self, instant_s: float) -> list[tuple[int, float]]:
        """Begin at a recorded time. Return the turns to be sent, and the seconds until then."""
        for index, turn in enumerate(self.session):
            if turn.arrival.arrival_s < instant_s:
                self._end(index)
        return [
            (index, max(0.0, turn.arrival.arrival_s - instant_s))
            for index, turn in enumerate(self.session)
            if self._num_awaited[index] == 0 and turn.arrival.arrival_s >= instant_s
        ]

    def ended(self, index: int) -> list[tuple[int, float]]:
        """End a turn. Return the turns that waited only for this one, and their pauses.

        A turn that ended before the recorded time of `begin` is not sent, even if it waited for this one.
        """
        self._end(index)
        ready = [each for each in self._followers[index] if each in self._left and not self._num_awaited[each]]
        return [(each, self.session[each].pause_s) for each in ready]

    def _end(self, index: int) -> None:
        self._left.remove(index)
        for each in self._followers[index]:
            self._num_awaited[each] -= 1
