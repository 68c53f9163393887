"""Remembers what the scheduler has just refused for want of time, and refuses its like before it costs anything.

With each refusal the scheduler says for how long it would refuse others like that request (`Reject.reject_ttl_s`).
Until then these are told what that one was told: they are neither tokenized nor asked about. Then one is let in, and
the answer to it decides again; the others are let in, too, unless that comes within `ANSWER_S`. What is said of one
key, priority, target and size holds for no other, so nobody is turned away for what others ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pdmesh.errors import RequestRejected

#: A refusal takes no longer to come, unless somebody is overloaded otherwise.
ANSWER_S = 0.05

#: Kinds that are kept: clients choose their targets.
MAX_KINDS = 1024


class RequestKind(NamedTuple):
    """Requests that the scheduler treats alike."""

    operation: str
    tenant: str
    priority: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    size: int  # of the body, in doublings


class _Closed(NamedTuple):
    until_s: float
    over_s: float  # from when on nobody is refused; in between one is let in to ask
    answer: RequestRejected


class RejectCache:
    """Remembers which kinds of requests are refused now, and with what answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._closed: dict[RequestKind, _Closed] = {}  # oldest first
        self._some_until_s = 0.0

    def __len__(self) -> int:
        return len(self._closed)

    @property
    def is_open(self) -> bool:
        """Whether nobody is refused."""
        return self._clock() >= self._some_until_s

    def check(self, kind: RequestKind) -> None:
        """Raises RequestRejected (429)."""
        closed = self._closed.get(kind)
        if closed is None:
            return
        now_s, answer = self._clock(), closed.answer
        if now_s < closed.until_s:
            raise RequestRejected(
                answer.message,
                status=answer.status,
                code=answer.code,
                retry_after_s=answer.retry_after_s,
            )
        del self._closed[kind]
        if now_s < closed.over_s:
            until_s = now_s + min(answer.reject_ttl_s, ANSWER_S)
            self._close(kind, _Closed(until_s, until_s, answer))

    def refused(self, kind: RequestKind, answer: RequestRejected) -> None:
        """The scheduler refused one of this kind with an answer that holds for ``reject_ttl_s``."""
        self._closed.pop(kind, None)
        until_s = self._clock() + answer.reject_ttl_s
        self._close(kind, _Closed(until_s, until_s + answer.reject_ttl_s, answer))

    def _close(self, kind: RequestKind, closed: _Closed) -> None:
        if len(self._closed) >= MAX_KINDS:
            del self._closed[next(iter(self._closed))]
        self._closed[kind] = closed
        self._some_until_s = max(self._some_until_s, closed.over_s)
