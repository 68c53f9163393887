"""A restart of every process, one after the other: instances, gateways, the scheduler. Nobody's stream breaks.

It is an operation that consists of others, under ids that begin with its own. Beside the last instance of a kind
another one is started first, and leaves once that kind is done. What is still to be restarted is a list of processes,
so that nothing is restarted twice: whoever asks for a part again names the process that is to go. It goes on under the
next scheduler, which is the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import anyio

from pdmesh.core.events import InstanceJoined
from pdmesh.core.operator_events import (
    MAX_OPERATION_S,
    OperationCancelled,
    OperationRequested,
    ProcessesReported,
    ResizeRequested,
)
from pdmesh.core.operators.records import TAKEN_BACK, OperationRecord, OperationRecords, OperationState, OperationView
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile, OperationId, OperationKind, PoolCounts, Role
from pdmesh.policy.views import InstanceView
from pdmesh.ranges import Range
from pdmesh_scheduler.actuators import ActuatorDesk
from pdmesh_scheduler.driver import Driver
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.startup_grace import StartupGrace

#: How often it is looked whether a process that is replaced takes too long, if nothing else happens.
LOOK_S = 5.0

_ROLES = tuple(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldProcess:
    """One that is to be another one."""

    name: str
    pid: int
    is_instance: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is under way: a process ends, or (None) the pools get other sizes."""

    operation_id: OperationId
    restarts: OldProcess | None = None
    grows: Role | None = None  # else they shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingWish:
    """What was asked for, and what is left of it: all that the next scheduler has to know."""

    operation_id: OperationId
    timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    start_timeout_s: Annotated[float, Range(0, MAX_OPERATION_S)]
    force: bool = False
    began_at: float = 0.0  # Unix time, seconds
    left: tuple[OldProcess, ...] = ()  # still to be restarted, in this order
    beside: tuple[InstanceId, ...] = ()  # started for a while
    part: Part | None = None
    ends_as: OperationState | None = None  # it restarts nothing more: what was started beside leaves, and it is over
    why: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class _Rolling(OperationRecord):
    wish: RollingWish
    waits_since_s: float | None = None  # for an instance that is away


class RollingDesk:
    """Runs rolling restarts, at most one at a time. ``on_change`` is called when one has changed, or may go on.

    Implements `pdmesh_scheduler.observing.Observer`.
    """

    def __init__(
        self,
        core: SchedulerCore,
        actuators: ActuatorDesk,
        startup_grace: StartupGrace,
        *,
        clock: Callable[[], float],
        wall_time: Callable[[float], float],
    ) -> None:
        self._core = core
        self._actuators = actuators
        self._startup_grace = startup_grace
        self._clock = clock
        self._wall_time = wall_time
        self._rollings: OperationRecords[_Rolling] = OperationRecords()
        self._running: _Rolling | None = None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def views(self) -> list[OperationView]:
        return self._rollings.views

    @property
    def wish(self) -> RollingWish | None:
        """The one that runs, for the next scheduler."""
        return None if self._running is None else self._running.wish

    def observe(self, handled: Handled) -> None:
        if self._running is not None and isinstance(handled.event, InstanceJoined | ProcessesReported):
            self.on_change()  # it may have waited for it

    # --- what is asked for ---

    def request(self, wish: RollingWish, profiles: Sequence[InstanceProfile]) -> None:
        """Begin one, or refuse it before anything has changed."""
        if wish.operation_id in self._rollings:
            return  # asked again
        rolling = self._add(wish, self._clock())
        rolling.wish = replace(wish, began_at=self._wall_time(rolling.began_s), left=self._processes(profiles))
        rolling.num_left = len(rolling.wish.left)
        refusal = self._refusal(rolling, profiles)
        if refusal is None:
            self._running = rolling
            self.on_change()
        else:
            self._end(rolling, OperationState.REFUSED, refusal)

    def resume(self, wish: RollingWish) -> None:
        """Go on with what the scheduler before this one had begun."""
        now_s = self._clock()
        self._running = self._add(wish, now_s - max(0.0, self._wall_time(now_s) - wish.began_at))

    async def cancel(self, operation_id: OperationId, driver: Driver) -> bool:
        """Whether it is one of ours. The process that is being restarted is; what was started beside it leaves."""
        rolling = self._rollings.get(operation_id)
        if rolling is not None and rolling is self._running and rolling.wish.ends_as is None:
            part = rolling.wish.part
            rolling.detail = _both(TAKEN_BACK, rolling.detail)
            self._change(rolling, replace(rolling.wish, ends_as=OperationState.CANCELLED, why=TAKEN_BACK))
            if part is not None and part.grows is not None:
                await driver.act(OperationCancelled(part.operation_id))
        return rolling is not None

    def _add(self, wish: RollingWish, began_s: float) -> _Rolling:
        rolling = _Rolling(
            operation_id=wish.operation_id,
            kind=OperationKind.ROLLING,
            timeout_s=wish.timeout_s,
            began_s=began_s,
            num_left=len(wish.left),
            wish=wish,
        )
        self._rollings.add(rolling)
        return rolling

    def _processes(self, profiles: Sequence[InstanceProfile]) -> tuple[OldProcess, ...]:
        """All that there are, in their turn: the scheduler last, since the others dial it."""
        pids = {profile.instance_id: profile.pid for profile in profiles}
        views = sorted(self._core.instances, key=lambda view: (_ROLES.index(view.role), view.instance_id))
        instances = [OldProcess(name=each.instance_id, pid=pids[each.instance_id], is_instance=True) for each in views]
        beside = [
            OldProcess(name=each.name, pid=each.pid, is_instance=False)
            for each in sorted(self._actuators.services, key=lambda each: each.name)  # the scheduler is the last
            if self._actuators.takes(each.name) and each.pid
        ]
        return (*instances, *beside)

    def _refusal(self, rolling: _Rolling, profiles: Sequence[InstanceProfile]) -> str | None:
        wish, facts = rolling.wish, self._actuators.facts(profiles)
        resizes = [view for view in self._core.operations if view.kind is OperationKind.RESIZE]
        running = [] if self._running is None else [self._running.view]
        running += [view for view in resizes if view.state is OperationState.RUNNING]
        for other in running:
            return f"operation {other.operation_id} ({other.kind}) runs: wait for it"
        there = {view.instance_id: view for view in self._core.instances}
        if not there:
            return "no instance is there"
        away = [] if facts is None else [each for each in facts.instance_ids if each not in there]
        if away:
            return f"{', '.join(away)} is restarting: try again when it is back"
        last = next((view for view in there.values() if self._is_last(view)), None)
        if wish.force or last is None:
            return None
        if facts is None:
            rolling.needs_actuator = True
            return (
                f"without {last.instance_id} no request can be served, and no supervisor is connected to start "
                "another: start one first, or use --force"
            )
        if facts.instance_bytes > facts.available_bytes:
            return (
                f"another instance beside {last.instance_id} takes about {facts.instance_bytes / 2**30:.1f} GiB of "
                f"memory, and {facts.available_bytes / 2**30:.1f} GiB are free: free some, or --force"
            )
        return None

    def _is_last(self, view: InstanceView) -> bool:
        """Whether the mesh could not serve while the instance is away, and can now."""
        usable = [each for each in self._core.instances if not each.draining and each.reachable]
        others = [each for each in usable if each.instance_id != view.instance_id]
        return _sizes(usable).why_not is None and _sizes(others).why_not is not None

    # --- what becomes of it ---

    async def run(self, driver: Driver, changed: Callable[[], anyio.Event]) -> None:
        """Carry on with it at every change, until cancelled."""
        await self._startup_grace.wait()
        while True:
            change = changed()
            if self._running is not None:
                await self._advance(self._running, driver)
            is_patient = self._running is None and not self._actuators.wishes
            with anyio.move_on_after(None if is_patient else LOOK_S):
                await change.wait()
            self._actuators.expire()

    async def _advance(self, rolling: _Rolling, driver: Driver) -> None:
        """Take note of what is done, and ask for what comes next, as far as that goes at once."""
        while rolling.is_running:
            part = rolling.wish.part
            if part is None:
                part = self._next(rolling)
                if part is None:
                    state = rolling.wish.ends_as or OperationState.DONE
                    self._end(rolling, state, rolling.wish.why)
                    return
                self._change(rolling, replace(rolling.wish, part=part))
            if (view := self._find(part.operation_id)) is None:
                if part.grows is not None and rolling.wish.ends_as is not None:  # taken back before it was asked for
                    self._change(rolling, replace(rolling.wish, part=None))
                    continue
                if part.restarts is None and self._waits(rolling):
                    return
                await self._ask(rolling, part, driver)
                view = self._find(part.operation_id)
            if view is not None and view.state is OperationState.RUNNING:
                self._say(rolling, part, view)
                return
            self._note(rolling, part, view)

    def _waits(self, rolling: _Rolling) -> bool:
        """Whether somebody is away, or the actuator has not told of what it started: the pools cannot change then.

        Nobody is waited for longer than for a start.
        """
        there = {view.instance_id for view in self._core.instances}
        followed = self._actuators.instance_ids or ()
        away = [each for each in followed if each not in there]
        away += [each for each in rolling.wish.beside if each in there and each not in followed]
        if not away:
            rolling.waits_since_s = None
            return False
        rolling.waits_since_s = self._clock() if rolling.waits_since_s is None else rolling.waits_since_s
        self._tell(rolling, f"waits for {', '.join(away)} to come back")
        return self._clock() < rolling.waits_since_s + rolling.wish.start_timeout_s

    def _next(self, rolling: _Rolling) -> Part | None:
        """What is to be done next; None if nothing is left."""
        wish = rolling.wish
        views = {view.instance_id: view for view in self._core.instances}
        process = wish.left[0] if wish.left and wish.ends_as is None else None
        view = None if process is None else views.get(InstanceId(process.name))
        roles = {views[each].role for each in wish.beside if each in views}
        if wish.beside and (view is None or view.role not in roles):
            return Part(operation_id=self._name(wish, "fewer", wish.beside[0]))
        if process is None:
            return None
        if view is not None and not wish.force and self._is_last(view):
            return Part(operation_id=self._name(wish, "more", view.role), grows=view.role)
        return Part(operation_id=self._name(wish, process.name), restarts=process)

    @staticmethod
    def _name(wish: RollingWish, *parts: str) -> OperationId:
        return OperationId("/".join((wish.operation_id, *parts)))

    def _find(self, operation_id: OperationId) -> OperationView | None:
        views = (*self._core.operations, *self._actuators.views)
        return next((view for view in views if view.operation_id == operation_id), None)

    async def _ask(self, rolling: _Rolling, part: Part, driver: Driver) -> None:
        wish = rolling.wish
        if (process := part.restarts) is not None:
            restart = OperationRequested(
                operation_id=part.operation_id,
                kind=OperationKind.RESTART,
                instance_id=InstanceId(process.name),
                timeout_s=wish.timeout_s,
                force=wish.force,
                pid=process.pid,
            )
            if process.is_instance:
                await driver.act(restart)
            else:
                self._actuators.request(restart)
            return
        there = Counter(view.role for view in self._core.instances)
        if part.grows is None:
            there.subtract(view.role for view in self._core.instances if view.instance_id in wish.beside)
        else:
            there[part.grows] += 1
        await driver.act(
            ResizeRequested(
                operation_id=part.operation_id,
                pools=PoolCounts(**{str(role): max(0, there[role]) for role in Role}),
                timeout_s=wish.timeout_s,
                start_timeout_s=wish.start_timeout_s,
                actuator=self._actuators.facts(driver.profiles),
                leaves=() if part.grows else wish.beside,
            )
        )

    def _note(self, rolling: _Rolling, part: Part, view: OperationView | None) -> None:
        """A part of it is over; without a view it was never taken on."""
        wish = replace(rolling.wish, part=None)
        done = view is not None and view.state is OperationState.DONE
        if part.restarts is not None:
            if done:
                wish = replace(wish, left=tuple(each for each in wish.left if each != part.restarts))
        elif part.grows is None:
            wish = replace(wish, beside=())  # a failed one is not tried again
        elif done and (grown := self._core.resize_wish) is not None:
            wish = replace(wish, beside=tuple(member.instance_id for member in grown.starts))
        is_last = part.restarts is None and part.grows is None
        if not done and (is_last or wish.ends_as is None):  # what was taken back is over as it should be
            outcome = "not known" if view is None else f"{view.state}: {view.detail}"
            what = f"the restart of {part.restarts.name}" if part.restarts else "the change of the pools"
            why = f"{what} was {outcome}"
            if is_last:
                why += f"; {', '.join(rolling.wish.beside)} may be there besides: see `pdmesh pool resize`"
            wish = replace(wish, ends_as=OperationState.FAILED, why=_both(wish.why, why))
        self._change(rolling, wish)

    def _change(self, rolling: _Rolling, wish: RollingWish) -> None:
        if wish != rolling.wish:
            rolling.wish, rolling.num_left = wish, len(wish.left)
            self.on_change()

    def _say(self, rolling: _Rolling, part: Part, view: OperationView) -> None:
        if part.restarts is not None:
            detail = f"{part.restarts.name}: {view.detail or f'{view.num_left} requests leave it'}"
        elif part.grows is not None:
            detail = f"another one beside the last {part.grows} instance: {view.detail}"
        else:
            detail = f"no more need of another one: {view.detail}"
        self._tell(rolling, _both(rolling.wish.why, detail))

    def _tell(self, rolling: _Rolling, detail: str) -> None:
        if detail != rolling.detail:
            rolling.detail = detail
            self.on_change()

    def _end(self, rolling: _Rolling, state: OperationState, detail: str) -> None:
        rolling.end(state, detail, self._clock())
        if self._running is rolling:
            self._running = None
        self.on_change()


def _both(why: str, detail: str) -> str:
    return "; ".join(filter(None, (why, detail)))


def _sizes(instances: Sequence[InstanceView]) -> PoolCounts:
    counts = Counter(view.role for view in instances)
    return PoolCounts(**{str(role): counts[role] for role in Role})
