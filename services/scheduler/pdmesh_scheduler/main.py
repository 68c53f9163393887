"""Composition root of the scheduler service."""

from __future__ import annotations

import random
import secrets
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread
from prometheus_client import CollectorRegistry

from pdmesh.config import MeshConfig
from pdmesh.core.config import CoreConfig, KvReservation, LatencyLearning
from pdmesh.core.requests.request_histories import RequestHistories
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.errors import ConfigError
from pdmesh.eventlog import EventLogWriter, Header
from pdmesh.garbage import rare_collections
from pdmesh.host import is_loopback
from pdmesh.model import GatewayId, InstanceId
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.latency_profile import Profile
from pdmesh.profiles import load_profile
from pdmesh.service import ServiceContext, run_service
from pdmesh.telemetry.exposition import serve_metrics, watch_event_loop
from pdmesh.telemetry.rejected_peer_metric import watch_rejected_peers
from pdmesh.wire.admin import ADMIN_METHOD
from pdmesh.wire.dialing import is_refused
from pdmesh.wire.endpoint import serving
from pdmesh.wire.link import serve_link
from pdmesh.wire.messages import GatewayDown, GatewayUp, WorkerDown, WorkerUp
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh.wire.roles import RoleRule, ServiceRole
from pdmesh_scheduler.activity import ActivityFeed
from pdmesh_scheduler.actuator_streams import ActuatorLinks
from pdmesh_scheduler.admin_service import Admin
from pdmesh_scheduler.desired_file import DesiredFile, DesiredKeeper, decode_desired, read_desired
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.gateway_streams import GatewayStreams
from pdmesh_scheduler.history import MeshHistory
from pdmesh_scheduler.latest_decisions import DecisionKeeper
from pdmesh_scheduler.mesh_check import MeshCheck
from pdmesh_scheduler.operation_progress import OperationStatuses
from pdmesh_scheduler.operator_tokens import Operators
from pdmesh_scheduler.peer_streams import Leases, Peers
from pdmesh_scheduler.request_records import RequestRecords
from pdmesh_scheduler.scheduler_metrics import SchedulerMetrics
from pdmesh_scheduler.scheduler_spans import SchedulerSpans
from pdmesh_scheduler.session_statuses import SessionStatuses
from pdmesh_scheduler.standby.leader_term import ALONE, LeaderTerm
from pdmesh_scheduler.startup_grace import REGISTER_S, StartupGrace
from pdmesh_scheduler.tenants import TenantUsage
from pdmesh_scheduler.worker_streams import RETURN_GRACE_S, WorkerStreams

SERVICE = "pdmesh.v1.Scheduler"

#: Seconds in which streams may end by themselves when the service stops.
STOP_GRACE_S = 2.0


def main(config: MeshConfig) -> int:
    """Run the scheduler until stopped, and return the exit code."""
    return run_service("scheduler", config, serve)


async def serve(config: MeshConfig, context: ServiceContext) -> None:
    """Schedule until ``context.stopping`` is set. Among several schedulers, first wait for the lead.

    Raises LeaseLost if another one takes over.
    """
    registry = CollectorRegistry()
    watch_event_loop(registry)
    rejected_peers = RejectedPeers()
    watch_rejected_peers(registry, rejected_peers)
    operators = await anyio.to_thread.run_sync(Operators, config.security)
    with serve_metrics(
        registry, host=config.telemetry.metrics_host, port=config.scheduler.metrics_port, security=config.security
    ) as metrics_port:
        if not config.standby.store:
            await _lead(context, operators, registry, rejected_peers, metrics_port, config, ALONE)
            return
        from pdmesh_scheduler.standby.standing_by import lead_in_turn  # imports the clients of stores

        lead = partial(_lead, context, operators, registry, rejected_peers, metrics_port)
        await lead_in_turn(
            config, context, operators, registry, rejected_peers, SERVICE, lead, metrics_port=metrics_port
        )


async def _lead(
    context: ServiceContext,
    operators: Operators,
    registry: CollectorRegistry,
    rejected_peers: RejectedPeers,
    metrics_port: int,
    config: MeshConfig,
    leader_term: LeaderTerm,
) -> None:
    """Schedule until ``context.stopping`` is set, then end all streams with UNAVAILABLE.

    Raise ConfigError if the event log cannot be written.
    """
    settings, clock = config.scheduler, time.monotonic  # finer than the event loop's clock
    began_at, began_s = time.time(), clock()
    profile = None if settings.profile is None else load_profile(settings.profile)
    core_config, seed = core_config_of(config, profile), secrets.randbits(63)
    core = SchedulerCore(core_config, make_bundle(settings.bundle, core_config.policy), random.Random(seed))
    workers: Peers[InstanceId, WorkerDown] = Peers()
    gateways: Peers[GatewayId, GatewayDown] = Peers()
    worker_leases: Leases[InstanceId] = Leases(settings.lease_s)
    silences: Leases[InstanceId] = Leases(settings.suspect_s)
    absences: Leases[InstanceId] = Leases(min(RETURN_GRACE_S, settings.max_queue_s))
    gateway_leases: Leases[GatewayId] = Leases(settings.gateway_lease_s)

    def wall_time(at_s: float) -> float:
        return began_at + at_s - began_s

    records = RequestRecords(wall_time)
    startup_grace = StartupGrace(core, until_s=began_s + settings.orphan_grace_s, clock=clock)
    operations = OperationStatuses(core, wall_time, settings.resize_command)
    keep = leader_term.keep
    if keep is None and settings.operations_file is not None:
        keep = DesiredFile(settings.operations_file).keep
    desired_keeper = DesiredKeeper(core, keep, operations.changed)
    patience_s = settings.orphan_grace_s + REGISTER_S
    if leader_term.desired is None:
        desired = await anyio.to_thread.run_sync(
            partial(read_desired, settings.operations_file, now=began_at, patience_s=patience_s)
        )
    else:
        desired = decode_desired(leader_term.desired or b"{}", "the lease", now=began_at, patience_s=patience_s)
    tenants = TenantUsage(core)

    with ExitStack() as closing:
        header = Header(seed=seed, bundle=settings.bundle, config=core_config, started_at=began_at, started_s=began_s)
        event_log = None
        if settings.event_log is not None:
            try:
                event_log = closing.enter_context(
                    EventLogWriter(
                        settings.event_log,
                        header,
                        max_bytes=settings.event_log_max_bytes,
                        keep=settings.event_log_keep,
                    )
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot write scheduler.event_log, {settings.event_log}: {error.strerror}"
                ) from error
        decisions = DecisionKeeper(header, settings.recent_decisions)
        metrics = SchedulerMetrics(registry, core, tenants)
        driver = Driver(
            core,
            clock=clock,
            workers=workers,
            gateways=gateways,
            lives=RequestHistories(settings.max_records),
            activity=ActivityFeed(core, gateways, clock=clock, label=records.label),
            history=MeshHistory(core, wall_time, began_s),
            observers=(
                metrics,
                records,
                SchedulerSpans(context.tracing, wall_time),
                operations,
                startup_grace,
                tenants,
                decisions,
            ),
            event_log=event_log,
            may_command=leader_term.is_valid,
        )
        actuators = ActuatorLinks(core, driver, operations.changed)
        check = MeshCheck(workers, config.security)
        worker_streams = WorkerStreams(
            driver, workers, worker_leases, silences, absences, settings, context.stopping, check, profile, leader_term
        )
        sessions = SessionStatuses(core, clock)
        gateway_streams = GatewayStreams(
            driver,
            gateways,
            gateway_leases,
            settings,
            context.stopping,
            clock,
            is_refused,
            check,
            sessions,
            leader_term,
            metrics=lambda: metrics.told,
        )
        rules = {role: RoleRule(role, config.security.tls_roles, rejected_peers) for role in ServiceRole}
        methods = {
            "Worker": serve_link(worker_streams.serve, WorkerUp, rules[ServiceRole.WORKER]),
            "Gateway": serve_link(gateway_streams.serve, GatewayUp, rules[ServiceRole.GATEWAY]),
            "Admin": Admin(
                driver=driver,
                records=records,
                sessions=sessions,
                operations=operations,
                actuators=actuators,
                startup_grace=startup_grace,
                operators=operators,
                mesh_token=config.security.mesh_token,
                tenants=tenants,
                check=check,
                decisions=decisions,
                is_wide=not (is_loopback(settings.host) or config.security.trusted_network),
            ).handler(),
        }
        async with anyio.create_task_group() as tasks:
            if event_log is not None:
                tasks.start_soon(event_log.run)
            tasks.start_soon(driver.run)
            for event in desired.events():
                await driver.act(event)
            tasks.start_soon(desired_keeper.run)
            tasks.start_soon(actuators.run)
            tasks.start_soon(worker_streams.watch)
            tasks.start_soon(gateway_leases.run, gateway_streams.expired)
            if leader_term.answer is not None:
                tasks.start_soon(leader_term.answer, gateway_streams.why_keep_lead)
            async with serving(
                SERVICE,
                methods,
                host=settings.host,
                port=settings.port,
                security=config.security,
                setting="scheduler.port",
                grace_s=STOP_GRACE_S,
                admits=lambda method, metadata: method == ADMIN_METHOD and operators.admits(metadata),
                rejected_peers=rejected_peers,
            ) as port:
                closing.enter_context(rare_collections())
                if leader_term is ALONE:
                    context.announce(address=f"{settings.host}:{port}", metrics_port=metrics_port)
                await context.stopping.wait()
            tasks.cancel_scope.cancel()


def core_config_of(config: MeshConfig, profile: Profile | None) -> CoreConfig:
    """Return the core's settings. Without a profile, the core predicts from the instances' measurements.

    Raises ConfigError.
    """
    settings, policy = config.scheduler, replace(config.policy, batching=config.scheduler.batching)
    if profile is not None:
        policy = replace(policy, latency=profile.latency)
    return CoreConfig(
        plans_in_flight=settings.plans_in_flight,
        max_queue_entries=settings.max_queue_entries,
        max_queue_tokens=settings.max_queue_bytes // 4,  # four bytes a token on the wire
        max_queue_s=settings.max_queue_s,
        refuses_early=settings.refuses_early,
        orphan_grace_s=settings.orphan_grace_s,
        kv_reservation=KvReservation(settings.kv_reservation),
        learning=LatencyLearning.MEASURED if profile is None else LatencyLearning.REFINED,
        policy=policy,
    )
