"""A worker process: start and stop of its engine, KV transport, links and step loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import structlog

from pdmesh.config import InstanceDegrees, MeshConfig, TransferConfig, WorkerConfig
from pdmesh.core.events import CacheReported, DrainRequested, InstanceEvent
from pdmesh.engine.base import Engine
from pdmesh.errors import ConfigError, InstanceUnavailable
from pdmesh.garbage import rare_collections
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.mover import KvMover
from pdmesh.kv.offload.tier import UNMEASURED_BYTES_PER_S, OffloadTier
from pdmesh.kv.outcome import TransferOutcome
from pdmesh.model import InstanceId, InstanceProfile, PrefixHashes, Role
from pdmesh.prefixes import PrefixHasher
from pdmesh.service import ServiceContext
from pdmesh.telemetry.exposition import serve_metrics, watch_event_loop
from pdmesh.transport.address import host_label
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.transport.reading import why_unreadable
from pdmesh.transport.ucx import UcxTransport
from pdmesh.transport.ucx_api import check_ucx_installed, names_shared_memory, ucx_devices, ucx_tls
from pdmesh.wire.endpoint import check_kv_devices
from pdmesh.wire.messages import RegisterWorker
from pdmesh.wire.scheduler_channel import open_scheduler_channel
from pdmesh.worker.cores import LentCores, open_cores
from pdmesh.worker.drafts import PromptLookup
from pdmesh.worker.engines import (
    EngineFacts,
    build_engine,
    check_ranks_can_compute,
    device_name,
    engine_facts,
    served_model_name,
    with_decided_dtype,
)
from pdmesh.worker.instance import Instance
from pdmesh.worker.known_steps import known_steps
from pdmesh.worker.measuring import measure_at_start
from pdmesh.worker.peer_checks import PeerChecks
from pdmesh.worker.rank_start import start_ranks
from pdmesh.worker.ranks import RankProcesses
from pdmesh.worker.scheduler_link import WorkerSession
from pdmesh.worker.state_frames import CacheSize, state_room
from pdmesh.worker.steps import run_steps
from pdmesh.worker.threads import EngineThread, fair_num_threads
from pdmesh.worker.token_links import open_token_links
from pdmesh.worker.worker_metrics import WorkerMetrics

# Importing torch takes seconds.
if TYPE_CHECKING:
    from pdmesh.engine.preloaded import PreloadedModel

log = structlog.get_logger()

#: Names of programs that are the first process of a container and start one other.
CONTAINER_INITS = frozenset({"catatonit", "docker-init", "dumb-init", "tini"})


async def run_worker(
    config: MeshConfig, context: ServiceContext, role: Role, preloaded: PreloadedModel | None = None
) -> None:
    """Serve as one instance until told to stop. ``preloaded`` is a model in memory, used if it is the one to serve.

    Raises ConfigError for settings that cannot be served, and InstanceUnavailable if the engine or a rank fails.
    """
    started_at = time.time()
    if not config.scheduler_address:
        raise ConfigError("no scheduler is set: set scheduler_address (PDMESH_SCHEDULER_ADDRESS) to its host:port")
    devices = ucx_devices(config.transfer)
    check_kv_devices(devices, config.transfer, config.security)
    if devices:
        check_ucx_installed()
    degrees = config.degrees_of(role)
    check_ranks_can_compute(config, degrees)
    num_threads = fair_num_threads(config.worker.num_threads, degrees.num_ranks)
    if degrees.num_ranks > 1:
        config = await anyio.to_thread.run_sync(with_decided_dtype, config, num_threads)
    cores = reserve_cores(config, degrees, num_threads)
    with start_ranks(config, degrees, num_threads) as ranks:
        async with EngineThread() as thread:
            build = partial(build_engine, config, num_threads, ranks, num_stages=degrees.stages, preloaded=preloaded)
            engine = await thread.run(build, on_cancel=lambda: None if ranks is None else ranks.kill())
            log.info("engine ready", engine=config.worker.engine, num_threads=num_threads, **degrees._asdict())
            facts = engine_facts(config)
            if facts.num_parameters:
                known = known_steps(config, engine, facts.device_name, num_threads)
                steps = await thread.run(partial(measure_at_start, engine, known=known))
                facts = replace(facts, measured_steps=steps)
            if cores is not None:
                cores = use_cores(engine, cores)
            page_bytes = engine.kv.layout.max_page_bytes
            transfer = transfer_for(device_name(config), config.transfer, why_unreadable(), page_bytes)
            config = replace(config, transfer=transfer)
            async with UcxTransport(config.transfer) as transport:
                # A full garbage collection would delay a step or a transfer by 100 ms.
                with rare_collections():
                    await serve_instance(
                        config,
                        context,
                        role,
                        thread=thread,
                        engine=engine,
                        transport=transport,
                        facts=facts,
                        ranks=ranks,
                        cores=cores,
                        started_at=started_at,
                    )


async def serve_instance(
    config: MeshConfig,
    context: ServiceContext,
    role: Role,
    *,
    thread: EngineThread,
    engine: Engine,
    transport: KvTransport,
    facts: EngineFacts = EngineFacts(),  # noqa: B008  # frozen
    ranks: RankProcesses | None = None,
    cores: LentCores | None = None,
    started_at: float = 0.0,
) -> None:
    """Serve as one instance until told to stop, with a given engine, the processes of its ranks, and a transport.

    ``started_at`` is the Unix time at which this process began, before it read its weights. Raise InstanceUnavailable
    if the engine fails or a rank is lost.
    """
    instance_id = InstanceId(config.worker.instance_id or f"{role}-{secrets.token_hex(4)}")
    number, device = process_number(started_at), device_name(config)
    drafter = prompt_lookup(config.worker, device)
    failure: Exception | None = None
    metrics = WorkerMetrics()
    watch_event_loop(metrics.registry)
    pool = BlockPool(engine.kv.num_blocks)
    range_tokens = config.worker.max_kv_tokens_per_instance
    size = CacheSize(engine.kv.num_blocks, 0 if engine.kv.frames is None else engine.kv.frames.num_frames)
    share = config.worker.cached_states_share
    room = state_room(engine.kv.layout, size, config.worker.max_num_seqs, share, engine.num_stages)

    def on_outcome(outcome: TransferOutcome) -> None:
        instance.on_outcome(outcome)

    def report(event: InstanceEvent) -> None:
        scheduler.report(event)

    def registration() -> RegisterWorker:
        profile = InstanceProfile(
            instance_id=instance_id,
            role=instance.role,
            model=served_model_name(config),
            kv_layout=engine.kv.layout,
            num_blocks=engine.kv.num_blocks,
            # The KV cache may hold fewer tokens than the model allows.
            max_model_len=min(engine.max_model_len, engine.kv.num_blocks * engine.kv.layout.block_size)
            if range_tokens == 0
            else engine.max_model_len,
            max_kv_tokens=range_tokens,
            max_num_seqs=room.num_seats,
            num_cached_states=room.num_cached,
            num_transfer_backends=config.transfer.num_backends,
            data_address=transport.address,
            device=device,
            pid=number,
            rank_pids=() if ranks is None else ranks.pids,
            device_name=facts.device_name,
            num_parameters=facts.num_parameters,
            num_heads=facts.num_heads,
            measured_steps=facts.measured_steps,
            joins_groups=engine.num_stages == 1 and engine.kv.frames is None,
            num_stages=engine.num_stages,
            compute=engine.compute_path,
            arithmetic=engine.arithmetic,
            weights=engine.weights,
            started_at=started_at,
            deterministic=config.worker.deterministic,
            host=host_label(),
            drafts=drafter is not None,
            num_offload_granules=0 if tier is None else tier.num_granules,
            load_bytes_per_s=load_bytes_per_s,
        )
        return RegisterWorker(
            profile=profile,
            residents=instance.residents(),
            kept=instance.kept,
            offloaded=instance.offloaded,
            states=instance.states,
            stopping=not instance.admits,
            dropped=tuple(instance.dropped),
            jumps=instance.jumps,
            uses=instance.last_uses,
        )

    def on_lost(granules: PrefixHashes) -> None:
        report(CacheReported(instance_id, lost=granules))

    tier = offload_tier(config.worker, engine, pool, thread.wakeup, on_lost)
    load_bytes_per_s = UNMEASURED_BYTES_PER_S
    async with (
        nullcontext() if tier is None else tier,
        KvMover(
            transport=transport,
            store=engine.kv,
            pool=pool,
            config=config.transfer,
            on_outcome=on_outcome,
            mesh_token=config.security.mesh_token,
            memory=() if tier is None else [tier.memory],
            attend_part=engine.attend_part if range_tokens else None,
            wakeup=thread.wakeup,
            weights=engine.weights,
        ) as mover,
        open_token_links(
            instance_id, config.security, report=report, arithmetic=engine.arithmetic, weights=engine.weights
        ) as tokens,
        open_scheduler_channel(config.scheduler_address, config.security) as channel,
        anyio.create_task_group() as links,
    ):
        if tier is not None:
            # The mover has registered the tier's memory with a device by now.
            load_bytes_per_s = await thread.run(tier.measure)
        instance = Instance(
            instance_id=instance_id,
            role=role,
            max_model_len=engine.max_model_len,
            store=engine.kv,
            pool=pool,
            hasher=PrefixHasher(config.security.mesh_token),
            mover=mover,
            wakeup=thread.wakeup,
            report=report,
            tokens=tokens,
            metrics=metrics,
            tracing=context.tracing,
            stop=context.stopping.set,
            drafter=drafter,
            tier=tier,
            num_stages=engine.num_stages,
            range_tokens=range_tokens,
            weights=engine.weights,
        )
        scheduler = WorkerSession(
            channel,
            prepare=instance.drop_all_but_decoding,
            registration=registration,
            registered=instance.registered,
            load=instance.load,
            handle=instance.handle,
            check=lambda message: checks.begin(message),
            lost=instance.lose_scheduler,
        )
        checks = PeerChecks(links, instance_id, mover.probes, config.security, scheduler.answer)
        metrics.watch(
            pool,
            model=served_model_name(config),
            block_size=engine.kv.layout.block_size,
            stages=instance.num_of_stage,
            pieces=mover.counters,
            offloads=None if tier is None else tier.counters,
            frames=instance.windows.frames,
        )
        with serve_metrics(
            metrics.registry,
            host=config.telemetry.metrics_host,
            port=config.worker.metrics_port,
            security=config.security,
        ) as metrics_port:
            announced = {
                "instance_id": instance_id,
                "role": str(role),
                "compute": str(engine.compute_path),
                "metrics_port": metrics_port,
                "pid": number,
            }
            links.start_soon(scheduler.run)
            async with anyio.create_task_group() as work:
                work.start_soon(_announce, context, scheduler, announced)
                work.start_soon(_drain, context, scheduler, instance, work.cancel_scope)
                if ranks is not None:
                    work.start_soon(_end_without, ranks, work.cancel_scope)
                failure = await run_steps(instance, engine, thread, cores)
                work.cancel_scope.cancel()
            if ranks is not None and (why_lost := ranks.why_lost()):
                failure = InstanceUnavailable(why_lost)
            await tokens.flush()
            await scheduler.leave()
        links.cancel_scope.cancel()
    if failure is not None:
        raise InstanceUnavailable(f"the engine failed: {failure}") from failure


def process_number(started_at: float) -> int:
    """Return a number that no earlier process of the same instance name had: the pid, or in a container the start time.

    In a container the pid is always the same, both of the first process and of an init's child.
    """
    pid = os.getpid()
    is_first = pid == 1 or (os.getppid() == 1 and Path("/proc/1/comm").read_text().strip() in CONTAINER_INITS)
    return int(started_at) % (1 << 31) if is_first else pid


async def _announce(context: ServiceContext, scheduler: WorkerSession, facts: dict[str, object]) -> None:
    await scheduler.registered.wait()
    context.announce(**facts)


async def _end_without(ranks: RankProcesses, work: anyio.CancelScope) -> None:
    """Cancel ``work`` once a rank is lost, and log the reason."""
    log.error("rank lost; stopping the instance", reason=await ranks.watch())
    work.cancel()


async def _drain(
    context: ServiceContext, scheduler: WorkerSession, instance: Instance, work: anyio.CancelScope
) -> None:
    """Wait for the stop; then refuse new requests, and cancel ``work`` when all have ended or the process must end."""
    await context.stopping.wait()
    instance.stop_admitting()
    scheduler.report(DrainRequested(instance.instance_id))
    async with anyio.create_task_group() as draining:

        async def give_up() -> None:
            await context.ending.wait()
            log.warning("stopping with unfinished requests", num_decoding=instance.num_decoding)
            draining.cancel_scope.cancel()

        draining.start_soon(give_up)
        await instance.emptied()
        draining.cancel_scope.cancel()
    work.cancel()


def reserve_cores(config: MeshConfig, degrees: InstanceDegrees, num_threads: int) -> LentCores | None:
    """Take a row for this worker in the table of cores and mark its cores as in use.

    Returns None if workers do not lend cores, for another engine or several ranks, or if the table cannot be used.
    """
    worker = config.worker
    if worker.cores_file is None or not worker.lend_cores or worker.engine != "torch" or degrees.num_ranks > 1:
        return None
    try:
        cores = open_cores(worker.cores_file, num_threads)
    except ConfigError as error:
        log.warning("cannot share cores with other workers", reason=str(error))
        return None
    cores.occupy()
    return cores


def use_cores(engine: Engine, cores: LentCores) -> LentCores | None:
    """Let the engine compute with ``cores`` and return them; None if results depend on the number of threads."""
    from pdmesh.engine.runner import TorchEngine

    assert isinstance(engine, TorchEngine)
    if not engine.any_num_threads:
        log.info("cores are not shared: results would depend on the number of threads", arithmetic=engine.arithmetic)
        return None
    engine.use(cores)
    return cores


def offload_tier(
    worker: WorkerConfig,
    engine: Engine,
    pool: BlockPool,
    wakeup: Wakeup,
    on_lost: Callable[[PrefixHashes], object],
) -> OffloadTier | None:
    """Return the configured offload tier; None without one. Raise ConfigError if the settings contradict each other.

    A tier that is too small for one granule counts as none, with a warning.
    """
    if worker.kv_offload_disk_bytes and worker.kv_offload_dir is None:
        raise ConfigError(
            "worker.kv_offload_disk_bytes is set, but worker.kv_offload_dir is not: name a directory on a disk"
        )
    if not (worker.kv_offload_host_bytes or worker.kv_offload_disk_bytes):
        return None
    tier = OffloadTier(
        engine.kv,
        pool,
        wakeup,
        host_bytes=worker.kv_offload_host_bytes,
        disk_bytes=worker.kv_offload_disk_bytes,
        directory=worker.kv_offload_dir,
        on_lost=on_lost,
        # anyio has no call from a thread that returns without waiting for the result.
        call_soon=asyncio.get_running_loop().call_soon_threadsafe,
    )
    if tier.num_granules == 0:
        log.warning("the offload tier is too small to hold KV", granule_bytes=tier.granule_bytes)
        return None
    return tier


def prompt_lookup(worker: WorkerConfig, device: str) -> PromptLookup | None:
    """Return the configured drafter; None without one. Raise ConfigError for a device without exact drafts."""
    if worker.speculation == "off":
        return None
    if device != "cpu":
        raise ConfigError(
            f"worker.speculation is {worker.speculation}, but the device is {device}, whose kernels for drafts may "
            "round differently than those for decodes: set it to off"
        )
    return PromptLookup(
        num_tokens=worker.num_speculative_tokens,
        min_ngram=worker.prompt_lookup_min,
        max_ngram=worker.prompt_lookup_max,
    )


def transfer_for(device: str, config: TransferConfig, unreadable: str | None, page_bytes: int = 0) -> TransferConfig:
    """Return the transfer settings for KV on ``device``. A message holds at least a page of ``page_bytes``.

    ``unreadable`` says why peers cannot read this process's memory; None: they can.
    """
    payload_bytes = config.max_payload_bytes if device == "cpu" else config.device_payload_bytes
    config = replace(config, max_payload_bytes=max(payload_bytes, page_bytes))
    if unreadable is None or not names_shared_memory(ucx_tls(config)):
        return config
    log.warning("KV goes through UCX, about ten times slower than reading it in memory", reason=unreadable)
    return replace(config, ucx_tls="^sm")
