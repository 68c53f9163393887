"""Runs a mesh as child processes of one supervisor: start in order, keep alive, drain in order.

The scheduler starts first, since all others dial it; the rest start together. A child that ends before it ever
served stops the start; one that served before is started again, after a delay that doubles with each failure. The
drain goes with the traffic: gateway (its streams end), workers (their residents end), scheduler.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.abc

from pdmesh.cli.processes import Child, ChildSpec, describe_exit, start_child
from pdmesh.errors import PdmeshError

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 15.0
#: A child that served this long has recovered: its next delay is the first one again.
STEADY_S = 60.0

EXIT_CONFIG = 2


class StartFailed(PdmeshError):
    """A service, or the whole mesh, cannot start. ``exit_code`` is what the command should exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Service:
    """Keeps one child running until it is stopped."""

    spec: ChildSpec
    #: Settings to keep over a restart, taken from what the child announced: the port that others dial.
    pin: Callable[[Mapping[str, Any]], Mapping[str, str]]
    on_event: Callable[[Service, str], None]
    start_timeout_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    child: Child | None = None
    _stopping: anyio.Event = field(default_factory=anyio.Event)
    _ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def name(self) -> str:
        return self.spec.name

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Start the child, say so when it serves, and start it again whenever it ends. Raises StartFailed."""
        try:
            returncode = await self._run_child(lambda: task_status.started())
            if not self.facts:
                raise self._start_failure(returncode)
            delay_s = FIRST_DELAY_S
            while not self._stopping.is_set():
                self.on_event(self, f"{describe_exit(returncode)}; starting it again in {delay_s:g} s")
                with anyio.move_on_after(delay_s):
                    await self._stopping.wait()
                    return
                began_s = anyio.current_time()
                returncode = await self._run_child(lambda: self.on_event(self, "serves again"))
                steady = anyio.current_time() - began_s > STEADY_S
                delay_s = FIRST_DELAY_S if steady else min(2 * delay_s, MAX_DELAY_S)
        finally:
            self._ended.set()

    async def _run_child(self, serving: Callable[[], None]) -> int:
        async with start_child(self.spec) as child:
            self.child = child
            try:
                facts: dict[str, Any] | None = None
                with anyio.move_on_after(self.start_timeout_s) as starting:
                    facts = await child.ready()
                if starting.cancelled_caught:
                    self.on_event(self, f"does not serve after {self.start_timeout_s:g} s and is killed")
                    child.send_signal(signal.SIGKILL)
                if facts is not None:
                    self.facts = facts
                    self.spec = replace(self.spec, environment={**self.spec.environment, **self.pin(facts)})
                    serving()
                return await child.wait()
            finally:
                self.child = None

    async def stop(self, drain_s: float) -> None:
        """Let the child drain, kill it after ``drain_s``, and return when it is gone."""
        self._stopping.set()
        if self.child is not None:
            self.child.send_signal(signal.SIGTERM)
        with anyio.move_on_after(drain_s):
            await self._ended.wait()
            return
        self.on_event(self, f"did not drain within {drain_s:g} s and is killed")
        self.kill()
        await self._ended.wait()

    def kill(self) -> None:
        self._stopping.set()
        if self.child is not None:
            self.child.send_signal(signal.SIGKILL)

    def _start_failure(self, returncode: int) -> StartFailed:
        if returncode == EXIT_CONFIG:
            return StartFailed(self._last_words() or f"{self.name}: {self._see_log()}", EXIT_CONFIG)
        return StartFailed(f"{self.name} {describe_exit(returncode)} before it served; {self._see_log()}")

    def _last_words(self) -> str:
        """The sentences a service writes to stderr when its configuration is wrong (`pdmesh.service`)."""
        lines = self.spec.log_file.read_text(errors="replace").splitlines()
        return "\n".join(line.removeprefix("pdmesh ") for line in lines if line.startswith("pdmesh "))

    def _see_log(self) -> str:
        return f"see {self.spec.log_file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What to run. The callbacks get the running services; their names are the specs' names."""

    scheduler: ChildSpec
    #: The gateway and the workers, given what the scheduler announced.
    others: Callable[[Mapping[str, Any]], tuple[ChildSpec, Sequence[ChildSpec]]]
    pin: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
    #: Returns when the gateway can serve a request.
    wait_ready: Callable[[Mapping[str, Any]], Awaitable[None]]
    start_timeout_s: float
    drain_s: float


class Supervisor:
    """Runs one mesh from start to drained."""

    def __init__(self, plan: MeshPlan, *, on_change: Callable[[Supervisor], None], say: Callable[[str], None]) -> None:
        self._plan = plan
        self._on_change = on_change
        self._say = say
        self.services: list[Service] = []
        self.ready = False
        self._stop = anyio.Event()

    def facts(self, name: str) -> Mapping[str, Any]:
        return next((service.facts for service in self.services if service.name == name), {})

    async def run(self) -> None:
        """Return when the mesh was stopped and is drained. Raises StartFailed."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_signals)
                try:
                    await self._start(tasks)
                    await self._stop.wait()
                    await self._drain()
                finally:
                    tasks.cancel_scope.cancel()
        except* StartFailed as group:
            failures = [leaf for leaf in _leaves(group) if isinstance(leaf, StartFailed)]
            # A wrong configuration is the cause; what else failed may be its effect.
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
            scheduler = await self._add(tasks, self._plan.scheduler)
            gateway, workers = self._plan.others(scheduler.facts)
            async with anyio.create_task_group() as together:
                for spec in (gateway, *workers):
                    together.start_soon(self._add, tasks, spec)
            try:
                with anyio.fail_after(self._plan.start_timeout_s):
                    await self._plan.wait_ready(self.facts(gateway.name))
            except TimeoutError as error:
                raise StartFailed(f"no request could be served within {self._plan.start_timeout_s:g} s") from error
            self.ready = True
            self._on_change(self)
            starting.cancel_scope.cancel()

    async def _add(self, tasks: anyio.abc.TaskGroup, spec: ChildSpec) -> Service:
        service = Service(
            spec,
            lambda facts: self._plan.pin(spec.name, facts),
            self._on_event,
            self._plan.start_timeout_s,
        )
        self.services.append(service)
        try:
            await tasks.start(service.run, name=spec.name)
        except BaseException:
            self.services.remove(service)  # it has ended: `start` waits for that
            raise
        self._on_change(self)
        return service

    def _on_event(self, service: Service, what: str) -> None:
        self._say(f"{service.name} {what}")
        self._on_change(self)

    async def _drain(self) -> None:
        def rank(service: Service) -> int:
            return {"gateway": 0, "scheduler": 2}.get(service.name, 1)

        for turn in range(3):
            async with anyio.create_task_group() as tasks:
                for service in self.services:
                    if rank(service) == turn:
                        tasks.start_soon(service.stop, self._plan.drain_s)

    async def _watch_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for _ in signals:
                if self._stop.is_set():
                    self._say("killing all services")
                    for service in self.services:
                        service.kill()
                else:
                    self._say("draining; once more to kill")
                    self._stop.set()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for nested in error.exceptions for leaf in _leaves(nested)]
