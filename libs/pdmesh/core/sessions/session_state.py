"""A session: the requests of one agent or conversation, as far as its client names it.

A session is a hint about the future of cached KV. It never changes a token.
"""

from __future__ import annotations

from enum import StrEnum
from math import exp, inf, log

from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import CacheUser, LastUse, PrefixHash, PrefixHashes, Request, SessionKey

#: Number of pauses after which the pause of a session is known, and which the mean then follows.
NUM_PAUSES = 3

#: Shorter pauses count as this long.
LEAST_PAUSE_S = 1e-3


class SessionState(StrEnum):
    """State of a session."""

    TURN = "turn"  # a request waits or runs
    ASIDE = "aside"  # a request waits until the whole session has room
    BETWEEN = "between"  # the next request is expected
    CHILDREN = "children"  # the next request is expected after the requests of child sessions
    ENDED = "ended"  # no more requests are expected


class Member:
    """A session's part in the working set (`pdmesh.core.sessions.working_set`), of ``num_tokens`` counted tokens.

    ``number`` is the order of joining. ``num_context_tokens`` is the length of the latest prompt, and ``chain`` its
    granules once the prompt was answered. Other sessions had cached ``num_shared_tokens`` of the first prompt. The last
    request of a child session ended at ``children_ended_s``. Now ``num_aside`` requests are set aside, since
    ``aside_from_s``. Before, ``num_waits`` requests were, for at most ``longest_aside_s``; a wait last reached its
    limit at ``let_in_s``. A member that ``is_out`` has no room.
    """

    __slots__ = (
        "aside_from_s",
        "chain",
        "children_ended_s",
        "is_out",
        "let_in_s",
        "longest_aside_s",
        "num_aside",
        "num_context_tokens",
        "num_shared_tokens",
        "num_tokens",
        "num_waits",
        "number",
        "session",
    )

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self.num_tokens = 0
        self.num_context_tokens = 0
        self.num_shared_tokens = 0
        self.chain: PrefixHashes = ()
        self.children_ended_s = -inf
        self.num_aside = 0
        self.aside_from_s = inf
        self.num_waits = 0
        self.longest_aside_s = 0.0
        self.let_in_s = -inf
        self.is_out = True

    @property
    def num_own_tokens(self) -> int:
        """Length of the context without the part that other sessions had cached before."""
        return max(0, self.num_context_tokens - self.num_shared_tokens)

    @property
    def is_running(self) -> bool:
        """Whether a request of the session is in line or runs."""
        return self.session.num_live > self.num_aside


class Session:
    """A session of one tenant.

    ``num_live`` counts requests that wait or run. ``num_children`` counts known child sessions, ``num_live_children``
    the ones with live requests. ``since_s`` is the time of the last change between a turn and a pause. ``tail`` is the
    last granule of the latest prompt. Of the prompts' tokens, ``num_possible_tokens`` were computed for an earlier
    turn, and ``num_reused_tokens`` were not computed again. ``member`` is its part in the working set, None without
    one.
    """

    __slots__ = (
        "_log_pause",
        "_num_pauses",
        "is_ended",
        "key",
        "member",
        "num_children",
        "num_live",
        "num_live_children",
        "num_possible_tokens",
        "num_prompt_tokens",
        "num_reused_tokens",
        "num_turns",
        "parent",
        "since_s",
        "tail",
        "tenant",
    )

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, key: SessionKey, tenant: str, parent: Session | None, now_s: float) -> None:
        self.key = key
        self.tenant = tenant
        self.parent = parent
        self.num_live = 0
        self.num_children = 0
        self.num_live_children = 0
        self.num_turns = 0
        self.since_s = now_s
        self.is_ended = False
        self.num_prompt_tokens = 0
        self.num_possible_tokens = 0
        self.num_reused_tokens = 0
        self.tail: PrefixHash | None = None
        self.member: Member | None = None
        self._num_pauses = 0
        self._log_pause = 0.0

    @property
    def state(self) -> SessionState:
        if self.num_live:
            is_aside = self.member is not None and not self.member.is_running
            return SessionState.ASIDE if is_aside else SessionState.TURN
        if self.is_ended:
            return SessionState.ENDED
        return SessionState.CHILDREN if self.num_live_children else SessionState.BETWEEN

    @property
    def generation(self) -> int:
        """Number of known sessions above."""
        return 0 if self.parent is None else self.parent.generation + 1

    @property
    def depth(self) -> int:
        """Number of granules of the latest prompt; 0 if they are unknown."""
        return 0 if self.tail is None else (self.num_prompt_tokens - 1) // GRANULE_TOKENS

    @property
    def is_new(self) -> bool:
        """Whether no second turn has come."""
        return self.num_turns < 2

    @property
    def pause_s(self) -> float | None:
        """Geometric mean of recent pauses between two turns; None until `NUM_PAUSES` were seen."""
        return exp(self._log_pause) if self._num_pauses == NUM_PAUSES else None

    def return_s(self, now_s: float, usual_pause_s: float) -> float:
        """Return the expected time of the next turn: infinite if the session ended.

        ``usual_pause_s`` is the pause of sessions in general. A session that is late is expected later the longer it is
        late.
        """
        if self.num_live:
            return now_s
        if self.is_ended:
            return inf
        pause_s = usual_pause_s if self.pause_s is None else self.pause_s
        due_s = (now_s if self.num_live_children else self.since_s) + pause_s
        return max(due_s, 2 * now_s - due_s)

    # --- turns ---

    def begin(self, now_s: float, *, continues: bool) -> float | None:
        """Begin a turn, or continue it. Return the pause before it, if there was one."""
        pause_s: float | None = None
        if not continues:
            if self.num_turns and not self.num_live:
                pause_s = max(now_s - self.since_s, LEAST_PAUSE_S)
                self._num_pauses = min(self._num_pauses + 1, NUM_PAUSES)
                self._log_pause += (log(pause_s) - self._log_pause) / self._num_pauses
            self.num_turns += 1
        if not self.num_live:
            self.since_s = now_s
            if self.parent is not None:
                self.parent.num_live_children += 1
        self.num_live += 1
        self.is_ended = False
        return pause_s

    def finish(self, request: Request, num_reused_tokens: int) -> int:
        """Count the prompt of an answered request, and return how many of its tokens could have been reused.

        These are the tokens of the previous prompt if the new one continues it, and at least ``num_reused_tokens``.
        """
        chain, depth, num_possible = request.chain, self.depth, num_reused_tokens
        if 0 < depth <= len(chain) and chain[depth - 1] == self.tail:
            num_possible = max(num_possible, depth * GRANULE_TOKENS)
        self.num_possible_tokens += num_possible
        self.num_reused_tokens += num_reused_tokens
        self.num_prompt_tokens = request.num_prompt_tokens
        self.tail = chain[-1] if chain else None
        if request.session is not None and request.session.is_last:
            self.is_ended = True
        return num_possible

    # --- turns before this scheduler ---

    def lacks(self, user: CacheUser, chain: PrefixHashes) -> bool:
        """Whether ``user`` had a later turn than is known, or had the same one and ``chain`` is more of its prompt."""
        if user.num_turns != self.num_turns:
            return user.num_turns > self.num_turns
        return bool(chain) and (self.tail is None or self.tail in chain[:-1])

    def precedes(self, use: LastUse, ended_s: float) -> bool:
        """Whether no turn began or ended here since another scheduler's turn, which ended at ``ended_s``."""
        return not self.num_live and (use.user.num_turns == self.num_turns or self.since_s <= ended_s)

    def recall(self, use: LastUse, chain: PrefixHashes, *, is_latest: bool) -> None:
        """Take over what an instance knows of a turn before this scheduler.

        The first ``chain`` of the turn's prompt is cached there. ``is_latest``: no turn that is known here came later.
        """
        user = use.user
        self.num_turns = max(self.num_turns, user.num_turns)
        if user.pause_s is not None:
            self._num_pauses, self._log_pause = NUM_PAUSES, log(max(user.pause_s, LEAST_PAUSE_S))
        if chain and (is_latest or self.tail is None):
            self.num_prompt_tokens, self.tail = use.num_prompt_tokens, chain[-1]

    def let_go(self, now_s: float) -> None:
        """Note that a request no longer waits or runs."""
        self.num_live -= 1
        if not self.num_live:
            self.since_s = now_s
            if self.parent is not None:
                self.parent.num_live_children -= 1
                if self.parent.member is not None:
                    self.parent.member.children_ended_s = now_s
