"""Frames over a real loopback gRPC stream: batching, malformed frames, broken peers, bounded outboxes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import grpc
import grpc.aio
import msgspec
import pytest

from pdmesh.config import SecurityConfig, TransferConfig
from pdmesh.core.commands import FreeKv
from pdmesh.core.events import KvReleased, LoadReported
from pdmesh.errors import ConfigError, InstanceUnavailable, OutboxFull
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId, SamplingParams
from pdmesh.wire.endpoint import check_bind, check_kv_devices, open_channel, serving
from pdmesh.wire.link import FRAME_BYTES, FrameLink, open_link, serve_link
from pdmesh.wire.messages import (
    CommandMessage,
    EventMessage,
    Generation,
    Submit,
    WorkerDown,
    WorkerUp,
    pack_token_ids,
    unpack_token_ids,
)
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_testing.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.anyio

SERVICE = "pdmesh.test"
BEAT = EventMessage.of(LoadReported(InstanceId("i"), 0, 0, 0, 0))


@asynccontextmanager
async def echo_server() -> AsyncGenerator[str]:
    """Answers each KvReleased with a FreeKv of the same request."""

    async def serve(link: FrameLink[WorkerDown, WorkerUp], _peer: str) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            async for frame in link.frames():
                for message in frame:
                    if isinstance(message, EventMessage) and isinstance(event := message.event, KvReleased):
                        free = FreeKv(instance_id=event.instance_id, request_id=event.request_id, epoch=event.epoch)
                        link.post(CommandMessage.of(free))
            link.close()

    methods = {"Echo": serve_link(serve, WorkerUp)}
    async with serving(SERVICE, methods, host="127.0.0.1", port=0, security=SecurityConfig()) as port:
        yield f"127.0.0.1:{port}"


async def test_a_peer_that_stands_still_unwinds_nobody() -> None:
    """gRPC answers our timeout with a cancellation that no task group knows: it must not reach any."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as stopped:
        address = f"127.0.0.1:{stopped.extra(anyio.abc.SocketAttribute.local_port)}"
        num_timeouts = 0
        async with anyio.create_task_group() as service:

            async def attempts() -> None:
                nonlocal num_timeouts
                async with open_channel(address, SecurityConfig()) as channel:
                    for _ in range(3):
                        try:
                            async with (
                                open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
                                anyio.create_task_group() as tasks,
                            ):
                                tasks.start_soon(link.pump)
                                link.post(BEAT)
                                with anyio.fail_after(0.1):
                                    await anext(aiter(link.frames()))
                        except* (TimeoutError, InstanceUnavailable):
                            num_timeouts += 1

            service.start_soon(attempts)
        assert num_timeouts == 3
        assert not service.cancel_scope.cancel_called


async def echo(address: str, names: list[str]) -> list[str]:
    got: list[str] = []
    async with (
        open_channel(address, SecurityConfig()) as channel,
        open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(link.pump)
        for name in names:
            link.post(EventMessage.of(KvReleased(InstanceId("i"), RequestId(name), Epoch(0))))
        with anyio.fail_after(10):
            async for frame in link.frames():
                got.extend(message.command.request_id for message in frame)
                if len(got) == len(names):
                    break
        tasks.cancel_scope.cancel()
    return got


async def test_messages_arrive_once_in_order_however_they_are_framed() -> None:
    names = [f"r{i}" for i in range(1000)]
    async with echo_server() as address:
        assert await echo(address, names) == names


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        msgspec.msgpack.encode([{"type": "Unknown"}]),
        msgspec.msgpack.encode([{"type": "EventMessage", "name": 1, "fields": {}}]),
        msgspec.msgpack.encode({"type": "Goodbye"}),
        b"\xdd\xff\xff\xff\xff",  # an array header that promises four billion messages
    ],
)
async def test_a_malformed_frame_ends_its_own_stream_and_no_other(garbage: bytes) -> None:
    async with echo_server() as address, open_channel(address, SecurityConfig()) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Echo")()
        await call.write(garbage)
        with anyio.fail_after(10), pytest.raises(grpc.aio.AioRpcError, match="malformed frame") as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await echo(address, ["a", "b"]) == ["a", "b"]


async def test_an_unreachable_peer_is_unavailable() -> None:
    async with (
        open_channel("127.0.0.1:1", SecurityConfig()) as channel,
        open_link(channel, f"/{SERVICE}/Echo", WorkerDown) as link,
    ):
        with anyio.fail_after(30), pytest.raises(InstanceUnavailable):
            async for _frame in link.frames():
                pass


async def test_the_outbox_is_bounded_and_closes() -> None:
    async def never(_data: bytes = b"") -> None:
        await anyio.Event().wait()

    link: FrameLink[WorkerUp, WorkerDown] = FrameLink(write=never, read=never, receive_type=WorkerDown, max_queued=2)
    link.post(BEAT)
    link.post(BEAT)
    with pytest.raises(OutboxFull):
        link.post(BEAT)
    link.close()
    with pytest.raises(InstanceUnavailable):
        link.post(BEAT)


async def test_frames_stay_far_below_the_limit_whatever_waits() -> None:
    frames: list[bytes] = []

    async def write(data: bytes) -> None:
        frames.append(data)

    link: FrameLink[Submit, WorkerDown] = FrameLink(write=write, read=anyio.sleep_forever, receive_type=WorkerDown)
    generation = Generation(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        gateway_id=GatewayId("g"),
        token_address="127.0.0.1:1",
        token_ids=bytes(300_000),
        num_prompt_tokens=75_000,
        params=SamplingParams(max_tokens=1),
    )
    for i in range(300):
        link.post(Submit(generation=generation, priority=i))
    link.close()
    await link.pump()
    assert max(map(len, frames)) < FRAME_BYTES + 301_000
    messages = [message for frame in frames for message in msgspec.msgpack.decode(frame, type=list[Submit])]
    assert [message.priority for message in messages] == list(range(300))
    assert all(message.generation == generation for message in messages)


def test_frames_keep_their_distance_and_nothing_waits_longer_than_that() -> None:
    frames: list[tuple[float, int]] = []

    async def talk() -> None:
        async def write(data: bytes) -> None:
            frames.append((round(asyncio.get_running_loop().time(), 3), len(msgspec.msgpack.decode(data))))

        link: FrameLink[WorkerUp, WorkerDown] = FrameLink(
            write=write, read=anyio.sleep_forever, receive_type=WorkerDown, interval_s=0.1
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump)
            for _ in range(8):
                link.post(BEAT)
                await anyio.sleep(0.03)
            await anyio.sleep(1)
            link.post(BEAT)
            link.post(BEAT)
            link.close()

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(Agenda(), lambda: False)) as runner:
        runner.run(talk())
    assert frames == [(0.0, 1), (0.1, 3), (0.2, 3), (0.3, 1), (1.24, 2)]


def test_token_ids_survive_packing() -> None:
    ids = [0, 1, 2**31 - 1, 128_000]
    assert list(unpack_token_ids(pack_token_ids(ids))) == ids
    with pytest.raises(ValueError, match="not a multiple"):
        unpack_token_ids(b"abc")


def test_a_wide_bind_needs_tls_and_a_key() -> None:
    check_bind("127.0.0.1", SecurityConfig(), what="gateway", has_key=False)
    check_bind("::1", SecurityConfig(), what="gateway", has_key=False)
    check_bind("0.0.0.0", SecurityConfig(trusted_network=True), what="gateway", has_key=False)
    with pytest.raises(ConfigError, match=r"TLS .* and a key"):
        check_bind("0.0.0.0", SecurityConfig(), what="gateway", has_key=False)


@pytest.mark.parametrize("devices", ["eth0", "all", "lo,mlx5_0:1"])
def test_kv_on_a_network_needs_somebody_who_vouches_for_it(devices: str) -> None:
    """UCX has neither TLS nor keys: `transfer.ucx_net_devices=all` used to start without a word."""
    for inside in ("", "lo"):
        check_kv_devices(inside, TransferConfig(), SecurityConfig())
    check_kv_devices(devices, TransferConfig(trusted_network=True), SecurityConfig())
    with pytest.raises(ConfigError, match="accepts data from any sender"):
        check_kv_devices(devices, TransferConfig(), SecurityConfig())


def test_kv_is_encrypted_only_with_a_secret() -> None:
    check_kv_devices("", TransferConfig(encrypt=True), SecurityConfig(mesh_token="secret"))
    with pytest.raises(ConfigError, match="mesh_token"):
        check_kv_devices("", TransferConfig(encrypt=True), SecurityConfig())


async def test_a_stranger_is_answered_before_it_has_said_a_word() -> None:
    async def serve(_link: FrameLink[WorkerDown, WorkerUp], _peer: str) -> None:
        pytest.fail("a stranger was let in")

    methods = {"Echo": serve_link(serve, WorkerUp)}
    security = SecurityConfig(mesh_token="s")
    async with (
        serving(SERVICE, methods, host="127.0.0.1", port=0, security=security) as port,
        open_channel(f"127.0.0.1:{port}", SecurityConfig(mesh_token="t")) as channel,
    ):
        call: Any = channel.stream_stream(f"/{SERVICE}/Echo")()
        with anyio.fail_after(20), pytest.raises(grpc.aio.AioRpcError, match="wrong mesh token") as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
