"""Operators' operations: an instance is drained, used again, or given another role, and nobody's stream breaks.

An operation is refused before it changes anything, or runs until nothing is left on the instance that has to leave it.
What decodes there moves to other instances with its KV, where there is room (`pdmesh.core.transfers.moves`). What is
still there at its time limit starts again elsewhere, under the next epoch and with the same tokens. An operator may
also move one request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from pdmesh.core.commands import SetRole, StopInstance
from pdmesh.core.instances.allocations import MOVES_AWAY, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import OperationRequested
from pdmesh.core.operators.judging import (
    COOL_DOWN_S,
    JUDGE_S,
    NUM_TO_JUDGE,
    Judge,
    Standing,
    has_enough_data,
    why_worse,
)
from pdmesh.core.operators.records import TAKEN_BACK, OperationRecord, OperationRecords, OperationState, OperationView
from pdmesh.core.requests import RequestState
from pdmesh.core.steps.placing import have_pair
from pdmesh.core.transfers.moves import Moves
from pdmesh.core.transfers.receivers import do_without
from pdmesh.core.transfers.transfer import Move
from pdmesh.model import InstanceId, OperationId, OperationKind, RequestId, RequestKey, Role

#: A process that was stopped is started again by then: a large model is loaded meanwhile.
COME_BACK_S = 600.0

#: What an instance may hold in its new role.
_STAYS: dict[Role, Collection[AllocationKind]] = {
    Role.PREFILL: MOVES_AWAY,
    Role.DECODE: (AllocationKind.LOCAL, AllocationKind.PROMISED, AllocationKind.RESIDENT),
    Role.MIXED: tuple(AllocationKind),
}


@dataclass(slots=True, eq=False, kw_only=True)
class _Operation(OperationRecord):
    wish: OperationRequested
    has_moved_all: bool = False  # what was left at its time limit
    stopped_pid: int | None = None  # of the process that was told to end
    back_by_s: float = inf  # then the next one has joined
    moving: tuple[RequestState, Move] | None = None  # of a move
    is_taken_back: bool = False
    role_before: Role | None = None  # of an instance that gets another one
    changed_s: float | None = None  # when it got that; it is judged from then on
    before: Standing | None = None  # how requests had fared by then

    @property
    def deadline_s(self) -> float:
        if self.changed_s is not None:
            return self.changed_s + JUDGE_S
        return self.back_by_s if self.has_moved_all else self.began_s + self.wish.timeout_s

    @property
    def wish_again(self) -> OperationRequested:
        return replace(self.wish, stopped_pid=self.stopped_pid, role_before=self.role_before)

    @classmethod
    def of(cls, wish: OperationRequested, now_s: float) -> _Operation:
        """One that begins now."""
        return cls(
            operation_id=wish.operation_id,
            kind=wish.kind,
            timeout_s=wish.timeout_s,
            began_s=now_s,
            instance_id=wish.instance_id,
            role=wish.role,
            request_id=wish.request_id,
            wish=wish,
            role_before=wish.role_before,
        )


class Operations:
    """Operations on instances, at most one each. What operators want outlives instances and schedulers."""

    def __init__(self, mesh: MeshState, moves: Moves, judge: Judge) -> None:
        self._mesh = mesh
        self._moves = moves
        self._moving: dict[OperationId, _Operation] = {}  # that move one request
        self._judge = judge
        self._taken_back_s: dict[InstanceId, float] = {}  # when a change of its role was
        self._operations: OperationRecords[_Operation] = OperationRecords()
        self._running: dict[InstanceId, _Operation] = {}
        #: The operations whose outcome still holds, by instance: what a new scheduler has to be told.
        self._drains: dict[InstanceId, OperationRequested] = {}
        self._roles: dict[InstanceId, OperationRequested] = {}
        #: Of any operation, or of what is wanted of instances: who looks on need not compare.
        self.num_changes = 0

    @property
    def views(self) -> list[OperationView]:
        return self._operations.views

    @property
    def wishes(self) -> list[OperationRequested]:
        """What operators want of the instances, in the order to ask for it again."""
        running = [operation.wish_again for operation in self._running.values()]
        return list(dict.fromkeys([*self._roles.values(), *self._drains.values(), *running]))

    @property
    def leaving(self) -> list[InstanceId]:
        """Instances that everything leaves that decodes there."""
        if not self._running and not self._drains:
            return []
        running = [name for name, operation in self._running.items() if self._empties(operation)]
        return list(dict.fromkeys((*self._drains, *running)))

    @staticmethod
    def _empties(operation: _Operation) -> bool:
        match operation.wish.kind:
            case OperationKind.DRAIN:
                return True
            case OperationKind.RESTART:
                return operation.stopped_pid is None
            case OperationKind.ROLE:
                return operation.wish.role is Role.PREFILL
            case OperationKind.UNDRAIN | OperationKind.MOVE | OperationKind.RESIZE | OperationKind.ROLLING:
                return False

    @property
    def next_deadline_s(self) -> float:
        if not self._running and not self._moving:
            return inf
        return min([operation.deadline_s for operation in (*self._running.values(), *self._moving.values())])

    def find(self, operation_id: OperationId) -> OperationView | None:
        operation = self._operations.get(operation_id)
        return None if operation is None else operation.view

    def running_on(self, instance_id: InstanceId) -> OperationView | None:
        operation = self._running.get(instance_id)
        return None if operation is None else operation.view

    # --- events ---

    def request(self, wish: OperationRequested, now_s: float) -> None:
        if wish.operation_id in self._operations:
            return  # asked again
        self.num_changes += 1
        operation = _Operation.of(wish, now_s)
        self._operations.add(operation)
        if wish.kind is OperationKind.MOVE:
            self._begin_move(operation, now_s)
            return
        refusal = None if wish.again else self._refusal(wish, now_s)
        if wish.kind in (OperationKind.RESIZE, OperationKind.ROLLING):
            refusal = "this operation is for the whole mesh, not for one instance"
        if refusal is not None:
            self._end(operation, OperationState.REFUSED, refusal, now_s)
            return
        there = self._mesh.instances.get(wish.instance_id)
        if there is not None and wish.pid not in (None, there.profile.pid) and wish.stopped_pid is None:
            self._end(operation, OperationState.DONE, "another process registered as this instance before", now_s)
            return
        before = self._running.get(wish.instance_id)
        if before is not None and before.wish.again:  # its outcome is kept, and holds when the instance comes
            self._end(before, OperationState.DONE, "", now_s)
        elif before is not None:
            instance = self._mesh.instances.get(wish.instance_id)
            if instance is not None and before.changed_s is None:
                self._restore(before, instance)
            self._end(before, OperationState.CANCELLED, f"{wish.kind} came after it", now_s)
        if wish.kind is OperationKind.UNDRAIN:
            self._drains.pop(wish.instance_id, None)
        elif wish.again and wish.kind is OperationKind.DRAIN:
            self._drains[wish.instance_id] = wish
        elif wish.again and wish.kind is OperationKind.ROLE:
            self._roles[wish.instance_id] = wish
        if wish.stopped_pid is not None:
            self._stops(operation, wish.stopped_pid, now_s)
        self._running[wish.instance_id] = operation
        self._begin(operation, now_s)

    def cancel(self, operation_id: OperationId, now_s: float) -> None:
        """Use the instance as before; nothing happens if the operation is over, or is not known."""
        operation = self._operations.get(operation_id)
        if operation is None or not operation.is_running:
            self._mesh.ignore("OperationCancelled")
            return
        if operation.moving is not None:
            self._moves.cancel(operation.moving[0])
            operation.is_taken_back = True
            return  # it may have landed all the same
        if instance := self._mesh.instances.get(operation.wish.instance_id):
            self._restore(operation, instance)
        self._end(operation, OperationState.CANCELLED, TAKEN_BACK, now_s)

    def forget(self, instance_id: InstanceId) -> None:
        """What was wanted of it: the next one under its name is another one."""
        self.num_changes += bool(self._drains.pop(instance_id, None)) + bool(self._roles.pop(instance_id, None))

    def use_again(self, instance: InstanceState) -> None:
        """Use an instance again that was drained; an operation that drains or restarts it now goes on."""
        self._drains.pop(instance.instance_id, None)
        running = self._running.get(instance.instance_id)
        instance.set_closed(running is not None and running.wish.kind in (OperationKind.DRAIN, OperationKind.RESTART))
        self._mesh.queue.unpark()
        self.num_changes += 1

    def joined(self, instance_id: InstanceId, now_s: float) -> None:
        """An instance came (back): what was wanted of it still is."""
        instance = self._mesh.instances[instance_id]
        if (wish := self._roles.get(instance_id)) and wish.role is not None:
            self._set_role(instance, wish.role)
        if instance_id in self._drains:
            instance.set_closed(True)
        if (operation := self._running.get(instance_id)) is None:
            return
        if operation.changed_s is not None:
            return  # it goes on being judged
        replaced = operation.wish.pid if operation.stopped_pid is None else operation.stopped_pid
        if replaced not in (None, instance.profile.pid):
            self._end(operation, OperationState.DONE, "", now_s)
        elif operation.stopped_pid is None:
            self._begin(operation, now_s)
        else:
            self._stop(operation, instance, now_s)

    def lost(self, instance_id: InstanceId, now_s: float) -> None:
        """Handle an instance that is gone and holds nothing: its drain is done."""
        operation = self._running.get(instance_id)
        if operation is not None and operation.wish.kind is OperationKind.DRAIN:
            self._drained(operation, "the instance is gone", now_s)

    def advance(self, now_s: float) -> None:
        """Look what has left the instances since; after any event."""
        if not self._running and not self._moving:
            return
        for operation in list(self._moving.values()):
            self._look_at_move(operation, now_s)
        for operation in list(self._running.values()):
            instance = self._mesh.instances.get(operation.wish.instance_id)
            if instance is None:
                if operation.deadline_s <= now_s:
                    self._end(operation, OperationState.FAILED, "the instance did not come back", now_s)
                continue
            if operation.changed_s is not None:
                self._look_how_it_goes(operation, instance, now_s)
                continue
            if operation.stopped_pid is not None:
                if operation.deadline_s <= now_s:
                    instance.set_closed(instance.instance_id in self._drains)
                    self._end(operation, OperationState.FAILED, "its process did not end", now_s)
                continue
            if operation.deadline_s <= now_s:
                operation.has_moved_all = True
                for key in self._left(operation.wish, instance):
                    self._restart(key, instance)
            num_left = len(self._left(operation.wish, instance))
            self.num_changes += num_left != operation.num_left
            operation.num_left = num_left
            if not operation.num_left:
                self._complete(operation, instance, now_s)

    # --- what is asked for ---

    def _refusal(self, wish: OperationRequested, now_s: float) -> str | None:
        instances = self._mesh.instances
        instance = instances.get(wish.instance_id)
        if instance is None and wish.pid is None:
            known = ", ".join(sorted(instances)) or "none"
            return f"no instance {wish.instance_id!r} is there: there are {known}"
        running = self._running.get(wish.instance_id)
        if running is not None and wish.kind is not OperationKind.UNDRAIN:
            return (
                f"operation {running.wish.operation_id} ({running.wish.kind}) runs on {wish.instance_id}: wait for it, "
                f"or `pdmesh ops cancel {running.wish.operation_id}`"
            )
        if instance is None or wish.kind is OperationKind.UNDRAIN or wish.force:
            return None
        taken_back_s = self._taken_back_s.get(wish.instance_id)
        if wish.judged and taken_back_s is not None and now_s < taken_back_s + COOL_DOWN_S:
            return (
                f"a change of {wish.instance_id}'s role was taken back {now_s - taken_back_s:.0f} s ago since it made "
                f"things worse: wait until {COOL_DOWN_S:g} s have passed, or --force"
            )
        others = [other for other in instances.values() if other is not instance and other.is_usable]
        if wish.role in (Role.MIXED, instance.role):
            return None  # it goes on with all that it does
        if not have_pair(others) and (have_pair([instance, *others]) or wish.kind is OperationKind.ROLE):
            kind = "prefill and decode" if instance.role is Role.MIXED else str(instance.role)
            return (
                f"without {wish.instance_id} no request can be served: it is the last that can {kind}. Start another "
                "one first, or use --force: then new requests wait, and are refused in the end"
            )
        return None

    def _begin(self, operation: _Operation, now_s: float) -> None:
        """Begin an operation: nothing new goes to the instance, and what would be long in leaving leaves at once.

        One that gets another role takes on what that does from here on, while what it did leaves: it is never idle.
        """
        instance = self._mesh.instances.get(operation.wish.instance_id)
        if instance is None:
            operation.detail = "waits for the instance to come back"
            return
        operation.detail = ""
        wish = operation.wish
        if wish.role is not None:
            operation.role_before = operation.role_before or instance.role
            operation.before = operation.before or self._judge.before(now_s)
            self._set_role(instance, wish.role)
        elif wish.kind is not OperationKind.UNDRAIN:
            instance.set_closed(True)
        for key in self._left(wish, instance):
            if self._takes_longer(key, operation.deadline_s - now_s):
                self._restart(key, instance)

    @staticmethod
    def _left(wish: OperationRequested, instance: InstanceState) -> Sequence[RequestKey]:
        """What has to leave the instance."""
        if wish.kind is OperationKind.UNDRAIN:
            return ()
        stays = () if wish.role is None else _STAYS[wish.role]
        return [key for key, allocation in instance.allocations.items() if allocation.kind not in stays]

    def _takes_longer(self, key: RequestKey, limit_s: float) -> bool:
        """Whether what is left of its prompt is predicted to."""
        state = self._mesh.find(key)
        if state is None or not state.is_in_prefill:
            return False
        num_left = state.request.num_prompt_tokens - state.num_planned_tokens
        return state.work_us * num_left / state.request.num_prompt_tokens > 1e6 * limit_s

    def _restart(self, key: RequestKey, instance: InstanceState) -> None:
        state = self._mesh.find(key)
        if state is not None and state.needs(instance.instance_id):
            do_without(self._mesh, state, instance.instance_id, f"instance {instance.instance_id} is drained")

    # --- of one request ---

    def _begin_move(self, operation: _Operation, now_s: float) -> None:
        wish = operation.wish
        state = self._mesh.requests.get(RequestId(wish.request_id or ""))
        target = self._mesh.instances.get(wish.instance_id)
        if state is None or target is None:
            missing = (
                f"request {wish.request_id!r} runs" if state is None else f"instance {wish.instance_id!r} is there"
            )
            self._end(operation, OperationState.REFUSED, f"no {missing}", now_s)
        elif (why_not := self._moves.why_not(state, target)) is not None:
            self._end(operation, OperationState.REFUSED, f"request {wish.request_id} {why_not}", now_s)
        else:
            operation.moving, operation.num_left = (state, self._moves.begin(state, target)), 1
            self._moving[wish.operation_id] = operation

    def _look_at_move(self, operation: _Operation, now_s: float) -> None:
        assert operation.moving is not None
        state, move = operation.moving
        if self._mesh.find(state.key) is not state:
            self._end(
                operation, OperationState.FAILED, "the request ended, or started again, before it had moved", now_s
            )
        elif state.move is not move and state.decode_id == move.target_id:
            self._end(operation, OperationState.DONE, "", now_s)
        elif state.move is not move:
            outcome = OperationState.CANCELLED if operation.is_taken_back else OperationState.FAILED
            self._end(operation, outcome, f"the request stays on {state.decode_id}", now_s)
        elif operation.deadline_s <= now_s and not operation.has_moved_all:
            operation.has_moved_all = True
            self._moves.cancel(state)

    # --- the end of one ---

    def _complete(self, operation: _Operation, instance: InstanceState, now_s: float) -> None:
        wish = operation.wish
        match wish.kind:
            case OperationKind.DRAIN:
                self._drained(operation, "", now_s)
                return
            case OperationKind.RESTART:
                self._stop(operation, instance, now_s)
                return
            case OperationKind.UNDRAIN:
                self.use_again(instance)
            case OperationKind.ROLE:
                self._roles[wish.instance_id] = wish
                if wish.judged and operation.role_before is not wish.role:
                    operation.changed_s = now_s
                    operation.detail = f"judged by {NUM_TO_JUDGE} requests, or for {JUDGE_S:g} s"
                    self.num_changes += 1
                    return
            case OperationKind.RESIZE | OperationKind.ROLLING:
                pass  # of pools, not of an instance (`pdmesh.core.operators.pools`)
            case OperationKind.MOVE:
                raise AssertionError("a move ends with its request")
        self._end(operation, OperationState.DONE, "", now_s)

    def _stop(self, operation: _Operation, instance: InstanceState, now_s: float) -> None:
        instance.set_closed(True)
        self._mesh.commands.append(StopInstance(instance_id=instance.instance_id))
        self._stops(operation, instance.profile.pid, now_s)

    def _stops(self, operation: _Operation, pid: int, now_s: float) -> None:
        operation.stopped_pid, operation.has_moved_all, operation.back_by_s = pid, True, now_s + COME_BACK_S
        operation.detail = "its process is started again"
        self.num_changes += 1

    def _drained(self, operation: _Operation, detail: str, now_s: float) -> None:
        self._drains[operation.wish.instance_id] = operation.wish
        self._end(operation, OperationState.DONE, detail, now_s)

    def _look_how_it_goes(self, operation: _Operation, instance: InstanceState, now_s: float) -> None:
        """Take a change of roles back once it can be told that things are worse."""
        assert operation.changed_s is not None
        assert operation.before is not None
        after = self._judge.after(operation.changed_s)
        if not has_enough_data(after, operation.changed_s, now_s):
            return
        first = self._mesh.queue.first
        waiting = [*([] if first is None else [first]), *self._mesh.awaiting_decode.values()]
        longest_wait_s = max([state.waited_s(now_s) for state in waiting if not state.request.epoch], default=0.0)
        worse = why_worse(operation.before, after, longest_wait_s)
        if worse is None:
            self._end(operation, OperationState.DONE, "", now_s)
            return
        assert operation.role_before is not None
        self._taken_back_s[instance.instance_id] = now_s
        self._end(operation, OperationState.FAILED, f"taken back: {worse}", now_s)
        back = replace(
            operation.wish,
            operation_id=OperationId(f"{operation.wish.operation_id}/back"),
            role=operation.role_before,
            judged=False,
            force=True,
        )
        self.request(back, now_s)

    def _restore(self, operation: _Operation, instance: InstanceState) -> None:
        """The instance is used as before."""
        instance.set_closed(instance.instance_id in self._drains)
        if operation.role_before is not None:
            if operation.changed_s is not None:
                self._roles.pop(instance.instance_id, None)
            self._set_role(instance, operation.role_before)

    def _set_role(self, instance: InstanceState, role: Role) -> None:
        if instance.role is role:
            return
        instance.set_role(role)
        self._mesh.regroup()
        self._mesh.commands.append(SetRole(instance_id=instance.instance_id, role=role))
        self._mesh.queue.unpark()

    def _end(self, operation: _Operation, state: OperationState, detail: str, now_s: float) -> None:
        self.num_changes += 1
        operation.end(state, detail, now_s)
        operation.num_left = 0
        self._moving.pop(operation.wish.operation_id, None)
        if self._running.get(operation.wish.instance_id) is operation:
            del self._running[operation.wish.instance_id]

    def check_integrity(self) -> None:
        for instance_id, operation in self._running.items():
            assert operation.is_running, f"{instance_id}: {operation.wish.operation_id} is over"
        running = len(self._operations.running)
        counted = len(self._running) + len(self._moving)
        assert running == counted, f"{running} operations run, recorded: {counted}"
