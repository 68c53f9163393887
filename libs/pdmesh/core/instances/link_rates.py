"""How fast KV went from host to host of late, as instances report of transfers that happened.

A link is a pair of hosts, in one direction. Nothing is known of one before its first transfer, nor once the last is
long ago: it is then taken for as fast as any, so that a link that was slow is tried again. Inside a host KV is copied
from cache to cache: no link is as fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.policy.views import InstanceView

#: With less, the time of a transfer says little of its link.
MIN_BYTES = 1 << 20

#: Transfers that the rate of a link is the median of: one that shared it, or waited, does not count much.
NUM_TRANSFERS = 7

#: A link without a transfer for so long is not known any more.
MEMORY_S = 60.0

#: The oldest of more are forgotten.
MAX_LINKS = 4096

#: A link is slow for some KV if that takes at least so much longer than over the fastest, by time and by factor.
SLOW_S = 0.1
SLOW_FACTOR = 2.0

_NOBODY: Set[InstanceId] = frozenset()


class LinkRate(NamedTuple):
    """What is known of a link: for people."""

    source: str  # host, or an instance that does not say where it is
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
        self.rates.append(bytes_per_s)
        self.bytes_per_s = sorted(self.rates)[len(self.rates) // 2]
        self.num_transfers += 1
        self.last_s = now_s


class MeasuredLinks:
    """The links between the hosts of a mesh."""

    def __init__(self) -> None:
        self._hosts: dict[InstanceId, str] = {}
        self._links: dict[tuple[str, str], _Link] = {}  # the one without a transfer for the longest time first
        self._fastest = 0.0
        self.are_uneven = False  # whether one is much slower than another

    def joined(self, profile: InstanceProfile) -> None:
        """Note where an instance is; one that does not say is a host of its own."""
        self._hosts[profile.instance_id] = profile.host or profile.instance_id
        self._compare()

    def left(self, instance_id: InstanceId) -> None:
        """Forget where an instance was. What is known of its host's links is true for the next one there."""
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
        """Take note of KV that went from one instance to another in ``duration_s``; 0 if that is not known."""
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
        """Return the bytes a second from one instance to another; None: not known."""
        link = self._links.get((self._hosts.get(source_id, ""), self._hosts.get(destination_id, "")))
        return None if link is None else link.bytes_per_s

    def slow_from(self, source_id: InstanceId, num_bytes: int, among: Collection[InstanceId]) -> Set[InstanceId]:
        """Return those of some instances to which KV takes much longer than over the fastest link, or inside a host."""
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
        """What is known of each link."""
        return [LinkRate(*key, link.bytes_per_s, link.num_transfers) for key, link in sorted(self._links.items())]

    def _compare(self) -> None:
        rates = [link.bytes_per_s for link in self._links.values()]
        is_any_shared = len(set(self._hosts.values())) < len(self._hosts)
        self._fastest = inf if is_any_shared and rates else max(rates, default=0.0)
        self.are_uneven = min(rates, default=0.0) * SLOW_FACTOR < self._fastest


@dataclass(frozen=True, slots=True)
class LinksAsMeasured:
    """Rates for predictions: what was measured, and what is configured for links that nothing is known of."""

    measured: MeasuredLinks
    configured_bytes_per_s: float

    def bytes_per_s(self, source: InstanceView, destination: InstanceView | None) -> float:
        if destination is None:
            return self.configured_bytes_per_s
        measured = self.measured.between(source.instance_id, destination.instance_id)
        return self.configured_bytes_per_s if measured is None else measured
