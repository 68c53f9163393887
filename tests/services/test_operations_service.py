"""Operators' operations over the wire: who may, what is kept for the next scheduler, and who waits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from pdmesh.apikeys import Operator, entry_of, hash_key
from pdmesh.config import MeshConfig, SecurityConfig
from pdmesh.core.commands import DesiredProcesses, SetRole
from pdmesh.core.operator_events import (
    BundleChangeRequested,
    FailedStart,
    OperationRequested,
    ResizeRequested,
    RollingRequested,
)
from pdmesh.errors import ConfigError
from pdmesh.model import InstanceId, Role
from pdmesh.operations import ManagedProcess, OperationId, OperationKind, PoolCounts, ProcessKind
from pdmesh.wire.endpoint import OPERATOR_METADATA
from pdmesh.wire.messages import (
    AdminError,
    AdminRequest,
    CancelOperation,
    CheckMesh,
    CloseSession,
    FollowPools,
    GetDecisions,
    GetPolicies,
    GetRequest,
    GetStatus,
    ListOperations,
    ListRequests,
    ListSessions,
    MeshStatus,
    OperationList,
    OperationStatus,
    Policies,
    PoolsDesired,
    SetBatching,
    SetPolicy,
    StartOperation,
    StartResize,
    StartRolling,
    WaitOperation,
)
from pdmesh_scheduler.admin_service import Admin, is_local
from pdmesh_scheduler.desired_file import read_desired
from pdmesh_scheduler.operator_tokens import Operators
from pdmesh_testing.core import a_report
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.running_scheduler import CONFIG as DEFAULTS
from pdmesh_testing.running_scheduler import running_scheduler

pytestmark = pytest.mark.anyio

#: Without an actuator, operations wait no longer than this after a start.
CONFIG = replace(DEFAULTS, scheduler=replace(DEFAULTS.scheduler, orphan_grace_s=0.05))
PREFILLS = [modelled_profile(name, Role.PREFILL) for name in ("p0", "p1")]
DECODE = modelled_profile("d0", Role.DECODE)


def asking(kind: OperationKind, instance: str, name: str = "x", role: Role | None = None) -> StartOperation:
    requested = OperationRequested(
        operation_id=OperationId(name), kind=kind, instance_id=InstanceId(instance), timeout_s=5.0, role=role
    )
    return StartOperation(requested=requested)


def kept_in(path: Path) -> MeshConfig:
    return replace(CONFIG, scheduler=replace(CONFIG.scheduler, operations_file=path))


async def test_a_role_is_changed_and_the_operation_can_be_looked_at() -> None:
    async with (
        running_scheduler(CONFIG) as mesh,
        mesh.worker(PREFILLS[0]),
        mesh.worker(DECODE),
        mesh.worker(PREFILLS[1]) as p1,
    ):
        done = await mesh.ask(asking(OperationKind.ROLE, "p1", role=Role.MIXED), OperationStatus)
        assert (done.state, done.num_left) == ("done", 0)
        assert (await p1.expect(SetRole)).role is Role.MIXED
        assert await mesh.ask(WaitOperation(operation_id=OperationId("x"), num_left=0, wait_s=1.0)) == done
        assert await mesh.ask(ListOperations()) == OperationList(operations=(done,))
        assert await mesh.ask(CancelOperation(operation_id=OperationId("x"))) == done, "it is over"


async def test_gateways_hear_at_once_of_a_shorter_context_when_an_instance_that_holds_ranges_is_drained() -> None:
    spread = [replace(each, max_kv_tokens=64) for each in (PREFILLS[0], DECODE, modelled_profile("d1", Role.DECODE))]
    async with (
        running_scheduler(CONFIG) as mesh,
        mesh.worker(spread[0]),
        mesh.worker(spread[1]),
        mesh.gateway() as g,
        mesh.worker(spread[2]),
    ):
        assert (await g.expect(MeshStatus)).max_model_len == 128
        await mesh.ask(asking(OperationKind.DRAIN, "d1"))
        assert (await g.expect(MeshStatus)).max_model_len == 64
        await mesh.ask(asking(OperationKind.UNDRAIN, "d1", "y"))
        assert (await g.expect(MeshStatus)).max_model_len == 128


async def test_who_waits_is_told_when_it_changes() -> None:
    async with running_scheduler(CONFIG) as mesh, mesh.worker(PREFILLS[0]), mesh.worker(DECODE):
        lost = asking(OperationKind.DRAIN, "nobody", "gone")
        refused = await mesh.ask(lost, OperationStatus)
        assert (refused.state, refused.detail) == ("refused", "no instance is called 'nobody': the mesh has d0, p0")
        refusal = await mesh.ask(asking(OperationKind.DRAIN, "p0"), OperationStatus)
        assert refusal.state == "refused"
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert status.ready
        assert isinstance(await mesh.ask(CancelOperation(operation_id=OperationId("none"))), AdminError)
        assert isinstance(await mesh.ask(asking(OperationKind.ROLE, "p0", "y")), AdminError), "without a role"
        assert isinstance(await mesh.ask(asking(OperationKind.DRAIN, "p0", "")), AdminError), "without an id"


async def test_changes_need_the_operators_token_where_there_is_one() -> None:
    security = SecurityConfig(operator_token="sesame")
    async with running_scheduler(replace(CONFIG, security=security)) as mesh:
        assert isinstance(await mesh.ask(GetPolicies()), Policies), "who has the mesh token may look"
        for token in ("", "wrong"):
            refusal = await mesh.ask(SetPolicy(bundle="fcfs"), AdminError, operator_token=token)
            assert "security.operator_token" in refusal.message
        before = await mesh.ask(GetPolicies(), Policies)
        assert before.bundle == "pdmesh"
        changed = await mesh.ask(SetPolicy(bundle="fcfs"), Policies, operator_token="sesame")
        assert changed.bundle == "fcfs", "answered once it is applied"


def entry(name: str, token: str, *scopes: str) -> str:
    return entry_of(Operator(name=name, hash=hash_key(token), scopes=frozenset(scopes)))


async def test_operators_have_tokens_and_scopes_of_their_own_and_changes_bear_their_names(tmp_path: Path) -> None:
    file = tmp_path / "operators.toml"
    file.write_text(entry("bob", "b", "read", "write") + entry("eve", "e", "read"))
    security = SecurityConfig(mesh_token="ours", operators_file=file)
    async with running_scheduler(replace(CONFIG, security=security)) as mesh:
        with capture_logs() as logs:
            for token in ("", "wrong"):
                stranger = await mesh.ask(GetPolicies(), AdminError, operator_token=token)
                assert "wrong mesh token" in stranger.message
            assert isinstance(await mesh.ask(GetPolicies(), operator_token="e"), Policies), "without the mesh token"
            refusal = await mesh.ask(SetPolicy(bundle="fcfs"), AdminError, operator_token="e")
            assert refusal.message.startswith("the operator 'eve' may not change the mesh")
            refusal = await mesh.ask(FOLLOWING, AdminError, operator_token="b")
            assert "it needs the mesh token" in refusal.message, "an operator does not start processes"
            assert isinstance(await mesh.ask(SetPolicy(bundle="fcfs"), operator_token="b"), Policies)
            inside = await mesh.ask(SetPolicy(bundle="sjf"), mesh_token="ours")
            assert isinstance(inside, AdminError), "a worker's token changes nothing"
            assert "an operator token" in inside.message
        audit = [(each["operator"], each["log_level"]) for each in logs if "operator" in each]
        assert audit == [("eve", "warning"), ("bob", "info"), ("", "warning")]


#: Every message to the Admin method, by who may say it.
ASKS: tuple[AdminRequest, ...] = (
    GetStatus(),
    CheckMesh(),
    GetRequest(request_id="x"),
    ListRequests(),
    ListSessions(),
    GetPolicies(),
    GetDecisions(),
    ListOperations(),
    WaitOperation(operation_id=OperationId("x"), num_left=0, wait_s=0.0),
)
CHANGES: tuple[AdminRequest, ...] = (
    SetPolicy(bundle="fcfs"),
    SetBatching(batching="mb"),
    asking(OperationKind.DRAIN, "nobody"),
    StartResize(operation_id=OperationId("r"), pools=PoolCounts(prefill=1, decode=1), timeout_s=1, start_timeout_s=1),
    StartRolling(operation_id=OperationId("s"), timeout_s=1, start_timeout_s=1),
    CancelOperation(operation_id=OperationId("x")),
    CloseSession(session="x"),
)


async def test_each_question_and_change_is_for_those_who_may_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh_scheduler.startup_grace.REGISTER_S", 0.0)  # none of those followed is there
    ours: tuple[AdminRequest, ...] = (FOLLOWING,)
    kinds = [type(question) for question in (*ASKS, *CHANGES, *ours)]
    assert sorted(kinds, key=str) == sorted(get_args(AdminRequest), key=str), "a new message needs a place above"
    file = tmp_path / "operators.toml"
    entries = {"w": ("write",), "rw": ("read", "write"), "r": ("read",), "none": ()}
    file.write_text("".join(entry(name, name, *scopes) for name, scopes in entries.items()))
    security = SecurityConfig(mesh_token="ours", operators_file=file)
    stranger, look, token, inside = (
        "wrong mesh token",
        "may not change the mesh",
        "changing the mesh needs",
        "only the mesh's own",
    )
    async with running_scheduler(replace(CONFIG, security=security)) as mesh:
        cases = (
            ("", "", (stranger, stranger, stranger)),
            ("wrong", "", (stranger, stranger, stranger)),
            ("none", "", (stranger, stranger, stranger)),
            ("r", "", ("", look, inside)),
            ("r", "ours", ("", look, "")),
            ("", "ours", ("", token, "")),
            ("w", "", ("", "", inside)),
            ("rw", "", ("", "", inside)),
        )
        for operator_token, mesh_token, reasons in cases:
            for questions, reason in zip((ASKS, CHANGES, ours), reasons, strict=True):
                for question in questions:
                    answer = await mesh.ask(question, operator_token=operator_token, mesh_token=mesh_token)
                    said = answer.message if isinstance(answer, AdminError) else ""
                    given = next((each for each in (stranger, look, token, inside) if each in said), "")
                    assert given == reason, (operator_token, mesh_token, question, said)


async def test_a_file_of_operators_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    security = SecurityConfig(operators_file=tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="operators_file"):
        Operators(security)


def test_operators_change_while_the_scheduler_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now_s = tmp_path / "operators.toml", 0.0
    file.write_text(entry("bob", "b", "read"))
    operators = Operators(SecurityConfig(operators_file=file, operator_token="one"), lambda: now_s)

    def who(token: str) -> str | None:
        found = operators.who({OPERATOR_METADATA: token.encode().hex()})
        return None if found is None else found.name

    assert [who(token) for token in ("b", "one", "e", "")] == ["bob", "operator_token", None, None]
    assert operators.who({OPERATOR_METADATA: "no hexadecimal digits"}) is None
    file.write_text(entry("eve", "e", "read", "write"))
    now_s += 2.0
    assert (who("b"), who("e")) == (None, "eve")
    file.write_text("nonsense")
    now_s += 2.0
    assert (who("b"), who("e")) == (None, "eve"), "a wrong file leaves them as they were"
    file.write_text(entry("bob", "b", "read"))

    def denied(*_arguments: object, **_options: object) -> str:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", denied)
        now_s += 2.0
        assert (who("b"), who("e")) == (None, "eve")
    file.chmod(0o600)
    now_s += 2.0
    assert (who("b"), who("e")) == ("bob", None), "it may be read now"


async def test_the_last_operator_who_leaves_the_file_may_do_nothing_and_nobody_else_may(tmp_path: Path) -> None:
    file, now_s = tmp_path / "operators.toml", 0.0
    file.write_text(entry("bob", "b", "read", "write"))
    operators = Operators(SecurityConfig(operators_file=file), lambda: now_s)
    bob = {OPERATOR_METADATA: b"b".hex()}
    assert operators.who(bob)
    file.write_text("# nobody\n")
    now_s += 2.0
    with capture_logs() as logs:
        assert operators.who(bob) is None
    assert [each["log_level"] for each in logs] == ["warning"]
    assert operators, "a token is needed as before"
    security = SecurityConfig(mesh_token="ours", operators_file=file)
    async with running_scheduler(replace(CONFIG, security=security)) as mesh:  # the next one starts all the same
        for token in ("b", ""):
            refusal = await mesh.ask(SetPolicy(bundle="fcfs"), operator_token=token, mesh_token="ours")
            assert isinstance(refusal, AdminError), "from this machine, too"
            assert "changing the mesh needs an operator token" in refusal.message


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("unix:", True),
        ("ipv4:10.0.0.7:5000", False),
        ("ipv6:%5Bfe80::1%5D:5000", False),
        ("ipv4:127.0.0.1.example:5000", False),
        ("", False),
    ],
)
def test_only_this_machine_is_local(peer: str, local: bool) -> None:
    assert is_local(peer) is local


@pytest.mark.parametrize("is_wide", [False, True])
def test_what_comes_from_this_machine_may_come_from_another_where_the_scheduler_listens_wide(is_wide: bool) -> None:
    """A forwarded port and a container beside it are this machine, too."""
    nothing: Any = None
    admin = Admin(
        driver=nothing,
        records=nothing,
        sessions=nothing,
        operations=nothing,
        actuators=nothing,
        startup_grace=nothing,
        operators=Operators(SecurityConfig()),
        mesh_token="ours",
        tenants=nothing,
        check=nothing,
        decisions=nothing,
        is_wide=is_wide,
    )
    refusal = admin._why_not(None, "ipv4:127.0.0.1:5000")
    assert (refusal is not None) is is_wide
    assert "needs an operator token" in (admin._why_not(None, "ipv4:10.0.0.7:5000") or "")


async def test_the_next_scheduler_knows_what_operators_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "state" / "operations.json"
    async with (
        running_scheduler(kept_in(path)) as mesh,
        mesh.worker(PREFILLS[0]),
        mesh.worker(PREFILLS[1]),
        mesh.worker(DECODE),
    ):
        await mesh.ask(SetPolicy(bundle="fcfs"))
        await mesh.ask(SetBatching(batching="ebplus"))
        await mesh.ask(asking(OperationKind.DRAIN, "p0"))
    assert len(read_desired(path, now=0.0, patience_s=0.0).operations) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    async with (
        running_scheduler(kept_in(path)) as mesh,
        mesh.worker(PREFILLS[0]),
        mesh.worker(PREFILLS[1]),
        mesh.worker(DECODE),
    ):
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert (status.bundle, status.batching) == ("fcfs", "ebplus")
        assert {row.instance_id: row.draining for row in status.instances} == {"p0": True, "p1": False, "d0": False}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", json.dumps({"operations": [{"kind": "explode"}]}).encode(), b"\xff"]
)
async def test_a_damaged_file_ends_no_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "operations.json"
    path.write_bytes(content)
    async with running_scheduler(kept_in(path)) as mesh:
        assert isinstance(await mesh.ask(GetPolicies()), Policies)


async def test_a_disk_that_takes_nothing_ends_no_operation(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with (
        running_scheduler(kept_in(blocked / "operations.json")) as mesh,
        mesh.worker(PREFILLS[0]),
        mesh.worker(PREFILLS[1]),
        mesh.worker(DECODE),
    ):
        done = await mesh.ask(asking(OperationKind.DRAIN, "p0"), OperationStatus)
        assert done.state == "done"


def following(
    *names: str, scheduler_pid: int = 1, revision: int = -1, wait_s: float = 0.0, **report: Any
) -> FollowPools:
    """A supervisor's question that keeps these instances, a gateway and the scheduler running."""
    said = a_report(*names, services={"scheduler": scheduler_pid, "gateway": 2})
    return FollowPools(report=replace(said, **report), revision=revision, wait_s=wait_s)


FOLLOWING = following("p0", "p1", "d0")


async def test_a_new_scheduler_refuses_nothing_for_those_whom_it_has_not_heard_of() -> None:
    """The last instance of a kind is one of two: the other one registers a moment later."""
    answers: list[OperationStatus] = []
    async with running_scheduler(CONFIG) as mesh, mesh.worker(PREFILLS[0]), mesh.worker(DECODE):
        await mesh.ask(FOLLOWING)

        async def drain() -> None:
            answer = await mesh.ask(asking(OperationKind.DRAIN, "p0"), OperationStatus)
            answers.append(answer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            await mesh.ask(GetStatus())
            await anyio.wait_all_tasks_blocked()
            async with mesh.worker(PREFILLS[1]):
                with anyio.fail_after(20):
                    while not answers:
                        await anyio.lowlevel.checkpoint()
    assert answers[0].state in ("running", "done"), answers[0].detail


def resizing(prefill: int, decode: int, name: str = "r") -> StartResize:
    pools = PoolCounts(prefill=prefill, decode=decode)
    return StartResize(operation_id=OperationId(name), pools=pools, timeout_s=5.0, start_timeout_s=5.0)


async def test_an_actuator_is_told_what_to_start_and_the_next_scheduler_tells_it_too(tmp_path: Path) -> None:
    path = tmp_path / "operations.json"
    async with running_scheduler(kept_in(path)) as mesh, mesh.worker(PREFILLS[0]), mesh.worker(DECODE):
        nobody = await mesh.ask(resizing(1, 2, "before"), OperationStatus)
        assert (nobody.state, nobody.needs_actuator) == ("refused", True)
        nothing = await mesh.ask(following("p0", "d0"), PoolsDesired)
        assert nothing.processes == DesiredProcesses()
        other = await mesh.ask(following("p0", "d0", actuator_id="b"))
        assert isinstance(other, AdminError), "there is one at a time"
        begun = await mesh.ask(resizing(1, 2), OperationStatus)
        assert (begun.state, begun.detail) == ("running", "decode-0 to start")
        wanted = await mesh.ask(following("p0", "d0", revision=nothing.revision, wait_s=4.0), PoolsDesired)
        assert [member.instance_id for member in wanted.processes.start] == ["decode-0"]
    async with running_scheduler(kept_in(path)) as mesh:
        wanted = await mesh.ask(FOLLOWING, PoolsDesired)
        assert [member.instance_id for member in wanted.processes.start] == ["decode-0"]
        status = await mesh.ask(GetStatus(), MeshStatus)
        assert status.pools == PoolCounts(prefill=1, decode=2)
        failed = FailedStart(instance_id=InstanceId("decode-0"), reason="no memory")
        await mesh.ask(following("p0", "p1", "d0", failed=(failed,)))
        over = await mesh.ask(WaitOperation(operation_id=OperationId("r"), num_left=0, wait_s=0.0), OperationStatus)
        assert (over.state, over.detail) == ("failed", "decode-0 could not be started: no memory")


async def test_a_service_is_replaced_by_the_actuator_also_past_the_end_of_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh_scheduler.startup_grace.REGISTER_S", 0.0)  # none of those followed is there
    path = tmp_path / "operations.json"
    async with running_scheduler(kept_in(path)) as mesh:
        refused = await mesh.ask(asking(OperationKind.RESTART, "gateway"), OperationStatus)
        assert refused.state == "refused", "nobody is there to do it"
        await mesh.ask(FOLLOWING)
        begun = await mesh.ask(asking(OperationKind.RESTART, "scheduler", "s"), OperationStatus)
        assert begun.state == "running"
        again = await mesh.ask(asking(OperationKind.RESTART, "scheduler", "t"), OperationStatus)
        assert (again.state, again.detail) == ("refused", "operation s (restart) runs on scheduler: wait for it")
        wanted = await mesh.ask(FOLLOWING, PoolsDesired)
        assert wanted.processes.replace == (ManagedProcess(name="scheduler", pid=1, kind=ProcessKind.SCHEDULER),)
    async with running_scheduler(kept_in(path)) as mesh:
        wanted = await mesh.ask(following("p0", "p1", "d0", scheduler_pid=9), PoolsDesired)
        assert wanted.processes.replace == ()
        over = await mesh.ask(WaitOperation(operation_id=OperationId("s"), num_left=0, wait_s=0.0), OperationStatus)
        assert over.state == "done"


async def test_what_the_version_before_kept_is_read(tmp_path: Path) -> None:
    """As a scheduler wrote it of which the rolling restart was no part of the core."""
    path = tmp_path / "operations.json"
    path.write_text(
        """{
  "bundle": "fcfs", "batching": null,
  "operations": [{"operation_id": "d", "kind": "drain", "instance_id": "p1", "timeout_s": 5.0, "role": null,
    "force": false, "again": false, "pid": null, "stopped_pid": null, "request_id": null, "judged": false,
    "role_before": null}],
  "pools": {"operation_id": "r", "pools": {"prefill": 1, "decode": 2, "mixed": 0}, "timeout_s": 5.0,
    "start_timeout_s": 5.0, "actuator": null, "again": true, "flips": [],
    "starts": [{"instance_id": "decode-1", "role": "decode"}], "leaves": []},
  "replacements": [{"operation_id": "x/gateway", "kind": "restart", "instance_id": "gateway", "timeout_s": 5.0,
    "role": null, "force": false, "again": false, "pid": 7, "stopped_pid": 7, "request_id": null, "judged": false,
    "role_before": null}],
  "rolling": {"operation_id": "x", "timeout_s": 5.0, "start_timeout_s": 20.0, "force": false, "began_at": 990.0,
    "left": [{"name": "gateway", "pid": 7, "is_instance": false}], "beside": [],
    "part": {"operation_id": "x/gateway", "restarts": {"name": "gateway", "pid": 7, "is_instance": false},
    "grows": null}, "ends_as": null, "why": ""}
}"""
    )
    desired = read_desired(path, now=1000.0, patience_s=3.0)
    bundle, drain, replacement, pools, rolling = desired.events()
    assert bundle == BundleChangeRequested("fcfs")
    assert isinstance(drain, OperationRequested)
    assert (drain.instance_id, drain.again, drain.of_service) == ("p1", True, False)
    assert isinstance(replacement, OperationRequested)
    assert (replacement.stopped_pid, replacement.again, replacement.of_service) == (7, True, True)
    assert isinstance(pools, ResizeRequested)
    assert [member.instance_id for member in pools.starts] == ["decode-1"]
    assert isinstance(rolling, RollingRequested)
    assert (rolling.age_s, rolling.patience_s, rolling.again) == (10.0, 3.0, True)
    assert rolling.part is not None
    assert rolling.part.restarts == rolling.left[0]
