"""Two schedulers of which one leads, over real gRPC: who stands by says so, takes over, and knows what was wanted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pdmesh.cluster_config import StandbyConfig
from pdmesh.config import GatewayConfig, MeshConfig, SchedulerConfig, SecurityConfig
from pdmesh.core.events import LoadReported
from pdmesh.errors import ConfigError, InstanceUnavailable, ProtocolError, leaves
from pdmesh.model import GatewayId, Role
from pdmesh.wire.admin import ask_one, ask_scheduler
from pdmesh.wire.endpoint import open_channel
from pdmesh.wire.messages import (
    CheckPeers,
    GatewayDown,
    GatewayHeartbeat,
    GetStatus,
    MeshStatus,
    PeerProblem,
    PeersChecked,
    RegisterWorker,
    SchedulerHeartbeat,
    SetPolicy,
    StandingBy,
    WelcomeGateway,
    WelcomeWorker,
    WorkerDown,
)
from pdmesh.wire.scheduler_channel import SchedulerChannel, open_scheduler_channel, scheduler_addresses
from pdmesh_gateway.gateway_session import GatewaySession, Outlook
from pdmesh_gateway.main import token_host_of
from pdmesh_scheduler.main import serve
from pdmesh_scheduler.standby.file_store import FileStore
from pdmesh_scheduler.standby.keeper import LeaseLost
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.running_scheduler import (
    CONFIG,
    GATEWAY_METHOD,
    REGISTRATION,
    WORKER_METHOD,
    RunningScheduler,
    SchedulerBench,
)
from pdmesh_testing.standby import free_port

pytestmark = pytest.mark.anyio

#: Long for a busy machine's stalls, short for a test that waits for its end.
LEASE_S = 2.0

PREFILL = modelled_profile("p0", Role.PREFILL)
NO_SECRETS = SecurityConfig()
LOAD = LoadReported(PREFILL.instance_id, 1, 0, 0, 0)
LIMIT_S = 30.0


class OneOfSeveral(RunningScheduler):
    """A scheduler among several, in this process."""

    def __init__(self, config: MeshConfig) -> None:
        super().__init__(ready_fd=None)
        self.ready = anyio.Event()
        self.ended = anyio.Event()
        self.config = config
        self.error: Exception | None = None

    async def run(self) -> None:
        try:
            await serve(self.config, self)
        except Exception as error:
            self.error = error
        self.ended.set()

    @property
    def address(self) -> str:
        return str(self.facts["address"])

    async def says(self) -> Any:
        """What it answers to a question."""
        return await ask_one(self.address, NO_SECRETS, GetStatus())

    async def leads(self) -> None:
        """Wait until it leads."""
        with anyio.fail_after(LIMIT_S):
            while True:
                try:
                    if isinstance(await self.says(), MeshStatus):
                        return
                except InstanceUnavailable:
                    pass  # between its two servers
                await anyio.sleep(0.02)

    @asynccontextmanager
    async def bench(self) -> AsyncGenerator[SchedulerBench]:
        async with open_channel(self.address, NO_SECRETS) as channel:
            yield SchedulerBench(self, channel)


def config_of(folder: Path, **more: Any) -> MeshConfig:
    standby = StandbyConfig(store="file", file=folder / "lease.json", lease_s=LEASE_S, **more)
    return replace(CONFIG, scheduler=replace(CONFIG.scheduler, port=free_port()), standby=standby)


@asynccontextmanager
async def running(folder: Path, number: int = 2, **more: Any) -> AsyncGenerator[list[OneOfSeveral]]:
    """So many schedulers, of which the first leads."""
    schedulers = [OneOfSeveral(config_of(folder, **more)) for _ in range(number)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for scheduler in schedulers:
                tasks.start_soon(scheduler.run)
                await scheduler.ready.wait()
                if scheduler is schedulers[0]:
                    await scheduler.leads()
            yield schedulers
            for scheduler in schedulers:
                scheduler.stopping.set()


async def test_who_stands_by_says_who_leads(tmp_path: Path) -> None:
    async with running(tmp_path) as (leader, other), other.bench() as mesh:
        await names(other, leader)
        registration = RegisterWorker(profile=PREFILL, residents=())
        async with mesh.connect(WORKER_METHOD, WorkerDown, registration) as peer:
            assert await peer.expect(StandingBy) == StandingBy(leader=leader.address)
            assert await peer.ended() == "OK"
        async with mesh.connect(GATEWAY_METHOD, GatewayDown, REGISTRATION) as peer:
            assert await peer.expect(StandingBy) == StandingBy(leader=leader.address)
        both = f"{other.address},{leader.address}"
        assert isinstance(await ask_scheduler(both, NO_SECRETS, GetStatus()), MeshStatus)
        assert isinstance(await ask_scheduler(other.address, NO_SECRETS, GetStatus()), MeshStatus), "it was told"


async def test_the_next_leader_knows_what_operators_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as (leader, other):
        await ask_scheduler(leader.address, NO_SECRETS, SetPolicy(bundle="fcfs"))
        async with leader.bench() as mesh, mesh.worker(PREFILL):
            pass
        leader.stopping.set()
        await leader.ended.wait()
        assert leader.error is None
        await other.leads()
        status = await ask_scheduler(other.address, NO_SECRETS, GetStatus())
        assert isinstance(status, MeshStatus)
        assert status.bundle == "fcfs"


async def test_terms_rise_and_leaders_speak(tmp_path: Path) -> None:
    registration = RegisterWorker(profile=PREFILL, residents=())
    welcomes: list[WelcomeWorker] = []
    async with running(tmp_path) as (leader, other):
        for scheduler in (leader, other):
            await scheduler.leads()
            async with scheduler.bench() as mesh, mesh.connect(WORKER_METHOD, WorkerDown, registration) as peer:
                welcomes.append(await peer.expect(WelcomeWorker))
                with anyio.fail_after(LIMIT_S):
                    async with anyio.create_task_group() as tasks:

                        async def speak() -> None:
                            while True:
                                peer.post(LOAD)
                                await anyio.sleep(0.1)

                        tasks.start_soon(speak)
                        await peer.expect(SchedulerHeartbeat)
                        tasks.cancel_scope.cancel()
            async with scheduler.bench() as mesh, mesh.connect(GATEWAY_METHOD, GatewayDown, REGISTRATION) as peer:
                assert (await peer.expect(WelcomeGateway)).term == welcomes[-1].term
            scheduler.stopping.set()
            await scheduler.ended.wait()
    assert 0 < welcomes[0].term < welcomes[1].term
    assert all(each.silent_beats and each.silent_beats * each.heartbeat_s < LEASE_S for each in welcomes)


async def test_a_leader_without_its_store_ends_before_another_leads(tmp_path: Path) -> None:
    """Its requests are not lost with it: workers and gateways tell the next one."""
    async with running(tmp_path, 1) as (leader,):
        lock = tmp_path / "lease.json"
        lock.unlink()
        lock.mkdir()
        await leader.ended.wait()
        assert leader.error is not None
        (error,) = leaves(leader.error)
        assert isinstance(error, LeaseLost)
        assert "could not be renewed in time" in str(error)


async def test_a_leader_whose_lease_was_taken_ends(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (leader,):
        (tmp_path / "lease.json").unlink()  # an operator's hand
        async with running(tmp_path, 1) as (other,):
            await leader.ended.wait()
            assert leader.error is not None
            await other.leads()


async def test_the_lead_goes_to_the_only_scheduler_that_a_gateway_reaches(tmp_path: Path) -> None:
    """New requests waited until the gateway and the leader reached each other again."""
    async with running(tmp_path) as (leader, other), leader.bench() as old_mesh, other.bench() as mesh:
        await names(other, leader)
        async with old_mesh.connect(WORKER_METHOD, WorkerDown, RegisterWorker(profile=PREFILL, residents=())) as worker:
            await worker.expect(WelcomeWorker)
            cut_off = msgspec.structs.replace(REGISTRATION, unreached_leader=leader.address)
            async with mesh.connect(GATEWAY_METHOD, GatewayDown, cut_off) as peer:
                await peer.expect(StandingBy)
            check = await worker.expect(CheckPeers)
            assert [address for _, address in check.gateways] == [other.address]
            worker.post(PeersChecked(check_id=check.check_id, problems=(), wall_time_s=0.0, version=""))
            await other.leads()
        await leader.ended.wait()
        assert leader.error is not None
        (error,) = leaves(leader.error)
        assert isinstance(error, LeaseLost)
        assert other.address in str(error)


@pytest.mark.parametrize("who", ["the gateway itself", "another gateway", "an instance that does not reach the other"])
async def test_the_lead_is_kept_where_more_would_be_lost(tmp_path: Path, who: str) -> None:
    async with running(tmp_path) as (leader, other), leader.bench() as old_mesh, other.bench() as mesh:
        await names(other, leader)
        cut_off = msgspec.structs.replace(REGISTRATION, unreached_leader=leader.address)
        async with AsyncExitStack() as stack:
            worker = None
            if who.startswith("an instance"):
                worker = await stack.enter_async_context(old_mesh.worker(PREFILL))
            else:
                gateway_id = GatewayId("g" if who == "the gateway itself" else "another")
                registration = msgspec.structs.replace(REGISTRATION, gateway_id=gateway_id)
                heard = await stack.enter_async_context(old_mesh.connect(GATEWAY_METHOD, GatewayDown, registration))
                await heard.expect(WelcomeGateway)
                tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(tasks.cancel_scope.cancel)

                async def speak() -> None:
                    while True:
                        heard.post(GatewayHeartbeat())
                        await anyio.sleep(0.1)

                tasks.start_soon(speak)
            async with mesh.connect(GATEWAY_METHOD, GatewayDown, cut_off) as peer:
                await peer.expect(StandingBy)
            await record_where(tmp_path, lambda record: record.asked_by == other.address)
            if worker is not None:
                check = await worker.expect(CheckPeers)
                problem = PeerProblem(kind="tokens to", peer="other", reason="no answer")
                worker.post(PeersChecked(check_id=check.check_id, problems=(problem,), wall_time_s=0.0, version=""))
            kept = await record_where(tmp_path, lambda record: not record.asked_by)
            assert kept.address == leader.address


async def names(standby: OneOfSeveral, leader: OneOfSeveral) -> None:
    """Wait until the standby knows the leader."""
    with anyio.fail_after(LIMIT_S):
        while await standby.says() != StandingBy(leader=leader.address):  # noqa: ASYNC110  # nothing tells
            await anyio.sleep(0.02)


async def record_where(folder: Path, holds: Callable[[LeaseRecord], bool]) -> LeaseRecord:
    """Wait until this holds of the lease record."""
    store = FileStore(folder / "lease.json")
    with anyio.fail_after(LIMIT_S):
        while (record := (await store.read()).record) is None or not holds(record):  # noqa: ASYNC110  # a file
            await anyio.sleep(0.02)
    return record


async def test_a_scheduler_alone_is_as_before(tmp_path: Path) -> None:
    scheduler = OneOfSeveral(replace(CONFIG, scheduler=SchedulerConfig(port=free_port())))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scheduler.run)
        await scheduler.ready.wait()
        registration = RegisterWorker(profile=PREFILL, residents=())
        async with scheduler.bench() as mesh, mesh.connect(WORKER_METHOD, WorkerDown, registration) as peer:
            welcome = await peer.expect(WelcomeWorker)
        assert (welcome.term, welcome.silent_beats) == (0, 15)
        scheduler.stopping.set()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"standby": StandbyConfig(store="file")}, "standby.file"),
        ({"standby": StandbyConfig(store="etcd", etcd_endpoints="10.0.0.1:2379")}, "standby.etcd_endpoints"),
        ({"standby": StandbyConfig(store="etcd", etcd_cert=Path("c"))}, "standby.etcd_cert"),
        ({"standby": StandbyConfig(store="etcd", etcd_ca=Path("/nowhere"))}, "standby.etcd_ca"),
        ({"standby": StandbyConfig(store="kubernetes")}, "kubernetes.account"),
        (
            {
                "standby": StandbyConfig(store="file", file=Path("/tmp/none/lease")),
                "scheduler": SchedulerConfig(host="0.0.0.0"),
                "security": SecurityConfig(trusted_network=True),
            },
            "standby.address",
        ),
    ],
)
async def test_a_wrong_setting_is_one_sentence(more: dict[str, Any], message: str) -> None:
    scheduler = OneOfSeveral(replace(CONFIG, **more))
    with anyio.fail_after(LIMIT_S):
        await scheduler.run()
    assert scheduler.error is not None
    (error,) = leaves(scheduler.error)
    assert isinstance(error, ConfigError)
    assert message in str(error)


# --- the other end ---


@pytest.mark.parametrize(
    ("setting", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,", ("a:1", "b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ("ipv4:10.0.0.1:1,10.0.0.2:1",)),
        ("dns:///name:7000", ("dns:///name:7000",)),
        ("", ()),
    ],
)
def test_addresses(setting: str, addresses: tuple[str, ...]) -> None:
    assert scheduler_addresses(setting) == addresses


def welcome(term: int) -> WelcomeWorker:
    return WelcomeWorker(heartbeat_s=1, term=term)


async def test_an_earlier_leader_is_refused() -> None:
    channel = SchedulerChannel(("a:1", "b:1"), NO_SECRETS)
    channel.check(welcome(5), WelcomeWorker)
    channel.check(welcome(5), WelcomeWorker)
    with pytest.raises(InstanceUnavailable, match="leads in an earlier term"):
        channel.check(welcome(4), WelcomeWorker)
    channel.check(welcome(0), WelcomeWorker)  # a scheduler that is alone
    with pytest.raises(InstanceUnavailable):
        channel.check(welcome(4), WelcomeWorker)
    with pytest.raises(ProtocolError):
        channel.check(WelcomeGateway(scheduler_id="s", heartbeat_s=1), WelcomeWorker)


async def test_a_gateway_finds_the_leader_and_the_next_one(tmp_path: Path) -> None:
    """Its list begins with one that nobody listens at, and the first answer it gets is from one that stands by."""

    class Nothing:
        is_watched = False

        def waiting(self) -> tuple[()]:
            return ()

        def unbegun(self, _scheduler_id: str) -> tuple[()]:
            return ()

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    async with running(tmp_path) as (leader, other), anyio.create_task_group() as tasks:
        addresses = f"127.0.0.1:{free_port()},{other.address}"
        link = GatewaySession(GatewayId("g"), addresses, NO_SECRETS, token_address="127.0.0.1:1")
        nothing: Any = Nothing()
        tasks.start_soon(link.run, nothing, nothing)
        with anyio.fail_after(LIMIT_S):
            await link.wait_changed(Outlook.NO_SCHEDULER)
            first = link.scheduler_id
            leader.stopping.set()
            await link.wait_changed(Outlook.NO_INSTANCE)
            await link.wait_changed(Outlook.NO_SCHEDULER)
        assert link.scheduler_id != first
        tasks.cancel_scope.cancel()


async def test_channels_to_leaders_that_were_named_do_not_pile_up() -> None:
    async with open_scheduler_channel(f"127.0.0.1:{free_port()}", NO_SECRETS) as channel:
        for number in range(1, 5):
            with pytest.raises(InstanceUnavailable):
                channel.check(StandingBy(leader=f"127.0.0.{number}:9"), WelcomeWorker)
            with anyio.move_on_after(0.05):
                await channel.channel_ready()
            assert len(channel._channels) <= 2


def test_a_gateway_is_reached_by_the_way_to_the_first_scheduler() -> None:
    config = MeshConfig(scheduler_address="127.0.0.1:1,127.0.0.2:1", gateway=GatewayConfig(token_host="0.0.0.0"))
    with pytest.raises(ConfigError, match="reached inside this machine"):
        token_host_of(config)
