"""Advice from a recorded run: what is known to be better is found, and nothing is proposed where nothing is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import MeshConfig
from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event
from pdmesh.core.operator_events import OperationRequested
from pdmesh.decisions import Decision, RecentDecisions, decode_decision
from pdmesh.errors import ConfigError
from pdmesh.eventlog import EventLogWriter, Header
from pdmesh.metrics import Slo
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationKind, PoolCounts
from pdmesh.policy.config import PolicyConfig
from pdmesh.wire.messages import InstanceStatus
from pdmesh_lab.cli.advise import advise, apply_advice, command_of, next_flip, read_log
from pdmesh_lab.cli.options import AdviceOptions
from pdmesh_lab.sim.advice import PoolForecast, Proposal, ranked, recent, splits, tpot_limit_s
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.recorded import recorded_run
from pdmesh_lab.sim.report import SimReport
from pdmesh_lab.sim.simulator import Core, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.recorded import RecordedCore
from pdmesh_testing.sim import TINY_LAYOUT, UNEVEN_MODEL

OPTIONS = AdviceOptions(slo_ttft_s=2.0)


def recorded(
    path: Path,
    num_prefill: int,
    num_decode: int,
    arrivals: list[Arrival],
    wrap: Callable[[RecordedCore], Core] = lambda core: core,
) -> Path:
    header = Header(
        seed=7,
        bundle="fcfs",
        config=CoreConfig(
            max_queue_s=1e6, refuses_early=False, policy=PolicyConfig(chunk_tokens=64, latency=UNEVEN_MODEL)
        ),
        started_at=0.0,
        started_s=0.0,
    )
    mesh = MeshShape(
        num_prefill=num_prefill, num_decode=num_decode, num_mixed=0, kv_layout=TINY_LAYOUT, num_kv_tokens=8192
    )
    with EventLogWriter(path, header) as log:
        Simulator(wrap(RecordedCore(header, log)), mesh.instances(UNEVEN_MODEL), arrivals).run()
    return path


def long_prompts(number: int = 60, every_s: float = 0.25) -> list[Arrival]:
    """Hardly anything to decode: what helps are prefill instances."""
    rng = random.Random(3)
    return [
        Arrival(arrival_s=index * every_s, num_prompt_tokens=rng.randrange(150, 250), num_output_tokens=3)
        for index in range(number)
    ]


def test_pools_that_are_known_to_be_better_are_found(tmp_path: Path) -> None:
    log = recorded(tmp_path / "log", 1, 3, long_prompts())
    advice = advise(read_log(log), OPTIONS, Output.JSON)
    assert advice.num_requests == 60
    assert advice.now.proposal.pools == PoolCounts(prefill=1, decode=3)
    assert advice.now.attainment == pytest.approx(advice.recorded.attainment, abs=0.05), "simulated as it was"
    best = advice.best
    assert best is not None
    assert best.attainment > advice.now.attainment + 0.2
    assert best.proposal.pools == PoolCounts(prefill=2, decode=2), "one role changes, and all are in time"
    assert best.attainment == max(each.attainment for each in advice.outlooks)
    after = recorded(tmp_path / "better", 3, 1, long_prompts())
    better = advise(read_log(after), OPTIONS, Output.JSON)
    told = next(each for each in advice.outlooks if each.proposal == better.now.proposal)
    assert better.recorded.attainment == pytest.approx(told.attainment, rel=0.15), "as foretold"


class Remembering:
    """A core whose decisions are kept in memory, too."""

    def __init__(self, core: RecordedCore, recent: RecentDecisions) -> None:
        self._core, self._recent = core, recent

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._core.handle(event, now_s)
        self._recent.record(now_s, event, commands)
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


def test_memory_gives_the_advice_that_the_log_gives(tmp_path: Path) -> None:
    recent = RecentDecisions("fcfs", 100_000)
    path = recorded(tmp_path / "log", 1, 3, long_prompts(), lambda core: Remembering(core, recent))
    log = read_log(path)
    decisions: list[Decision] = []
    start: int | None = 0
    while start is not None:
        page, start = recent.page(start)
        decisions += map(decode_decision, page)
    memory = replace(log, run=recorded_run(decisions))
    assert memory.run.arrivals == log.run.arrivals
    assert memory.run.steps == log.run.steps
    from_memory, from_log = (advise(each, OPTIONS, Output.JSON) for each in (memory, log))
    assert from_memory.best == from_log.best is not None


def foretold(pools: PoolCounts, attainment: float, tpot_s: float, bundle: str = "fcfs") -> PoolForecast:
    figures = SimpleNamespace(
        all=SimpleNamespace(
            slo_attainment=attainment, tpot_s=SimpleNamespace(p99=tpot_s), ttft_s=SimpleNamespace(p99=0.1)
        ),
        goodput_per_s=attainment,
    )
    return PoolForecast(Proposal(pools, bundle), cast(SimReport, figures))


def test_of_what_is_alike_the_least_change_is_first_and_what_makes_tokens_slow_is_last() -> None:
    now = foretold(PoolCounts(prefill=1, decode=3), 0.5, 0.02)
    one = foretold(PoolCounts(prefill=2, decode=2), 0.995, 0.021)
    two = foretold(PoolCounts(prefill=3, decode=1), 1.0, 0.03)
    other = foretold(PoolCounts(prefill=2, decode=2), 1.0, 0.02, "pdmesh")
    mixed = foretold(PoolCounts(prefill=0, decode=0, mixed=4), 1.0, 0.06)
    all_of_them = [mixed, two, other, one, now]
    limit_s = tpot_limit_s(now, Slo(ttft_s=1.0), [], 0.05)
    assert limit_s == 0.05, "what the policies go by"
    assert ranked(all_of_them, now, limit_s) == [one, two, other, now, mixed]
    slow = foretold(PoolCounts(prefill=1, decode=3), 0.5, 0.2)
    assert tpot_limit_s(slow, Slo(ttft_s=1.0), [], 0.05) == pytest.approx(0.22), "a slow machine keeps its pace"
    with_target = tpot_limit_s(now, Slo(ttft_s=1.0, tpot_s=0.05), [], 0.05)
    assert ranked(all_of_them, now, with_target)[-1] is now, "targets are counted in the share of requests in time"
    same = foretold(now.proposal.pools, 0.992, 0.02)
    assert ranked([one, two, same], same, limit_s)[0] is same, "of what is alike, what is there"


def test_nothing_is_proposed_where_nothing_is_better(tmp_path: Path) -> None:
    advice = advise(read_log(recorded(tmp_path / "log", 2, 2, long_prompts(every_s=3.0))), OPTIONS, Output.JSON)
    assert advice.now.attainment == 1.0
    assert advice.best is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (replace(OPTIONS, last_s=2.0), "9 requests finished in the last 2 s"),
        (replace(OPTIONS, slo_ttft_s=None), "the requests have no targets"),
    ],
)
def test_a_log_that_does_not_tell_enough_is_said(tmp_path: Path, options: AdviceOptions, reason: str) -> None:
    log = recorded(tmp_path / "log", 1, 1, long_prompts(30))
    with pytest.raises(ConfigError, match=reason):
        advise(read_log(log), options, Output.JSON)


def test_what_to_type_for_it(tmp_path: Path) -> None:
    advice = advise(read_log(recorded(tmp_path / "log", 1, 3, long_prompts())), OPTIONS, Output.JSON)
    now = advice.now.proposal
    other = now._replace(pools=PoolCounts(prefill=2, decode=2), bundle="sjf")
    assert command_of(now, other) == [
        "pdmesh pool resize --prefill 2 --decode 2 --mixed 0",
        "pdmesh policy set sjf",
    ]
    assert json.dumps(command_of(now, now)) == "[]"


def test_splits_are_all_ways_to_share_instances_out() -> None:
    assert [str(pools) for pools in splits(3)] == ["1 prefill + 2 decode", "2 prefill + 1 decode", "3 mixed"]
    assert [str(pools) for pools in splits(1)] == ["1 mixed"]
    assert all(pools.total == 100 for pools in splits(100))
    assert recent([], 1.0) == []


def row(name: str, *, num_decoding: int = 0, draining: bool = False) -> InstanceStatus:
    role = Role(name.partition("-")[0])
    return InstanceStatus(
        instance_id=InstanceId(name),
        role=role,
        model="m",
        device="cpu",
        pid=1,
        draining=draining,
        num_blocks=1,
        num_free_blocks=1,
        num_held_blocks=0,
        num_quarantined_blocks=0,
        num_prefilling=0,
        num_decoding=num_decoding,
        num_queued_tokens=0,
    )


def test_the_advice_is_followed_by_one_instance_at_a_time() -> None:
    there = [row("prefill-0"), row("decode-0", num_decoding=3), row("decode-1", num_decoding=1), row("decode-2")]
    wanted = PoolCounts(prefill=3, decode=1)
    assert next_flip(there, wanted) == ("decode-2", Role.PREFILL)
    there[3] = row("decode-2", draining=True)
    assert next_flip(there, wanted) == ("decode-1", Role.PREFILL), "one that is drained is left alone"
    assert next_flip(there, PoolCounts(prefill=1, decode=3)) is None, "it is there"


def test_advice_that_is_applied_asks_for_one_change_of_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(MeshConfig(), StateFolder("mesh", tmp_path), Output.TABLE)
    there = SimpleNamespace(instances=[row("prefill-0"), row("decode-0"), row("decode-1")])
    now = foretold(PoolCounts(prefill=1, decode=2), 0.5, 0.02)
    best = foretold(PoolCounts(prefill=2, decode=1), 0.9, 0.02)
    requests: list[OperationRequested] = []

    def start(_asked: object, requested: OperationRequested) -> int:
        requests.append(requested)
        return 1

    monkeypatch.setattr("pdmesh_lab.cli.advise.current_state", lambda *_: there)
    monkeypatch.setattr("pdmesh_lab.cli.advise.recording_of", lambda *_: None)
    monkeypatch.setattr("pdmesh_lab.cli.advise.advise", lambda *_, **__: SimpleNamespace(best=best, now=now))
    monkeypatch.setattr("pdmesh_lab.cli.advise.start", start)
    assert apply_advice(asked, OPTIONS, timeout_s=1.0) == 1
    (requested,) = requests
    assert (requested.kind, requested.instance_id) == (OperationKind.ROLE, "decode-0")
    assert (requested.role, requested.timeout_s) == (Role.PREFILL, 1.0)


def test_it_says_where_the_pools_are_as_advised_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is of the minutes before."""
    there = SimpleNamespace(instances=[row("prefill-0"), row("prefill-1"), row("decode-0")])
    better = foretold(PoolCounts(prefill=2, decode=1), 1.0, 0.02)
    monkeypatch.setattr("pdmesh_lab.cli.advise.current_state", lambda *_: there)
    monkeypatch.setattr("pdmesh_lab.cli.advise.recording_of", lambda *_: None)
    monkeypatch.setattr("pdmesh_lab.cli.advise.advise", lambda *_, **__: SimpleNamespace(best=better, now=better))
    said = "pdmesh: 2 prefill + 1 decode, the better pools, are already running\n"
    asked = Asked(MeshConfig(), StateFolder("mesh", tmp_path), Output.TABLE)
    assert apply_advice(asked, OPTIONS, timeout_s=1.0) == 0
    assert capsys.readouterr() == (said, "")
    assert apply_advice(replace(asked, output=Output.JSON), OPTIONS, timeout_s=1.0) == 0
    assert capsys.readouterr() == ("", said), "standard output is for JSON"
