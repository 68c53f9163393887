"""Metric of refused peers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.wire.rejected_peers import RejectedPeers


class _Refused(Collector):
    def __init__(self, rejected_peers: RejectedPeers) -> None:
        self._strangers = rejected_peers

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("pdmesh:refused_peers", "Peers that were refused, by reason.", labels=["reason"])
        for reason, count in self._strangers.refused.items():
            family.add_metric([reason], count)
        yield family


def watch_rejected_peers(registry: CollectorRegistry, rejected_peers: RejectedPeers) -> None:
    """Register the counter of refused peers, which is read when Prometheus asks."""
    registry.register(_Refused(rejected_peers))
