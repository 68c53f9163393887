"""The definition of every figure that the mesh reports, with formula, unit and undefined case.

``arrival_s`` is when the client's request was accepted. ``token_times_s`` are when its output tokens were delivered,
all on one clock. An undefined figure is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil


def ttft_s(arrival_s: float, token_times_s: Sequence[float]) -> float | None:
    """Return the time to first token, seconds: first token - arrival; None without a token."""
    return token_times_s[0] - arrival_s if token_times_s else None


def queueing_s(arrival_s: float, started_s: float) -> float:
    """Return the queueing delay, seconds: start of the first step that computes any of the prompt - arrival."""
    return started_s - arrival_s


def e2e_s(arrival_s: float, token_times_s: Sequence[float]) -> float | None:
    """Return the end-to-end latency (job completion time), seconds: last token - arrival; None without a token."""
    return token_times_s[-1] - arrival_s if token_times_s else None


def tpot_s(token_times_s: Sequence[float]) -> float | None:
    """Return the time per output token, seconds: (E2E - TTFT) / (n - 1); None for fewer than two tokens."""
    return tpot_between_s(token_times_s[0], token_times_s[-1], len(token_times_s)) if token_times_s else None


def tpot_between_s(first_s: float, last_s: float, num_tokens: int) -> float | None:
    """Return `tpot_s` from the times of the first and the last token; None for fewer than two tokens."""
    return (last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else None


def itl_s(token_times_s: Sequence[float]) -> list[float]:
    """Return inter-token latencies, seconds: each token - the one before. Empty for fewer than two tokens."""
    return [later - earlier for earlier, later in pairwise(token_times_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A service level objective, in seconds. None sets no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def with_own(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """Return these targets, replaced by a request's own targets that are not None."""
        return Slo(
            ttft_s=self.ttft_s if ttft_s is None else ttft_s,
            tpot_s=self.tpot_s if tpot_s is None else tpot_s,
            e2e_s=self.e2e_s,
        )


#: Objective without a target.
NO_SLO = Slo()


def meets_slo(slo: Slo, arrival_s: float, token_times_s: Sequence[float]) -> bool:
    """Return whether a finished request met every target.

    An undefined figure meets its target, except that a request without a token meets none.
    """
    return keeps_slo(
        slo,
        ttft_s=ttft_s(arrival_s, token_times_s),
        tpot_s=tpot_s(token_times_s),
        e2e_s=e2e_s(arrival_s, token_times_s),
    )


def keeps_slo(slo: Slo, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> bool:
    """Return `meets_slo` from the figures instead of the tokens' times. A figure of None counts as undefined."""
    figures = ((slo.ttft_s, ttft_s), (slo.tpot_s, tpot_s), (slo.e2e_s, e2e_s))
    return ttft_s is not None and all(limit is None or figure is None or figure <= limit for limit, figure in figures)


def slo_attainment(met: Iterable[bool]) -> float | None:
    """Return the share of requests that met their objective, 0 to 1; None for no request.

    Failed and rejected requests count as not met.
    """
    outcomes = list(met)
    return sum(outcomes) / len(outcomes) if outcomes else None


def goodput(met: Iterable[bool], duration_s: float) -> float | None:
    """Return requests per second that met their objective: number met / duration; None for a duration of 0."""
    return sum(met) / duration_s if duration_s > 0 else None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that at least ``percent`` % of the values do not exceed (nearest rank).

    None for no value. Raise ValueError for a percentage outside 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, not {percent}")
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else None
