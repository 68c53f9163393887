"""Workloads of a simulated mesh: requests with their arrivals and lengths, drawn or changed by a seeded stream."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from pdmesh.metrics import percentile
from pdmesh.model import PrefixHash, PrefixHashes, SessionName


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a workload.

    `arrival_s` counts from the start of the workload. The request asks, and reserves room, for `max_tokens`; None:
    exactly for the tokens that it generates.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    tenant: str = ""
    #: Numbers of the prompt's granules, and perhaps of the output's. Equal numbers name equal beginnings. None: nothing
    #: is shared.
    granules: Sequence[int] | None = None
    session: SessionName | None = None

    @property
    def hashes(self) -> PrefixHashes:
        """Hashes of the granules, as gateways would make them."""
        return tuple(map(_hash_of, self.granules or ()))


@lru_cache(maxsize=1 << 20)  # prompts share most granules, which should be in memory once
def _hash_of(number: int) -> PrefixHash:
    return PrefixHash(number.to_bytes(16))


class Clients(Protocol):
    """Clients of one simulation, which send a request when others have ended."""

    def begin(self) -> Sequence[Arrival]:
        """Return the first requests, in the order of their numbers, each with the time at which it is sent."""
        ...

    def ended(self, index: int, now_s: float) -> Sequence[Arrival]:
        """Return the next requests, now that the request of this number has ended."""
        ...


class Loop(Protocol):
    """A description of clients that wait for answers."""

    def clients(self, arrivals: Iterable[Arrival]) -> Clients:
        """Return new clients for one simulation of a workload."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Clients that each send a request, wait for its end, think for ``think_s``, and send the next.

    ``num_clients`` are pairs of a request's index and the number of clients from then on. When the number falls,
    clients leave at the end of their requests. Clients take a workload's requests in order, and ignore the times of
    arrival.
    """

    num_clients: Sequence[tuple[int, int]]
    think_s: float = 0.0

    def clients_at(self, index: int) -> int:
        """Return the number of clients when the request of this index is sent."""
        return [number for first, number in self.num_clients if first <= index][-1]

    def clients(self, arrivals: Iterable[Arrival]) -> Clients:
        """Return clients that send these requests."""
        return _EqualClients(self, arrivals)


class _EqualClients:
    """Clients of a `ClosedLoop`."""

    def __init__(self, loop: ClosedLoop, arrivals: Iterable[Arrival]) -> None:
        self._loop = loop
        self._arrivals = iter(arrivals)
        self._num_sent = 0
        self._num_open = 0

    def begin(self) -> Sequence[Arrival]:
        return self._next(0.0)

    def ended(self, index: int, now_s: float) -> Sequence[Arrival]:
        self._num_open -= 1
        return self._next(now_s + self._loop.think_s)

    def _next(self, at_s: float) -> Sequence[Arrival]:
        sent: list[Arrival] = []
        while self._num_open < self._loop.clients_at(self._num_sent):
            found = next(self._arrivals, None)
            if found is None:
                break
            sent.append(replace(found, arrival_s=at_s))
            self._num_sent += 1
            self._num_open += 1
        return sent


def with_rate_scaled(arrivals: Iterable[Arrival], rate_scale: float) -> list[Arrival]:
    """Return the same requests, ``rate_scale`` times as many a second."""
    return [replace(arrival, arrival_s=arrival.arrival_s / rate_scale) for arrival in arrivals]


def with_long_inputs(
    arrivals: Sequence[Arrival], percent: float, long_range: tuple[int, int], rng: random.Random
) -> list[Arrival]:
    """Return requests whose prompts above the ``percent``-th percentile have a new length, uniform in ``long_range``.

    Both ends of the range are included. PecSched §6.2 uses percentile 95, and 100K to 500K tokens.
    """
    limit = percentile((arrival.num_prompt_tokens for arrival in arrivals), percent)
    return [
        replace(arrival, num_prompt_tokens=rng.randint(*long_range))
        if limit is not None and arrival.num_prompt_tokens > limit
        else arrival
        for arrival in arrivals
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Poisson arrivals of log-normal lengths, a share of them long.

    The defaults resemble the Azure 2023 conversation trace: median prompt 1,020 and output 130 tokens, with its spread.
    The sigmas are of the logarithm. `max_prompt_tokens` does not limit long prompts.
    """

    num_requests: int = 1000
    requests_per_s: float = 5.5
    median_prompt_tokens: float = 1020.0
    sigma_prompt: float = 0.9
    median_output_tokens: float = 130.0
    sigma_output: float = 0.9
    max_prompt_tokens: int = 14_000
    max_output_tokens: int = 1_000
    long_share: float = 0.0
    long_range: tuple[int, int] = (100_000, 500_000)


def synthetic(shape: Synthetic, rng: random.Random) -> list[Arrival]:
    """Draw a workload."""
    arrivals: list[Arrival] = []
    now_s = 0.0
    for _ in range(shape.num_requests):
        now_s += rng.expovariate(shape.requests_per_s)
        is_long = rng.random() < shape.long_share
        num_prompt_tokens = _log_normal(rng, shape.median_prompt_tokens, shape.sigma_prompt, shape.max_prompt_tokens)
        if is_long:
            num_prompt_tokens = rng.randint(*shape.long_range)
        num_output_tokens = _log_normal(rng, shape.median_output_tokens, shape.sigma_output, shape.max_output_tokens)
        arrivals.append(
            Arrival(arrival_s=now_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
        )
    return arrivals


def _log_normal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0.0, sigma))))
