"""The working set: the contexts of sessions with recent turns, and which of them have room for KV.

A turn is fast only if its whole context is cached. While the contexts exceed the room, some sessions are *out*: their
next turns wait (`pdmesh.core.admission.aside`), and their KV is evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import inf

from pdmesh.core.sessions.session_state import Member, Session
from pdmesh.model import LastUse, PrefixHashes, Request, SessionKey

#: Pause after which a session leaves the working set, unless child sessions have live requests.
RECENT_S = 60.0

#: Most sessions in the working set. Beyond, the tenant with the most loses its longest idle one.
MAX_MEMBERS = 2048

#: Most granules of all members that are remembered.
MAX_CHAINED = 1 << 18

#: Number of sessions with a second turn that a tenant counts as if they had been seen, and most that it remembers.
RETURNS_ASSUMED = 32
_OPENED_REMEMBERED = 256


class _OfTenant:
    """Members of one tenant in the order of their last changes, and the sum of their counted tokens.

    ``share`` is the weight of the tenant's key. Of ``num_opened`` recent sessions, ``num_returned`` had a second turn.
    """

    def __init__(self) -> None:
        self.share = 1
        self.members: dict[SessionKey, Member] = {}
        self.num_tokens = 0
        self.num_opened = self.num_returned = RETURNS_ASSUMED

    @property
    def counts_new(self) -> bool:
        """Whether a session with one turn is expected to have another one."""
        return 2 * self.num_returned >= self.num_opened

    def opened(self) -> None:
        """Count a new session."""
        self.num_opened += 1
        if self.num_opened > _OPENED_REMEMBERED:
            self.num_opened //= 2
            self.num_returned //= 2


class WorkingSet:
    """Members by tenant. ``num_tokens`` is the sum of their contexts; ``num_changes`` grows with each change.

    While most of a tenant's sessions have one turn only, these do not count, unless they are set aside: a client may
    use a new name for each request. Turns that were set aside waited ``aside_s`` together, at most ``longest_aside_s``.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_changes = 0
        self.aside_s = 0.0
        self.longest_aside_s = 0.0
        self._tenants: dict[str, _OfTenant] = {}
        self._num_members = 0
        self._num_joined = 0
        self._num_chained = 0
        self._running: dict[SessionKey, None] = {}

    @property
    def is_running(self) -> bool:
        """Whether a member's request is in line or runs."""
        return bool(self._running)

    @property
    def num_members(self) -> int:
        """Number of sessions in the working set."""
        return self._num_members

    def members(self, tenant: str) -> list[Member]:
        """Return a tenant's members, in the order of their last changes."""
        own = self._tenants.get(tenant)
        return [] if own is None else list(own.members.values())

    def share_of(self, tenant: str) -> int:
        """Return the weight of a tenant's key; 1 if the tenant has no members."""
        own = self._tenants.get(tenant)
        return 1 if own is None else own.share

    @property
    def tenants(self) -> list[str]:
        return list(self._tenants)

    # --- turns ---

    def begin(self, session: Session, request: Request, num_cached_tokens: int) -> None:
        """Add a session whose turn begins, or update the context length and share of a member.

        A session is not added if the turn's prompt cannot be cached, or if there is no room for one more member. Of a
        new session's prompt, ``num_cached_tokens`` are cached for others. The session's idle children leave: their
        parent has their answers.
        """
        if session.num_children and not request.epoch:
            children = [member.session for member in self.members(session.tenant) if member.session.parent is session]
            for child in children:
                if not child.num_live:
                    self.leave(child)
        member = session.member
        if member is None:
            if not request.chain or not self._has_room():
                return
            self._num_members += 1
            self._num_joined += 1
            parent = None if session.parent is None else session.parent.member
            member = session.member = Member(session, self._num_joined if parent is None else parent.number)
            own = self._tenants.setdefault(session.tenant, _OfTenant())
            if session.is_new:
                own.opened()
                member.num_shared_tokens = num_cached_tokens
        elif not request.epoch and session.num_turns == 2:
            self._tenants[session.tenant].num_returned += 1
        self._tenants[session.tenant].share = request.share
        member.num_context_tokens = request.num_prompt_tokens
        self.changed(member)

    def learn(
        self, session: Session, use: LastUse, chain: PrefixHashes, now_s: float, *, is_latest: bool = True
    ) -> None:
        """Add a session that paused before this scheduler, with room: the beginning of its context is cached.

        A member gets the context if ``is_latest``: no turn that is known here came later.
        Of such sessions, the ones with more turns count as older, and all count as older than sessions seen since.
        """
        if session.member is None:
            if not chain or session.since_s + RECENT_S <= now_s or not self._has_room():
                return
            self._num_members += 1
            session.member = Member(session, 0)
            session.member.is_out = False
            is_latest = True
            self._tenants.setdefault(session.tenant, _OfTenant()).share = use.user.share
        member = session.member
        member.number = -use.user.num_turns
        member.num_shared_tokens = use.user.num_shared_tokens
        if is_latest:
            member.num_context_tokens = use.num_prompt_tokens
        if chain and (is_latest or not member.chain):
            self._set_chain(member, chain)
        self.changed(member)

    def end(self, member: Member, request: Request) -> None:
        """Note the chain of an answered request."""
        self._set_chain(member, request.chain)

    def _set_chain(self, member: Member, chain: PrefixHashes) -> None:
        self._num_chained += len(chain) - len(member.chain)
        member.chain = chain
        if self._num_chained > MAX_CHAINED:
            self._num_chained -= len(member.chain)
            member.chain = ()

    def changed(self, member: Member) -> None:
        """Count a member's tokens anew, and put it last."""
        session, own = member.session, self._tenants[member.session.tenant]
        counts = not session.is_new or member.num_aside > 0 or own.counts_new
        num_tokens = member.num_own_tokens if counts and (session.num_live or not session.is_ended) else 0
        own.num_tokens += num_tokens - member.num_tokens
        self.num_tokens += num_tokens - member.num_tokens
        member.num_tokens = num_tokens
        own.members.pop(session.key, None)
        own.members[session.key] = member
        if member.is_running:
            self._running[session.key] = None
        else:
            self._running.pop(session.key, None)
        self.num_changes += 1

    def leave(self, session: Session) -> None:
        """Remove a session without live requests; without effect if it is no member."""
        member = session.member
        if member is None:
            return
        own = self._tenants[session.tenant]
        del own.members[session.key]
        own.num_tokens -= member.num_tokens
        self.num_tokens -= member.num_tokens
        self._num_members -= 1
        self._num_chained -= len(member.chain)
        self._running.pop(session.key, None)
        session.member = None
        if not own.members:
            del self._tenants[session.tenant]
        self.num_changes += 1

    def expire(self, now_s: float) -> None:
        """Remove the members without recent turns."""
        for own in list(self._tenants.values()):
            stale: list[Session] = []
            for member in own.members.values():
                session = member.session
                if session.num_live or session.num_live_children:
                    continue
                if not session.is_ended and max(session.since_s, member.children_ended_s) + RECENT_S > now_s:
                    break
                stale.append(session)
            for session in stale:
                self.leave(session)

    def _has_room(self) -> bool:
        """Whether one more member may come, perhaps after the tenant with the most lost its longest idle one."""
        if self._num_members < MAX_MEMBERS:
            return True
        most = max(self._tenants.values(), key=_num_members)
        idle = next((member.session for member in most.members.values() if not member.session.num_live), None)
        if idle is not None:
            self.leave(idle)
        return idle is not None

    # --- turns aside ---

    def set_aside(self, member: Member, since_s: float) -> None:
        """Set one of a member's requests aside, which counts as set aside since ``since_s``."""
        member.aside_from_s = min(member.aside_from_s, since_s)
        member.num_aside += 1
        self.changed(member)

    def come_back(self, member: Member, waited_s: float) -> None:
        """Let a request that was set aside for ``waited_s`` go on, or end."""
        member.num_aside -= 1
        if not member.num_aside:
            member.aside_from_s = inf
        if waited_s:
            member.num_waits += 1
            member.longest_aside_s = max(member.longest_aside_s, waited_s)
            self.aside_s += waited_s
            self.longest_aside_s = max(self.longest_aside_s, waited_s)
        self.changed(member)

    # --- room ---

    def divide(self, num_tokens: int, let_in_from_s: float, due_from_s: float) -> Iterator[Member]:
        """Divide ``num_tokens`` of KV, and yield the members whose turns may run now.

        Tenants get room by their shares, as far as they need it. Within a tenant, members that have room keep it, the
        oldest first, as far as all fit. Others follow by their age, and the ones with one turn come last. *Due* members
        come before all: their wait reached its limit after ``let_in_from_s``, or they have waited since before
        ``due_from_s``. The members that have waited longest get the room that no tenant fills.
        """
        left, waiting = num_tokens, list[Member]()
        for own, room in self._rooms(num_tokens).items():
            may_run = self._divide(own, room, let_in_from_s, due_from_s)
            yield from may_run
            left -= sum(
                [member.num_tokens for member in own.members.values() if member.is_running or not member.is_out]
            )
            waiting += [member for member in own.members.values() if member.is_out and member.num_aside]
        for member in sorted(waiting, key=_waits_from):
            if member.num_tokens <= left:
                left -= member.num_tokens
                member.is_out = False
                yield member

    @staticmethod
    def _divide(own: _OfTenant, left: int, let_in_from_s: float, due_from_s: float) -> list[Member]:
        due: list[Member] = []
        have: list[Member] = []
        others: list[Member] = []
        for member in sorted(own.members.values(), key=_age):
            is_due = member.let_in_s > let_in_from_s or member.aside_from_s < due_from_s
            if is_due and not member.session.is_new:
                due.append(member)
            elif member.is_out:
                others.append(member)
            else:
                have.append(member)
        may_run: list[Member] = []
        for member in chain(due, have):
            member.is_out = member.num_tokens > left
            if not member.is_out:
                left -= member.num_tokens
                may_run.append(member)
        # Turns that still run without room hold KV until their ends.
        left -= sum([member.num_tokens for member in own.members.values() if member.is_out and member.is_running])
        if left < 0:
            are_due = set(due)
            return [member for member in may_run if not member.num_aside or member not in are_due]
        for member in others:
            if member.num_aside and member.num_tokens <= left:
                left -= member.num_tokens
                member.is_out = False
                may_run.append(member)
        return may_run

    def _rooms(self, num_tokens: int) -> dict[_OfTenant, int]:
        """Return each tenant's part of the room: its share, and more if it needs more and other tenants need less."""
        rooms: dict[_OfTenant, int] = {}
        num_shares = sum([own.share for own in self._tenants.values()])
        for own in sorted(self._tenants.values(), key=_want):
            rooms[own] = min(own.num_tokens, num_tokens * own.share // num_shares)
            num_tokens -= rooms[own]
            num_shares -= own.share
        return rooms

    def check_integrity(self) -> None:
        """Raise AssertionError if sums and members differ."""
        for own in self._tenants.values():
            num_tokens = sum(member.num_tokens for member in own.members.values())
            assert num_tokens == own.num_tokens, f"{own.num_tokens} tokens counted, the members have {num_tokens}"
            for member in own.members.values():
                assert member.session.member is member, "a session does not know that it is a member"
                assert 0 <= member.num_aside <= member.session.num_live, "more requests are aside than are live"
                assert (member.session.key in self._running) == member.is_running, "running members miscounted"
        num_tokens = sum(own.num_tokens for own in self._tenants.values())
        assert num_tokens == self.num_tokens, "the working set is miscounted"
        assert self._num_members == sum(map(_num_members, self._tenants.values())), "members miscounted"


def _num_members(own: _OfTenant) -> int:
    return len(own.members)


def _waits_from(member: Member) -> float:
    return member.aside_from_s


def _want(own: _OfTenant) -> float:
    """Return how much of its share a tenant needs."""
    return own.num_tokens / own.share


def _age(member: Member) -> tuple[bool, int]:
    """Return the key of the order in which members get room. A child is as old as its parent, which waits for it."""
    session = member.session
    return session.is_new and (session.parent is None or session.parent.member is None), member.number
