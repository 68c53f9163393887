"""The supervisor with real, small child processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from pdmesh.cli import actuator as actuator_module
from pdmesh.cli import supervisor as supervisor_module
from pdmesh.cli.http import is_live
from pdmesh.cli.process_id import ProcessId, process_id, wait_for_end
from pdmesh.cli.processes import ChildSpec
from pdmesh.cli.supervisor import Backoff, MeshPlan, StartFailed, Supervisor
from pdmesh.cli.supervisor_actuator import follow_scheduler
from pdmesh.config import SecurityConfig
from pdmesh.core.commands import DesiredProcesses
from pdmesh.model import InstanceId, Role
from pdmesh.operations import ManagedProcess, PoolMember
from pdmesh.wire.messages import FollowPools, PoolsDesired
from pdmesh_testing.processes import is_running, write_stand_in

DEADLINE_S = 30.0

pytestmark = pytest.mark.anyio


class Mesh:
    """A supervisor over stand-ins, with what happened in it."""

    def __init__(
        self,
        folder: Path,
        behaviours: Mapping[str, str] | None = None,
        *,
        drain_s: float = DEADLINE_S,
        hang_s: float = DEADLINE_S,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.log_folder = folder
        self.events_file = folder / "events"
        self.said: list[str] = []
        self.asked: list[FollowPools] = []
        self.wanted: PoolsDesired | None = None  # None: no answer
        self.shares: dict[str, int] = {}  # of how many a worker takes its part
        self.ready = anyio.Event()
        self.changed = anyio.Event()
        self._script = write_stand_in(folder)
        self._behaviours = behaviours or {}
        plan = MeshPlan(
            scheduler=self._spec("scheduler"),
            others=self._others,
            pin=lambda name, facts: {"PDMESH_SCHEDULER_PORT": "7777"} if name == "scheduler" else {},
            answers=self._answers,
            wait_ready=self._wait_ready,
            tend=self._tend,
            start_timeout_s=DEADLINE_S,
            hang_s=hang_s,
            drain_s=lambda: drain_s,
            name_prefix="",
            worker=lambda member, num_workers: self._spec(member.instance_id),
            resized=self._resized,
            follow=self._follow,
            close=lambda: None,
        )
        self.supervisor = Supervisor(plan, act=follow_scheduler, on_change=self._on_change, say=self.said.append)

    def _spec(self, name: str) -> ChildSpec:
        command = (sys.executable, "-S", str(self._script), name, str(self.events_file))
        return ChildSpec(
            name=name,
            command=(*command, self._behaviours.get(name, "good")),
            environment={},
            log_file=self.log_folder / f"{name}.log",
        )

    def _others(self, scheduler: Mapping[str, Any]) -> tuple[Sequence[ChildSpec], Sequence[ChildSpec]]:
        assert scheduler["address"] == "127.0.0.1:7001"
        return [self._spec("gateway")], [self._spec("prefill-0"), self._spec("decode-0")]

    async def _wait_ready(self, gateway: Mapping[str, Any]) -> None:
        assert gateway["http_address"]

    async def _answers(self, name: str, facts: Mapping[str, Any]) -> bool:
        address = facts.get("http_address") or f"127.0.0.1:{facts['metrics_port']}"
        return await is_live(f"http://{address}", SecurityConfig())

    async def _tend(self) -> None:
        pass

    def _resized(self, spec: ChildSpec, num_workers: int) -> ChildSpec:
        self.shares[spec.name] = num_workers
        return spec

    async def _follow(self, question: FollowPools) -> PoolsDesired | None:
        self.asked.append(question)
        self._on_change(self.supervisor)
        while self.wanted is not None and self.wanted.revision == question.revision:
            await self.changed.wait()
        return self.wanted

    def want(
        self, *start: str, stop: tuple[str, ...] = (), replace: Mapping[str, int] | None = None, beside: str = ""
    ) -> None:
        new = tuple(PoolMember(instance_id=InstanceId(name), role=Role(name[:-2])) for name in start)
        old = tuple(ManagedProcess(name=name, pid=pid) for name, pid in (replace or {}).items())
        desired = DesiredProcesses(
            start=new, stop=tuple(map(InstanceId, stop)), replace=old, temporary=(InstanceId(beside),)
        )
        self.wanted = PoolsDesired(revision=0 if self.wanted is None else self.wanted.revision + 1, processes=desired)
        self._on_change(self.supervisor)

    def pids_told(self, name: str) -> set[int]:
        """Of a service, as the scheduler has last heard."""
        return (
            {service.pid for service in self.asked[-1].report.processes if service.name == name}
            if self.asked
            else set()
        )

    @property
    def serving(self) -> set[str]:
        """As the scheduler has last heard."""
        return {service.name for service in self.asked[-1].report.processes} if self.asked else set()

    def _on_change(self, supervisor: Supervisor) -> None:
        if supervisor.ready:
            self.ready.set()
        self.changed.set()
        self.changed = anyio.Event()

    def pid(self, name: str) -> int:
        (service,) = (service for service in self.supervisor.services if service.name == name)
        assert service.child is not None
        return service.child.pid

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.changed.wait()

    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines() if self.events_file.exists() else []


def stop_ourselves(number: signal.Signals = signal.SIGTERM) -> None:
    """Signal the supervisor, which runs in this process."""
    os.kill(os.getpid(), number)


@asynccontextmanager
async def running(mesh: Mesh) -> AsyncGenerator[None]:
    """Stop the mesh as its user does when the block is left, which begins once all its services are there."""
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mesh.supervisor.run)
            await mesh.ready.wait()
            yield
            stop_ourselves()


async def test_starts_the_scheduler_first_and_drains_with_the_traffic(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    pids: list[int] = []
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mesh.supervisor.run)
            await mesh.ready.wait()
            pids += [mesh.pid(name) for name in ("scheduler", "gateway", "prefill-0", "decode-0")]
            stop_ourselves(signal.SIGINT)
    events = mesh.events()
    assert events[0] == "scheduler starting"
    assert sorted(events[1:4]) == ["decode-0 starting", "gateway starting", "prefill-0 starting"]
    assert events[4] == "gateway stopped"
    assert sorted(events[5:7]) == ["decode-0 stopped", "prefill-0 stopped"]
    assert events[7:] == ["scheduler stopped"]
    assert not any(map(is_running, pids))


async def test_a_killed_child_is_started_again_with_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.001)
    mesh = Mesh(tmp_path)
    pids: dict[str, int] = {}
    async with running(mesh):
        for name in ("prefill-0", "scheduler"):
            pids[name] = mesh.pid(name)
            os.kill(pids[name], signal.SIGKILL)
            await mesh.until(lambda name=name: f"{name} serves again" in mesh.said)  # type: ignore[misc]
    assert "prefill-0 was killed by SIGKILL; starting it again in 0.001 s" in mesh.said
    ended = [(each.name, each.pid, each.cause, each.has_served) for each in mesh.supervisor.ended]
    assert ended == [(name, pid, "was killed by SIGKILL", True) for name, pid in pids.items()]
    assert mesh.supervisor.facts("scheduler")["address"] == "127.0.0.1:7777"


@pytest.mark.parametrize("culprit", ["scheduler", "gateway", "prefill-0"])
async def test_a_wrong_configuration_stops_the_start_and_is_told(tmp_path: Path, culprit: str) -> None:
    mesh = Mesh(tmp_path, {culprit: "config-error"})
    with anyio.fail_after(DEADLINE_S), pytest.raises(StartFailed) as failure:
        await mesh.supervisor.run()
    assert failure.value.exit_code == 2
    assert str(failure.value) == f"{culprit}: model 'nowhere' is no directory"
    assert all(service.child is None for service in mesh.supervisor.services)


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("error", "exited with code 1: memory ran out"),
        ("crash", "exited with code 1: terminate called"),  # the last line of its log
        ("illegal", "was killed by SIGILL (an instruction that this processor lacks; "),
    ],
)
async def test_a_child_that_dies_before_it_serves_stops_the_start_and_says_why(
    tmp_path: Path, behaviour: str, told: str
) -> None:
    mesh = Mesh(tmp_path, {"decode-0": behaviour})
    with anyio.fail_after(DEADLINE_S), pytest.raises(StartFailed) as failure:
        await mesh.supervisor.run()
    assert failure.value.exit_code == 1
    assert str(failure.value).startswith(f"decode-0 did not start: it {told}")
    assert str(tmp_path / "decode-0.log") in str(failure.value)
    assert all(service.child is None for service in mesh.supervisor.services)


async def test_a_child_that_the_kernel_kills_for_want_of_memory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter(range(100))
    monkeypatch.setattr(supervisor_module, "num_oom_kills", lambda: next(kills))  # one more at each look
    monkeypatch.setattr(supervisor_module, "memory_limit_bytes", lambda: 3 << 29)
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.001)
    mesh = Mesh(tmp_path)
    async with running(mesh):
        os.kill(mesh.pid("prefill-0"), signal.SIGKILL)
        await mesh.until(lambda: "prefill-0 serves again" in mesh.said)
    assert (
        "prefill-0 was killed by the kernel because the 1.5 GiB of its control group's memory ran out" in mesh.said[0]
    )


async def test_a_stop_while_starting_leaves_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, {"gateway": "silent"})
    seen: list[int] = []
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mesh.supervisor.run)
            await mesh.until(lambda: bool(mesh.supervisor.facts("prefill-0") and mesh.supervisor.facts("decode-0")))
            seen += [mesh.pid(name) for name in ("scheduler", "gateway", "prefill-0", "decode-0")]
            stop_ourselves()
    assert len(seen) == 4
    assert not any(map(is_running, seen))


async def test_the_second_signal_kills(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, {"gateway": "stubborn"})
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mesh.supervisor.run)
            await mesh.ready.wait()
            stop_ourselves(signal.SIGINT)
            await anyio.wait_all_tasks_blocked()
            stop_ourselves(signal.SIGINT)
    assert mesh.said == ["draining; press Ctrl-C again to kill", "killing all services"]
    assert "scheduler stopped" not in mesh.events()


async def test_a_child_that_does_not_drain_is_told_again_and_then_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(tmp_path, {"prefill-0": "stubborn"}, drain_s=0.0)
    monkeypatch.setattr(supervisor_module, "MIN_DRAIN_S", 0.02)
    monkeypatch.setattr(supervisor_module, "END_S", 0.05)
    async with running(mesh):
        pass
    told = [line for line in mesh.said if line.startswith("prefill-0")]
    assert told == [
        "prefill-0 did not drain within 0.02 s: its last requests are ended",
        "prefill-0 did not end and is killed",
    ]


async def test_the_scheduler_hears_which_instances_are_coming(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    async with running(mesh):
        hold = tmp_path / "events.prefill-0.hold"
        hold.touch()
        os.kill(mesh.pid("prefill-0"), signal.SIGKILL)
        await mesh.until(lambda: bool(mesh.asked) and mesh.asked[-1].report.coming == ("prefill-0",))
        hold.unlink()
        await mesh.until(lambda: mesh.asked[-1].report.coming == ())
    assert "prefill-0 serves again" in mesh.said


async def test_workers_start_and_stop_as_the_scheduler_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actuator_module, "AWAY_PAUSE_S", 0.01)
    mesh = Mesh(tmp_path)
    first = {"scheduler", "gateway", "prefill-0", "decode-0"}
    async with running(mesh):
        mesh.want("decode-1", "decode-2", beside="decode-2")
        await mesh.until(lambda: mesh.serving == first | {"decode-1", "decode-2"})
        assert set(mesh.shares.values()) == {3}, "decode-2 leaves again, and does not count"
        os.kill(mesh.pid("decode-2"), signal.SIGKILL)
        await mesh.until(lambda: "decode-2 serves again" in mesh.said)
        mesh.want("decode-1", "decode-2", stop=("decode-0", "never-there"))
        await mesh.until(lambda: "decode-0 stopped" in mesh.events() and "decode-0" not in mesh.serving)
        mesh.want("decode-1", "decode-2")
    assert mesh.events().count("decode-1 starting") == 1, "what is there is not started again"
    assert "decode-2 stopped" in mesh.events()


async def test_a_gateway_is_replaced_without_a_gap_and_the_scheduler_where_it_was(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    mesh.want()
    async with running(mesh):
        before = {name: mesh.pid(name) for name in ("gateway", "scheduler")}
        for name, pid in before.items():
            mesh.want(replace={name: pid})
            await mesh.until(lambda name=name, pid=pid: mesh.pids_told(name) not in ({0}, {pid}, set(), {0, pid}))  # type: ignore[misc]
            await mesh.until(lambda name=name, pid=pid: pid not in mesh.pids_told(name))  # type: ignore[misc]
    events = [event for event in mesh.events() if event.startswith("gateway")]
    assert events == ["gateway starting", "gateway starting", "gateway stopped", "gateway stopped"]
    events = [event for event in mesh.events() if event.startswith("scheduler")]
    assert events == ["scheduler starting", "scheduler stopped", "scheduler starting", "scheduler stopped"]


async def test_a_worker_that_cannot_be_started_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, {"decode-1": "crash"})
    mesh.want()
    async with running(mesh):
        mesh.want("decode-1")
        await mesh.until(lambda: any(question.report.failed for question in mesh.asked))
        mesh.want("decode-1")
        await mesh.until(lambda: mesh.asked[-1].revision == mesh.wanted.revision)  # type: ignore[union-attr]
    (failed,) = next(question.report.failed for question in mesh.asked if question.report.failed)
    assert failed.instance_id == "decode-1"
    assert "decode-1 did not start: it exited with code 1" in failed.reason
    assert sum("decode-1 starts, because" in line for line in mesh.said) == 1


async def test_a_worker_that_is_wanted_no_longer_while_it_starts_is_ended(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, {"decode-1": "silent"})
    mesh.want()
    async with running(mesh):
        mesh.want("decode-1")
        while "decode-1 starting" not in mesh.events():  # noqa: ASYNC110  # written by another process
            await anyio.sleep(0.01)
        child = next(service.child for service in mesh.supervisor.services if service.name == "decode-1")
        assert child is not None
        mesh.want(stop=("decode-1",))
        assert await child.wait() == -signal.SIGKILL, "nothing is on it yet"
    assert not mesh.asked[-1].report.failed
    assert "decode-1 stopped" not in mesh.events()


async def test_a_child_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    class Probed(Mesh):
        async def _answers(self, name: str, facts: Mapping[str, Any]) -> bool:
            # The others are there: a busy machine must not make it look otherwise.
            return name != "gateway" or await super()._answers(name, facts)

    mesh = Probed(tmp_path, hang_s=0.3)
    async with running(mesh):
        os.kill(mesh.pid("gateway"), signal.SIGSTOP)
        await mesh.until(lambda: "gateway serves again" in mesh.said)
    assert "gateway has not answered for 0.3 s and is killed" in mesh.said
    assert not any(line.startswith(("scheduler", "prefill-0", "decode-0")) for line in mesh.said)


async def test_a_child_that_stands_still_for_less_is_left_alone(tmp_path: Path) -> None:
    """A stop that its streams survive is no hang: only probes in a row without an answer count."""
    silent = iter([False] * 5 + [True] + [False] * 5)
    asked = 0

    class Probed(Mesh):
        async def _answers(self, name: str, facts: Mapping[str, Any]) -> bool:
            nonlocal asked
            if name != "decode-0":
                return True
            asked += 1
            answer = next(silent, None)
            if answer is None:
                self.changed.set()
            return answer is not False

    mesh = Probed(tmp_path, hang_s=0.06)
    async with running(mesh):
        await mesh.until(lambda: asked > 12)
    assert not any("killed" in line for line in mesh.said)


def test_a_child_that_served_well_starts_again_at_once() -> None:
    backoff = Backoff()
    assert [backoff.after(served_s=0.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert backoff.after(served_s=29.0) == 15.0  # longer than it took to come back, or it is no recovery
    assert [backoff.after(served_s=30.0), backoff.after(served_s=5.0)] == [0.0, 0.0]
    assert [backoff.after(served_s=4.9), backoff.after(served_s=5.0)] == [0.5, 0.0]


async def test_what_the_supervisor_cannot_write_does_not_end_it(tmp_path: Path) -> None:
    """A log folder that goes away: a child that is started again then has no log, and serves."""
    mesh = Mesh(tmp_path / "mesh")
    logs = tmp_path / "logs"
    logs.mkdir()
    mesh.log_folder = logs
    async with running(mesh):
        shutil.rmtree(logs)
        os.kill(mesh.pid("prefill-0"), signal.SIGKILL)
        await mesh.until(lambda: "prefill-0 serves again" in mesh.said)


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Nothing can be cleaned up after SIGKILL, so the kernel must do it."""
    program = """
import sys
import anyio
from pathlib import Path
from pdmesh.cli.processes import ChildSpec, start_child
from pdmesh_testing.processes import write_stand_in

async def main(folder):
    command = (sys.executable, "-S", str(write_stand_in(folder)), "prefill-0", str(folder / "events"), "stubborn")
    spec = ChildSpec(name="prefill-0", command=command, environment={}, log_file=folder / "log")
    async with start_child(spec) as child:
        await child.ready()
        print(child.pid, flush=True)
        await child.wait()

anyio.run(main, Path(sys.argv[1]))
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = process_id(int(parent.stdout.readline()))
        assert child is not None
        parent.kill()
    assert wait_for_end(child, DEADLINE_S)


def test_a_pid_that_is_used_again_is_another_process() -> None:
    me = process_id(os.getpid())
    assert me is not None
    assert me.alive
    assert not ProcessId(me.pid, me.start_ticks + 1).alive
