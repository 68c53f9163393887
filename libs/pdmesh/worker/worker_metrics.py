"""A worker's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.frames import WindowFrames
from pdmesh.kv.mover import TransferCounters
from pdmesh.kv.offload.tier import OffloadCounters
from pdmesh.telemetry.exposition import Aliases

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TRANSFER_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)

_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")

#: Reasons for dropping pieces that no member of the mesh can have sent.
_OF_STRANGERS = ("refused", "malformed")

#: Stages in which a request waits for its turn or for KV to arrive.
_WAITING_STAGES = ("queued", "receiving")


class WorkerMetrics:
    """Counters of one instance, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.step_s = Histogram(
            "pdmesh:step_seconds",
            "Device time of a step.",
            ["kind"],  # prefill | decode | mixed
            buckets=_STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.lent_core_s = Counter(
            "pdmesh:lent_core_seconds", "Core seconds of steps on cores of idle workers.", registry=self.registry
        )
        self.kv_wait_s = Histogram(
            "pdmesh:kv_wait_seconds",
            "How long a step waited for KV of its prompt from other instances or the offload tier.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("pdmesh:prompt_tokens", "Prompt tokens computed.", registry=self.registry)
        self.recomputed_tokens = Counter(
            "pdmesh:kv_part_recomputed_tokens",
            "Tokens computed again of ranges of spread contexts whose holder was lost.",
            registry=self.registry,
        )
        self.generation_tokens = Counter("pdmesh:generation_tokens", "Tokens sampled.", registry=self.registry)
        self.cache_queries = Counter(
            "pdmesh:prefix_cache_queries", "Prompt tokens admitted whose KV could be here.", registry=self.registry
        )
        self.cache_hits = Counter(
            "pdmesh:prefix_cache_hits", "Of these, the tokens whose KV was here.", registry=self.registry
        )
        self.fetched_tokens = Counter(
            "pdmesh:prefix_cache_fetched_tokens", "Tokens whose KV came from another's cache.", registry=self.registry
        )
        self.fetched_bytes = Counter("pdmesh:prefix_cache_fetched_bytes", "Bytes of that.", registry=self.registry)
        self.unseen_tokens = Counter(
            "pdmesh:prefix_cache_unseen_tokens",
            "Cached tokens computed again since their states, or their KV in layers with a window, were gone.",
            registry=self.registry,
        )
        self.stale_prefixes = Counter(
            "pdmesh:num_stale_prefixes", "Requests refused since KV to reuse was not here.", registry=self.registry
        )
        self.loaded_tokens = Counter(
            "pdmesh:kv_offload_loaded_tokens",
            "Of the hits, the tokens whose KV came back from the offload tier.",
            registry=self.registry,
        )
        self.transfer_bytes = Counter(
            "pdmesh:kv_transfer_bytes", "KV moved, by direction.", ["direction"], registry=self.registry
        )
        self.transfer_s = Histogram(
            "pdmesh:kv_transfer_seconds",
            "An outgoing transfer, from its grant to its acknowledgement.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=self.registry,
        )
        self.exposed_s = Histogram(
            "pdmesh:kv_transfer_exposed_seconds",
            "The part of an outgoing transfer after the prompt was computed and its first token sampled.",
            buckets=_TRANSFER_BUCKETS_S,
            registry=self.registry,
        )
        self.failed_transfers = Counter(
            "pdmesh:num_failed_transfers", "Transfers that failed, by direction.", ["direction"], registry=self.registry
        )
        self._drafts = Counter(
            "pdmesh:spec_decode_num_drafts", "Decodes of a step with drafted tokens.", registry=self.registry
        )
        self._draft_tokens = Counter(
            "pdmesh:spec_decode_num_draft_tokens", "Drafted tokens that were verified.", registry=self.registry
        )
        self._accepted_tokens = Counter(
            "pdmesh:spec_decode_num_accepted_tokens", "Of these, those that were drawn.", registry=self.registry
        )
        self._accepted_per_pos = Counter(
            "pdmesh:spec_decode_num_accepted_tokens_per_pos",
            "The same, by place in the draft.",
            ["position"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "pdmesh:num_refused_requests", "Requests and chunks the instance could not take.", registry=self.registry
        )

    def drafted(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft of ``num_tokens`` whose first ``num_accepted`` tokens were drawn."""
        self._drafts.inc()
        self._draft_tokens.inc(num_tokens)
        self._accepted_tokens.inc(num_accepted)
        for position in range(num_accepted):
            self._accepted_per_pos.labels(position).inc()

    def watch(
        self,
        pool: BlockPool,
        *,
        model: str,
        block_size: int,
        stages: Callable[[], Mapping[str, int]],
        pieces: Callable[[], TransferCounters],
        offloads: Callable[[], OffloadCounters] | None = None,
        frames: WindowFrames | None = None,
    ) -> None:
        """Register gauges that are read when Prometheus asks; ``stages`` returns the number of requests by stage."""
        self.registry.register(_Books(pool, stages, pieces))
        if frames is not None:
            self.registry.register(_Frames(frames))
        load = _Load(pool, model, block_size, stages)
        self.registry.register(load)
        if offloads is not None:
            self.registry.register(_Offloads(offloads))
        drafts = (self._drafts, self._draft_tokens, self._accepted_tokens, self._accepted_per_pos)
        self.registry.register(Aliases(load, self.cache_queries, self.cache_hits, *drafts))


class _Books(Collector):
    """Gauges of blocks and requests, and counters of KV pieces."""

    def __init__(
        self,
        pool: BlockPool,
        stages: Callable[[], Mapping[str, int]],
        pieces: Callable[[], TransferCounters],
    ) -> None:
        self._pool = pool
        self._stages = stages
        self._pieces = pieces

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("pdmesh:kv_blocks", "KV blocks, by state.", labels=["state"])
        blocks.add_metric(["free"], self._pool.num_free)
        blocks.add_metric(["held"], self._pool.num_held)
        blocks.add_metric(["kept"], self._pool.num_cached)
        blocks.add_metric(["quarantined"], self._pool.num_quarantined)
        yield blocks
        requests = GaugeMetricFamily("pdmesh:num_requests", "Requests held, by stage.", labels=["stage"])
        for stage, count in self._stages().items():
            requests.add_metric([stage], count)
        yield requests
        dropped = CounterMetricFamily("pdmesh:num_dropped_pieces", "KV pieces dropped, by reason.", labels=["reason"])
        counters = self._pieces()
        for reason, count in counters.dropped.items():
            dropped.add_metric([reason], count)
        yield dropped
        refused = CounterMetricFamily("pdmesh:refused_peers", "Peers that were refused, by reason.", labels=["reason"])
        refused.add_metric(["data"], sum(counters.dropped.get(reason, 0) for reason in _OF_STRANGERS))
        yield refused
        yield CounterMetricFamily(
            "pdmesh:num_pieces_asked_again", "Damaged KV pieces that were asked for again.", counters.num_asked_again
        )
        yield CounterMetricFamily(
            "pdmesh:kv_part_answers",
            "What this instance made of its part of contexts that decode elsewhere: one a layer and step.",
            counters.num_part_answers,
        )
        exchanged = CounterMetricFamily(
            "pdmesh:kv_exchange_bytes", "KV passed on between instances of a prefill group.", labels=["direction"]
        )
        exchanged.add_metric(["out"], counters.num_bytes_exchanged.sent)
        exchanged.add_metric(["in"], counters.num_bytes_exchanged.received)
        yield exchanged
        yield CounterMetricFamily(
            "pdmesh:kv_peer_read_bytes",
            "KV copied from other instances' caches on the same host.",
            counters.num_bytes_peer_read,
        )


class _Frames(Collector):
    """Gauges of the KV blocks of layers with a window."""

    def __init__(self, frames: WindowFrames) -> None:
        self._frames = frames

    def collect(self) -> Iterator[Metric]:
        frames = self._frames
        states = GaugeMetricFamily(
            "pdmesh:kv_window_blocks", "KV blocks of layers with a window, by state.", labels=["state"]
        )
        states.add_metric(["free"], frames.num_free)
        states.add_metric(["held"], frames.num_held)
        states.add_metric(["kept"], frames.num_available - frames.num_free)
        yield states


class _Offloads(Collector):
    """Contents of the offload tier, and bytes copied to the tier and back."""

    def __init__(self, counters: Callable[[], OffloadCounters]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters()
        granules = GaugeMetricFamily(
            "pdmesh:kv_offload_granules", "Granules in the offload tier, by medium.", labels=["medium"]
        )
        granules.add_metric(["host"], counters.num_host_granules)
        granules.add_metric(["disk"], counters.num_disk_granules)
        yield granules
        moved = CounterMetricFamily(
            "pdmesh:kv_offload_bytes", "KV copied to the offload tier and back.", labels=["direction"]
        )
        moved.add_metric(["out"], counters.num_bytes_offloaded)
        moved.add_metric(["in"], counters.num_bytes_loaded)
        yield moved
        yield CounterMetricFamily(
            "pdmesh:kv_offload_lost_granules",
            "Granules that the offload tier could not take, write or read.",
            counters.num_lost_granules,
        )


class _Load(Collector):
    """The five metrics that routers and dashboards for vLLM read from each server."""

    def __init__(self, pool: BlockPool, model: str, block_size: int, stages: Callable[[], Mapping[str, int]]) -> None:
        self._pool = pool
        self._model = model
        self._block_size = block_size
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        stages = self._stages()
        num_waiting = sum(stages.get(stage, 0) for stage in _WAITING_STAGES)
        usage = 1 - (self._pool.num_free + self._pool.num_cached) / self._pool.num_blocks
        values = (
            ("num_requests_waiting", "Requests held for which nothing is being computed yet.", num_waiting),
            ("num_requests_running", "All other requests held.", sum(stages.values()) - num_waiting),
            ("kv_cache_usage_perc", "KV blocks in use; 1 is all.", usage),
        )
        for name, text, value in values:
            gauge = GaugeMetricFamily(f"pdmesh:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        lora = GaugeMetricFamily("pdmesh:lora_requests_info", "Adapters in use: there are none.", labels=_LORA_LABELS)
        lora.add_metric(["0", "", ""], 1)
        yield lora
        cache = GaugeMetricFamily("pdmesh:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks"])
        cache.add_metric([str(self._block_size), str(self._pool.num_blocks)], 1)
        yield cache
