"""Role flips and a rolling restart of every process under load: does a stream break or differ, and what does it cost?

Usage: python benchmarks/operate.py [--flips N] [--streams N] [--gateways N] [--every-s S] [--no-restart] [--no-timings]
                                    [--costs TERMS]

A mesh of 2 prefill and 2 decode instances and two gateways serves so many streams of the `openai` client all the time,
greedy and seeded, each compared with an undisturbed one. One instance of each kind gets the other role and then its own
again, in turns, a flip every ``--every-s`` seconds; then `pdmesh restart --rolling` restarts instances, gateways and
the scheduler. Goodput is the tokens a second that clients get. Four flips lead back to the pools that there were, and
after every four of them the mesh is left alone for as long: *before* is what clients get then, *during* while there
are flips, so that a machine that is busier for a while is so for both.

With ``--costs`` the engine is the stand-in, whose steps take what that says (``a_s=0.01,b_s=0.001,decode_a_s=0.02``):
then processes do not compete for cores, and what a flip costs instances is seen.

Exit code 1 if a stream fails or differs, an operation fails, or, without ``--no-timings``, goodput during the flips is
below 0.9 of before.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdmesh.config import SecurityConfig
from pdmesh.core.operator_events import OperationRequested
from pdmesh.model import InstanceId, OperationId, OperationKind, Role
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import MAX_WAIT_S, OperationStatus, StartOperation, WaitOperation
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.load import StreamLoad, requests_of, running_load
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.timed import timed_mesh

LEAST_SHARE = 0.9

#: Instance, the role that it gets, for ever in turns.
FLIPS = (
    ("decode-1", Role.PREFILL),
    ("decode-1", Role.DECODE),
    ("prefill-1", Role.DECODE),
    ("prefill-1", Role.PREFILL),
)


class Span(NamedTuple):
    """On the clock of `time.monotonic`."""

    began_s: float
    ended_s: float


async def flip(mesh: RunningMesh, instance: str, role: Role) -> OperationStatus:
    """Ask for it, and wait until it is over."""
    security = SecurityConfig(mesh_token=mesh.record.mesh_token)
    requested = OperationRequested(
        operation_id=OperationId(secrets.token_hex(4)),
        kind=OperationKind.ROLE,
        instance_id=InstanceId(instance),
        timeout_s=1.0,
        role=role,
    )
    status = await ask_scheduler(mesh.record.scheduler_address, security, StartOperation(requested=requested))
    while isinstance(status, OperationStatus) and status.state == "running":
        question = WaitOperation(operation_id=requested.operation_id, num_left=status.num_left, wait_s=MAX_WAIT_S)
        status = await ask_scheduler(mesh.record.scheduler_address, security, question)
    assert isinstance(status, OperationStatus)
    return status


async def operate(mesh: RunningMesh, options: argparse.Namespace) -> list[str]:
    """Print what was seen; what is not as it should be."""
    requests = requests_of(5, [20, 45, 70, 130, 300], max_tokens=120)
    async with running_load(mesh.base_url, mesh.model, requests, at_once=options.streams) as load:
        await asyncio.sleep(3.0)
        wrong: list[str] = []
        took_s: defaultdict[str, list[float]] = defaultdict(list)
        still, busy = list[Span](), list[Span]()
        next_s = 0.0
        for number in range(options.flips):
            if number % len(FLIPS) == 0:
                still.append(await _left_alone(len(FLIPS) * options.every_s))
                next_s = time.monotonic()
            instance, role = FLIPS[number % len(FLIPS)]
            began_s = time.monotonic()
            status = await flip(mesh, instance, role)
            took_s[f"{instance} to {role}"].append(time.monotonic() - began_s)
            if status.state != "done":
                wrong.append(f"role {instance} {role}: {status.state}: {status.detail}")
            next_s += options.every_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            busy.append(Span(began_s, time.monotonic()))
        flipped_s = time.monotonic()
        restart_s = 0.0
        if not options.no_restart:
            before = mesh.pids()
            await asyncio.to_thread(mesh.pdmesh, "restart", "--rolling", "--timeout", "1")
            restart_s = time.monotonic() - flipped_s
            kept = set(before.values()) & set(mesh.pids().values())
            if kept or set(before) != set(mesh.pids()):
                wrong.append(f"not restarted: {kept}")
    before_per_s, during_per_s = (_per_s(load, spans) for spans in (still, busy))
    share = during_per_s / before_per_s
    for what, all_s in took_s.items():
        print(f"{what}: {len(all_s)} flips, median {1e3 * median(all_s):.0f} ms, the longest {1e3 * max(all_s):.0f} ms")
    print(f"rolling restart of {len(mesh.pids())} processes in {restart_s:.1f} s")
    print(f"goodput before {before_per_s:.0f}, during flips {during_per_s:.0f} tokens/s: {share:.2f} ({LEAST_SHARE})")
    _tell(load)
    wrong += ["streams failed"] * bool(load.failed) + ["streams differ"] * bool(load.differ)
    if not options.no_timings and share < LEAST_SHARE:
        wrong.append("goodput during flips")
    return wrong


async def _left_alone(for_s: float) -> Span:
    began_s = time.monotonic()
    await asyncio.sleep(for_s)
    return Span(began_s, time.monotonic())


def _per_s(load: StreamLoad, spans: Sequence[Span]) -> float:
    """Tokens a second."""
    num_tokens = sum(load.num_tokens(span.began_s, span.ended_s) for span in spans)
    return num_tokens / sum(span.ended_s - span.began_s for span in spans)


def _tell(load: StreamLoad) -> None:
    print(f"{len(load.streams)} streams: {len(load.failed)} failed, {len(load.differ)} differ")
    for why, number in Counter(load.failed + load.differ).most_common(10):
        print(f"  {number} x {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--streams", type=int, default=6, help="at once")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=1.0, help="between the beginnings of two flips")
    parser.add_argument("--costs", metavar="TERMS", help="of the stand-in engine's steps")
    parser.add_argument("--no-restart", action="store_true")
    parser.add_argument("--no-timings", action="store_true", help="on a busy machine: goodput is printed, not judged")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pools = {"prefill": 2, "decode": 2, "gateways": options.gateways}
        if options.costs is None:
            running = running_mesh(folder, model=write_checkpoint(folder / "model", seed=3), **pools)
        else:
            running = timed_mesh(folder, options.costs, max_num_seqs=32, **pools)
        with running as mesh:
            wrong = asyncio.run(operate(mesh, options))
    print(f"missed: {'; '.join(wrong)}" if wrong else "all limits kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
