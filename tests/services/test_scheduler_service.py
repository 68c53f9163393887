"""The scheduler service over real gRPC on loopback, with scripted workers and gateways."""

from __future__ import annotations

import math
import socket
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import grpc
import grpc.aio
import msgspec
import pytest

from pdmesh.config import SecurityConfig
from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, FreeKv, Reject, Restart, RunStep, SendCopy
from pdmesh.core.events import (
    DrainRequested,
    Event,
    InstanceLost,
    KvExpected,
    KvReleased,
    LoadReported,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferLanded,
    TransferOffered,
    TransferSent,
)
from pdmesh.core.operator_events import ActuatorReported
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.errors import ConfigError, InstanceUnavailable, leaves
from pdmesh.eventlog import EventLogReader, replay
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    RejectReason,
    RequestId,
    Resident,
    Role,
    SamplingParams,
)
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency_profile import Subject
from pdmesh.profiles import save_profile
from pdmesh.wire.endpoint import open_channel
from pdmesh.wire.link import GRPC_OPTIONS
from pdmesh.wire.messages import (
    AdminError,
    EventMessage,
    FollowPools,
    GatewayDown,
    GatewayHeartbeat,
    Generation,
    GetPolicies,
    GetRequest,
    GetStatus,
    Goodbye,
    InstanceStatus,
    MeshStatus,
    OtherChoice,
    PeerGone,
    PeersHere,
    Policies,
    PoolsDesired,
    RegisterWorker,
    RequestRecord,
    SetBatching,
    SetPolicy,
    Submit,
    WelcomeWorker,
    WorkerDown,
    pack_token_ids,
)
from pdmesh_scheduler import gateway_streams as gateways
from pdmesh_scheduler import peer_streams as peers
from pdmesh_scheduler.main import serve
from pdmesh_testing.core import step_done
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.profiles import profile_file
from pdmesh_testing.running_scheduler import (
    CONFIG,
    GATEWAY_METHOD,
    REGISTRATION,
    WORKER_METHOD,
    RunningScheduler,
    SchedulerPeer,
)
from pdmesh_testing.running_scheduler import SchedulerBench as Mesh
from pdmesh_testing.running_scheduler import running_scheduler as running

pytestmark = pytest.mark.anyio


GATEWAY = GatewayId("g")
R = RequestId("r.g")
ZERO = Epoch(0)


def prefill(name: str = "p") -> InstanceProfile:
    return modelled_profile(name, Role.PREFILL)


def decode(name: str = "d") -> InstanceProfile:
    return modelled_profile(name, Role.DECODE)


def mixed(name: str = "m") -> InstanceProfile:
    return modelled_profile(name, Role.MIXED)


#: A tag that is no text.
BAD_UTF8 = b"\x91\x81\xa4type\xa2\xc3\x28"


def submit(request_id: str = R, *, prompt: int = 8, **params: Any) -> Submit:
    return Submit(
        generation=Generation(
            request_id=RequestId(request_id),
            epoch=ZERO,
            gateway_id=GATEWAY,
            token_address="127.0.0.1:1",
            token_ids=pack_token_ids(list(range(prompt))),
            num_prompt_tokens=prompt,
            params=SamplingParams(max_tokens=4, **params),
        )
    )


def step_report(run: RunStep) -> StepDone:
    return step_done(run.instance_id, run.plan)


async def told(mesh: Mesh, what: str, count: int) -> list[str]:
    """What the record tells, once it tells ``what`` so many times: the reports have a way to go."""
    while True:
        record = await mesh.ask(GetRequest(request_id="r"), RequestRecord)
        whats = [entry.what for entry in record.entries]
        if whats.count(what) == count:
            return whats


async def placed(peer: SchedulerPeer, command: type[AdmitPrefill] | type[ExpectCopy] = ExpectCopy) -> Generation:
    """Return the request that comes with the next such command."""
    _, prompt = await peer.expect_with_prompt(command)
    assert prompt is not None
    return prompt.generation


# --- a request's way ---


async def test_every_member_of_a_group_gets_the_prompt() -> None:
    """The second one's AdmitPrefill ended the scheduler: the prompt was gone with the first."""
    config = replace(CONFIG, policy=PolicyConfig(long_prompt_tokens=16, group_size=2))
    config = replace(config, scheduler=replace(config.scheduler, bundle="fcfs"))
    pair = [replace(mixed(name), joins_groups=True) for name in ("m0", "m1")]
    async with running(config) as mesh, mesh.worker(pair[0]) as one, mesh.worker(pair[1]) as other:
        async with mesh.gateway() as g:
            g.post(submit(prompt=32))
            admits = [await member.expect_with_prompt(AdmitPrefill) for member in (one, other)]
            assert [prompt and prompt.generation for _, prompt in admits] == 2 * [submit(prompt=32).generation]
            assert [command.leads for command, _ in admits] == [True, False]
            assert [command.num_blocks for command, _ in admits] == [9, 8]  # one of 35 tokens, one of the prompt
        assert isinstance(await mesh.ask(GetStatus()), MeshStatus)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (EventMessage.of(KvReleased(InstanceId("other"), R, ZERO)), "a message from m names other"),
        (EventMessage(name="GatewayLost", fields=msgspec.Raw(b"\x80")), "unknown message type"),
        (EventMessage(name="KvReleased", fields=msgspec.Raw(b"\x80")), "malformed KvReleased"),
        (EventMessage.of(RequestCancelled(GATEWAY, R, ZERO)), "unknown message type"),
        (
            EventMessage.of(LoadReported(InstanceId("m"), 0, -1, 0, 0)),
            "malformed LoadReported: Expected `int` >= 0 - at `$.num_held_blocks`",
        ),
    ],
)
async def test_an_instance_says_what_an_instance_may_and_of_itself(message: EventMessage, reason: str) -> None:
    async with running() as mesh, mesh.worker(mixed()) as m:
        m.post(message)
        assert reason in await m.ended()
        assert isinstance(await mesh.ask(GetStatus()), MeshStatus)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (EventMessage.of(RequestCancelled(GatewayId("other"), R, ZERO)), "a message from g names other"),
        (EventMessage.of(KvReleased(InstanceId("m"), R, ZERO)), "unknown message type"),
    ],
)
async def test_a_gateway_says_what_a_gateway_may_and_of_itself(message: EventMessage, reason: str) -> None:
    async with running() as mesh, mesh.gateway() as g:
        g.post(message)
        assert reason in await g.ended()
        assert isinstance(await mesh.ask(GetStatus()), MeshStatus)


async def test_a_refusal_is_no_failed_transfer() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        await m.expect(AdmitPrefill)
        m.post(RequestDropped(InstanceId("m"), R, ZERO, "the instance is stopping"))
        assert (await g.expect(Restart)).reason == "instance m dropped it: the instance is stopping"
        assert "dropped" in await told(mesh, "dropped", 1)


async def test_a_request_goes_all_its_way_and_its_record_tells_of_it() -> None:
    async with running() as mesh, mesh.worker(prefill()) as p, mesh.worker(decode()) as d, mesh.gateway() as g:
        g.post(submit())
        admit, prompt = await p.expect_with_prompt(AdmitPrefill)
        assert (admit.num_blocks, prompt and prompt.generation) == (2, submit().generation)
        assert admit.transfer is not None
        place, prompt = await d.expect_with_prompt(ExpectCopy)
        assert prompt is not None
        assert (prompt.num_context_tokens, place.num_blocks) == (8, 3)
        assert place.transfer == admit.transfer
        of_p = (InstanceId("p"), R, ZERO)
        of_d = (InstanceId("d"), R, ZERO)
        transfer_id = place.transfer.transfer_id
        assert prompt.generation.token_ids == b""
        d.post(KvExpected(*of_d, transfer_id))
        run = await p.expect(RunStep)
        p.post(TransferOffered(*of_p, transfer_id))
        assert (await p.expect(SendCopy)).transfer == place.transfer
        p.post(step_report(run))
        await told(mesh, "chunk", 1)  # the two workers' streams have no common order
        d.post(TransferLanded(*of_d, transfer_id, num_bytes=1000, duration_s=0.5))
        p.post(TransferSent(*of_p, transfer_id, num_bytes=1000, duration_s=0.5, exposed_s=0.25))
        p.post(KvReleased(*of_p))
        d.post(RequestFinished(*of_d, reason=FinishReason.STOP, num_output_tokens=3))
        d.post(KvReleased(*of_d, transfer_id))
        whats = await told(mesh, "released", 2)
        assert [what for what in whats if what not in ("released", "sent", "landed")] == [
            "queued",
            "placed for decode",
            "placed for prefill",
            "offered",
            "granted",
            "chunk",
            "finished",
            "ended",
        ]
        record = await mesh.ask(GetRequest(request_id="r"), RequestRecord)
        assert (record.num_prompt_tokens, record.bundle) == (8, "pdmesh")
        figures = {entry.what: entry.figures for entry in record.entries}
        assert figures["sent"] == {"num_bytes": 1000.0, "duration_s": 0.5, "exposed_s": 0.25}


async def test_prompts_are_sent_to_a_decoder_that_samples_by_them() -> None:
    async with running() as mesh, mesh.worker(prefill()), mesh.worker(decode()) as d, mesh.gateway() as g:
        g.post(submit(repetition_penalty=1.1))
        assert (await placed(d)).num_tokens == 8


async def test_prompts_are_sent_to_a_decoder_that_drafts_by_them() -> None:
    drafting = replace(decode(), drafts=True)
    async with running() as mesh, mesh.worker(prefill()), mesh.worker(drafting) as d, mesh.gateway() as g:
        g.post(submit())
        assert (await placed(d)).token_ids == submit().generation.token_ids


async def test_a_cancel_reaches_the_worker() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        await m.expect(RunStep)
        g.post(RequestCancelled(GATEWAY, R, ZERO))
        assert (await m.expect(FreeKv)).request_id == R


async def test_what_never_fits_is_rejected_with_its_lengths() -> None:
    async with running() as mesh, mesh.worker(mixed()), mesh.gateway() as g:
        g.post(submit(prompt=2000))
        rejected = await g.expect(Reject)
        assert (rejected.reason, rejected.retry_after_s) == (RejectReason.TOO_LONG, None)
        assert "2000 prompt tokens" in rejected.message


async def test_a_request_waits_only_so_long_for_an_instance() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_queue_s=0.05))
    async with running(config) as mesh, mesh.gateway() as g:
        g.post(submit())
        assert (await g.expect(Reject)).reason is RejectReason.NO_INSTANCE


# --- who is there ---


async def test_gateways_hear_of_readiness_and_at_each_heartbeat() -> None:
    async with running() as mesh, mesh.gateway() as g, mesh.worker(mixed()) as m:
        state = await g.expect(MeshStatus)
        assert (state.ready, state.max_model_len, state.num_gateways) == (True, 1024, 1)
        m.post(LoadReported(InstanceId("m"), 60, 3, 1, num_decoding=2))
        status = await heard(g, mesh)
        assert (status.num_free_blocks, status.num_held_blocks, status.num_quarantined_blocks) == (60, 3, 1)
        m.post(DrainRequested(InstanceId("m")))
        state = await g.expect(MeshStatus)
        assert (state.ready, state.reason) == (False, "no prefill instance is running")


async def heard(g: SchedulerPeer, mesh: Mesh) -> Any:
    """The instance's status at a gateway's heartbeat, once the worker's has been heard."""
    while True:
        g.post(GatewayHeartbeat())
        (status,) = (await g.expect(MeshStatus)).instances
        if status.num_held_blocks:
            return status


async def test_a_goodbye_loses_the_instance_at_once() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        await m.expect(RunStep)
        m.post(Goodbye())
        assert (await g.expect(Restart)).request_id == R
        assert await m.ended() == "OK"


async def test_every_instance_is_sent_the_others_addresses_before_it_needs_them() -> None:
    async with running() as mesh, mesh.worker(decode()) as d, mesh.gateway() as g:
        async with mesh.worker(prefill()) as p:
            g.post(submit())
            assert (await d.expect(PeersHere)).data_addresses == {"d": b"d", "p": b"p"}
            await d.expect(ExpectCopy)
            assert (await p.expect(PeersHere)).data_addresses == {"d": b"d", "p": b"p"}
            await p.expect(AdmitPrefill)
        await until_missed(mesh, prefill().instance_id)
        async with mesh.worker(replace(prefill(), data_address=b"another")):
            assert (await d.expect(PeerGone)).data_address == b"p"
            g.post(submit("t.g"))
            assert (await d.expect(PeersHere)).data_addresses == {"p": b"another"}


async def until_missed(mesh: Mesh, instance_id: InstanceId) -> None:
    """Wait until the scheduler has noticed that an instance's stream broke: before, another process is refused."""
    with anyio.fail_after(10):
        while any(
            each.instance_id == instance_id and each.state == "up"
            for each in (await mesh.ask(GetStatus(), MeshStatus)).instances
        ):
            await anyio.lowlevel.checkpoint()


async def test_the_others_are_told_of_a_data_address_that_is_gone() -> None:
    async with running() as mesh, mesh.worker(decode()) as d:
        async with mesh.worker(prefill()) as p:
            p.post(Goodbye())
            assert await p.ended() == "OK"
        assert (await d.expect(PeerGone)).data_address == prefill().data_address
        async with mesh.worker(prefill()):
            pass  # it is killed
        await until_missed(mesh, prefill().instance_id)
        async with mesh.worker(replace(prefill(), data_address=b"started again")) as p:
            assert (await d.expect(PeerGone)).data_address == prefill().data_address
            p.post(Goodbye())
            assert (await d.expect(PeerGone)).data_address == b"started again"


async def test_an_instance_that_was_given_up_and_is_there_is_told_what_the_others_have_closed() -> None:
    """Else the first that it sends to each comes to nothing: seconds are lost."""
    async with running() as mesh, mesh.worker(decode()):
        async with mesh.worker(prefill()) as p:
            p.post(Goodbye())
            assert await p.ended() == "OK"
        async with mesh.worker(prefill()) as p:
            assert (await p.expect(PeerGone)).data_address == decode().data_address
            p.post(Goodbye())
            assert await p.ended() == "OK", "else the next process may meet this one's stream"
        async with mesh.worker(replace(prefill(), data_address=b"another process")) as p:
            p.post(LoadReported(prefill().instance_id, 0, 0, 0, 0))
            with pytest.raises(TimeoutError):
                await p.expect(PeerGone, limit_s=0.1)


async def test_a_broken_stream_is_a_death_unless_the_instance_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BROKEN_STREAM_GRACE_S", 0.01)
    async with running() as mesh, mesh.gateway() as g:
        async with mesh.worker(mixed()) as m:
            g.post(submit())
            await m.expect(RunStep)
        assert (await g.expect(Restart)).request_id == R
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert status.instances == ()


async def test_a_broken_stream_is_no_loss_if_the_instance_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BROKEN_STREAM_GRACE_S", 60.0)
    resident = Resident(request_id=R, epoch=ZERO, gateway_id=GATEWAY, num_blocks=3, num_context_tokens=9, decoding=True)
    async with running() as mesh, mesh.gateway() as g:
        async with mesh.worker(mixed()) as m:
            await g.expect(MeshStatus)
            g.post(submit())
            m.post(step_report(await m.expect(RunStep)))
        state = await g.expect(MeshStatus)
        assert (state.ready, state.num_running) == (False, 1)
        async with mesh.worker(mixed(), resident):
            state = await g.expect(MeshStatus)
            assert (state.ready, state.num_running) == (True, 1)


async def test_an_operator_switches_the_batching_mode_while_serving() -> None:
    async with running() as mesh, mesh.gateway() as g, mesh.worker(mixed()) as m:
        await g.expect(MeshStatus)
        answer = await mesh.ask(SetBatching(batching="eb", threshold=0.3), Policies)
        assert (answer.batching, answer.batchings) == ("eb", ("mb", "eb", "ebplus"))
        g.post(submit())
        plan = await m.expect(RunStep)
        assert plan.plan.holds_decodes
        for refused, why in (
            (SetBatching(batching="best"), "'best'"),
            (SetBatching(batching="eb", threshold=1.0), "1.0"),
            (SetBatching(batching="eb", threshold=0.0), "0.0"),
            (SetBatching(batching="eb", threshold=-0.3), "-0.3"),
            (SetBatching(batching="eb", threshold=math.nan), "nan"),
        ):
            refusal = await mesh.ask(refused, AdminError)
            assert why in refusal.message
        status = await mesh.ask(GetStatus(), MeshStatus)
        (row,) = status.instances
        assert row.batching is not None
        assert (row.batching.mode, row.batching.idle_share, status.batching) == ("eb", 0.3, "eb")


async def test_a_mesh_without_instances_that_do_both_has_no_exclusive_mode() -> None:
    async with running() as mesh, mesh.gateway() as g, mesh.worker(prefill()), mesh.worker(decode()):
        await g.expect(MeshStatus)
        assert isinstance(await mesh.ask(SetPolicy(bundle="fcfs")), Policies)
        refusal = await mesh.ask(SetBatching(batching="eb"), AdminError)
        assert refusal.message.startswith("no instance has a choice of modes")
        assert isinstance(await mesh.ask(SetPolicy(bundle="pdmesh")), Policies)  # decode instances prefill under it
        assert isinstance(await mesh.ask(SetBatching(batching="eb")), Policies)
        status = await mesh.ask(GetStatus(), MeshStatus)
        modes = {row.role: row.batching and row.batching.mode for row in status.instances}
        assert modes == {Role.PREFILL: None, Role.DECODE: "eb"}


async def test_an_operator_switches_the_policy_while_serving() -> None:
    async with running() as mesh, mesh.gateway() as g, mesh.worker(mixed()) as m:
        await g.expect(MeshStatus)
        g.post(submit())
        plan = await m.expect(RunStep)
        before = await mesh.ask(GetPolicies(), Policies)
        assert before.bundle == "pdmesh"
        assert {"fcfs", "medha", "pdmesh"} <= set(before.bundles)
        answer = await mesh.ask(SetPolicy(bundle="fcfs"), Policies)
        assert (answer.bundle, answer.bundles) == ("fcfs", before.bundles)
        m.post(step_report(plan))
        refusal = await mesh.ask(SetPolicy(bundle="quick"), AdminError)
        assert "'quick'" in refusal.message
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert (status.bundle, status.num_running) == ("fcfs", 1)


async def test_a_policy_that_would_leave_short_prompts_no_instance_is_refused() -> None:
    """And what runs goes on."""
    config = replace(CONFIG, policy=PolicyConfig(reserved_instances=2))
    async with running(config) as mesh, mesh.worker(mixed("m0")) as m0, mesh.worker(mixed("m1")), mesh.gateway() as g:
        g.post(submit())
        plan = await m0.expect(RunStep)
        refusal = await mesh.ask(SetPolicy(bundle="reservation"), AdminError)
        assert refusal.message.startswith("reservation reserves the first 2 instances")
        m0.post(step_report(plan))
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert (status.bundle, status.num_running) == ("pdmesh", 1)
        async with mesh.worker(mixed("m2")):
            assert isinstance(await mesh.ask(SetPolicy(bundle="reservation")), Policies)


async def test_an_unknown_profile_stops_the_start() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, profile="abacus"))
    with pytest.raises(ConfigError, match=r"'abacus'.*h200-llama3-8b"):
        await serve(config, RunningScheduler(ready_fd=None))


async def test_an_instance_that_the_profile_is_not_of_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    file = tmp_path / "of-m.json"
    save_profile(file, profile_file(Subject.of(mixed())))
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, profile=str(file)))
    async with running(config) as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        run = await m.expect(RunStep)
        other = replace(mixed("other"), model="large", device="cuda:0")
        async with mesh.connect(WORKER_METHOD, WorkerDown, RegisterWorker(profile=other, residents=())) as refused:
            why = await refused.ended()
        assert str(Subject.of(mixed())) in why
        assert str(Subject.of(other)) in why
        m.post(step_report(run))
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert [instance.instance_id for instance in status.instances] == ["m"]


@pytest.mark.parametrize("newcomer_insists", [False, True])
async def test_a_deterministic_mesh_takes_one_arithmetic_class(newcomer_insists: bool) -> None:
    first = replace(prefill(), arithmetic="bfloat16/ordered-1", deterministic=not newcomer_insists)
    other = replace(decode("d0"), arithmetic="bfloat16/dot-amx-1", deterministic=newcomer_insists)
    same = replace(decode("d1"), arithmetic=first.arithmetic)
    async with running() as mesh, mesh.worker(first), mesh.worker(same):
        async with mesh.connect(WORKER_METHOD, WorkerDown, RegisterWorker(profile=other, residents=())) as refused:
            why = await refused.ended()
        assert "d0 computes in the arithmetic class bfloat16/dot-amx-1 and p in bfloat16/ordered-1" in why
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert [row.instance_id for row in status.instances] == ["p", "d1"]


async def test_a_hand_over_to_another_class_is_served_counted_and_told() -> None:
    profiles = replace(prefill(), arithmetic="bfloat16/ordered-1"), replace(decode(), arithmetic="bfloat16/dot-amx-1")
    async with running() as mesh, mesh.worker(profiles[0]) as p, mesh.worker(profiles[1]) as d, mesh.gateway() as g:
        g.post(submit())
        await p.expect(RunStep)
        await d.expect(ExpectCopy)
        record = await mesh.ask(GetRequest(request_id="r"))
        assert isinstance(record, RequestRecord)
        (told,) = [entry for entry in record.entries if entry.what == "another arithmetic class"]
        assert told.instance_id == "d"
        assert told.detail.startswith("bfloat16/ordered-1 to bfloat16/dot-amx-1")
        url = f"http://127.0.0.1:{mesh.context.facts['metrics_port']}/metrics"
        lines = (await anyio.to_thread.run_sync(fetch, url)).splitlines()
        assert 'pdmesh:cross_class_requests_total{how="hand_over"} 1.0' in lines
        assert 'pdmesh:cross_class_requests_total{how="restart"} 0.0' in lines


async def test_a_worker_that_says_no_class_may_register() -> None:
    """As one of before: the fields are not in its frame."""
    registration = msgspec.to_builtins(RegisterWorker(profile=mixed(), residents=()), builtin_types=(bytes,))
    for name in ("arithmetic", "deterministic", "compute"):
        del registration["profile"][name]
    assert msgspec.convert(registration, RegisterWorker) == RegisterWorker(profile=mixed(), residents=())


async def test_an_expired_lease_loses_the_instance() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, lease_s=0.2))
    async with running(config) as mesh, mesh.worker(mixed()) as m:
        assert "lease expired" in await m.ended()
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert status.instances == ()


async def test_what_a_silent_instance_was_given_is_served_by_one_that_speaks() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, suspect_s=0.3))
    profiles = {name: mixed(name) for name in ("m0", "m1")}
    async with (
        running(config) as mesh,
        mesh.worker(profiles["m0"]) as m0,
        mesh.worker(profiles["m1"]) as m1,
        mesh.gateway() as g,
    ):
        speaking = {"m0": m0, "m1": m1}

        async def until(is_so: Callable[[InstanceStatus], bool]) -> str:
            """The first instance of which it is so; the others speak meanwhile."""
            while True:
                for name, peer in speaking.items():
                    peer.post(LoadReported(InstanceId(name), profiles[name].num_blocks, 0, 0, 0))
                status = await mesh.ask(GetStatus(), MeshStatus)
                for instance in status.instances:
                    if is_so(instance):
                        return instance.instance_id

        g.post(submit())
        name = await until(lambda instance: instance.num_prefilling > 0)
        silent = speaking.pop(name)
        await until(lambda instance: instance.instance_id == name and instance.state == "silent")
        assert "silent" in (await g.expect(Restart)).reason
        again = submit()
        g.post(msgspec.structs.replace(again, generation=msgspec.structs.replace(again.generation, epoch=Epoch(1))))
        await until(lambda instance: instance.instance_id != name and instance.num_prefilling > 0)
        (other,) = speaking.values()
        await other.expect(RunStep)
        speaking[name] = silent
        await until(lambda instance: instance.instance_id == name and instance.state == "up")


async def test_an_expired_lease_of_a_gateway_ends_its_requests() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, gateway_lease_s=0.2))
    async with running(config) as mesh:
        async with mesh.gateway() as g:
            g.post(submit(), GatewayHeartbeat())
            assert (await g.expect(MeshStatus)).num_gateways == 1
        assert await told(mesh, "ended", 1) == ["queued", "ended"]
        record = await mesh.ask(GetRequest(request_id="r"), RequestRecord)
        assert record.entries[-1].detail == "gateway_lost"


async def test_a_second_registration_takes_the_place_of_the_first() -> None:
    async with running() as mesh, mesh.worker(mixed()) as old, mesh.worker(mixed()) as new, mesh.gateway() as g:
        assert "took over" in await old.ended()
        g.post(submit())
        await new.expect(RunStep)


async def test_another_process_does_not_take_the_place_of_one_that_speaks() -> None:
    """Two of one id on two hosts threw each other out for ever: 82 joins in 8 s, and nobody was told."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, suspect_s=0.5))
    own = mixed()
    registration = RegisterWorker(profile=replace(own, data_address=b"another host's"), residents=())
    async with running(config) as mesh, mesh.worker(own) as first:

        async def speak() -> None:
            while True:
                first.post(LoadReported(InstanceId("m"), own.num_blocks, 0, 0, 0))
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(speak)
            async with mesh.connect(WORKER_METHOD, WorkerDown, registration) as second:
                assert "an instance named m already runs at ipv4:127.0.0.1:" in await second.ended()
            tasks.cancel_scope.cancel()
        while True:  # its host may have lost power
            async with mesh.connect(WORKER_METHOD, WorkerDown, registration) as second:
                with suppress(InstanceUnavailable):
                    await second.expect(WelcomeWorker)
                    break
        assert "took over" in await first.ended()


async def test_a_gateway_that_cannot_be_reached_keeps_its_requests_and_one_whose_process_ended_does_not() -> None:
    """A cut between scheduler and gateway used to stop all its streams, though tokens do not pass there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with running() as mesh:
            registration = msgspec.structs.replace(REGISTRATION, token_address=address)
            for is_alive in (True, False):
                async with mesh.connect(GATEWAY_METHOD, GatewayDown, registration) as g:
                    g.post(submit(), GatewayHeartbeat())
                    await g.expect(MeshStatus)
                if not is_alive:
                    assert await told(mesh, "ended", 1) == ["queued", "ended"]
                    break
                await anyio.sleep(2 * peers.BROKEN_STREAM_GRACE_S)
                assert await told(mesh, "queued", 1) == ["queued"]
                listener.close()


async def test_residents_are_claimed_after_a_restart() -> None:
    resident = Resident(
        request_id=R, epoch=Epoch(2), gateway_id=GATEWAY, num_blocks=3, num_context_tokens=9, decoding=True
    )
    lost = RequestId("lost.g")
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, orphan_grace_s=0.05))
    async with running(config) as mesh, mesh.worker(mixed(), resident), mesh.gateway((lost, ZERO)) as g:
        restarted = await g.expect(Restart)
        assert (restarted.request_id, restarted.epoch) == (lost, ZERO)
    async with running() as mesh, mesh.worker(mixed(), resident), mesh.gateway((R, Epoch(2))):
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert status.num_running == 1


# --- bad peers ---


@pytest.mark.parametrize("method", [WORKER_METHOD, GATEWAY_METHOD])
@pytest.mark.parametrize(
    "frame", [b"garbage", b"", b"\x91\xc0", BAD_UTF8, msgspec.msgpack.encode([GatewayHeartbeat()])]
)
async def test_garbage_ends_its_own_stream_alone(method: str, frame: bytes) -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        multi: Any = mesh.channel.stream_stream(method)
        call = multi()
        await call.write(frame)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        g.post(submit())
        await m.expect(RunStep)


async def test_garbage_after_a_registration_ends_its_own_stream_alone() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        multi: Any = mesh.channel.stream_stream(WORKER_METHOD)
        call = multi()
        await call.write(msgspec.msgpack.encode([RegisterWorker(profile=mixed("x"), residents=())]))
        await call.read()
        await call.write(b"\xff" * 100)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "malformed frame of 100 bytes" in await call.details()
        g.post(submit())
        await m.expect(RunStep)


async def test_an_oversized_frame_ends_its_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(
        (name, 1_000_000 if name == "grpc.max_receive_message_length" else value) for name, value in GRPC_OPTIONS
    )
    monkeypatch.setattr("pdmesh.wire.endpoint.GRPC_OPTIONS", small)
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        multi: Any = mesh.channel.stream_stream(GATEWAY_METHOD)
        call = multi()
        await call.write(bytes(2_000_000))
        assert await call.code() is not grpc.StatusCode.OK
        g.post(submit())
        await m.expect(RunStep)


async def test_strangers_are_refused() -> None:
    config = replace(CONFIG, security=SecurityConfig(mesh_token="secret"))
    async with running(config) as mesh:
        for token in ("", "wrong", "sécret"):
            async with open_channel(mesh.context.facts["address"], SecurityConfig(mesh_token=token)) as channel:
                stranger = Mesh(mesh.context, channel)
                for method, down in ((WORKER_METHOD, WorkerDown), (GATEWAY_METHOD, GatewayDown)):
                    async with stranger.connect(method, down) as peer:  # says nothing, and has its answer
                        assert "UNAUTHENTICATED: wrong mesh token" in await peer.ended()
            assert "wrong mesh token" in (await mesh.ask(GetStatus(), AdminError, mesh_token=token)).message
        await mesh.ask(GetStatus(), MeshStatus, mesh_token="secret")


@pytest.mark.parametrize(
    ("registration", "reason"),
    [
        (RegisterWorker(profile=mixed(), residents=(), version=99), "protocol version 99"),
        (
            RegisterWorker(profile=replace(mixed(), num_blocks=0), residents=()),
            "num_blocks",
        ),
        (RegisterWorker(profile=replace(mixed(), num_transfer_backends=-1), residents=()), "num_transfer_backends"),
    ],
)
async def test_a_worker_of_another_kind_is_refused(registration: RegisterWorker, reason: str) -> None:
    async with running() as mesh, mesh.connect(WORKER_METHOD, WorkerDown, registration) as peer:
        assert reason in await peer.ended()


@pytest.mark.parametrize(
    "generation",
    [
        {"token_ids": b""},
        {"token_ids": b"123"},
        {"num_prompt_tokens": 9},
        {"params": SamplingParams(max_tokens=0)},
        {"params": SamplingParams(max_tokens=2**62)},
        {"gateway_id": GatewayId("other")},
        {"request_id": RequestId("r.other")},
        {"request_id": RequestId("r")},
        {"epoch": Epoch(-1)},
    ],
)
async def test_an_impossible_request_is_refused_alone(generation: dict[str, Any]) -> None:
    impossible = Submit(generation=msgspec.structs.replace(submit().generation, **generation))
    await refused_alone(impossible)


@pytest.mark.parametrize("target", ["slo_ttft_s", "slo_tpot_s"])
@pytest.mark.parametrize("slo_s", [0.0, -1.0, 5e-324, float("nan"), float("inf")])
async def test_a_target_that_is_none_is_refused_alone(target: str, slo_s: float) -> None:
    await refused_alone(msgspec.structs.replace(submit(), **{target: slo_s}))


async def test_a_share_that_is_none_is_refused_alone() -> None:
    await refused_alone(msgspec.structs.replace(submit(), share=0))


async def test_choices_of_one_prompt_are_requests_of_their_own() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(msgspec.structs.replace(submit("a.g"), others=(OtherChoice(RequestId("b.g"), 5),)))
        admitted = [await placed(m, AdmitPrefill) for _ in range(2)]
        assert [(one.request_id, one.params.seed) for one in admitted] == [("a.g", 0), ("b.g", 5)]
        assert admitted[0].token_ids == admitted[1].token_ids


async def test_choices_after_the_first_are_due_after_it() -> None:
    first = msgspec.structs.replace(submit("a.g"), others=(OtherChoice(RequestId("b.g"), 5),), num_tokens_before=6)
    requests = [
        gateways._request(first, generation, 0.0, index) for index, generation in enumerate(first.generations())
    ]
    num_tokens = first.generation.num_tokens
    assert [request.num_tokens_before for request in requests] == [6, 6 + num_tokens]


async def test_a_choice_with_the_id_of_another_gateways_request_is_refused_with_all_of_its_prompt() -> None:
    await refused_alone(msgspec.structs.replace(submit(), others=(OtherChoice(RequestId("r.other"), 5),)))


async def test_a_gateway_waits_for_no_request_of_another() -> None:
    """Nobody else could have it any more: it would be told that another gateway's request has its id."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, orphan_grace_s=0.05))
    async with running(config) as mesh, mesh.gateway((RequestId("r.other"), ZERO), (R, ZERO)) as g:
        assert (await g.expect(Restart)).request_id == R


async def refused_alone(impossible: Submit) -> None:
    """The request is refused, and another one of the same frame is served."""
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(impossible)
        g.post(submit("good.g"))
        rejected = await g.expect(Reject)
        assert (rejected.request_id, rejected.reason) == (impossible.generation.request_id, RejectReason.INVALID)
        assert (await m.expect(RunStep)).plan.chunks[0].request_id == "good.g"


# --- an operator ---


async def test_the_admin_method_answers_and_refuses() -> None:
    async with running() as mesh, mesh.worker(mixed()):
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert [instance.instance_id for instance in status.instances] == ["m"]
        assert isinstance(await mesh.ask(GetRequest(request_id="nobody")), AdminError)
        call: Any = mesh.channel.unary_unary("/pdmesh.v1.Scheduler/Admin")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"garbage")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_metrics_are_served() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        await m.expect(RunStep)
        url = f"http://127.0.0.1:{mesh.context.facts['metrics_port']}/metrics"
        lines = (await anyio.to_thread.run_sync(fetch, url)).splitlines()
        assert "pdmesh:num_requests_running 1.0" in lines
        assert "pdmesh:num_requests_waiting 0.0" in lines
        assert "pdmesh:prompt_tokens_total 8.0" in lines
        assert 'pdmesh:kv_cache_usage_perc{instance="m"} 0.046875' in lines


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


# --- the end ---


async def test_a_bug_in_the_core_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(core: SchedulerCore, event: Event, now_s: float) -> list[Command]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SchedulerCore, "handle", broken)
    with pytest.raises(ExceptionGroup) as caught:
        async with running() as mesh, mesh.connect(GATEWAY_METHOD, GatewayDown, REGISTRATION) as g:
            await g.ended()
    assert "a bug" in [str(error) for error in leaves(caught.value)]


async def test_streams_end_with_unavailable_when_the_service_stops() -> None:
    async with running() as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        mesh.context.stopping.set()
        assert "UNAVAILABLE: the service is stopping" in await m.ended()
        assert "UNAVAILABLE: the service is stopping" in await g.ended()


async def instances_of(mesh: Mesh) -> list[InstanceStatus]:
    status = await mesh.ask(GetStatus(), MeshStatus)
    return list(status.instances)


async def test_the_event_log_of_a_live_run_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, event_log=path))
    async with running(config) as mesh, mesh.worker(mixed()) as m, mesh.gateway() as g:
        g.post(submit())
        m.post(step_report(await m.expect(RunStep)))
        m.post(RequestFinished(InstanceId("m"), R, ZERO, FinishReason.STOP, num_output_tokens=1))
        m.post(KvReleased(InstanceId("m"), R, ZERO))
        m.post(Goodbye())
        await m.ended()
        with anyio.fail_after(10):
            while await instances_of(mesh):
                pass  # it has left, and the log will say so soon
    with EventLogReader(path) as log:
        events = [entry.event for entry, _ in replay(log)]
    assert any(isinstance(event, RequestFinished) for event in events)
    assert any(isinstance(event, InstanceLost) for event in events)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bundle": "quick"}, "quick"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"event_log": Path("/dev/null/x")}, "event_log"),
    ],
)
async def test_a_wrong_setting_stops_the_start(settings: dict[str, Any], named: str) -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, **settings))
    context = RunningScheduler(ready_fd=None)
    context.ready = anyio.Event()
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await serve(config, context)
    errors = leaves(caught.value)
    assert [type(error) for error in errors] == [ConfigError]
    assert named in str(errors[0])


async def test_gateways_hear_which_instances_are_coming_until_they_have_come() -> None:
    def following(*coming: str) -> FollowPools:
        report = ActuatorReported(
            actuator_id="a", processes=(), available_bytes=0, coming=tuple(map(InstanceId, coming))
        )
        return FollowPools(report=report, revision=-1, wait_s=0.0)

    async with running() as mesh, mesh.gateway() as g:
        await mesh.ask(following("m", "other"), PoolsDesired)
        assert (await g.expect(MeshStatus)).num_coming == 2
        async with mesh.worker(mixed()):
            assert (await g.expect(MeshStatus)).num_coming == 1
            await mesh.ask(following())
            assert (await g.expect(MeshStatus)).num_coming == 0


async def test_an_instance_that_registers_again_hears_only_what_is_decided_after() -> None:
    """It was silent, and its stream broke unnoticed. What waits is placed on it once, as it is now."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, suspect_s=0.1))
    async with running(config) as mesh, mesh.worker(mixed()), mesh.gateway() as g:
        while True:
            status = await mesh.ask(GetStatus(), MeshStatus)
            if status.instances[0].suspected:
                break
        g.post(submit())
        await told(mesh, "queued", 1)
        async with mesh.worker(mixed()) as again:
            assert (await placed(again, AdmitPrefill)).epoch == ZERO
            record = await mesh.ask(GetRequest(request_id="r"), RequestRecord)
            assert "restarted" not in [entry.what for entry in record.entries]


async def test_gateways_may_wait_for_an_instance_given_up_for_silence_but_not_for_ever() -> None:
    """It hangs, or is stopped: its stream is whole. One whose stream broke is dead."""
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, lease_s=0.3, max_queue_s=0.3))
    async with running(config) as mesh, mesh.gateway() as g:
        async with mesh.worker(mixed("silent")):
            await becomes(g, ready=True, num_coming=0)
            await becomes(g, ready=False, num_coming=1)
            await becomes(g, ready=False, num_coming=0)
        async with mesh.worker(mixed("dead")):
            await becomes(g, ready=True, num_coming=0)
        await becomes(g, ready=False, num_coming=0)


async def test_an_instance_that_comes_back_is_not_waited_for_any_longer() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, lease_s=0.3))
    async with running(config) as mesh, mesh.gateway() as g:
        async with mesh.worker(mixed()):
            await becomes(g, ready=False, num_coming=1)
        async with mesh.worker(mixed()):
            await becomes(g, ready=True, num_coming=0)


async def becomes(g: SchedulerPeer, *, ready: bool, num_coming: int) -> None:
    """Until the gateway, which says all the time that it lives, hears so."""
    with anyio.fail_after(20):
        while True:
            g.post(GatewayHeartbeat())
            state = await g.expect(MeshStatus)
            if (state.ready, state.num_coming) == (ready, num_coming):
                return


async def test_what_an_instance_has_not_begun_starts_again_at_once_when_its_stream_breaks() -> None:
    """It waited half a second for an instance that would have dropped it before it came back."""
    async with running() as mesh, mesh.gateway() as g, mesh.worker(mixed("m0")) as m0:
        g.post(submit())
        await m0.expect(RunStep)
        async with mesh.worker(mixed("m1")):
            m0.post(EventMessage.of(KvReleased(InstanceId("other"), R, ZERO)))  # which ends the stream
            assert (await g.expect(Restart)).reason == "instance m0 is silent"
