"""``docs/metrics.md`` and what the services serve are the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdmesh.core.commands import AdmitPrefill, Command, ForgetRequest, Outcome, Reject
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    DecodeStepsDone,
    Event,
    InstanceJoined,
    KvReleased,
    RequestArrived,
    RequestFinished,
    StepDone,
    Tick,
    TransferSent,
)
from pdmesh.core.requests.request_histories import RequestHistories
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.frames import FrameMap, WindowFrames
from pdmesh.kv.mover import ExchangedBytes, TransferCounters
from pdmesh.kv.offload.tier import OffloadCounters
from pdmesh.metrics import Slo
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    OwnDecodeSteps,
    RejectReason,
    Request,
    RequestId,
    Role,
    TransferId,
)
from pdmesh.plans import ChunkDone
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.telemetry.exposition import watch_event_loop
from pdmesh.telemetry.rejected_peer_metric import watch_rejected_peers
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh.worker.worker_metrics import WorkerMetrics
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.transcripts import Transcripts
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.scheduler_metrics import SchedulerMetrics, leads_gauge
from pdmesh_scheduler.tenants import TenantUsage
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.worker import a_shard

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"

#: Name, type and labels.
Described = tuple[str, str, frozenset[str]]


def documented(service: str) -> tuple[set[Described], set[str]]:
    """The service's own metrics and its aliases."""
    section = DOCUMENT.read_text().split(f"\n## {service}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 7 and row[2] for row in rows)
    described = {(row[0].strip("`"), row[1], frozenset(re.findall(r"`(\w+)`", row[3]))) for row in rows}
    assert len(described) == len(rows)
    return described, {alias for row in rows for alias in re.findall(r"\*\*`(.+?)`\*\*", row[5])}


def served(registry: CollectorRegistry) -> tuple[set[Described], set[str]]:
    """What the registry collects. A metric with labels must have a sample by now."""
    described: set[Described] = set()
    aliases: set[str] = set()
    for metric in registry.collect():
        if metric.name.startswith("vllm:"):
            aliases.add(metric.name)
            continue
        assert metric.samples, f"{metric.name}: no sample tells its labels"
        labels = frozenset(label for sample in metric.samples for label in sample.labels if label != "le")
        described.add((metric.name, metric.type, labels))
    return described, aliases


async def test_the_gateways() -> None:
    metrics = GatewayMetrics("m", Transcripts(), lambda: None)
    watch_event_loop(metrics.registry)
    watch_rejected_peers(metrics.registry, RejectedPeers())
    metrics.responded("/", 200)
    metrics.failed("/", "KeyError")
    metrics.finished(1, 1, "stop", num_cached_tokens=0, ttft_s=1.0, e2e_s=1.0, slo=Slo(ttft_s=2.0))
    assert served(metrics.registry) == documented("Gateway")


async def test_the_schedulers() -> None:
    core = SchedulerCore(CoreConfig(), make_bundle("fcfs", PolicyConfig()), random.Random(0))
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry, core, TenantUsage(core))
    leads_gauge(registry)
    watch_rejected_peers(registry, RejectedPeers())
    watch_event_loop(registry)
    lives = RequestHistories()

    def tell(event: Event, commands: Sequence[Command], now_s: float) -> None:
        milestones = lives.observe(event, commands, now_s)
        metrics.observe(Handled(event=event, now_s=now_s, commands=commands, milestones=milestones))

    profile = modelled_profile("i", Role.MIXED)
    core.handle(InstanceJoined(profile, ()), 0.0)
    core.handle(KvReleased(profile.instance_id, RequestId("nobody's"), Epoch(0)), 0.0)
    core.handle(InstanceJoined(modelled_profile("other", Role.MIXED), ()), 0.0)
    key: dict[str, Any] = {"request_id": RequestId("r"), "epoch": Epoch(0)}
    sent = TransferSent(
        profile.instance_id,
        **key,
        transfer_id=TransferId(1),
        num_bytes=1 << 30,
        duration_s=1.0,
        exposed_s=0.0,
        sent_s=1.0,
        destination_id=InstanceId("other"),
    )
    core.handle(sent, 0.0)
    gateway_id = GatewayId("g")
    request = Request(**key, gateway_id=gateway_id, num_prompt_tokens=8, max_tokens=1, arrival_s=0.0, tenant="k")
    core.handle(RequestArrived(request), 0.0)
    admit = AdmitPrefill(
        **key, instance_id=profile.instance_id, shards=(a_shard(profile.instance_id, 1),), transfer=None
    )
    reject = Reject(**key, gateway_id=gateway_id, reason=RejectReason.OVERLOADED, message="", retry_after_s=None)
    tell(InstanceJoined(profile, ()), [], 0.0)
    tell(RequestFinished(profile.instance_id, RequestId("unknown"), Epoch(0), FinishReason.STOP, 1), [], 0.0)
    tell(RequestArrived(request), [], 0.5)
    tell(Tick(), [admit], 1.0)
    tell(StepDone(profile.instance_id, 0, 0.1, (ChunkDone(**key, num_tokens=8, is_last=True),), 0), [], 2.0)
    tell(Tick(), [reject, ForgetRequest(**key, gateway_id=gateway_id, outcome=Outcome.REJECTED)], 3.0)
    tell(StepDone(profile.instance_id, 1, 0.1, (ChunkDone(**key, num_tokens=8, is_last=True),), 0), [], 4.0)  # late
    own = OwnDecodeSteps(num_steps=4, num_tokens=12, num_context_tokens=60, duration_s=0.1, wall_s=0.1)
    tell(DecodeStepsDone(profile.instance_id, own), [], 4.5)
    finished = RequestFinished(profile.instance_id, request.request_id, Epoch(0), FinishReason.STOP, 1)
    tell(finished, [], 5.0)
    text = generate_latest(registry).decode()
    assert f'iteration_tokens_total_sum{{model_name="{profile.model}"}} 30.0' in text  # two steps of 8 and a draw
    assert f'iteration_tokens_total_count{{model_name="{profile.model}"}} 6.0' in text
    assert f'iteration_tokens_total_bucket{{le="8.0",model_name="{profile.model}"}} 4.0' in text
    assert f'inference_time_seconds_sum{{model_name="{profile.model}"}} 4.0' in text
    told = {family.name: family for family in metrics.told}
    assert ("_sum", {"model_name": profile.model}, 30.0) in told["pdmesh:iteration_tokens_total"].samples
    assert f'request_queue_time_seconds_sum{{model_name="{profile.model}"}} 1.0' in text
    assert f'request_prefill_time_seconds_sum{{model_name="{profile.model}"}} 1.0' in text
    assert "pdmesh:prompt_tokens_total 8.0" in text
    assert served(registry) == documented("Scheduler")


async def test_a_workers() -> None:
    dropped = {"checksum": 1, "malformed": 2, "refused": 3}
    metrics = WorkerMetrics()
    watch_event_loop(metrics.registry)
    metrics.step_s.labels("prefill")
    metrics.transfer_bytes.labels("out")
    metrics.failed_transfers.labels("in")
    metrics.drafted(num_tokens=2, num_accepted=1)
    pool = BlockPool(4)
    frames = WindowFrames(pool, FrameMap.shared_out(4, 3))
    blocks = pool.allocate(2)
    pool.keep(blocks[:1])
    frames.hold(blocks)
    frames.let_go(blocks[:1])
    metrics.watch(
        pool,
        model="m",
        block_size=16,
        stages=lambda: {"decoding": 1},
        pieces=lambda: TransferCounters(0, 0, 0, 0, ExchangedBytes(0, 0), 0, dropped, 1, 0, 0, 0, 0),
        offloads=lambda: OffloadCounters(1, 2, 3, 4, 5),
        frames=frames,
    )
    text = generate_latest(metrics.registry).decode()
    assert 'pdmesh:refused_peers_total{reason="data"} 5.0' in text
    assert all(f'pdmesh:kv_window_blocks{{state="{state}"}} 1.0' in text for state in ("free", "held", "kept"))
    assert served(metrics.registry) == documented("Worker")


def test_the_grafana_board_asks_for_metrics_and_labels_that_are_served() -> None:
    described = set[Described]().union(*(documented(service)[0] for service in ("Gateway", "Scheduler", "Worker")))
    labels_of: dict[str, set[str]] = {}
    for name, kind, labels in described:
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(kind, ("",))
        for suffix in suffixes:
            labels_of.setdefault(name + suffix, set()).update(labels)
    board = json.loads((DOCUMENT.parents[1] / "deploy/grafana/pdmesh.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 30
    scraped = {"le", "instance", "job"}  # of the text format, and put there by Prometheus
    for target in targets:
        expression = target["expr"]
        names = re.findall(r"(?:pdmesh|vllm):\w+", expression)
        assert names, expression
        for name in names:
            assert name in labels_of, f"{expression}: nobody serves {name}"
        asked = set(re.findall(r"by \(([^)]*)\)", expression)) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        asked = {label.strip() for group in asked for label in group.split(",")}
        asked |= set(re.findall(r"(\w+)(?:=|!=)~?\"", expression))
        known = set[str]().union(*(labels_of[name] for name in names)) | scraped
        assert asked <= known, f"{expression}: {asked - known} are no labels of {names}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
