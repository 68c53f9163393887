"""A scheduler among several: stands by until it leads, then leads until it is stopped or loses the lease."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import grpc
import msgspec
import structlog
from prometheus_client import CollectorRegistry

from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError
from pdmesh.extensions import extension
from pdmesh.service import ServiceContext
from pdmesh.wire.admin import ADMIN_METHOD
from pdmesh.wire.dialing import is_wildcard
from pdmesh.wire.endpoint import serving
from pdmesh.wire.link import FrameLink, serve_link
from pdmesh.wire.messages import GatewayUp, RegisterGateway, StandingBy, WorkerUp
from pdmesh.wire.rejected_peers import RejectedPeers
from pdmesh_scheduler.operator_tokens import Operators
from pdmesh_scheduler.scheduler_metrics import leads_gauge
from pdmesh_scheduler.standby.etcd_store import open_etcd
from pdmesh_scheduler.standby.file_store import FileStore
from pdmesh_scheduler.standby.keeper import LeaseKeeper, LeaseLost
from pdmesh_scheduler.standby.leader_term import Judge, LeaderTerm
from pdmesh_scheduler.standby.leadership import Candidate
from pdmesh_scheduler.standby.lease_store import LeaseStore

log = structlog.get_logger()

#: Part of a lease for which a leader may be silent before workers and gateways look for another one.
SILENCE = 2 / 3

#: Seconds for a refused peer to read the leader's address.
REFUSAL_LIMIT_S = 1.0

#: Entry points of lease stores in other distributions, by the name in `standby.store`.
STORES = "pdmesh.lease_stores"

#: Leads for a term, on the configured port, until the service is told to stop.
Lead = Callable[[MeshConfig, LeaderTerm], Awaitable[None]]


async def lead_in_turn(
    config: MeshConfig,
    context: ServiceContext,
    operators: Operators,
    registry: CollectorRegistry,
    rejected_peers: RejectedPeers,
    service: str,
    lead: Lead,
    **facts: Any,
) -> None:
    """Refuse all calls of ``service`` until this scheduler leads, and then ``lead``.

    Raises LeaseLost once it must not lead any more, and ConfigError.
    """
    standby = config.standby
    leads = leads_gauge(registry)
    async with _open_store(config) as store:
        async with _refusing(config, service, operators, rejected_peers) as (port, keepers):
            address = standby.address or _own_address(config, port)
            keeper = LeaseKeeper(store, Candidate(secrets.token_hex(8), address, standby.lease_s), standby.lease_s)
            keepers.append(keeper)
            context.announce(address=f"{config.scheduler.host}:{port}", **facts)
            if not await _acquired(keeper, context.stopping):
                return
        leads.set(1)
        leader_term = LeaderTerm(
            term=keeper.term,
            silence_s=SILENCE * standby.lease_s,
            is_valid=lambda: keeper.leads,
            desired=keeper.state.encode(),
            keep=lambda content: keeper.save(content.decode()),
            answer=partial(_answer, keeper),
        )
        lost: LeaseLost | None = None

        async def keep() -> None:
            nonlocal lost
            try:
                await keeper.keep()
            except LeaseLost as error:
                log.error("lease lost; this scheduler stops", reason=str(error))
                lost = error
                context.stopping.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep)
            await lead(replace(config, scheduler=replace(config.scheduler, port=port)), leader_term)
            tasks.cancel_scope.cancel()
        await keeper.release()
        if lost is not None:
            raise LeaseLost(f"{lost}: start this scheduler again as a standby") from lost


async def _answer(keeper: LeaseKeeper, judge: Judge) -> None:
    """Judge each request for the lead until one is granted, and then give the lease to its sender. Log each answer."""
    while True:
        request = await keeper.asked()
        why_not = await judge(request)
        if not why_not:
            log.warning("handing the lease to the only scheduler that a gateway reaches", **request._asdict())
            keeper.give(request.address)
            return
        log.warning("refused to hand the lease to another scheduler", **request._asdict(), reason=why_not)
        keeper.refuse()


async def _acquired(keeper: LeaseKeeper, stopping: anyio.Event) -> bool:
    """Wait until the lease is held, or until told to stop. Return whether it is held."""
    async with anyio.create_task_group() as racing:

        async def stop() -> None:
            await stopping.wait()
            racing.cancel_scope.cancel()

        racing.start_soon(stop)
        await keeper.acquire()
        racing.cancel_scope.cancel()
    return keeper.leads


@asynccontextmanager
async def _refusing(
    config: MeshConfig, service: str, operators: Operators, rejected_peers: RejectedPeers
) -> AsyncGenerator[tuple[int, list[LeaseKeeper]]]:
    """Answer all calls within the block with the leader's address. Yield the port, and the list for the lease's keeper.

    Until the caller has added a keeper, the answers name no leader. A gateway that does not reach the leader makes the
    keeper ask for the lease.
    """
    keepers: list[LeaseKeeper] = []

    def answer() -> StandingBy:
        return StandingBy(leader=keepers[0].leader if keepers else "")

    async def refuse(link: FrameLink[Any, Any], _peer: str) -> None:
        with anyio.move_on_after(REFUSAL_LIMIT_S):
            # Read first: if a peer's write fails, gRPC reports that error to the peer instead of our answer.
            match await anext(link.frames(), None):
                case [RegisterGateway(unreached_leader=leader, gateway_id=gateway_id), *_] if keepers:
                    keepers[0].ask(leader, gateway_id)
                case _:
                    pass
            link.post(answer())
            link.close()
            await link.pump()

    async def refuse_question(_frame: bytes, _context: Any) -> bytes:
        return msgspec.msgpack.encode([answer()])

    methods = {
        "Worker": serve_link(refuse, WorkerUp),
        "Gateway": serve_link(refuse, GatewayUp),
        "Admin": grpc.unary_unary_rpc_method_handler(refuse_question),
    }
    async with serving(
        service,
        methods,
        host=config.scheduler.host,
        port=config.scheduler.port,
        security=config.security,
        setting="scheduler.port",
        grace_s=0.0,
        admits=lambda method, metadata: method == ADMIN_METHOD and operators.admits(metadata),
        rejected_peers=rejected_peers,
    ) as port:
        yield port, keepers


def _own_address(config: MeshConfig, port: int) -> str:
    host = config.scheduler.host
    if is_wildcard(host):
        raise ConfigError(
            f"other hosts cannot reach this scheduler at {host}: set standby.address to the host:port by which "
            "workers and gateways reach it"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def _open_store(config: MeshConfig) -> AsyncGenerator[LeaseStore]:
    standby = config.standby
    match standby.store:
        case "file":
            if standby.file is None:
                raise ConfigError("standby.file is not set: name a file that the schedulers of this host share")
            yield FileStore(standby.file)
        case "etcd":
            async with open_etcd(standby) as etcd:
                yield etcd
        case name:
            entry = extension(STORES, name, wanted=f"standby.store is {name}, which", install=f"pdmesh[{name}]")
            opened: Callable[[MeshConfig], AbstractAsyncContextManager[LeaseStore]] = entry.load()
            async with opened(config) as store:
                yield store
