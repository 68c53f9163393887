"""Composition root of the gateway."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.to_thread
import structlog

from pdmesh.config import LOOPBACK, MeshConfig
from pdmesh.engine.files import load_model_info, resolve_model, served_name, with_adapter
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.model import GatewayId
from pdmesh.service import ServiceContext, run_service
from pdmesh.telemetry.exposition import watch_event_loop
from pdmesh.telemetry.rejected_peer_metric import watch_rejected_peers
from pdmesh.wire.dialing import is_wildcard, own_host_towards
from pdmesh.wire.endpoint import bind_socket, check_bind
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh_gateway.answer_format import find_format
from pdmesh_gateway.answer_grammars import GrammarChecker
from pdmesh_gateway.auth import ApiKeys
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.gateway_session import GatewaySession
from pdmesh_gateway.generate import Generator
from pdmesh_gateway.grammar_process import GrammarProcess
from pdmesh_gateway.grpc_service import serve_grpc
from pdmesh_gateway.http.origins import Origins
from pdmesh_gateway.http.routes import build_app
from pdmesh_gateway.http.server import open_listener, serve_http
from pdmesh_gateway.limits import RequestLimiter
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.page_activity import ActivityHub
from pdmesh_gateway.pooling import load_pooling
from pdmesh_gateway.prompt_prefixes import Prefixes
from pdmesh_gateway.reject_cache import RejectCache
from pdmesh_gateway.serving import Serving
from pdmesh_gateway.session_names import SessionNames
from pdmesh_gateway.templates import RequestTemplates
from pdmesh_gateway.token_server import serve_tokens
from pdmesh_gateway.transcripts import Transcripts

log = structlog.get_logger()


def main(config: MeshConfig) -> int:
    """Run a gateway until it is stopped; return the exit code."""
    return run_service("gateway", config, serve)


async def serve(config: MeshConfig, context: ServiceContext) -> None:
    """Build the gateway and serve until stopped. Raise ConfigError for unusable settings."""
    gateway = config.gateway
    if config.model is None:
        raise ConfigError("the gateway needs a model: set `model` to the directory or hub id that the workers serve")
    if not config.scheduler_address:
        raise ConfigError("the gateway needs `scheduler_address`: the host:port of the scheduler")
    keys = ApiKeys(config.security)
    check_bind(gateway.host, config.security, what="the gateway", has_key=bool(keys))
    directory = await anyio.to_thread.run_sync(resolve_model, config.model)
    info = await anyio.to_thread.run_sync(load_model_info, directory)
    request_templates = RequestTemplates() if gateway.trust_request_templates else None
    tokenizer = await anyio.to_thread.run_sync(ModelTokenizer.load, directory, request_templates)
    answer_format = await anyio.to_thread.run_sync(find_format, tokenizer, gateway.tool_format)
    if answer_format.tells_tools and tokenizer.template is not None:
        log.info(
            "the chat template does not list tools; the system message lists them",
            tool_format=answer_format.tools.name,
        )
    pooling = await anyio.to_thread.run_sync(load_pooling, directory, gateway.embeddings)
    model = config.worker.served_model_name or with_adapter(served_name(config.model), config.worker.lora)

    transcripts = Transcripts()
    gateway_id = GatewayId(f"gateway-{secrets.token_hex(4)}")
    token_host = await anyio.to_thread.run_sync(token_host_of, config)
    rejected_peers = RejectedPeers()
    async with serve_tokens(transcripts, gateway, config.security, rejected_peers) as token_port:
        token_address = gateway.token_address or _address(token_host, token_port)
        link = GatewaySession(gateway_id, config.scheduler_address, config.security, token_address=token_address)
        metrics = GatewayMetrics(model, transcripts, lambda: link.state)
        activity = ActivityHub(model, metrics.latencies, link.ask_activity)
        watch_event_loop(metrics.registry)
        watch_rejected_peers(metrics.registry, rejected_peers)
        generator = Generator(
            gateway_id=gateway_id,
            token_address=token_address,
            tokenizer=tokenizer,
            prefixes=Prefixes(config.security.mesh_token, gateway.prefix_reuse, info, model),
            transcripts=transcripts,
            link=link,
            metrics=metrics,
            tracing=context.tracing,
            model=model,
            no_instance_grace_s=gateway.no_instance_grace_s,
        )
        judge = GrammarProcess(directory, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        listener = open_listener(gateway)
        # Behind a shared port a client cannot know which gateway answers, so each gateway also has a port of its own.
        probes = None if gateway.listen_fd is None else bind_socket(LOOPBACK, 0, setting="gateway.listen_fd")
        # Clients of the edge show keys, not certificates of the mesh.
        edge_security = replace(config.security, tls_ca=None)
        async with _ending(judge), anyio.create_task_group() as tasks:
            serving = Serving(
                config=gateway,
                model=model,
                model_path=config.model,
                created=int(time.time()),
                info=info,
                tokenizer=tokenizer,
                answer_format=answer_format,
                pooling=pooling,
                grammars=GrammarChecker(judge),
                generator=generator,
                session_names=SessionNames(config.security.mesh_token),
                link=link,
                admission=RequestLimiter(
                    max_requests=gateway.max_concurrent_requests, max_bytes=gateway.max_queued_bytes
                ),
                reject_cache=RejectCache(time.monotonic),
                keys=keys,
                origins=Origins(hosts=gateway.allowed_hosts, cors=gateway.cors_origins, has_keys=bool(keys)),
                metrics=metrics,
                activity=activity,
                scheduler=(config.scheduler_address, config.security),
                stopping=context.stopping,
                tasks=tasks,
            )
            async with serve_grpc(serving, edge_security, context.stopping) as grpc_port:
                tasks.start_soon(link.run, generator, activity)
                tasks.start_soon(_end_streams, context, transcripts)
                context.announce(
                    http_address=_address(gateway.host, listener.getsockname()[1]),
                    grpc_address=_address(gateway.host, grpc_port),
                    token_address=token_address,
                    model=model,
                    **({} if probes is None else {"own_address": _address(LOOPBACK, probes.getsockname()[1])}),
                )
                await serve_http(
                    build_app(serving),
                    listener,
                    edge_security,
                    context.stopping,
                    probes=probes,
                    linger_s=gateway.linger_s,
                )
            # Calls of gRPC have ended, too.
            tasks.cancel_scope.cancel()


async def _end_streams(context: ServiceContext, transcripts: Transcripts) -> None:
    """When the time to drain is over, fail all generations that still run, so that their streams end with an error."""
    await context.ending.wait()
    transcripts.fail_all(
        RequestRejected(
            "The gateway is stopping. Try again.",
            status=503,
            code="stopping",
            retry_after_s=1,
        )
    )


def token_host_of(config: MeshConfig) -> str:
    """Return the host by which workers reach the token port.

    A wildcard becomes this machine's address towards the scheduler, if workers need it. Raises ConfigError without one.
    """
    gateway = config.gateway
    if gateway.token_address is not None or not is_wildcard(gateway.token_host):
        return gateway.token_host
    try:
        return own_host_towards(config.scheduler_address)
    except ConfigError as error:
        raise ConfigError(
            f"workers on other hosts cannot send tokens to {gateway.token_host}: set gateway.token_address "
            f"to the host:port by which they reach this gateway ({error})"
        ) from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def _ending(judge: GrammarProcess) -> AsyncGenerator[None]:
    """Close the process that compiles grammars at the end of the block."""
    try:
        yield
    finally:
        judge.close()
