"""What a worker tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.kv.blocks import BlockPool

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TRANSFER_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


class WorkerMetrics:
    """One instance's counters, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.step_s = Histogram(
            "pdmesh:step_seconds",
            "Device time of a step.",
            ["kind"],  # prefill | decode | mixed
            buckets=_STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("pdmesh:prompt_tokens", "Prompt tokens computed.", registry=self.registry)
        self.generation_tokens = Counter("pdmesh:generation_tokens", "Tokens drawn.", registry=self.registry)
        self.transfer_bytes = Counter(
            "pdmesh:kv_transfer_bytes", "KV moved, by direction.", ["direction"], registry=self.registry
        )
        self.transfer_s = Histogram(
            "pdmesh:kv_transfer_seconds",
            "A sent transfer, from its grant to the acknowledgement.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=self.registry,
        )
        self.exposed_s = Histogram(
            "pdmesh:kv_transfer_exposed_seconds",
            "The part of a sent transfer after the last layer of the last chunk was computed.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=self.registry,
        )
        self.failed_transfers = Counter(
            "pdmesh:num_failed_transfers", "Transfers given up, by direction.", ["direction"], registry=self.registry
        )
        self.refused_requests = Counter(
            "pdmesh:num_refused_requests", "Requests and chunks the instance could not take.", registry=self.registry
        )

    def watch(
        self,
        pool: BlockPool,
        *,
        num_decoding: Callable[[], int],
        num_dropped_pieces: Callable[[], Mapping[str, int]],
    ) -> None:
        """Export the books as they are when somebody asks."""
        self.registry.register(_Books(pool, num_decoding, num_dropped_pieces))


class _Books(Collector):
    def __init__(
        self, pool: BlockPool, num_decoding: Callable[[], int], num_dropped_pieces: Callable[[], Mapping[str, int]]
    ) -> None:
        self._pool = pool
        self._num_decoding = num_decoding
        self._num_dropped_pieces = num_dropped_pieces

    def collect(self) -> list[Metric]:
        blocks = GaugeMetricFamily("pdmesh:kv_blocks", "KV blocks, by state.", labels=["state"])
        blocks.add_metric(["free"], self._pool.num_free)
        blocks.add_metric(["held"], self._pool.num_held)
        blocks.add_metric(["quarantined"], self._pool.num_quarantined)
        decoding = GaugeMetricFamily("pdmesh:num_decoding", "Residents being decoded.", value=self._num_decoding())
        dropped = CounterMetricFamily("pdmesh:num_dropped_pieces", "KV pieces refused, by reason.", labels=["reason"])
        for reason, count in self._num_dropped_pieces().items():
            dropped.add_metric([reason], count)
        return [blocks, decoding, dropped]
