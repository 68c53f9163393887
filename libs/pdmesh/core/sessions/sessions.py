"""All sessions, in bounded memory.

A request that names a session opens it. A session is forgotten after it was idle for a while. If there is no room for
another one, the tenant with the most sessions loses its longest idle one. A session with live requests is never
forgotten. No request fails because of its session: beyond the limits it is served as if it named none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import takewhile
from math import exp, log
from sys import intern

from pdmesh.core.sessions.leases import Leases
from pdmesh.core.sessions.session_state import Session, SessionState
from pdmesh.core.sessions.working_set import WorkingSet
from pdmesh.model import MAX_LEASE_S, CacheUser, LastUse, PrefixHash, PrefixHashes, Request, SessionKey

#: Time without a live request after which a session is forgotten.
IDLE_S = 300.0

#: Most sessions, of all tenants and of one.
MAX_SESSIONS = 65_536
MAX_OF_TENANT = 4_096

#: Most ended sessions whose keys are remembered. A key takes about 200 bytes.
MAX_ENDED = 8192

#: Most child sessions of one session, and most generations below a session without a parent.
MAX_CHILDREN = 64
MAX_GENERATIONS = 8

#: Number of pauses that the usual pause follows.
_PAUSES_REMEMBERED = 256

#: Usual pause before one was seen: about the time of a tool call.
_FIRST_PAUSE_S = 5.0


class _OfTenant:
    """A tenant's sessions with and without live requests, each in the order of the last change of their states."""

    def __init__(self) -> None:
        self.live: dict[SessionKey, Session] = {}
        self.idle: dict[SessionKey, Session] = {}

    def __len__(self) -> int:
        return len(self.live) + len(self.idle)

    def find(self, key: SessionKey) -> Session | None:
        return self.live.get(key) or self.idle.get(key)


class Sessions:
    """Sessions by key. The keys of two tenants never agree, since a key is a hash of the tenant and the name.

    ``now_s`` is the time of the present event. ``num_possible_tokens`` and ``num_reused_tokens`` are sums as of
    `Session`, including forgotten sessions. ``working_set`` has the sessions with recent turns. ``leases`` outlive the
    sessions.
    """

    def __init__(self, leased: dict[PrefixHash, int] | None = None) -> None:
        """``leased`` counts the leases of each granule."""
        self.leases = Leases({} if leased is None else leased)
        self.now_s = 0.0
        self.num_possible_tokens = 0
        self.num_reused_tokens = 0
        #: Tokens whose KV was loaded from offload tiers before the next turns.
        self.num_loaded_tokens = 0
        self.working_set = WorkingSet()
        #: Sessions whose next turn is expected since this event.
        self.paused: list[Session] = []
        self._tenants: dict[str, _OfTenant] = {}
        self._num_sessions = 0
        self._log_pause = log(_FIRST_PAUSE_S)
        self._num_pauses = 0
        #: Sessions that ended and have no live requests.
        self._num_ended = 0
        #: Keys of sessions that ended, also of forgotten ones, in the order of their ends, with the times of these.
        self._ended_s: OrderedDict[SessionKey, float] = OrderedDict()

    def __len__(self) -> int:
        return self._num_sessions

    @property
    def all(self) -> Iterator[Session]:
        """All sessions. Each tenant's are in the order of the last changes of their states, live ones last."""
        for own in self._tenants.values():
            yield from own.idle.values()
            yield from own.live.values()

    def newest(self, tenant: str | None = None) -> Iterator[Session]:
        """Yield the sessions of a tenant, or of all for None, whose states changed last, the newest first."""
        lines = [reversed(line.values()) for each in self._of(tenant) for line in (each.live, each.idle)]
        return merge(*lines, key=_since_s, reverse=True)

    def num_by_state(self) -> Counter[SessionState]:
        """Count the sessions by state. Takes time for each live session and tenant only."""
        live = [session for own in self._tenants.values() for session in own.live.values()]
        numbers = Counter([session.state for session in live])
        parents = {session.parent for session in live if session.parent is not None}
        known = [parent.state for parent in parents if self.find(parent.key, parent.tenant) is parent]
        numbers[SessionState.CHILDREN] = known.count(SessionState.CHILDREN)
        numbers[SessionState.ENDED] = self._num_ended
        numbers[SessionState.BETWEEN] = len(self) - numbers.total()
        return numbers

    @property
    def usual_pause_s(self) -> float:
        """Geometric mean of recent pauses of all sessions."""
        return exp(self._log_pause)

    def find(self, key: SessionKey, tenant: str | None = None) -> Session | None:
        """Return a session of a tenant, or of any for None, which takes time for each; None if it is unknown."""
        for own in self._of(tenant):
            if (session := own.find(key)) is not None:
                return session
        return None

    def _of(self, tenant: str | None) -> Iterable[_OfTenant]:
        if tenant is None:
            return self._tenants.values()
        own = self._tenants.get(tenant)
        return () if own is None else (own,)

    def return_s(self, session: Session) -> float:
        """Return the expected time of a session's next turn; infinite if it ended."""
        return session.return_s(self.now_s, self.usual_pause_s)

    def latest_return_first(self, prefixes: Collection[Sequence[PrefixHash]]) -> list[Sequence[PrefixHash]]:
        """Sort cached prefixes, given in the order of their use, by the expected time of their next use.

        A prefix without a session counts as if it returned after the usual pause.
        """
        if not self._tenants:
            return list(prefixes)
        by_tail = {session.tail: session for session in self.all if session.tail is not None}
        keyed: list[tuple[float, int, Sequence[PrefixHash]]] = []
        for number, prefix in enumerate(prefixes):
            session = next((by_tail[granule] for granule in reversed(prefix) if granule in by_tail), None)
            return_s = self.now_s + self.usual_pause_s if session is None else self.return_s(session)
            keyed.append((-return_s, number, prefix))
        keyed.sort(key=_return_and_use)
        return [prefix for *_, prefix in keyed]

    # --- requests ---

    def begin(self, request: Request, num_cached_tokens: int = 0, *, is_adopted: bool = False) -> Session | None:
        """Begin or continue the turn of a request. Return its session; None if it names none, or there is no room.

        ``num_cached_tokens`` of the prompt are cached on some instance. A turn continues in later epochs, and if it
        runs already and ``is_adopted``.
        """
        name = request.session
        if name is None:
            return None
        if (own := self._tenants.get(request.tenant)) is not None:
            self._expire(own)
        session = self.find(name.key, request.tenant) or self._open(request.tenant, name.key, name.parent)
        if session is None:
            return None
        self._ended_s.pop(name.key, None)
        own = self._tenants.setdefault(session.tenant, _OfTenant())
        if own.idle.pop(session.key, None) is not None and session.is_ended:
            self._num_ended -= 1
        own.live[session.key] = session
        pause_s = session.begin(self.now_s, continues=is_adopted or request.epoch > 0)
        if pause_s is not None:
            self._num_pauses = min(self._num_pauses + 1, _PAUSES_REMEMBERED)
            self._log_pause += (log(pause_s) - self._log_pause) / self._num_pauses
        self.working_set.begin(session, request, num_cached_tokens)
        return session

    def end(self, session: Session, request: Request, num_reused_tokens: int | None) -> None:
        """End a request of a session.

        ``num_reused_tokens`` of its prompt were not computed; None: the request was not answered, and does not count.
        """
        if num_reused_tokens is not None:
            self.num_possible_tokens += session.finish(request, num_reused_tokens)
            self.num_reused_tokens += num_reused_tokens
            if session.member is not None:
                self.working_set.end(session.member, request)
            if session.is_ended:
                self._ended(session.key)
            elif request.session is not None and request.session.lease_s:
                self.leases.grant(
                    session.key, session.tenant, request.chain, self.now_s + min(request.session.lease_s, MAX_LEASE_S)
                )
        elif session.member is not None:
            session.member.num_context_tokens = session.num_prompt_tokens
        session.let_go(self.now_s)
        for each in (session.parent, session):
            if each is not None and each.member is not None:
                self.working_set.changed(each.member)
        if not session.num_live:
            own = self._tenants[session.tenant]
            own.idle[session.key] = own.live.pop(session.key)
            self._num_ended += session.is_ended
            if session.pause_s is not None and not session.is_ended:
                self.paused.append(session)

    def close(self, key: SessionKey) -> bool:
        """End a session as its client asked, and its lease; return whether one of them was known.

        A lease outlives its session. Reports of instances do not bring an ended session back.
        """
        session, has_lease = self.find(key), self.leases.num_granules(key) > 0
        if session is not None:
            self._num_ended += not (session.is_ended or session.num_live)
            session.is_ended = True
            if session.member is not None:
                self.working_set.changed(session.member)
        self._ended(key)
        return session is not None or has_lease

    def _ended(self, key: SessionKey) -> None:
        """End a session's lease, and remember the session's end as long as an instance may report a lease."""
        self.leases.end(key)
        self._ended_s.pop(key, None)
        self._ended_s[key] = self.now_s
        while (first := next(iter(self._ended_s))) != key:
            if len(self._ended_s) <= MAX_ENDED and self._ended_s[first] + MAX_LEASE_S > self.now_s:
                break
            del self._ended_s[first]

    # --- changes of schedulers ---

    def user_of(self, request: Request, session: Session | None) -> CacheUser | None:
        """Return the user of a request's KV as the next scheduler should know it; None without tenant and session."""
        name = request.session
        if session is None or name is None or name.is_last:
            return CacheUser(request.tenant, request.share) if request.tenant else None
        return CacheUser(
            request.tenant,
            request.share,
            session.key,
            name.parent,
            session.num_turns,
            session.pause_s,
            0 if session.member is None else session.member.num_shared_tokens,
            min(name.lease_s or self.leases.left_s(session.key, self.now_s), MAX_LEASE_S),
        )

    def learn(self, found: Iterable[tuple[LastUse, PrefixHashes]]) -> None:
        """Learn of sessions' last turns from an instance, each with the cached beginning of its prompt.

        A session stays as it is if this scheduler knows of a later turn, or of as much of the prompt of the same turn.
        """
        changed: set[str] = set()
        for use, chain in found:
            user, ended_s = use.user, self.now_s - use.ago_s
            key = user.session
            if key is None or key in self._ended_s:
                continue
            session = self.find(key, user.tenant)
            if session is not None and (session.is_ended or not session.lacks(user, chain)):
                continue
            is_latest = (
                self.leases.num_granules(key) <= len(chain) if session is None else session.precedes(use, ended_s)
            )
            if chain and is_latest and user.lease_s > use.ago_s:
                self.leases.grant(key, user.tenant, chain, ended_s + user.lease_s)
            if use.ago_s >= IDLE_S:
                continue
            if session is None:
                session = self._open(user.tenant, key, user.parent)
                if session is None:
                    continue
                session.since_s = ended_s
                self._tenants.setdefault(session.tenant, _OfTenant()).idle[key] = session
            if not session.num_live:
                session.since_s = max(session.since_s, ended_s)
                changed.add(session.tenant)
            session.recall(use, chain, is_latest=is_latest)
            self.working_set.learn(session, use, chain, self.now_s, is_latest=is_latest)
            if not session.num_live and session.pause_s is not None:
                self.paused.append(session)
        for tenant in changed:
            # A later session may have taken the place of the tenant's only one.
            if (own := self._tenants.get(tenant)) is not None:
                own.idle = dict(sorted(own.idle.items(), key=lambda item: item[1].since_s))

    # --- bounds ---

    def expire(self) -> None:
        """Forget the sessions that were idle for too long. Until then, a tenant's own requests do so for its own."""
        for own in list(self._tenants.values()):
            self._expire(own)

    def _expire(self, own: _OfTenant) -> None:
        since_s = self.now_s - IDLE_S
        for session in list(takewhile(lambda each: each.since_s <= since_s, own.idle.values())):
            self._forget(session)

    def _open(self, tenant: str, key: SessionKey, parent_key: SessionKey | None) -> Session | None:
        own = self._tenants.get(tenant)
        if own is not None and len(own) >= MAX_OF_TENANT:
            if not own.idle:
                return None
            self._forget(next(iter(own.idle.values())))
        elif len(self) >= MAX_SESSIONS:
            most = max(self._tenants.values(), key=len)
            if not most.idle:
                return None
            self._forget(next(iter(most.idle.values())))
        parent = None if parent_key is None else self.find(parent_key, tenant)
        if parent is not None and (parent.num_children >= MAX_CHILDREN or parent.generation >= MAX_GENERATIONS):
            parent = None
        if parent is not None:
            parent.num_children += 1
        self._num_sessions += 1
        return Session(key, intern(tenant), parent, self.now_s)

    def _forget(self, session: Session) -> None:
        self._num_sessions -= 1
        self.working_set.leave(session)
        own = self._tenants[session.tenant]
        del own.idle[session.key]
        self._num_ended -= session.is_ended
        if not len(own):
            del self._tenants[session.tenant]
        if session.parent is not None:
            session.parent.num_children -= 1
            # A child may still refer to this session. Its ancestors need not stay in memory.
            session.parent = None

    def check_integrity(self) -> None:
        """Raise AssertionError if the indexes of sessions differ."""
        for name, own in self._tenants.items():
            for sessions, is_live in ((own.live, True), (own.idle, False)):
                states = [(each.tenant, each.num_live > 0) for each in sessions.values()]
                assert states.count((name, is_live)) == len(states), f"sessions of {name!r} are in the wrong line"
                changes_s = [each.since_s for each in sessions.values()]
                assert changes_s == sorted(changes_s), f"sessions of {name!r} are out of order"
        assert sum(map(len, self._tenants.values())) == len(self), "sessions of tenants miscounted"
        states_now = Counter(session.state for session in self.all)
        assert +self.num_by_state() == states_now, f"{self.num_by_state()} counted, not {states_now}"
        self.working_set.check_integrity()
        self.leases.check_integrity()


def _since_s(session: Session) -> float:
    return session.since_s


def _return_and_use(keyed: tuple[float, int, Sequence[PrefixHash]]) -> tuple[float, int]:
    return keyed[:2]
