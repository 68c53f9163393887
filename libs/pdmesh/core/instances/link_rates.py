"""Measured rates of KV transfers between hosts, from the transfers that instances report.

A link is a pair of hosts, in one direction. A link without a recent transfer is unknown and counts as fast, so that a
formerly slow link is tried again. Inside a host KV is copied from cache to cache, which is faster than any link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.policy.views import InstanceView

#: Smallest transfer that counts: the time of a smaller one says little about its link.
MIN_BYTES = 1 << 20

#: Number of transfers whose median is the rate of a link: a transfer that shared the link or waited has little weight.
NUM_TRANSFERS = 7

#: Time without a transfer after which a link is forgotten.
MEMORY_S = 60.0

#: Most remembered links; the ones longest without a transfer are forgotten.
MAX_LINKS = 4096

#: A link is slow for some KV if the transfer takes longer than over the fastest link, by this time and by this factor.
SLOW_S = 0.1
SLOW_FACTOR = 2.0

_NOBODY: Set[InstanceId] = frozenset()


class LinkRate(NamedTuple):
    """Measured rate of a link, for display. ``source`` and ``destination`` name hosts, or instances of unknown host."""

    source: str
    destination: str
    bytes_per_s: float
    num_transfers: int


class _Link:
    """The last transfers of a link."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=NUM_TRANSFERS)
        self.bytes_per_s = 0.0
        self.num_transfers = 0
        self.last_s = 0.0

    def note(self, bytes_per_s: float, now_s: float) -> None:
        """Add a transfer, and update the median rate."""
        self.rates.append(bytes_per_s)
        self.bytes_per_s = sorted(self.rates)[len(self.rates) // 2]
        self.num_transfers += 1
        self.last_s = now_s


class MeasuredLinks:
    """The links between the hosts of a mesh. ``are_uneven``: some link is much slower than the fastest one."""

    def __init__(self) -> None:
        self._hosts: dict[InstanceId, str] = {}
        #: The links, the one longest without a transfer first.
        self._links: dict[tuple[str, str], _Link] = {}
        self._fastest = 0.0
        self.are_uneven = False

    def joined(self, profile: InstanceProfile) -> None:
        """Record the host of an instance. An instance of unknown host counts as a host of its own."""
        self._hosts[profile.instance_id] = profile.host or profile.instance_id
        self._compare()

    def left(self, instance_id: InstanceId) -> None:
        """Forget the host of an instance. The host's links stay known for the next instance there."""
        self._hosts.pop(instance_id, None)
        self._compare()

    def note(
        self,
        source_id: InstanceId,
        destination_id: InstanceId | None,
        num_bytes: int,
        duration_s: float,
        now_s: float,
    ) -> None:
        """Record a transfer of KV.

        Ignored if it is small, ``duration_s`` is 0, or an instance is unknown or None.
        """
        if destination_id is None or num_bytes < MIN_BYTES or duration_s <= 0.0:
            return
        source, destination = self._hosts.get(source_id), self._hosts.get(destination_id)
        if source is None or destination is None:
            return
        key = source, destination
        link = self._links.pop(key, None) or _Link()
        link.note(num_bytes / duration_s, now_s)
        self._links[key] = link
        if len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]
        self._compare()

    def expire(self, now_s: float) -> None:
        """Forget links without a transfer for a long time."""
        num_before = len(self._links)
        while self._links and next(iter(self._links.values())).last_s + MEMORY_S <= now_s:
            del self._links[next(iter(self._links))]
        if len(self._links) < num_before:
            self._compare()

    def between(self, source_id: InstanceId, destination_id: InstanceId) -> float | None:
        """Return the rate in bytes per second from one instance to another; None if it is unknown."""
        link = self._links.get((self._hosts.get(source_id, ""), self._hosts.get(destination_id, "")))
        return None if link is None else link.bytes_per_s

    def slow_from(self, source_id: InstanceId, num_bytes: int, among: Collection[InstanceId]) -> Set[InstanceId]:
        """Return the ids in ``among`` to which ``num_bytes`` take much longer than over the fastest link.

        If two instances share a host, copies inside a host are the fastest.
        """
        if not self.are_uneven:
            return _NOBODY
        least_s = num_bytes / self._fastest
        slow: set[InstanceId] = set()
        for destination_id in among:
            rate = self.between(source_id, destination_id)
            if rate is not None and rate * SLOW_FACTOR < self._fastest and num_bytes / rate - least_s >= SLOW_S:
                slow.add(destination_id)
        return slow

    @property
    def rates(self) -> list[LinkRate]:
        """The measured rate of each known link, by name."""
        return [LinkRate(*key, link.bytes_per_s, link.num_transfers) for key, link in sorted(self._links.items())]

    def _compare(self) -> None:
        rates = [link.bytes_per_s for link in self._links.values()]
        is_any_shared = len(set(self._hosts.values())) < len(self._hosts)
        self._fastest = inf if is_any_shared and rates else max(rates, default=0.0)
        self.are_uneven = min(rates, default=0.0) * SLOW_FACTOR < self._fastest


@dataclass(frozen=True, slots=True)
class LinksAsMeasured:
    """Rates for predictions: the measured rate of a link, and the configured one for an unknown link."""

    measured: MeasuredLinks
    configured_bytes_per_s: float

    def bytes_per_s(self, source: InstanceView, destination: InstanceView | None) -> float:
        """Return the rate from ``source`` to ``destination``; the configured rate without a ``destination``."""
        if destination is None:
            return self.configured_bytes_per_s
        measured = self.measured.between(source.instance_id, destination.instance_id)
        return self.configured_bytes_per_s if measured is None else measured
