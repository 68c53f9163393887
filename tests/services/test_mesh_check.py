"""`pdmesh doctor --mesh`: the scheduler asks every instance which of its peers it reaches."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from pdmesh.config import SecurityConfig
from pdmesh.errors import KvTransferError
from pdmesh.kv.probes import KvProbes, probe_key
from pdmesh.model import GatewayId, InstanceId
from pdmesh.wire.messages import (
    AdminError,
    CheckMesh,
    CheckPeers,
    MeshChecked,
    PeersChecked,
)
from pdmesh.worker import peer_checks
from pdmesh.worker.peer_checks import PeerChecks
from pdmesh_scheduler import mesh_check
from pdmesh_testing.core import named_profile
from pdmesh_testing.kv import SMALL_LAYOUT, SMALL_TRANSFER, TransportMaker
from pdmesh_testing.running_scheduler import running_scheduler
from pdmesh_testing.scripted_peers import ScriptedGateway, serving_gateway
from pdmesh_testing.transfers import open_pair

pytestmark = pytest.mark.anyio

A, B = InstanceId("a"), InstanceId("b")


@pytest.mark.parametrize("kind", ["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
async def test_instances_that_reach_each_other_hear_each_others_probes(kind: str) -> None:
    async with open_pair(TransportMaker(kind), SMALL_LAYOUT, SMALL_TRANSFER) as pair:
        a, b, key = pair.a.mover.probes, pair.b.mover.probes, probe_key(1, A, B)
        await a.send(pair.b.transport.address, key)
        assert await b.wait([key], limit_s=10.0) == set()
        other = probe_key(2, A, B)
        assert await b.wait([key, other], limit_s=0.01) == {other}
        assert pair.b.mover.counters().dropped == {}
        pair.free_all()


async def test_an_instance_says_which_peers_it_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is there and sends nothing, one is no address; of the gateways one is there, and nobody at the others'."""
    monkeypatch.setattr(peer_checks, "LIMIT_S", 0.5)
    said: list[PeersChecked] = []
    async with (
        open_pair(TransportMaker("memory"), SMALL_LAYOUT, SMALL_TRANSFER) as pair,
        serving_gateway(ScriptedGateway()) as gateway,
        anyio.create_task_group() as tasks,
    ):
        async with serving_gateway(ScriptedGateway()) as gone:
            pass
        answered = anyio.Event()

        def say(answer: PeersChecked) -> None:
            said.append(answer)
            answered.set()

        checks = PeerChecks(tasks, A, pair.a.mover.probes, SecurityConfig(), say)
        gateways = (("there", gateway), ("gone", gone), ("wrong", "nonsense"))
        checks.begin(
            CheckPeers(
                check_id=7,
                kv_peers=((B, pair.b.transport.address), (InstanceId("c"), b"no address")),
                gateways=tuple((GatewayId(name), address) for name, address in gateways),
            )
        )
        with anyio.fail_after(20):
            await answered.wait()
        assert await pair.b.mover.probes.wait([probe_key(7, A, B)], limit_s=5.0) == set()
        pair.free_all()
    (answer,) = said
    assert answer.check_id == 7
    assert answer.version
    assert sorted((problem.kind, problem.peer) for problem in answer.problems) == [
        ("kv from", "b"),
        ("kv from", "c"),
        ("kv to", "c"),
        ("tokens to", "gone"),
        ("tokens to", "wrong"),
    ]


async def test_a_peer_that_hears_of_the_check_later_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_checks, "LIMIT_S", 0.5)
    monkeypatch.setattr(peer_checks, "RETRY_S", 0.01)
    send, tried = KvProbes.send, list[bytes]()

    async def hang_up_once(self: KvProbes, address: bytes, key: bytes) -> None:
        tried.append(address)
        if len(tried) == 1:
            raise KvTransferError("the piece was not sent: the peer is gone")
        await send(self, address, key)

    monkeypatch.setattr(KvProbes, "send", hang_up_once)
    said: list[PeersChecked] = []
    async with (
        open_pair(TransportMaker("memory"), SMALL_LAYOUT, SMALL_TRANSFER) as pair,
        anyio.create_task_group() as tasks,
    ):
        address = pair.b.transport.address
        checks = PeerChecks(tasks, A, pair.a.mover.probes, SecurityConfig(), said.append)
        checks.begin(CheckPeers(check_id=7, kv_peers=((B, address),), gateways=()))
        assert await pair.b.mover.probes.wait([probe_key(7, A, B)], limit_s=5.0) == set()
        pair.free_all()
        assert tried == [address, address]
    assert [problem.kind for problem in said[0].problems] == ["kv from"]


async def test_the_scheduler_asks_all_at_once_and_says_who_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_check, "LIMIT_S", 1.0)
    answers, new = list[object](), 0
    async with running_scheduler() as mesh:
        profiles = [replace(named_profile(name), data_address=name.encode()) for name in ("p", "d")]
        async with mesh.worker(profiles[0]) as p, mesh.worker(profiles[1]) as d, anyio.create_task_group() as tasks:

            async def ask() -> None:
                answers.append(await mesh.ask(CheckMesh()))

            tasks.start_soon(ask)
            asked = await p.expect(CheckPeers)
            assert (asked.kv_peers, asked.gateways) == ((("d", b"d"),), ())
            assert isinstance(await mesh.ask(CheckMesh()), AdminError)  # one at a time
            await d.expect(CheckPeers)
            old, new = asked.check_id - 1, asked.check_id
            for check_id in (old, new):
                p.post(PeersChecked(check_id=check_id, problems=(), wall_time_s=0.0, version=str(check_id)))
        (answer,) = answers
        assert isinstance(answer, MeshChecked)
        found = {str(row.instance_id): row.checked for row in answer.instances}
        assert found["d"] is None
        assert found["p"] is not None
        assert found["p"].version == str(new)
        assert all(row.clock_offset_s < -1e9 for row in answer.instances if row.checked is not None)
