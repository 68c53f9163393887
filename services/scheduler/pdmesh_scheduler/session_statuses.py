"""Sessions as operators see them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.sessions.session_state import Session
from pdmesh.model import SessionKey
from pdmesh.wire.messages import SessionStatus


class SessionStatuses:
    """Reader of a core's sessions. An id is the hexadecimal form of a session's key."""

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    def newest(self, limit: int) -> tuple[SessionStatus, ...]:
        """Return the sessions whose state changed last, the newest first."""
        self._core.sessions.expire()
        return tuple(map(self._status, islice(self._core.sessions.newest(), limit)))

    def of_tenant(self, tenant: str, key: SessionKey | None, limit: int) -> tuple[SessionStatus, ...]:
        """Return a tenant's sessions whose state changed last, the newest first; with a key that session alone."""
        self._core.sessions.expire()
        if key is None:
            return tuple(map(self._status, islice(self._core.sessions.newest(tenant), limit)))
        session = self._core.sessions.find(key, tenant)
        return () if session is None else (self._status(session),)

    def find(self, beginning: str) -> tuple[Session, ...]:
        """Return the sessions whose ids begin like this."""
        return tuple(each for each in self._core.sessions.all if each.key.hex().startswith(beginning.lower()))

    def statuses(self, sessions: tuple[Session, ...]) -> tuple[SessionStatus, ...]:
        return tuple(map(self._status, sessions))

    def _status(self, session: Session) -> SessionStatus:
        now_s = self._clock()
        pause_s, member = session.pause_s, session.member
        return SessionStatus(
            session=session.key.hex(),
            tenant=session.tenant,
            state=session.state,
            since_s=max(0.0, now_s - session.since_s),
            pause_s=pause_s,
            parent=None if session.parent is None else session.parent.key.hex(),
            num_children=session.num_children,
            num_turns=session.num_turns,
            num_prompt_tokens=session.num_prompt_tokens,
            num_reused_tokens=session.num_reused_tokens,
            num_possible_tokens=session.num_possible_tokens,
            cached_on=tuple(self._core.holders_of(session)),
            num_waits=0 if member is None else member.num_waits,
            longest_aside_s=0.0 if member is None else member.longest_aside_s,
        )
