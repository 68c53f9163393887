"""The scheduler's Prometheus metrics, in the shapes that dashboards know from vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, ForgetRequest, Hold, Reject, Restart
from pdmesh.core.events import (
    DecodeStepsDone,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    MembersSet,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferLanded,
)
from pdmesh.core.requests.request_histories import Attempt, Chunk, CrossedClass
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.sessions.session_state import SessionState
from pdmesh.model import InstanceId, OwnDecodeSteps
from pdmesh.policy.batching import Mode
from pdmesh.telemetry.exposition import Aliases
from pdmesh.telemetry.histograms import LoopHistogram
from pdmesh.wire.messages import MetricFamily
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.tenants import TenantUsage

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's buckets
_DECISION_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2)


def leads_gauge(registry: CollectorRegistry) -> Gauge:
    """Return the gauge that says whether a scheduler among several leads."""
    return Gauge("pdmesh:scheduler_leads", "1 if this scheduler leads, 0 if it stands by", registry=registry)


class SchedulerMetrics:
    """Counters of events and commands, and timers of milestones. Gauges are read from the core when Prometheus asks."""

    def __init__(self, registry: CollectorRegistry, core: SchedulerCore, tenants: TenantUsage) -> None:
        self._queue_time = Histogram(
            "pdmesh:request_queue_time_seconds",
            "From a request's arrival at the scheduler to its placement on instances",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._prefill_time = Histogram(
            "pdmesh:request_prefill_time_seconds",
            "From a request's placement to the report that its whole prompt is computed",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._inference_time = Histogram(
            "pdmesh:request_inference_time_seconds",
            "From a request's placement to its end",
            ["model_name"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._iteration_tokens = LoopHistogram(
            "pdmesh:iteration_tokens_total",
            "Tokens of a step: those computed of prompts, and those drawn",
            _ITERATION_TOKENS,
            registry,
        )
        self._decision = Histogram(
            "pdmesh:scheduler_decision_seconds",
            "Time that the scheduling core takes for one event",
            registry=registry,
            buckets=_DECISION_SECONDS,
        )
        self._prompt_tokens = Counter("pdmesh:prompt_tokens", "Prompt tokens placed", registry=registry)
        self._generation_tokens = Counter(
            "pdmesh:generation_tokens", "Output tokens of finished requests", registry=registry
        )
        self._success = Counter(
            "pdmesh:request_success", "Requests finished, by reason", ["finished_reason"], registry=registry
        )
        self._rejected = Counter(
            "pdmesh:request_rejected", "Requests rejected, by reason", ["reason"], registry=registry
        )
        self._ended = Counter("pdmesh:request_ended", "Requests ended, by outcome", ["outcome"], registry=registry)
        self._restarts = Counter(
            "pdmesh:request_restarts", "Requests sent back to be resumed elsewhere", registry=registry
        )
        self._suspicions = Counter(
            "pdmesh:instance_suspicions",
            "Times an instance was silent for so long that it was suspected",
            registry=registry,
        )
        self._retractions = Counter(
            "pdmesh:num_preemptions",
            "Decodes resumed after their KV was freed for others",
            registry=registry,
        )
        self._landed_bytes = Counter("pdmesh:kv_landed_bytes", "Bytes of KV whose transfer landed", registry=registry)
        self._landed = Histogram(
            "pdmesh:kv_landing_seconds",
            "From a transfer's first KV piece to its last, at the receiver",
            registry=registry,
            buckets=_SECONDS,
        )
        self._part_moves = Counter(
            "pdmesh:kv_part_moves",
            "Ranges of contexts that went to another instance while their requests decoded",
            registry=registry,
        )
        self._prompt_parts = Counter(
            "pdmesh:kv_prompt_parts_given_back",
            "Ranges of prompts longer than an instance's room, given back there as they were where they decode",
            registry=registry,
        )
        self._failed = Counter(
            "pdmesh:num_transfer_failed_reqs", "Transfers that failed at either end", registry=registry
        )
        self._received_again = Counter(
            "pdmesh:kv_received_again",
            "Prompts whose KV survived the failure of its receiver: it went to another, or decodes at its source",
            ["where"],
            registry=registry,
        )
        for where in ("receiver", "source"):
            self._received_again.labels(where)
        self._cross_class = Counter(
            "pdmesh:cross_class_requests",
            "Requests given to an instance of another arithmetic class, which are not promised the same tokens",
            ["how"],
            registry=registry,
        )
        for how in ("hand_over", "move", "restart"):
            self._cross_class.labels(how)
        awaiting_decode = Gauge(
            "pdmesh:kv_waiting_tokens",
            "Prompt tokens of placed requests whose KV lacks a receiver",
            registry=registry,
        )
        awaiting_decode.set_function(lambda: core.num_awaiting_decode_tokens)
        waiting = Gauge("pdmesh:num_requests_waiting", "Requests in the queue", registry=registry)
        waiting.set_function(lambda: core.num_waiting)
        running = Gauge("pdmesh:num_requests_running", "Requests placed and still in progress", registry=registry)
        running.set_function(lambda: core.num_running)
        registry.register(_CoreCollector(core, tenants))
        self._told = (self._queue_time, self._prefill_time, self._inference_time, self._iteration_tokens)
        registry.register(Aliases(*self._told))
        self._models: dict[InstanceId, str] = {}

    @property
    def told(self) -> tuple[MetricFamily, ...]:
        """The metric families that gateways serve, too, for dashboards made for a single server."""
        return tuple(
            MetricFamily(
                family.name,
                family.documentation,
                family.type,
                tuple((each.name.removeprefix(family.name), each.labels, each.value) for each in family.samples),
            )
            for collector in self._told
            for family in collector.collect()
        )

    def observe(self, handled: Handled) -> None:
        """Count an event and its commands, even if their requests have no record here."""
        self._decision.observe(handled.decision_s)
        event = handled.event
        match event:
            case InstanceJoined():
                self._models[event.profile.instance_id] = event.profile.model
            case RequestFinished():
                self._success.labels(event.reason).inc()
                self._generation_tokens.inc(max(0, event.num_output_tokens))
                self._own_steps(event.instance_id, event.own_steps)
            case MembersSet(of_prompt=True):
                self._prompt_parts.inc()
            case MembersSet():
                self._part_moves.inc()
            case StepDone():
                self._own_steps(event.instance_id, event.own_steps)
                num_tokens = sum(chunk.num_tokens + (chunk.is_last and chunk.num_tokens > 0) for chunk in event.chunks)
                if (num_tokens := num_tokens + event.num_decodes) > 0 and event.instance_id in self._models:
                    self._iteration_tokens.of(self._models[event.instance_id]).observe(num_tokens)
            case DecodeStepsDone():
                self._own_steps(event.instance_id, event.own_steps)
            case TransferLanded():
                self._landed_bytes.inc(max(0, event.num_bytes))
                self._landed.observe(event.duration_s)
            case TransferFailed(committed=None):
                self._failed.inc()
            case InstanceSuspected(suspected=True):
                self._suspicions.inc()
            case _:
                pass
        for command in handled.commands:
            match command:
                case Reject():
                    self._rejected.labels(command.reason).inc()
                case Restart():
                    (self._retractions if command.retracted else self._restarts).inc()
                case ForgetRequest():
                    self._ended.labels(command.outcome).inc()
                case _:
                    pass
        for life, attempt, what in handled.milestones:
            match what:
                case AdmitPrefill() if what.leads:
                    request = attempt.request
                    self._queue_time.labels(self._models[what.instance_id]).observe(handled.now_s - request.arrival_s)
                    self._prompt_tokens.inc(request.num_prompt_tokens)
                case ExpectCopy() if what.receives_prompt and attempt.num_receivers > 1:
                    self._received_again.labels("receiver").inc()
                case CrossedClass():
                    self._cross_class.labels(what.how).inc()
                case RequestFinished() if attempt.placed_s is not None and what.instance_id in self._models:
                    taken_s = handled.now_s - attempt.placed_s
                    self._inference_time.labels(self._models[what.instance_id]).observe(taken_s)
                case Hold(ends_move=False) if attempt.num_receivers > 0:
                    self._received_again.labels("source").inc()
                case Chunk(is_last=True) if what.instance_id == life.prefill_id and attempt.outcome is None:
                    self._prefilled(attempt, what.instance_id, handled.now_s)
                case _:
                    pass
        if isinstance(event, InstanceLost):
            self._models.pop(event.instance_id, None)

    def _own_steps(self, instance_id: InstanceId, steps: OwnDecodeSteps | None) -> None:
        """Count decode steps that an instance made by itself, each as their mean: only their sums are reported."""
        if steps is not None and steps.num_steps > 0 and instance_id in self._models:
            mean = steps.num_tokens / steps.num_steps
            self._iteration_tokens.of(self._models[instance_id]).observe(mean, steps.num_steps)

    def _prefilled(self, attempt: Attempt, leader_id: InstanceId, now_s: float) -> None:
        if attempt.placed_s is not None and leader_id in self._models:
            self._prefill_time.labels(self._models[leader_id]).observe(now_s - attempt.placed_s)


class _CoreCollector(Collector):
    """Figures of the core's state, one sample for each instance or kind."""

    def __init__(self, core: SchedulerCore, tenants: TenantUsage) -> None:
        self._core = core
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily(
            "pdmesh:kv_cache_usage_perc",
            "Fraction of an instance's KV blocks that are allocated or promised",
            labels=["instance"],
        )
        queued = GaugeMetricFamily(
            "pdmesh:num_queued_tokens", "Prompt tokens placed on an instance and not yet computed", labels=["instance"]
        )
        exclusive = GaugeMetricFamily(
            "pdmesh:batching_exclusive",
            "1 while an instance computes prompts in separate phases (eb), 0 while its steps mix them",
            labels=["instance"],
        )
        gain = GaugeMetricFamily(
            "pdmesh:batching_gain",
            "Predicted throughput of exclusive batching over that of mixed batching, minus 1; 0 while unknown",
            labels=["instance"],
        )
        for view in self._core.instances:
            usage.add_metric([view.instance_id], 1 - view.num_free_blocks / view.num_blocks)
            queued.add_metric([view.instance_id], view.num_queued_tokens)
            batching = self._core.batching_of(view.instance_id)
            if batching is not None:
                exclusive.add_metric([view.instance_id], batching.mode is Mode.EXCLUSIVE)
                gain.add_metric([view.instance_id], batching.gain or 0.0)
        ignored = CounterMetricFamily(
            "pdmesh:reports_ignored", "Reports of instances that did not match the scheduler's state", labels=["kind"]
        )
        for kind, count in self._core.ignored.items():
            ignored.add_metric([kind], count)
        used = GaugeMetricFamily(
            "pdmesh:tenant_recent_share", "A tenant's share of the tokens charged in the last minute", labels=["tenant"]
        )
        waiting = GaugeMetricFamily(
            "pdmesh:tenant_requests_waiting", "Requests waiting in the queue, by tenant", labels=["tenant"]
        )
        for tenant in self._tenants.statuses:
            used.add_metric([tenant.tenant], tenant.recent_share)
            waiting.add_metric([tenant.tenant], tenant.num_waiting)
        links = GaugeMetricFamily(
            "pdmesh:kv_link_bytes_per_second",
            "Rate at which KV went from one host to another in the last minute: the median of the last transfers",
            labels=["source", "destination"],
        )
        for link in self._core.link_rates:
            links.add_metric([link.source, link.destination], link.bytes_per_s)
        states = GaugeMetricFamily(
            "pdmesh:sessions", "Sessions that clients named, by what they do now", labels=["state"]
        )
        numbers = self._core.sessions.num_by_state()
        for state in SessionState:
            states.add_metric([state], numbers[state])
        reused = CounterMetricFamily(
            "pdmesh:session_reused_tokens", "Prompt tokens of sessions that were not computed again"
        )
        reused.add_metric([], self._core.sessions.num_reused_tokens)
        possible = CounterMetricFamily(
            "pdmesh:session_possible_tokens", "Prompt tokens of sessions that an earlier turn had computed"
        )
        possible.add_metric([], self._core.sessions.num_possible_tokens)
        loaded = CounterMetricFamily(
            "pdmesh:session_loaded_tokens", "Tokens of sessions loaded from offload tiers before their next turns"
        )
        loaded.add_metric([], self._core.sessions.num_loaded_tokens)
        working_set = self._core.sessions.working_set
        aside = CounterMetricFamily(
            "pdmesh:session_aside_seconds", "Time for which turns waited until their whole sessions had room"
        )
        aside.add_metric([], working_set.aside_s)
        longest = GaugeMetricFamily(
            "pdmesh:session_longest_aside_seconds", "Longest time for which a turn waited until its session had room"
        )
        longest.add_metric([], working_set.longest_aside_s)
        yield from (usage, queued, exclusive, gain, ignored, used, waiting, links)
        yield from (states, reused, possible, loaded, aside, longest)
