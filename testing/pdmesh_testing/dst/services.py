"""Composition roots of the simulated processes: the real services, and a gateway without its HTTP edge."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import anyio

import pdmesh.worker.runtime as worker_runtime
import pdmesh_scheduler.main as scheduler_main
from pdmesh.config import MeshConfig, SchedulerConfig, SecurityConfig, TransferConfig, WorkerConfig
from pdmesh.engine.files import DefaultSampling, ModelInfo
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import GatewayId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.service import ServiceContext
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.gateway_session import GatewaySession
from pdmesh_gateway.generate import Generator
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.page_activity import ActivityHub
from pdmesh_gateway.prompt_prefixes import Prefixes
from pdmesh_gateway.token_server import serve_tokens
from pdmesh_gateway.transcripts import Transcripts
from pdmesh_testing.dst.data_plane import DataPlane, SimulatedTransport
from pdmesh_testing.dst.engine import STEP_S, TOKEN_S, SimulatedEngine, SimulatedThread
from pdmesh_testing.dst.plan import Plan
from pdmesh_testing.dst.process import running_process
from pdmesh_testing.fake_engine import FAKE_LAYOUT

SCHEDULER_ADDRESS = "127.0.0.1:7000"


def config_of(plan: Plan) -> MeshConfig:
    """Return the configuration of all services of a plan."""
    return MeshConfig(
        model="simulated",
        scheduler_address=SCHEDULER_ADDRESS,
        security=SecurityConfig(mesh_token="simulated"),
        scheduler=SchedulerConfig(
            port=7000, bundle=plan.bundle, max_queue_s=40.0, max_queue_entries=plan.max_queue_entries
        ),
        policy=PolicyConfig(
            chunk_tokens=plan.chunk_tokens,
            latency=LinearLatencyModel(a_s=STEP_S, b_s=TOKEN_S, c_s=0.0, d_s=0.0),
            prefill_step_s=STEP_S + TOKEN_S * plan.chunk_tokens,
            local_step_share=1.0,
        ),
        worker=WorkerConfig(
            engine="fake",
            max_num_seqs=plan.max_num_seqs,
            cached_states_share=plan.cached_states_share,
            max_kv_tokens_per_instance=plan.range_tokens,
            kv_offload_host_bytes=plan.num_offload_granules * GRANULE_TOKENS * FAKE_LAYOUT.token_bytes,
            speculation="ngram" if plan.drafts else "off",
            # Drawn tokens hardly ever repeat more.
            prompt_lookup_min=1,
        ),
        transfer=TransferConfig(
            num_backends=plan.num_backends,
            max_payload_bytes=plan.blocks_per_piece * FAKE_LAYOUT.max_page_bytes,
            num_send_buffers=plan.num_buffers,
            num_receive_buffers=plan.num_buffers,
            # A hand-over takes about twenty copies, several at once.
            deadline_s=8.0 + 40 * plan.copy_s,
            no_progress_s=2.0,
            group_no_progress_s=2.0,
            peer_reads=plan.peer_reads,
        ),
    )


async def serve_scheduler(config: MeshConfig, context: ServiceContext) -> None:
    await scheduler_main.serve(config, context)


async def serve_instance(
    config: MeshConfig, context: ServiceContext, *, role: Role, plan: Plan, plane: DataPlane, rng: random.Random
) -> None:
    process = running_process()
    if plan.keeps_ids:
        config = replace(config, worker=replace(config.worker, instance_id=process.name))
    engine = SimulatedEngine(
        plan.layout,
        num_blocks=plan.num_blocks,
        num_frames=plan.num_frames,
        max_model_len=plan.max_model_len,
        copies_on_threads=plan.copy_s > 0,
    )
    process.parts["engine"] = engine
    async with SimulatedThread(rng) as thread, SimulatedTransport(config.transfer, plane) as transport:
        await worker_runtime.serve_instance(config, context, role, thread=thread, engine=engine, transport=transport)


@dataclass(slots=True)
class Gateway:
    """What a client's connection meets in a gateway."""

    generator: Generator
    transcripts: Transcripts
    link: GatewaySession


_INFO = ModelInfo(
    architecture="simulated",
    max_model_len=1 << 20,
    vocab_size=1 << 20,
    eos_token_ids=(),
    default_sampling=DefaultSampling(),
    fingerprint=b"",
)


async def serve_gateway(config: MeshConfig, context: ServiceContext) -> None:
    """Serve as `pdmesh_gateway.main.serve` does, without HTTP and a model's files."""
    transcripts = Transcripts()
    gateway_id = GatewayId(f"gateway-{secrets.token_hex(4)}")
    async with serve_tokens(transcripts, config.gateway, config.security, RejectedPeers()) as token_port:
        address = f"127.0.0.1:{token_port}"
        link = GatewaySession(gateway_id, config.scheduler_address, config.security, token_address=address)
        metrics = GatewayMetrics("simulated", transcripts, lambda: link.state)
        generator = Generator(
            gateway_id=gateway_id,
            token_address=address,
            tokenizer=cast(ModelTokenizer, _Tokenizer()),
            prefixes=Prefixes(config.security.mesh_token, config.gateway.prefix_reuse, _INFO),
            transcripts=transcripts,
            link=link,
            metrics=metrics,
            tracing=Tracing(),
            model="simulated",
            no_instance_grace_s=config.gateway.no_instance_grace_s,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run, generator, ActivityHub("simulated", metrics.latencies, link.ask_activity))
            running_process().parts["gateway"] = Gateway(generator, transcripts, link)
            await context.stopping.wait()
            tasks.cancel_scope.cancel()


class _Tokenizer:
    """Tokenizer for a gateway whose output text is not checked."""

    def detokenizer(self, prompt_tail: Sequence[int], **_: Any) -> _Detokenizer:
        return _Detokenizer()


class _Detokenizer:
    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""
