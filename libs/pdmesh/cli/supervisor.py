"""A supervisor, which runs a mesh as its child processes: starts them in order, keeps them alive, drains them in order.

The scheduler starts first, because all others dial it; the rest start together. A child that ends before it has ever
served stops the start. A child that served before is started again: at once if it had served well, else after a delay
that doubles. A child that stays silent for long is killed, and so started again. The drain follows the traffic:
gateways (their streams end), workers (their residents end), scheduler.

No write of the supervisor can end it: logs, the record and its messages may meet a full disk.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.abc

from pdmesh.cli.forking import ForkServer
from pdmesh.cli.processes import Child, ChildSpec, StartChild, describe_oom, is_gateway, start_child
from pdmesh.core.operator_events import MAX_ENDED, EndedProcess
from pdmesh.errors import PdmeshError, leaves
from pdmesh.failures import describe_exit
from pdmesh.host import memory_limit_bytes, num_oom_kills
from pdmesh.operations import PoolMember, ProcessKind
from pdmesh.service import ENDING_LIMIT_S
from pdmesh.wire.messages import FollowPools, PoolsDesired

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 15.0
#: Seconds after which a child has served well, if they are also twice its last delay.
SERVED_WELL_S = 5.0

#: Probes in a row without an answer, after which a child hangs. A pause of this process fails only one of them.
NUM_PROBES = 6

#: Seconds between two rounds of maintenance: growing logs, and a record that could not be written.
TEND_S = 10.0

#: Seconds for a child that was told to end running requests, before it is killed.
END_S = ENDING_LIMIT_S + 5.0
#: Least drain time of the processes after the gateways, since their requests end with the gateways'.
MIN_DRAIN_S = 5.0

EXIT_CONFIG = 2

#: Largest part of a log line, quoted on the terminal.
_MAX_LINE = 500


class StartFailed(PdmeshError):
    """A service, or the whole mesh, cannot start. ``exit_code`` is the command's exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Backoff:
    """Delay before a child is started again."""

    _delay_s: float = 0.0

    def after(self, served_s: float) -> float:
        """Return the delay before the next start of a child that served for ``served_s``.

        0 after `SERVED_WELL_S` and twice the last delay. Otherwise twice the last delay, at least `FIRST_DELAY_S` and
        at most `MAX_DELAY_S`.
        """
        if served_s >= max(SERVED_WELL_S, 2 * self._delay_s):
            self._delay_s = 0.0
        else:
            self._delay_s = min(max(FIRST_DELAY_S, 2 * self._delay_s), MAX_DELAY_S)
        return self._delay_s


@dataclass(frozen=True, slots=True)
class _Life:
    """History of one child process: how long it served, and how it ended in words."""

    served_s: float
    pid: int = 0
    returncode: int = 1
    how: str = ""
    last_words: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The end in words, with the child's own reason if it gave one."""
        return self.how + (f": {' '.join(self.last_words)}" if self.last_words else "")


@dataclass(slots=True)
class Service:
    """Keeper of one child, which restarts the child until it is stopped."""

    spec: ChildSpec
    #: Returns settings to keep over a restart, taken from the child's announcement: the port that others dial.
    pin: Callable[[Mapping[str, Any]], Mapping[str, str]]
    #: Asks the child's health endpoint, given the child's announced facts.
    answers: Callable[[Mapping[str, Any]], Awaitable[bool]]
    on_event: Callable[[Service, str], None]
    start_timeout_s: float
    hang_s: float
    fork: StartChild | None = None
    #: Ends of restarted processes, for the scheduler. Services may share one deque.
    ended: deque[EndedProcess] = field(default_factory=deque[EndedProcess])
    facts: dict[str, Any] = field(default_factory=dict)
    child: Child | None = None
    #: The child served, and is being started again. A child that failed to start is not known to come.
    is_coming: bool = False
    num_restarts: int = 0
    _stopping: anyio.Event = field(default_factory=anyio.Event)
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _kill_reason: str = ""  # why the present child is killed

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def instance_id(self) -> str:
        """Name by which the scheduler knows the service: an instance's id, else the service's name."""
        return str(self.facts.get("instance_id", self.name))

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run the child until the service stops: announce once that the child serves, and restart a child that ends.

        Raises StartFailed if the first child ends before serving.
        """
        try:
            life = await self._run_child(lambda: task_status.started())
            if not self.facts:
                raise self._start_failure(life)
            backoff = Backoff()
            while not self._stopping.is_set():
                delay_s = backoff.after(life.served_s)
                self.is_coming = life.served_s > 0
                self.ended.append(
                    EndedProcess(name=self.instance_id, pid=life.pid, cause=life.why, has_served=self.is_coming)
                )
                when = f"in {delay_s:g} s" if delay_s else "at once"
                self.on_event(self, f"{life.why}; starting it again {when}")
                with anyio.move_on_after(delay_s):
                    await self._stopping.wait()
                    return
                self.num_restarts += 1
                life = await self._run_child(lambda: self.on_event(self, "serves again"))
        finally:
            self._ended.set()

    async def _run_child(self, serving: Callable[[], None]) -> _Life:
        life = _Life(served_s=0.0)
        self._kill_reason = ""
        num_oom_kills_before = num_oom_kills()
        async with start_child(self.spec, self.fork) as child, anyio.create_task_group() as tasks:
            self.child = child
            try:
                facts: dict[str, Any] | None = None
                with anyio.move_on_after(self.start_timeout_s) as starting:
                    facts = await child.ready()
                    if facts is None:
                        await child.wait()
                if starting.cancelled_caught:
                    self._kill_child(child, f"did not start within {self.start_timeout_s:g} s")
                began_s = anyio.current_time()
                if facts is not None:
                    self.facts = facts
                    self.spec = replace(self.spec, environment={**self.spec.environment, **self.pin(facts)})
                    self.is_coming = False
                    serving()
                    tasks.start_soon(self._watch, child)
                returncode = await child.wait()
                by_kernel = returncode == -signal.SIGKILL and num_oom_kills() > num_oom_kills_before
                how = describe_oom(memory_limit_bytes()) if by_kernel else describe_exit(returncode)
                life = _Life(
                    served_s=0.0 if facts is None else anyio.current_time() - began_s,
                    pid=child.pid,
                    returncode=returncode,
                    how=f"{how} by its supervisor: it {self._kill_reason}" if self._kill_reason else how,
                    last_words=child.last_words(),
                )
                tasks.cancel_scope.cancel()
            finally:
                self.child = None
        return life

    async def _watch(self, child: Child) -> None:
        """Kill the child once ``NUM_PROBES`` probes in a row, spread over ``hang_s``, had no answer.

        Return then, or once the supervisor is stopping: a draining child is not killed here.
        """
        num_silent = 0
        while not self._stopping.is_set():  # a draining child takes no new connections
            answered = False
            with anyio.move_on_after(self.hang_s / NUM_PROBES) as turn:
                answered = await self.answers(self.facts)
            num_silent = 0 if answered else num_silent + 1
            if num_silent == NUM_PROBES and not self._stopping.is_set():
                self._kill_child(child, f"has not answered for {self.hang_s:g} s")
                return
            await anyio.sleep_until(turn.deadline)

    def _kill_child(self, child: Child, reason: str) -> None:
        self._kill_reason = reason
        self.on_event(self, f"{reason} and is killed")
        child.send_signal(signal.SIGKILL)

    async def restart(self, drain_s: float) -> None:
        """Let the child drain, end and be started again. Return once it has ended; at once if it is not running.

        After ``drain_s`` it is told to end running requests, and after `END_S` more it is killed.
        """
        child = self.child
        if child is None:
            return  # already being started again
        for number, limit_s in ((signal.SIGTERM, drain_s), (signal.SIGTERM, END_S), (signal.SIGKILL, None)):
            child.send_signal(number)
            with anyio.move_on_after(limit_s):
                await child.wait()
                return

    async def stop(self, drain_s: float) -> None:
        """Let the child drain, after ``drain_s`` tell it to end running requests, and return once it has ended.

        A child that does not end within `END_S` is killed.
        """
        if not self._stopping.is_set():  # a second signal would end running requests
            self._stopping.set()
            self._signal(signal.SIGTERM)
        if await self._ends_within(drain_s):
            return
        self.on_event(self, f"did not drain within {drain_s:.3g} s: its last requests are ended")
        self._signal(signal.SIGTERM)
        if await self._ends_within(END_S):
            return
        self.on_event(self, "did not end and is killed")
        self.kill()
        await self._ended.wait()

    async def _ends_within(self, limit_s: float) -> bool:
        with anyio.move_on_after(limit_s):
            await self._ended.wait()
        return self._ended.is_set()

    def _signal(self, number: signal.Signals) -> None:
        if self.child is not None:
            self.child.send_signal(number)

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _start_failure(self, life: _Life) -> StartFailed:
        if life.returncode == EXIT_CONFIG and life.last_words:
            return StartFailed("\n".join(f"{self.name}: {words}" for words in life.last_words), EXIT_CONFIG)
        why = " ".join(life.last_words) or self._last_line()
        quoted = f": {why}" if why else ""
        return StartFailed(f"{self.name} did not start: it {life.how}{quoted}\n(the log is {self.spec.log_file})")

    def _last_line(self) -> str:
        """Return the log's last line that is no event, such as the words of a process that crashed; may be empty."""
        try:
            lines = self.spec.log_file.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        plain = [line.strip() for line in lines if line.strip() and not line.startswith("{")]
        return plain[-1][:_MAX_LINE] if plain else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The processes to run. Callbacks take the names of the specs, and the facts that services announced."""

    scheduler: ChildSpec
    #: Returns the specs of gateways and workers, given the scheduler's announced facts.
    others: Callable[[Mapping[str, Any]], tuple[Sequence[ChildSpec], Sequence[ChildSpec]]]
    #: Prefix of the workers' ids; empty if no id is configured.
    name_prefix: str
    #: Returns the spec of a wanted instance in a mesh of this many workers.
    worker: Callable[[PoolMember, int], ChildSpec]
    #: Returns a worker's spec for its next start in a mesh of this many workers.
    resized: Callable[[ChildSpec, int], ChildSpec]
    pin: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
    #: Returns whether the service of that name answers at its health endpoint. The caller has a deadline.
    answers: Callable[[str, Mapping[str, Any]], Awaitable[bool]]
    #: Returns when the gateway can serve a request.
    wait_ready: Callable[[Mapping[str, Any]], Awaitable[None]]
    #: Called every `TEND_S`: for growing logs, and a record that could not be written.
    tend: Callable[[], Awaitable[None]]
    start_timeout_s: float
    hang_s: float
    #: Returns for how long requests may continue, once the mesh is told to stop.
    drain_s: Callable[[], float]
    #: Called as the mesh begins to drain, so that no new connections come.
    close: Callable[[], None]
    #: Reports the processes to the scheduler, and waits for its wishes; returns None if it does not answer.
    follow: Callable[[FollowPools], Awaitable[PoolsDesired | None]]
    #: Spec of the process that forks workers, if there is one.
    fork_server: ChildSpec | None = None


class Supervisor:
    """Runner of one mesh, from its start until it is drained."""

    def __init__(
        self,
        plan: MeshPlan,
        *,
        act: Callable[[Supervisor, anyio.abc.TaskGroup], Coroutine[Any, Any, None]],
        on_change: Callable[[Supervisor], None],
        say: Callable[[str], None],
    ) -> None:
        """``act`` runs beside the started mesh until it is told to stop; children that it adds live in its tasks."""
        self._plan = plan
        self._act = act
        self._on_change = on_change
        self._say = say
        self.services: list[Service] = []
        self.ready = False
        self._fork_server = (
            None
            if plan.fork_server is None
            else ForkServer(plan.fork_server, start_timeout_s=plan.start_timeout_s, say=say)
        )
        self._stop = anyio.Event()
        self._changed = anyio.Event()
        self.ended: deque[EndedProcess] = deque(maxlen=MAX_ENDED)

    @property
    def plan(self) -> MeshPlan:
        return self._plan

    @property
    def workers(self) -> list[Service]:
        return [service for service in self.services if not self.is_control(service)]

    def kind(self, service: Service) -> ProcessKind:
        """Return the kind of a service's process."""
        if service.name == self._plan.scheduler.name:
            return ProcessKind.SCHEDULER
        return ProcessKind.GATEWAY if is_gateway(service.name) else ProcessKind.INSTANCE

    def is_control(self, service: Service) -> bool:
        """Return whether a service is the scheduler or a gateway."""
        return self.kind(service) is not ProcessKind.INSTANCE

    @property
    def changed(self) -> anyio.Event:
        """Event that is set at the next change of a service."""
        return self._changed

    def say(self, what: str) -> None:
        self._say(what)

    def facts(self, name: str) -> Mapping[str, Any]:
        return next((service.facts for service in self.services if service.name == name), {})

    async def run(self) -> None:
        """Run the mesh until it is stopped and drained. Raise StartFailed if a child does not start."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_signals)
                if self._fork_server is not None:
                    tasks.start_soon(self._fork_server.run)
                tasks.start_soon(self._tend)
                try:
                    await self._start(tasks)
                    async with anyio.create_task_group() as acting:
                        acting.start_soon(self._act, self, tasks)
                        await self._stop.wait()
                        acting.cancel_scope.cancel()
                    await self._drain()
                finally:
                    tasks.cancel_scope.cancel()
        except* StartFailed as group:
            failures = [leaf for leaf in leaves(group) if isinstance(leaf, StartFailed)]
            # A wrong configuration is the cause; other failures may be its effects.
            failure = max(failures, key=lambda failure: failure.exit_code)
        else:
            return
        raise failure

    async def _start(self, tasks: anyio.abc.TaskGroup) -> None:
        async with anyio.create_task_group() as starting:

            async def cancel_when_stopped() -> None:
                await self._stop.wait()
                starting.cancel_scope.cancel()

            starting.start_soon(cancel_when_stopped)
            scheduler = await self.add(tasks, self._plan.scheduler)
            (gateway, *gateways), workers = self._plan.others(scheduler.facts)
            async with anyio.create_task_group() as together:
                for spec in (gateway, *workers):
                    together.start_soon(self.add, tasks, spec)
            pinned = self._plan.pin(gateway.name, self.facts(gateway.name))  # ports that all share
            async with anyio.create_task_group() as together:
                for spec in gateways:
                    shared = replace(spec, environment={**spec.environment, **pinned})
                    together.start_soon(self.add, tasks, shared)
            try:
                with anyio.fail_after(self._plan.start_timeout_s):
                    await self._plan.wait_ready(self.facts(gateway.name))
            except TimeoutError as error:
                raise StartFailed(f"no request could be served within {self._plan.start_timeout_s:g} s") from error
            self.ready = True
            self._on_change(self)
            starting.cancel_scope.cancel()

    async def add(self, tasks: anyio.abc.TaskGroup, spec: ChildSpec) -> Service:
        """Keep a child running in ``tasks``, and return its service once it serves. Raises StartFailed."""
        service = Service(
            spec,
            lambda facts: self._plan.pin(spec.name, facts),
            lambda facts: self._plan.answers(spec.name, facts),
            self._on_event,
            self._plan.start_timeout_s,
            self._plan.hang_s,
            None if self._fork_server is None else self._fork_server.fork,
            self.ended,
        )
        self.services.append(service)
        try:
            await tasks.start(service.run, name=spec.name)
        except BaseException:
            self.services.remove(service)  # ended, because `start` waits for that
            raise
        self.note_change()
        return service

    async def remove(self, service: Service, drain_s: float) -> None:
        """Let a child drain and end, and do not start it again."""
        await service.stop(drain_s)
        self.services.remove(service)
        self.note_change()

    def note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        self._on_change(self)

    def _on_event(self, service: Service, what: str) -> None:
        self._say(f"{service.name} {what}")
        self.note_change()

    async def _tend(self) -> None:
        while True:
            await anyio.sleep(TEND_S)
            await self._plan.tend()

    async def _drain(self) -> None:
        self._plan.close()

        deadline_s = anyio.current_time() + self._plan.drain_s()
        for kind in (ProcessKind.GATEWAY, ProcessKind.INSTANCE, ProcessKind.SCHEDULER):
            left_s = deadline_s - anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for service in self.services:
                    if self.kind(service) is kind:
                        limit_s = left_s if kind is ProcessKind.GATEWAY else max(left_s, MIN_DRAIN_S)
                        tasks.start_soon(service.stop, limit_s)

    async def _watch_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for _ in signals:
                if self._stop.is_set():
                    self._say("killing all services")
                    for service in self.services:
                        service.kill()
                else:
                    self._say("draining; press Ctrl-C again to kill")
                    self._stop.set()
