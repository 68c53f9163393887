"""Prometheus metrics of the gateway, in the shapes that dashboards for vLLM expect, under our prefix.

The latency histograms and the gauges that routers read are exposed a second time under vLLM's own names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdmesh.metrics import NO_SLO, Slo, keeps_slo, tpot_between_s
from pdmesh.model import RejectReason
from pdmesh.telemetry.exposition import Aliases
from pdmesh.telemetry.histograms import LoopHistogram
from pdmesh.wire.messages import MeshStatus
from pdmesh_gateway.transcripts import Transcripts

PREFIX = "pdmesh"

# Bucket bounds equal vLLM's, so that its dashboards draw the same.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REFUSAL_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_LENGTH_BUCKETS = tuple(scale * step for scale in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))

#: Number of latest tokens in the percentiles on the page. Dashboards read the histograms of ``/metrics``.
NUM_LATENCIES = 2048

#: Limit of the requests that the page draws as dots in one frame.
NUM_NEW = 256


class RecentLatencies:
    """The latest TTFTs, ITLs and TPOTs of this gateway in seconds, and the number of output tokens delivered."""

    def __init__(self) -> None:
        self._ttft_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._itl_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._new_ttft_s: deque[float] = deque(maxlen=NUM_NEW)
        self._new_tpot_s: deque[float] = deque(maxlen=NUM_NEW)
        self.num_output_tokens = 0

    def first_token(self, ttft_s: float) -> None:
        self._ttft_s.append(ttft_s)
        self._new_ttft_s.append(ttft_s)

    def next_token(self, itl_s: float) -> None:
        self._itl_s.append(itl_s)

    def finished(self, tpot_s: float) -> None:
        self._new_tpot_s.append(tpot_s)

    def take_new(self) -> dict[str, list[float] | int]:
        """Return and clear the TTFTs and TPOTs since the last call, at most `NUM_NEW` of each.

        The number of output tokens in the result counts from the start.
        """
        new: dict[str, list[float] | int] = {
            "ttfts_s": list(self._new_ttft_s),
            "tpots_s": list(self._new_tpot_s),
            "num_output_tokens": self.num_output_tokens,
        }
        self._new_ttft_s.clear()
        self._new_tpot_s.clear()
        return new

    def percentiles(self) -> dict[str, dict[str, float] | None]:
        """Return the median and 99th percentile of TTFT and ITL; None for one without a measurement."""
        return {"ttft_s": _percentiles(self._ttft_s), "itl_s": _percentiles(self._itl_s)}


def _percentiles(values: deque[float]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else 99 * [values[0]]
    return {"p50": cuts[49], "p99": cuts[98]}


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, model: str, transcripts: Transcripts, mesh_state: Callable[[], MeshStatus | None]) -> None:
        self.latencies = RecentLatencies()
        self.registry = CollectorRegistry()

        # Metrics that are also exposed under vLLM's name.
        aliased: list[Collector] = []

        def histogram(name: str, text: str, buckets: Sequence[float], *, has_alias: bool = True) -> Histogram:
            made = Histogram(f"{PREFIX}:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            aliased.extend([made] if has_alias else [])
            return made.labels(model)

        def counter(name: str, text: str, *, has_alias: bool = True) -> Counter:
            made = Counter(f"{PREFIX}:{name}", text, ["model_name"], registry=self.registry)
            aliased.extend([made] if has_alias else [])
            return made.labels(model)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From a request's submission to its first token.", _TTFT_BUCKETS
        )
        itl = LoopHistogram(
            f"{PREFIX}:inter_token_latency_seconds",
            "Between two tokens of one generation.",
            _ITL_BUCKETS,
            self.registry,
        )
        aliased.append(itl)
        self._itl = itl.of(model)
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Per request: from its first to its last token, per token after the first.",
            _ITL_BUCKETS,
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From a request's submission to its last token.", _E2E_BUCKETS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Per request: from its first to its last token.", _E2E_BUCKETS
        )
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _LENGTH_BUCKETS)
        self._output_length = histogram("request_generation_tokens", "Output tokens of a request.", _LENGTH_BUCKETS)
        self._asked_tokens = histogram(
            "request_params_max_tokens", "Output tokens that a request may have.", _LENGTH_BUCKETS
        )
        self._asked_choices = histogram("request_params_n", "Choices of a client's request.", (1, 2, 5, 10, 20))
        self._longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", _LENGTH_BUCKETS
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        output_tokens = _OutputTokens(model, self.latencies)
        self.registry.register(output_tokens)
        aliased.append(output_tokens)
        self._cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens of finished requests, which could have been cached."
        )
        self._cache_hits = counter("prefix_cache_hits", "Of these, the tokens whose KV was there before.")
        self.restarts = counter("request_restarts", "Requests resumed after a loss.", has_alias=False)
        self.retractions = counter("num_preemptions", "Requests resumed because other requests needed their KV memory.")
        self._preempted = histogram(
            "request_num_preemptions", "Preemptions of a request, until it ended.", (1, 2, 5, 10, 20)
        )
        rejections = Counter(
            f"{PREFIX}:admission_rejections",
            "Requests refused for want of room or time, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._rejections = {
            reason: rejections.labels(model, reason) for reason in (RejectReason.OVERLOADED, RejectReason.QUEUE_TIMEOUT)
        }
        self._refusal = histogram(
            "request_refusal_seconds",
            "Time from a request's headers to its refusal for lack of room or time.",
            _REFUSAL_BUCKETS,
            has_alias=False,
        )
        self._success = Counter(
            f"{PREFIX}:request_success",
            "Generations that ended, by outcome.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._targets = Counter(
            f"{PREFIX}:request_slo",
            "Completed generations with a target of their own, by whether they met it.",
            ["model_name", "met"],
            registry=self.registry,
        )
        self._responses = Counter(
            f"{PREFIX}:http_requests", "HTTP responses.", ["path", "status"], registry=self.registry
        )
        self.ignored_fields = Counter(
            f"{PREFIX}:ignored_fields", "Fields of requests that were unknown and passed over.", registry=self.registry
        )
        self._failures = Counter(
            f"{PREFIX}:internal_errors",
            "Requests that failed with an unexpected error.",
            ["where", "error"],
            registry=self.registry,
        )
        self._model = model
        waiting = Gauge(f"{PREFIX}:gateway_transcripts", "Generations under way here.", registry=self.registry)
        waiting.set_function(lambda: len(transcripts))
        stray = Gauge(
            f"{PREFIX}:gateway_stray_tokens",
            "Tokens dropped because they were late, duplicate or unknown.",
            registry=self.registry,
        )
        stray.set_function(lambda: transcripts.num_stray)
        mesh = _MeshCollector(model, mesh_state)
        self.registry.register(mesh)
        self.registry.register(Aliases(*aliased, rejections, self._success, mesh))

    def tokens_out(self, num_tokens: int, now_s: float, started_s: float, last_s: float | None) -> None:
        """Record ``num_tokens`` tokens of one generation delivered together.

        ``last_s`` is the time of the previous delivery, None for the first.
        """
        self.latencies.num_output_tokens += num_tokens
        if last_s is None:
            self._ttft.observe(now_s - started_s)
            self.latencies.first_token(now_s - started_s)
        elif num_tokens:
            gap_s = (now_s - last_s) / num_tokens
            self.latencies.next_token(gap_s)
            self._itl.observe(gap_s, num_tokens)

    def finished(
        self,
        num_prompt_tokens: int,
        num_tokens: int,
        reason: str,
        *,
        num_cached_tokens: int,
        ttft_s: float,
        e2e_s: float,
        slo: Slo,
    ) -> None:
        """Record a generation that ended well; ``slo`` is the target of its request."""
        tpot_s = tpot_between_s(ttft_s, e2e_s, num_tokens)
        if slo != NO_SLO:
            met = keeps_slo(slo, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
            self._targets.labels(self._model, str(met).lower()).inc()
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cache_queries.inc(num_prompt_tokens)
        self._cache_hits.inc(num_cached_tokens)
        self._prompt_length.observe(num_prompt_tokens)
        self._output_length.observe(num_tokens)
        self._e2e.observe(e2e_s)
        self._decode.observe(e2e_s - ttft_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
            self.latencies.finished(tpot_s)

    def answered(self, *, max_tokens: int, n: int, num_longest_tokens: int, num_preemptions: int) -> None:
        """Record a client's request whose choices have all ended: its parameters and the longest choice's output
        tokens.
        """
        self._preempted.observe(num_preemptions)
        self._asked_tokens.observe(max_tokens)
        self._asked_choices.observe(n)
        self._longest.observe(num_longest_tokens)

    def refused(self, reason: RejectReason, took_s: float) -> None:
        """Count a request that was refused for lack of room (OVERLOADED) or time (QUEUE_TIMEOUT).

        ``took_s`` is recorded for lack of room alone.
        """
        self._rejections[reason].inc()
        if reason is RejectReason.OVERLOADED:
            self._refusal.observe(took_s)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def failed(self, where: str, error: str) -> None:
        """Record a request that failed by a bug: ``where`` is the path or method, ``error`` the error's type."""
        self._failures.labels(where, error).inc()

    def exposition(self) -> bytes:
        """Return the metrics in the text format of ``/metrics``."""
        return generate_latest(self.registry)


class _OutputTokens(Collector):
    """Counter of output tokens that takes no lock per token."""

    def __init__(self, model: str, latencies: RecentLatencies) -> None:
        self._model = model
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        counter = CounterMetricFamily(f"{PREFIX}:generation_tokens", "Output tokens delivered.", labels=["model_name"])
        counter.add_metric([self._model], self._latencies.num_output_tokens)
        yield counter


class _MeshCollector(Collector):
    """Collector of the gauges that routers read, from the scheduler's last report."""

    def __init__(self, model: str, mesh_state: Callable[[], MeshStatus | None]) -> None:
        self._model = model
        self._mesh_state = mesh_state

    def collect(self) -> Iterator[Metric]:
        state = self._mesh_state()
        instances = () if state is None else state.instances
        num_blocks = sum(instance.num_blocks for instance in instances)
        num_taken = sum(instance.num_taken_blocks for instance in instances)
        values = {
            "num_requests_waiting": (0 if state is None else state.num_waiting, "Requests in the scheduler's queue."),
            "num_requests_running": (0 if state is None else state.num_running, "Requests on instances."),
            "kv_cache_usage_perc": (num_taken / num_blocks if num_blocks else 0, "KV blocks in use; 1 is all."),
        }
        for name, (value, help_text) in values.items():
            gauge = GaugeMetricFamily(f"{PREFIX}:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        by_reason = GaugeMetricFamily(
            f"{PREFIX}:num_requests_waiting_by_reason",
            "Requests in the scheduler's queue: in line, or deferred as they fit no instance that is there now.",
            labels=["model_name", "reason"],
        )
        num_parked = 0 if state is None else state.num_parked
        by_reason.add_metric([self._model, "capacity"], 0 if state is None else state.num_waiting - num_parked)
        by_reason.add_metric([self._model, "deferred"], num_parked)
        yield by_reason
        lora = GaugeMetricFamily(
            f"{PREFIX}:lora_requests_info",
            "Adapters in use: there are none.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora.add_metric(["0", "", ""], 1)
        yield lora
        num_tokens = sum(instance.num_blocks * instance.block_size for instance in instances)
        num_longest = num_tokens / state.max_model_len if state is not None and state.max_model_len else 0
        labels = ["num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
        cache = GaugeMetricFamily(f"{PREFIX}:cache_config_info", "The KV cache.", labels=labels)
        cache.add_metric([str(num_blocks), str(num_tokens), f"{num_longest:.2f}"], 1)
        yield cache
        for told in () if state is None else state.metrics:
            metric = Metric(told.name, told.documentation, told.type)
            metric.samples = [Sample(told.name + rest, labels, value) for rest, labels, value in told.samples]
            yield metric
