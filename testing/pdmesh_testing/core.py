"""A scheduling core with its clock in hand, for tests that tell one story each."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pdmesh.core.commands import Command, ExpectCopy, Hold, RunStep, SetPlaces, Stop, StopCopy
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    Event,
    GatewayJoined,
    InstanceJoined,
    KvExpected,
    KvReleased,
    RequestArrived,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.operator_events import ActuatorReported, FailedStart, OperationRequested
from pdmesh.core.operators.operation_records import OperationRecord
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    Request,
    RequestId,
    Role,
    Then,
    TransferId,
)
from pdmesh.operations import ManagedProcess, OperationId, OperationKind, ProcessKind
from pdmesh.plans import ChunkDone, PrefillGroup, StepPlan
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.views import InstanceView
from pdmesh_testing.modelled import modelled_profile

CommandT = TypeVar("CommandT", bound=Command)

GATEWAY = GatewayId("g")


def a_request(
    request_id: str,
    prompt: int = 8,
    output: int = 4,
    *,
    epoch: int = 0,
    arrival_s: float = 0.0,
    arithmetic: str = "",
    weights: str = "",
) -> Request:
    return Request(
        request_id=RequestId(request_id),
        epoch=Epoch(epoch),
        gateway_id=GATEWAY,
        num_prompt_tokens=prompt,
        max_tokens=output,
        arrival_s=arrival_s,
        arithmetic=arithmetic,
        weights=weights,
    )


def a_role(instance_id: str, role: Role, operation_id: str = "role") -> OperationRequested:
    """Return an operator's request to change an instance's role with ``force``, within 60 s."""
    return OperationRequested(
        operation_id=OperationId(operation_id),
        kind=OperationKind.ROLE,
        instance_id=InstanceId(instance_id),
        timeout_s=60.0,
        role=role,
        force=True,
    )


def a_report(
    *names: str,
    services: Mapping[str, int] | None = None,
    available_bytes: int = 1 << 40,
    failed: tuple[FailedStart, ...] = (),
    pids: Mapping[str, int] | None = None,
    outdated: Iterable[str] = (),
) -> ActuatorReported:
    """Return an actuator's report of the instances and the other services, with pids, that it keeps running."""
    instances = [ManagedProcess(name=name, pid=(pids or {}).get(name, 1)) for name in names]
    others = [
        ManagedProcess(name=name, pid=pid, kind=ProcessKind(name.partition("-")[0]))
        for name, pid in (services or {}).items()
    ]
    return ActuatorReported(
        actuator_id="a",
        processes=(*instances, *others),
        available_bytes=available_bytes,
        failed=failed,
        outdated=tuple(map(InstanceId, outdated)),
    )


def step_done(
    instance_id: str,
    plan: StepPlan,
    duration_s: float = 0.01,
    *,
    num_tokens: int | None = None,
    num_decodes: int = 0,
    **more: Any,
) -> StepDone:
    """Report all of ``plan``, or ``num_tokens`` of each of its chunks."""
    chunks = tuple(
        ChunkDone(
            request_id=chunk.request_id,
            epoch=chunk.epoch,
            num_tokens=chunk.num_tokens if num_tokens is None else num_tokens,
            is_last=chunk.is_last,
        )
        for chunk in plan.chunks
    )
    return StepDone(InstanceId(instance_id), plan.plan_id, duration_s, chunks, num_decodes, **more)


def a_view(instance_id: str = "a", role: Role = Role.MIXED, **fields: Any) -> InstanceView:
    """Return the view of an empty instance, with ``fields`` replaced."""
    empty = InstanceView(
        instance_id=InstanceId(instance_id),
        role=role,
        num_blocks=64,
        num_free_blocks=64,
        num_virtual_blocks=0,
        num_seats_taken=0,
        max_num_seqs=8,
        num_prefilling=0,
        num_decoding=0,
        num_queued_tokens=0,
        draining=False,
    )
    return replace(empty, **fields)


def named_profile(name: str, **fields: Any) -> InstanceProfile:
    """Return the profile of an instance whose name begins with the first letter of its role: ``d0``, ``decode-0``."""
    role = next(role for role in Role if role.value[0] == name[0])
    return modelled_profile(name, role, **fields)


class FixedGrowth(Growth):
    """Growth with a constant mean. Set it on a core before instances join."""

    def __init__(self, mean_tokens: float, *, on_demand: bool = True, risk: float = 0.01) -> None:
        super().__init__(on_demand=on_demand, risk=risk)
        self.mean_tokens = mean_tokens

    def drew(self, num_tokens: int) -> bool:
        return False

    def ended(self, num_tokens: int) -> bool:
        return False


class CoreBench:
    """Feeds a core, checks its state after every event, and remembers its commands. Receivers confirm at once."""

    def __init__(self, *profiles: InstanceProfile, config: CoreConfig | None = None, chunk_tokens: int = 16) -> None:
        config = config or CoreConfig(policy=PolicyConfig(chunk_tokens=chunk_tokens))
        self.core = SchedulerCore(config, make_bundle("fcfs", config.policy), random.Random(0))
        self.now_s = 0.0
        self.commands: list[Command] = []
        # Latest transfer of each request.
        self.transfers: dict[str, TransferId] = {}
        self.feed(GatewayJoined(GATEWAY, ()))
        for profile in profiles:
            self.feed(InstanceJoined(profile, ()))

    def feed(self, event: Event, at_s: float | None = None) -> list[Command]:
        self.now_s = self.now_s if at_s is None else at_s
        commands = self.core.handle(event, self.now_s)
        self.core.check_integrity()
        for placed in of(ExpectCopy, commands):
            if placed.transfer.then is Then.KEEP:
                continue
            transfer_id = self.transfers[placed.request_id] = placed.transfer.transfer_id
            reserved = KvExpected(placed.instance_id, placed.request_id, placed.epoch, transfer_id)
            commands += self.core.handle(reserved, self.now_s)
            self.core.check_integrity()
        self.commands += commands
        return commands

    def arrive(self, request_id: str, prompt: int = 8, output: int = 4, *, epoch: int = 0) -> list[Command]:
        """Let a request arrive now."""
        return self.feed(RequestArrived(a_request(request_id, prompt, output, epoch=epoch, arrival_s=self.now_s)))

    def decoding(self, request_id: str) -> str:
        """Let a request arrive, be prefilled on one instance, and move to another. Return the decode instance."""
        commands = self.arrive(request_id)
        (place,), (step,) = of(ExpectCopy, commands), of(RunStep, commands)
        self.done(step.instance_id, step.plan)
        self.landed(place.instance_id, request_id)
        self.sent(step.instance_id, request_id)
        self.released(step.instance_id, request_id)
        return place.instance_id

    def operation(self, name: str) -> OperationRecord:
        """Return an operator's operation by id."""
        return next(view for view in self.core.operations if view.operation_id == name)

    def done(self, instance_id: str, plan: StepPlan) -> list[Command]:
        """Report that the instance completed ``plan``."""
        return self.feed(step_done(instance_id, plan))

    def finish(self, instance_id: str, request_id: str, epoch: int = 0, *, num_output_tokens: int = 1) -> list[Command]:
        """Report that the instance drew the last token of a request."""
        what = InstanceId(instance_id), RequestId(request_id), Epoch(epoch)
        return self.feed(RequestFinished(*what, FinishReason.LENGTH, num_output_tokens))

    def released(self, instance_id: str, request_id: str, epoch: int = 0) -> list[Command]:
        """Report that an instance released a request, for the transfer of its present allocation."""
        key = RequestId(request_id), Epoch(epoch)
        instance = self.core._mesh.instances.get(InstanceId(instance_id))
        allocation = None if instance is None else instance.allocations.get(key)
        transfer_id = NO_TRANSFER if allocation is None else allocation.transfer_id
        return self.feed(KvReleased(InstanceId(instance_id), *key, transfer_id))

    def offered(self, instance_id: str, request_id: str) -> list[Command]:
        return self.feed(TransferOffered(*self._transfer(instance_id, request_id)))

    def paused(self, instance_id: str, request_id: str) -> list[Command]:
        return self.feed(TransferPaused(*self._transfer(instance_id, request_id)))

    def landed(self, instance_id: str, request_id: str) -> list[Command]:
        return self.feed(TransferLanded(*self._transfer(instance_id, request_id), num_bytes=1, duration_s=0.1))

    def sent(self, instance_id: str, request_id: str) -> list[Command]:
        return self.feed(TransferSent(*self._transfer(instance_id, request_id), 1, 0.1, 0.0))

    def failed(self, instance_id: str, request_id: str, reason: str) -> list[Command]:
        return self.feed(TransferFailed(*self._transfer(instance_id, request_id), reason))

    def _transfer(self, instance_id: str, request_id: str) -> tuple[InstanceId, RequestId, Epoch, TransferId]:
        """Return the first fields of an instance's report of a transfer, in the first epoch."""
        return InstanceId(instance_id), RequestId(request_id), Epoch(0), self.transfers[request_id]

    def free_blocks(self, instance_id: str) -> int:
        return next(view.num_free_blocks for view in self.core.instances if view.instance_id == instance_id)


def of(command_type: type[CommandT], commands: Sequence[Command]) -> list[CommandT]:
    """Return the commands of one type."""
    return [command for command in commands if isinstance(command, command_type)]


def stopped(how: Stop, commands: Sequence[Command]) -> list[StopCopy]:
    """Return the commands that stop a transfer in this way."""
    return [command for command in of(StopCopy, commands) if command.how is how]


def grown(commands: Sequence[Command]) -> list[Hold]:
    """Return the commands that only give room."""
    return [command for command in of(Hold, commands) if not command.decodes]


def resumed(commands: Sequence[Command]) -> list[Hold]:
    """Return the commands that end a move."""
    return [command for command in of(Hold, commands) if command.ends_move]


def kept_here(commands: Sequence[Command]) -> list[Hold]:
    """Return the commands that let a prompt decode where it is computed."""
    return [command for command in of(Hold, commands) if command.decodes and not command.ends_move]


def regrouped(commands: Sequence[Command]) -> list[tuple[InstanceId, PrefillGroup]]:
    """Return the groups that their members are sent."""
    told = of(SetPlaces, commands)
    return [(each.instance_id, each.places) for each in told if isinstance(each.places, PrefillGroup)]


def bench_of(*names: str) -> CoreBench:
    """Return a bench of a core with these instances (`named_profile`)."""
    return CoreBench(*(named_profile(name) for name in names))
