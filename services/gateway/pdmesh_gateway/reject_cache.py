"""Cache of the scheduler's refusals for lack of time, which refuses similar requests without further work.

With each refusal the scheduler reports how long it would refuse similar requests (`Reject.reject_ttl_s`). During this
time they get the same answer, and are neither tokenized nor submitted. Afterwards one request is submitted, and its
answer decides again. Until that answer, and for at most `ANSWER_S`, other requests are refused.

An entry holds for one key, priority, target and size only, so that no client is refused for other clients' requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pdmesh.errors import RequestRejected

#: Time within which a refusal arrives, unless another part of the mesh is overloaded.
ANSWER_S = 0.05

#: Limit of cached kinds, because clients choose their targets.
MAX_KINDS = 1024


class RequestKind(NamedTuple):
    """Key of requests that the scheduler treats alike. ``size`` is the body's size in doublings."""

    operation: str
    tenant: str
    priority: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    size: int


class _Closed(NamedTuple):
    """Refusal of a kind: all requests are refused until ``until_s``.

    If the first request after that comes before ``over_s``, it passes, and others are refused for at most `ANSWER_S`.
    """

    until_s: float
    over_s: float
    answer: RequestRejected


class RejectCache:
    """Cache of the kinds of requests that are refused now, with the answer of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Oldest first.
        self._closed: dict[RequestKind, _Closed] = {}
        self._some_until_s = 0.0

    def __len__(self) -> int:
        return len(self._closed)

    @property
    def is_open(self) -> bool:
        """Whether surely no request is refused now."""
        return self._clock() >= self._some_until_s

    def check(self, kind: RequestKind) -> None:
        """Raise the cached refusal if this kind is refused now. The first request after a refusal's time passes."""
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
        """Record the scheduler's refusal of a request of this kind, which holds for ``reject_ttl_s``."""
        self._closed.pop(kind, None)
        until_s = self._clock() + answer.reject_ttl_s
        self._close(kind, _Closed(until_s, until_s + answer.reject_ttl_s, answer))

    def _close(self, kind: RequestKind, closed: _Closed) -> None:
        if len(self._closed) >= MAX_KINDS:
            del self._closed[next(iter(self._closed))]
        self._closed[kind] = closed
        self._some_until_s = max(self._some_until_s, closed.over_s)
