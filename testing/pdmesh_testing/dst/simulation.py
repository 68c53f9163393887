"""A mesh of simulated processes: starts, stops and kills them, applies a plan's faults, and brings its requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from pdmesh.core.operator_events import BundleChangeRequested, OperationRequested
from pdmesh.errors import InstanceUnavailable
from pdmesh.model import InstanceId, RequestId, Role
from pdmesh.operations import OperationId, OperationKind
from pdmesh.service import ServiceContext
from pdmesh.worker.instance import Instance
from pdmesh_scheduler.driver import Driver
from pdmesh_testing.dst.clients import SimulatedClient
from pdmesh_testing.dst.data_plane import DataPlane
from pdmesh_testing.dst.laws import Laws
from pdmesh_testing.dst.network import Network
from pdmesh_testing.dst.nonsense import meddle
from pdmesh_testing.dst.plan import SCHEDULER, Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.process import Process, ProcessLoop
from pdmesh_testing.dst.services import Gateway, config_of, serve_gateway, serve_instance, serve_scheduler
from pdmesh_testing.dst.timeline import Timeline

#: Time limit of an operator's drain; then the remaining requests start again elsewhere.
DRAIN_S = 2.0

#: Interval at which an operator moves the decodes of an instance.
MOVE_EVERY_S = 0.02

Serve = Callable[[ServiceContext], Awaitable[None]]


class Simulation:
    """See the module's docstring. Everything here runs beside the processes, in none of them."""

    def __init__(
        self,
        plan: Plan,
        loop: ProcessLoop,
        network: Network,
        plane: DataPlane,
        rng: random.Random,
        laws: Laws,
        timeline: Timeline,
    ) -> None:
        self.plan = plan
        self.processes: dict[str, Process] = {}
        self.clients: list[SimulatedClient] = []
        self._loop = loop
        self._network = network
        self._plane = plane
        self._rng = rng
        self._laws = laws
        self._timeline = timeline
        self._contexts: dict[Process, ServiceContext] = {}
        self._tasks: dict[Process, list[asyncio.Task[None]]] = {}
        config = config_of(plan)
        self._serve: dict[str, Serve] = {SCHEDULER: partial(serve_scheduler, config)}
        for name in plan.gateways:
            self._serve[name] = partial(serve_gateway, config)
        self._is_over = False
        for name, role in zip(plan.instances, plan.roles, strict=True):
            self._serve[name] = partial(serve_instance, config, role=role, plan=plan, plane=plane, rng=rng)

    @property
    def now_s(self) -> float:
        return self._loop.agenda.now_s

    # --- processes ---

    def start(self, name: str) -> None:
        """Start a process, unless it runs, or all is over."""
        if name in self.processes or self._is_over:
            return
        process = Process(name, clock_offset_s=self.plan.clocks.get(name, 0.0))
        self.processes[name] = process
        self._contexts[process] = context = ServiceContext(ready_fd=None)
        self._timeline.note(name, "starts")
        task = self._loop.create_task(self._live(process, context), context=process.context())
        self._tasks[process] = [task]

    async def _live(self, process: Process, context: ServiceContext) -> None:
        """Run a process to its end. An end without a kill or a request to stop is a failure."""
        failure: BaseException | None = None
        try:
            await self._serve[process.name](context)
        except BaseException as error:
            failure = error
        if process.is_dead:
            return
        self._timeline.note(process.name, "ends" if failure is None else f"ends with {failure!r}")
        is_expected = (failure is None and context.stopping.is_set()) or _device_broke(process, failure)
        self._bury(process)
        if not is_expected:
            self._laws.on_failure(process, failure or RuntimeError("the service ended by itself"))
        if not context.stopping.is_set():
            self._later(0.2, partial(self.start, process.name))

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        self._timeline.note(name, "is killed")
        self._bury(process)
        if process.is_stopped:
            process.go_on(self._loop)
        for task in self._tasks[process]:
            task.cancel()

    def _bury(self, process: Process) -> None:
        process.is_dead = True
        self._network.died(process)
        del self.processes[process.name]
        for client in process.parts.get("clients", ()):
            client.lose_connection()

    def terminate(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            self._timeline.note(name, "is told to stop")
            process.context().run(self._contexts[process].stopping.set)

    @property
    def is_whole(self) -> bool:
        """Whether every process runs, and none was told to stop."""
        stopping = (self._contexts[process].stopping.is_set() for process in self.processes.values())
        return len(self.processes) == len(self._serve) and not any(stopping)

    # --- requests ---

    def ask(self, ask: Ask) -> SimulatedClient | None:
        """Let a client ask; None if its gateway is not there."""
        process = self.processes.get(ask.gateway)
        gateway: Gateway | None = None if process is None else process.parts.get("gateway")
        if process is None or gateway is None:
            return None
        client = SimulatedClient(f"c{len(self.clients)}", ask, self.plan.layout, self._timeline)
        self.clients.append(client)
        process.parts.setdefault("clients", []).append(client)
        task = self._loop.create_task(client.run(gateway), context=process.context())
        self._tasks[process].append(task)
        return client

    def bring(self, ask: Ask) -> None:
        """Send a request, like `ask`, whose client the simulation does not wait for."""
        self.ask(ask)

    # --- faults ---

    def begin(self, fault: Fault) -> None:
        """Begin a fault, and schedule its end."""
        self._timeline.note("FAULT", fault)
        process = self.processes.get(fault.target)
        match fault.kind:
            case FaultKind.KILL:
                self.kill(fault.target)
            case FaultKind.TERMINATE:
                self.terminate(fault.target)
            case FaultKind.STOP if process is not None:
                process.stop()
                self._network.stopped(process)
            case FaultKind.CUT:
                self._network.cut(
                    lambda c, s: fault.target in (c.name, s.name), "the connection was cut", fault.duration_s
                )
            case FaultKind.AWAY:
                pair = frozenset((fault.target, fault.other))
                self._network.weather.away[pair] = fault.end_s
                self._later(min(15.0, fault.duration_s + 1e-6), partial(self._lose_those_away, fault))
            case FaultKind.SLOW if process is not None:
                process.slowness = 10.0
            case FaultKind.FRAMES:
                self._network.weather.slow_share, self._network.weather.slow_s = 0.3, 1.0
            case FaultKind.PIECES:
                weather = self._plane.weather
                weather.lost_share, weather.damaged_share, weather.repeated_share = 0.1, 0.05, 0.3
                weather.slow_share, weather.slow_s = 0.3, 0.5
            case FaultKind.BREAK if process is not None and "engine" in process.parts:
                process.parts["engine"].breaks = True
            case FaultKind.DRAIN:
                self._ask_for(OperationKind.DRAIN, self._instance_id(fault.target))
            case FaultKind.MOVE:
                self._move(fault, self.now_s + fault.duration_s)
            case FaultKind.ROLE:
                self._ask_for(OperationKind.ROLE, self._instance_id(fault.target), role=Role(fault.other))
            case FaultKind.BUNDLE:
                self._operate(BundleChangeRequested(fault.other))
            case FaultKind.NONSENSE if process is not None:
                meddle(process, [other for other in self.processes.values() if other is not process])
            case _:
                # The target of the fault is gone.
                pass
        self._later(fault.duration_s, partial(self._end, fault, process))

    def _end(self, fault: Fault, process: Process | None) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.TERMINATE:
                self._start_again(fault.target)
            case FaultKind.BREAK:
                if process is not None and "engine" in process.parts:
                    process.parts["engine"].breaks = False
            case FaultKind.DRAIN | FaultKind.ROLE:
                self.restore(fault.target)
            case FaultKind.STOP if process is not None and process.is_stopped:
                self._timeline.note(process.name, "goes on")
                process.go_on(self._loop)
            case FaultKind.SLOW if process is not None:
                process.slowness = 1.0
            case FaultKind.FRAMES:
                self._network.weather.slow_share = 0.0
            case FaultKind.PIECES:
                weather = self._plane.weather
                weather.lost_share = weather.damaged_share = weather.repeated_share = weather.slow_share = 0.0
            case _:
                pass

    def _start_again(self, name: str) -> None:
        """Start a process again as a supervisor does, after it has stopped."""
        if name in self.processes and self._contexts[self.processes[name]].stopping.is_set():
            self._later(0.2, partial(self._start_again, name))
        else:
            self.start(name)

    def _lose_those_away(self, fault: Fault) -> None:
        """Break the streams between both ends of a fault that is long enough for keepalive to notice."""
        if fault.duration_s >= 15.0:
            pair = {fault.target, fault.other}
            self._network.cut(lambda c, s: {c.name, s.name} == pair, "keepalive: no answer", 1.0)

    def restore(self, name: str) -> None:
        """Give an instance the role that it was started with, and new work, if operators took these from it."""
        process = self.processes.get(name)
        instance: Instance | None = None if process is None else process.parts.get("instance")
        if process is None or instance is None or self._contexts[process].stopping.is_set():
            return
        role = self.plan.roles[self.plan.instances.index(name)]
        if instance.role is not role:
            self._ask_for(OperationKind.ROLE, instance.instance_id, role=role)
        scheduler = self.processes.get(SCHEDULER)
        driver: Driver | None = None if scheduler is None else scheduler.parts.get("driver")
        views = () if driver is None else driver._core.instances
        if any(view.draining for view in views if view.instance_id == instance.instance_id):
            self._ask_for(OperationKind.UNDRAIN, instance.instance_id)

    def _ask_for(
        self,
        kind: OperationKind,
        instance_id: InstanceId,
        *,
        request_id: RequestId | None = None,
        role: Role | None = None,
    ) -> None:
        """Ask for an operation with ``force``."""
        operation_id = OperationId(f"operation {self._rng.getrandbits(32):08x}")
        self._operate(
            OperationRequested(
                operation_id=operation_id,
                kind=kind,
                instance_id=instance_id,
                timeout_s=DRAIN_S,
                force=True,
                request_id=request_id,
                role=role,
            )
        )

    def _move(self, fault: Fault, until_s: float) -> None:
        """Ask, again and again while it lasts, for all that decodes on an instance to go on on another."""
        scheduler = self.processes.get(SCHEDULER)
        driver: Driver | None = None if scheduler is None else scheduler.parts.get("driver")
        source, target = self._instance_id(fault.target), self._instance_id(fault.other)
        for view in () if driver is None else driver._core.requests(100):
            if view.decodes and view.instance_ids[-1] == source != target:
                self._ask_for(OperationKind.MOVE, target, request_id=view.request_id)
        if self.now_s + MOVE_EVERY_S < until_s:
            self._later(MOVE_EVERY_S, partial(self._move, fault, until_s))

    def _operate(self, event: OperationRequested | BundleChangeRequested) -> None:
        scheduler = self.processes.get(SCHEDULER)
        if scheduler is not None and "driver" in scheduler.parts:
            scheduler.context().run(scheduler.parts["driver"].post, event)

    def _instance_id(self, name: str) -> InstanceId:
        process = self.processes.get(name)
        instance: Instance | None = None if process is None else process.parts.get("instance")
        return InstanceId("nobody") if instance is None else instance.instance_id

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._loop.agenda.at(self.now_s + delay_s, action)

    # --- the end ---

    async def shut_down(self) -> None:
        """Let every process end, however it is."""
        self._is_over = True
        for process in list(self.processes.values()):
            self.kill(process.name)
        tasks = [task for tasks in self._tasks.values() for task in tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=60.0)


def _device_broke(process: Process, failure: BaseException | None) -> bool:
    engine = process.parts.get("engine")
    return engine is not None and engine.broke and isinstance(failure, InstanceUnavailable)
