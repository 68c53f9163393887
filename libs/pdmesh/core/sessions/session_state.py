"""A session: the requests of one agent or conversation, as far as its client names it.

A session is a hint about the future of cached KV. It never changes a token.
"""

from __future__ import annotations

from enum import StrEnum
from math import exp, inf, log

from pdmesh.model import GRANULE_TOKENS, PrefixHash, Request, SessionKey

#: Number of pauses after which the pause of a session is known, and which the mean then follows.
NUM_PAUSES = 3

#: Shorter pauses count as this long.
LEAST_PAUSE_S = 1e-3


class SessionState(StrEnum):
    """State of a session."""

    TURN = "turn"  # a request waits or runs
    BETWEEN = "between"  # the next request is expected
    CHILDREN = "children"  # the next request is expected after the requests of child sessions
    ENDED = "ended"  # no more requests are expected


class Session:
    """A session of one tenant.

    ``num_live`` counts requests that wait or run. ``num_children`` counts known child sessions, ``num_live_children``
    the ones with live requests. ``since_s`` is the time of the last change between a turn and a pause. ``tail`` is the
    last granule of the latest prompt, of ``depth`` granules. Of the prompts' tokens, ``num_possible_tokens`` were
    computed for an earlier turn, and ``num_reused_tokens`` were not computed again.
    """

    __slots__ = (
        "_log_pause",
        "_num_pauses",
        "depth",
        "generation",
        "is_ended",
        "key",
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
        self.generation: int = 0 if parent is None else parent.generation + 1
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
        self.depth = 0
        self._num_pauses = 0
        self._log_pause = 0.0

    @property
    def state(self) -> SessionState:
        if self.num_live:
            return SessionState.TURN
        if self.is_ended:
            return SessionState.ENDED
        return SessionState.CHILDREN if self.num_live_children else SessionState.BETWEEN

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

    def begin(self, request: Request, now_s: float) -> float | None:
        """Begin a turn, or continue it in a later epoch. Return the pause before it, if there was one."""
        pause_s: float | None = None
        if not request.epoch:
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

        These are the tokens of the latest prompt before, if the new one continues it.
        """
        chain, num_possible = request.chain, num_reused_tokens
        if self.tail is not None and len(chain) >= self.depth and chain[self.depth - 1] == self.tail:
            num_possible = max(num_possible, self.depth * GRANULE_TOKENS)
        self.num_possible_tokens += num_possible
        self.num_reused_tokens += num_reused_tokens
        self.num_prompt_tokens = request.num_prompt_tokens
        self.depth = len(chain)
        self.tail = chain[-1] if chain else None
        if request.session is not None and request.session.is_last:
            self.is_ended = True
        return num_possible

    def let_go(self, now_s: float) -> None:
        """Note that a request no longer waits or runs."""
        self.num_live -= 1
        if not self.num_live:
            self.since_s = now_s
            if self.parent is not None:
                self.parent.num_live_children -= 1
