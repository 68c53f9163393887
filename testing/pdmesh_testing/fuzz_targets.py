"""Fuzzing targets in this process: a gateway before a scripted mesh, and a scheduler."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import anyio
import httpx

from pdmesh.config import MeshConfig, SchedulerConfig, SecurityConfig
from pdmesh.core.events import InstanceEvent, RequestCancelled
from pdmesh.model import Epoch, FinishReason, GatewayId, InstanceId, RequestId, Role, SamplingParams
from pdmesh.service import ServiceContext
from pdmesh.wire import messages
from pdmesh.wire.endpoint import TOKEN_METADATA, open_channel
from pdmesh.wire.link import open_link
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_scheduler import main as scheduler
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.fuzz import Report, fuzz_frames, fuzz_grpc, fuzz_http, watching
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import scripted_mesh

_CONTEXT = 512

Target = Callable[..., Awaitable[Report]]


@asynccontextmanager
async def _gateway(folder: Path, security: SecurityConfig | None = None) -> AsyncGenerator[RunningGateway]:
    write_checkpoint(folder / "model", max_position_embeddings=_CONTEXT)
    async with (
        scripted_mesh() as mesh,
        running_gateway(folder / "model", mesh.address, security=security) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as client,
    ):
        await mesh.until(lambda: len(mesh.registrations) == 1)
        while (await client.get("/ready")).status_code != 200:
            pass
        yield running
        # It serves as if nothing had been.
        for _ in range(3):
            body = {"prompt": "abc", "max_tokens": 6}
            assert (await client.post("/v1/completions", json=body, timeout=20)).json()["choices"][0][
                "text"
            ] == "abcabc"


async def http(folder: Path, *, num_cases: int, seed: int) -> Report:
    """Fuzz the gateway's HTTP edge."""
    async with _gateway(folder) as gateway:
        report = await _watched(lambda: fuzz_http(gateway.url, num_cases=num_cases, seed=seed))
    return report


async def grpc(folder: Path, *, num_cases: int, seed: int) -> Report:
    """Fuzz the gateway's gRPC edge: Generate, health, reflection, and unknown methods."""
    sampling = pb.SamplingOptions(max_tokens=3, temperature=0.5, stop=["a"], logprobs=1, seed=3, logit_bias={1: 2.0})
    generate = [
        pb.GenerateRequest(text="abc", sampling=sampling, priority=1, slo_ttft_ms=100.0, request_id="r"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingOptions(max_tokens=2)),
    ]
    calls: dict[str, Sequence[bytes]] = {
        "/pdmesh.api.v1.Inference/Generate": [request.SerializeToString() for request in generate],
        "/grpc.health.v1.Health/Check": [b"", b"\x0a\x01x"],
        "/grpc.health.v1.Health/Watch": [b""],
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [
            b"\x3a\x00",
            b"\x22\x18pdmesh.api.v1.Inference1",
        ],
    }
    async with _gateway(folder) as gateway:
        address = gateway.facts["grpc_address"]
        return await _watched(lambda: fuzz_grpc(address, calls, num_cases=num_cases, seed=seed))


async def frames(folder: Path, *, num_cases: int, seed: int) -> Report:
    """Fuzz the scheduler's streams and the gateway's token port: half of the peers know the mesh token."""
    security = SecurityConfig(mesh_token="secret")
    known = ((TOKEN_METADATA, b"secret".hex()),)
    report = Report()

    async def attack(address: str, of: Mapping[str, Sequence[Any]], seed: int) -> None:
        for metadata in (known, ()):
            part = await _watched(
                lambda: fuzz_frames(address, of, num_cases=num_cases // 4, seed=seed, metadata=metadata)  # noqa: B023
            )
            report.statuses.update(part.statuses)
            report.failures += part.failures

    async with _scheduler(security) as address:
        await attack(address, _SCHEDULER_MESSAGES, seed)
    async with _gateway(folder, None) as gateway:
        await attack(gateway.facts["token_address"], _TOKEN_MESSAGES, seed + 1)
    return report


TARGETS: dict[str, Target] = {"http": http, "grpc": grpc, "frames": frames}


async def _watched(attack: Callable[[], Awaitable[Report]]) -> Report:
    seen = Report()
    with watching(seen):
        report = await attack()
    report.failures += seen.failures
    return report


@dataclass(slots=True)
class _Context(ServiceContext):
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    ready: anyio.Event = field(default_factory=anyio.Event)

    def announce(self, **facts: Any) -> None:
        self.facts = facts
        self.ready.set()


@asynccontextmanager
async def _scheduler(security: SecurityConfig) -> AsyncGenerator[str]:
    context = _Context(ready_fd=None)
    config = MeshConfig(security=security, scheduler=SchedulerConfig())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scheduler.serve, config, context)
        with anyio.fail_after(30):
            await context.ready.wait()
        address = context.facts["address"]
        yield address
        # It takes a gateway as if nothing had been.
        async with (
            open_channel(address, security) as channel,
            open_link(channel, "/pdmesh.v1.Scheduler/Gateway", messages.GatewayDown) as link,
            anyio.create_task_group() as pumping,
        ):
            pumping.start_soon(link.pump)
            link.post(messages.RegisterGateway(gateway_id=GatewayId("last"), waiting=()))
            with anyio.fail_after(20):
                async for frame in link.frames():
                    if any(isinstance(message, messages.MeshStatus) for message in frame):
                        break
            pumping.cancel_scope.cancel()
        context.stopping.set()


_R, _E = RequestId("r.g"), Epoch(0)
_IDS: dict[str, Any] = {"request_id": _R, "epoch": _E}
_GENERATION = messages.Generation(
    **_IDS,
    gateway_id=GatewayId("g"),
    token_address="127.0.0.1:1",
    token_ids=bytes(32),
    num_prompt_tokens=8,
    params=SamplingParams(max_tokens=4),
)


def _event(kind: type[Any]) -> Any:
    """Return an event of this kind, valid for an instance that has the request above."""
    ids = {"instance_id": "m", "request_id": _R, "epoch": _E, "reason": FinishReason.STOP, "chunks": ()}
    return kind(**{item.name: ids.get(item.name, 1) for item in fields(kind)})


_SCHEDULER_MESSAGES: dict[str, Sequence[Any]] = {
    "/pdmesh.v1.Scheduler/Gateway": [
        messages.RegisterGateway(gateway_id=GatewayId("g"), waiting=((_R, _E),)),
        messages.Submit(generation=_GENERATION, slo_ttft_s=0.5, others=(messages.OtherChoice(RequestId("s.g"), 3),)),
        messages.EventMessage.of(RequestCancelled(GatewayId("g"), _R, _E)),
        messages.GatewayHeartbeat(),
    ],
    "/pdmesh.v1.Scheduler/Worker": [
        messages.RegisterWorker(profile=modelled_profile("m", Role.MIXED), residents=()),
        *(messages.EventMessage.of(_event(kind)) for kind in get_args(InstanceEvent)),
        messages.Goodbye(),
    ],
    "/pdmesh.v1.Scheduler/Admin": [messages.GetStatus(), messages.GetRequest(request_id=_R)],
}
_TOKEN_MESSAGES: dict[str, Sequence[Any]] = {
    "/pdmesh.v1.Gateway/Tokens": [
        messages.RegisterTokens(instance_id=InstanceId("w")),
        messages.TokensHeartbeat(),
        messages.TokenOut(**_IDS, index=0, token_id=1),
        messages.PromptLogprobs(**_IDS, start=1, logprobs=(messages.TokenLogprobs(-1.0),)),
    ],
}
