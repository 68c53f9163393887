"""The event log: what was decided can be decided again."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    Event,
    GatewayJoined,
    InstanceJoined,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    StepDone,
)
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.eventlog import FORMAT_VERSION, EventLogError, EventLogReader, EventLogWriter, Header, replay
from pdmesh.model import Epoch, FinishReason, InstanceId, RequestId, Resident, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import GATEWAY, a_request
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

POLICY = PolicyConfig(chunk_tokens=8)
CONFIG = CoreConfig(policy=POLICY)
HEADER = Header(seed=11, bundle="fcfs", config=CONFIG, started_at=1.7e9, started_s=5.0)


def recorded_run(path: Path, num_requests: int = 40) -> list[tuple[Event, list[Command]]]:
    """A mesh serving requests, one of three cancelled, with its log at ``path``."""
    core = SchedulerCore(CONFIG, make_bundle("fcfs", CONFIG.policy), random.Random(HEADER.seed))
    profiles = [modelled_profile(f"i{n}", role) for n, role in enumerate((Role.PREFILL, Role.DECODE, Role.MIXED))]
    mesh = ModelledMesh(profiles)
    rng, now_s, run = random.Random(3), 5.0, list[tuple[Event, list[Command]]]()
    resident = Resident(
        request_id=RequestId("old"),
        epoch=Epoch(1),
        gateway_id=GATEWAY,
        num_blocks=2,
        num_context_tokens=7,
        decoding=True,
    )
    with EventLogWriter(path, HEADER) as log:

        def feed(event: Event) -> None:
            nonlocal now_s
            now_s += rng.random() / 7
            log.record(now_s, event)
            commands = core.handle(event, now_s)
            run.append((event, commands))
            for command in commands:
                mesh.send(command)

        feed(GatewayJoined(GATEWAY, ((RequestId("old"), Epoch(1)),)))
        for profile in profiles:
            feed(InstanceJoined(profile, (resident,) if profile.role is Role.DECODE else ()))
        for n in range(num_requests):
            feed(RequestArrived(a_request(f"r{n}", rng.randint(1, 30), rng.randint(1, 9), arrival_s=now_s)))
            if n % 3 == 0:
                feed(RequestCancelled(GATEWAY, RequestId(f"r{n}"), Epoch(0)))
            for instance in mesh.instances.values():
                while instance.commands:
                    instance.take_command()
                if instance.can_begin:
                    instance.begin_step()
                    instance.end_step()
                instance.do(instance.machine.report_load())
            for transfer in mesh.transfers():
                if transfer[0].sequences[transfer[2]].is_computed:
                    mesh.land(*transfer)
            for instance in mesh.instances.values():
                for key in instance.decoding:
                    instance.finish(key)
                while instance.events:
                    feed(instance.events.popleft())
    return run


def test_a_replay_repeats_every_command(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    run = recorded_run(path)
    with EventLogReader(path) as log:
        assert log.header == HEADER
        repeated = [(entry.event, commands) for entry, commands in replay(log)]
    assert repeated == run
    assert len(run) > 200


def test_a_record_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    num_events = len(recorded_run(path, num_requests=2))
    path.write_bytes(path.read_bytes()[:-3])
    with EventLogReader(path) as log:
        assert len(list(log)) == num_events - 1


def test_a_damaged_record_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    recorded_run(path, num_requests=2)
    data = bytearray(path.read_bytes())
    for place in (len(data) // 2, len(data) // 3):
        damaged = bytearray(data)
        damaged[place : place + 8] = b"\xc1" * 8
        path.write_bytes(damaged)
        with EventLogReader(path) as log, pytest.raises(EventLogError, match=r"events\.log is damaged before byte \d+"):
            list(log)


@pytest.mark.parametrize("content", [b"", b"hello, this is no log at all", b"\x92\x00\xc4\x01\x00"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(content)
    with pytest.raises(EventLogError, match=r"events\.log"):
        EventLogReader(path)


def test_a_log_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    with EventLogWriter(path, replace(HEADER, version=FORMAT_VERSION - 1)) as log:
        log.record(6.0, GatewayJoined(GATEWAY, ()))
    says = rf"events\.log has format {FORMAT_VERSION - 1}, this pdmesh reads {FORMAT_VERSION}$"
    with pytest.raises(EventLogError, match=says):
        EventLogReader(path)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (RequestArrived(a_request("r", 2**40)), r"<= 16777216.*num_prompt_tokens"),
        (RequestArrived(a_request("r", 0)), ">= 1.*num_prompt_tokens"),
        (RequestArrived(a_request("r", output=2**62)), "max_tokens"),
        (RequestFinished(InstanceId("i"), RequestId("r"), Epoch(0), FinishReason.STOP, 2**40), "num_output_tokens"),
        (StepDone(InstanceId("i"), 1, math.nan, (), 0), ">= 0.*duration_s"),
        (LoadReported(InstanceId("i"), -1, 0, 0, 0), ">= 0.*num_free_blocks"),
        (InstanceJoined(replace(modelled_profile("i", Role.MIXED), num_blocks=-5), ()), r">= 1.*profile\.num_blocks"),
    ],
)
def test_a_number_that_cannot_be_is_damage(tmp_path: Path, event: Event, what: str) -> None:
    """Tables grow with the longest prompt: the reader must not let any core see these."""
    path = tmp_path / "events.log"
    with EventLogWriter(path, HEADER) as log:
        log.record(6.0, event)
    with EventLogReader(path) as read, pytest.raises(EventLogError, match=rf"events\.log is damaged.*{what}"):
        list(read)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            replace(CONFIG, policy=replace(POLICY, chunk_tokens=-16)),
            r">= 1.*policy\.chunk_tokens",
        ),
        (replace(CONFIG, policy=replace(POLICY, slo_tpot_s=math.nan)), r">= 0\.001.*policy\.slo_tpot_s"),
        (
            replace(CONFIG, policy=replace(POLICY, latency=replace(POLICY.latency, b_s=math.inf))),
            "its header has a latency model of",
        ),
        (replace(CONFIG, kv_risk=1.0), r"<= 0\.5.*kv_risk"),
    ],
)
def test_a_setting_that_cannot_be_is_damage(tmp_path: Path, config: CoreConfig, what: str) -> None:
    path = tmp_path / "events.log"
    with EventLogWriter(path, replace(HEADER, config=config)):
        pass
    with pytest.raises(EventLogError, match=rf"events\.log is damaged.*{what}"):
        EventLogReader(path)


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.log"
    for _ in range(3):
        with EventLogWriter(path, HEADER):
            pass
    assert sorted(kept.name for kept in path.parent.iterdir()) == ["events.log", "events.log.1", "events.log.2"]


def test_a_disk_too_slow_ends_the_log_and_leaves_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.log"
    monkeypatch.setattr("pdmesh.eventlog.MAX_BUFFERED_BYTES", 2000)
    with EventLogWriter(path, HEADER) as log:
        for n in range(1000):
            log.record(float(n), GatewayJoined(GATEWAY, ()))
    with EventLogReader(path) as read:
        times_s = [entry.now_s for entry in read]
    assert 0 < len(times_s) < 1000
    assert times_s == [float(n) for n in range(len(times_s))]


@pytest.mark.anyio
async def test_records_reach_the_file_while_the_writer_runs(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    written = anyio.Event()

    class Watched(EventLogWriter):
        def _write(self, chunk: bytes) -> None:
            super()._write(chunk)
            if chunk and not written.is_set():
                anyio.from_thread.run_sync(written.set)

    with Watched(path, HEADER) as log:
        log.record(6.0, GatewayJoined(GATEWAY, ()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.run)
            with anyio.fail_after(10):
                await written.wait()
            tasks.cancel_scope.cancel()
        with EventLogReader(path) as read:
            assert [entry.now_s for entry in read] == [6.0]


@pytest.mark.anyio
@pytest.mark.parametrize("num_turns", range(6))
async def test_a_writer_that_is_stopped_at_any_turn_of_the_loop_loses_nothing(tmp_path: Path, num_turns: int) -> None:
    """What it had taken to write went with it if no thread had begun to."""
    path = tmp_path / "events.log"
    with EventLogWriter(path, HEADER) as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.run)
            await anyio.sleep(0.05)  # the header is written
            log.record(6.0, GatewayJoined(GATEWAY, ()))
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    with EventLogReader(path) as read:
        assert [entry.now_s for entry in read] == [6.0]
