"""The longest context that clients are told of, while instances die, come back, and are taken away."""

from __future__ import annotations

from pdmesh.core.commands import Command, Reject
from pdmesh.core.events import InstanceJoined, InstanceLost, RequestArrived, Tick
from pdmesh.core.operator_events import OperationRequested, ResizeRequested
from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.model import InstanceId, InstanceProfile, RejectReason, Role
from pdmesh.operations import OperationId, OperationKind, PoolCounts
from pdmesh_scheduler.longest_context import LongestContext
from pdmesh_testing.core import CoreBench, a_report, a_request, named_profile

LIMIT = 16
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1", "decode-2")


class Mesh:
    """A core with instances that come and go, and how many ranges a context has that clients are told of."""

    def __init__(self, *names: str, limit: int = LIMIT) -> None:
        self.bench = CoreBench()
        self.limit = limit
        self.profiles: dict[InstanceId, InstanceProfile] = {}
        self.longest = LongestContext(self.bench.core, lambda: self.bench.now_s)
        for name in names:
            self.join(name)
        self.bench.feed(a_report(*names))

    @property
    def num_ranges(self) -> float:
        return self.longest.num_tokens(self.profiles) / LIMIT

    def join(self, name: str) -> None:
        profile = named_profile(name, max_kv_tokens=self.limit, max_model_len=1000 * LIMIT)
        self.profiles[profile.instance_id] = profile
        self.longest.joined(profile.instance_id)
        self.bench.feed(InstanceJoined(profile, ()))

    def lose(self, name: str) -> None:
        instance_id = InstanceId(name)
        self.longest.is_lost(instance_id)
        self.bench.feed(InstanceLost(instance_id))
        del self.profiles[instance_id]

    def ask(self, kind: OperationKind, name: str, role: Role | None = None) -> None:
        requested = OperationRequested(
            operation_id=OperationId(f"{kind}-{name}-{role}"),
            kind=kind,
            instance_id=InstanceId(name),
            timeout_s=10.0,
            role=role,
        )
        self.bench.feed(requested)


def test_without_a_limit_of_an_instance_it_is_the_instances_own() -> None:
    mesh = Mesh(*PREFILLS, *DECODES, limit=0)
    assert mesh.num_ranges == 1000
    assert Mesh().num_ranges == 0


def test_one_that_computes_a_prompt_holds_no_range_of_it() -> None:
    assert Mesh(*PREFILLS, *DECODES).num_ranges == 3
    assert Mesh("mixed-0", "mixed-1", "mixed-2").num_ranges == 2
    assert Mesh("mixed-0").num_ranges == 1


def test_one_that_died_is_waited_for_as_long_as_it_may_take_to_start() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.lose("decode-1")
    assert mesh.num_ranges == 3
    mesh.bench.now_s += COME_BACK_S - 1
    assert mesh.num_ranges == 3
    mesh.bench.now_s += 1
    assert mesh.num_ranges == 2
    mesh.join("decode-1")
    assert mesh.num_ranges == 3
    mesh.lose("decode-1")
    mesh.join("decode-1")
    assert mesh.num_ranges == 3, "it is not counted twice"


def test_one_that_is_restarted_is_waited_for() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.ask(OperationKind.RESTART, "decode-0")
    assert mesh.num_ranges == 3
    mesh.lose("decode-0")
    assert mesh.num_ranges == 3


def test_one_that_is_drained_is_not() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.ask(OperationKind.DRAIN, "decode-0")
    assert mesh.num_ranges == 2
    mesh.lose("decode-0")
    assert mesh.num_ranges == 2
    mesh.join("decode-0")
    assert mesh.num_ranges == 2, "it is still drained"
    mesh.ask(OperationKind.UNDRAIN, "decode-0")
    assert mesh.num_ranges == 3


def test_a_pool_that_shrinks_holds_less_at_once_and_as_much_as_before_once_it_grows() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    shrinks = ResizeRequested(
        operation_id=OperationId("x"), pools=PoolCounts(prefill=2, decode=2), timeout_s=10.0, start_timeout_s=10.0
    )
    mesh.bench.feed(shrinks)
    (leaves,) = mesh.bench.core.desired_processes("a").stop
    assert mesh.num_ranges == 2
    mesh.lose(leaves)
    mesh.bench.feed(a_report(*mesh.profiles))
    assert mesh.bench.operation("x").state == "done"
    assert mesh.num_ranges == 2
    mesh.join(leaves)
    assert mesh.num_ranges == 3, "somebody started it by hand"


def test_one_that_got_another_role_is_counted_by_it_also_once_it_died() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.ask(OperationKind.ROLE, "decode-0", Role.PREFILL)
    assert mesh.num_ranges == 2
    mesh.lose("decode-0")
    assert mesh.num_ranges == 2
    mesh.ask(OperationKind.ROLE, "prefill-0", Role.DECODE)
    assert mesh.num_ranges == 3


def resume(mesh: Mesh) -> None:
    """A request comes again that needs three ranges, one of which has no instance now."""
    mesh.bench.feed(RequestArrived(a_request("r", 2 * LIMIT + 1, 8, epoch=1, arrival_s=mesh.bench.now_s)))
    assert mesh.bench.core.num_parked == 1


def after(mesh: Mesh, seconds: float) -> list[Command]:
    """Let so much time pass in half a minute's steps, and return what refuses a request."""
    told: list[Command] = []
    for _ in range(int(seconds / 30)):
        mesh.bench.now_s += 30
        told += [each for each in mesh.bench.feed(Tick()) if isinstance(each, Reject)]
    return told


def test_a_resumed_request_waits_for_a_lost_instance_as_long_as_that_may_take_to_start() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.lose("decode-1")
    resume(mesh)
    assert after(mesh, COME_BACK_S - 30) == []
    mesh.join("decode-1")
    assert mesh.bench.core.num_waiting == 0, "it is served"


def test_a_resumed_request_whose_instance_does_not_come_back_is_refused() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    mesh.lose("decode-1")
    resume(mesh)
    (rejected,) = after(mesh, COME_BACK_S + 150)
    assert isinstance(rejected, Reject)
    assert rejected.reason is RejectReason.TOO_LONG
    assert "No remaining or expected instance can hold 33 prompt tokens and 8 output tokens" in rejected.message
    assert mesh.bench.core.num_waiting == 0


def test_a_resumed_request_does_not_wait_for_an_instance_that_left_its_pool() -> None:
    mesh = Mesh(*PREFILLS, *DECODES)
    shrinks = ResizeRequested(
        operation_id=OperationId("x"), pools=PoolCounts(prefill=2, decode=2), timeout_s=10.0, start_timeout_s=10.0
    )
    mesh.bench.feed(shrinks)
    (leaves,) = mesh.bench.core.desired_processes("a").stop
    mesh.lose(leaves)
    mesh.bench.feed(a_report(*mesh.profiles))
    resume(mesh)
    assert len(after(mesh, 150)) == 1
