"""Advice from a recorded run: what is known to be better is found, and nothing is proposed where nothing is."""

from __future__ import annotations

import random
from collections import Counter
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
from pdmesh.model import Role
from pdmesh.operations import OperationKind, PoolCounts
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.wire.messages import InstanceStatus
from pdmesh_lab.cli.advise import advise, apply_advice, command_of, next_flip, read_log
from pdmesh_lab.cli.options import AdviceOptions
from pdmesh_lab.sim.advice import PoolForecast, Proposal, neighbours, ranked, splits, tpot_limit_s
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.recorded import recorded_run
from pdmesh_lab.sim.report import SimReport
from pdmesh_lab.sim.samples import fitted_model
from pdmesh_lab.sim.simulator import Core, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.recorded import RecordedCore, row
from pdmesh_testing.sim import TINY_LAYOUT, UNEVEN_MODEL

OPTIONS = AdviceOptions(slo_ttft_s=2.0)


def recorded(
    path: Path,
    num_prefill: int,
    num_decode: int,
    arrivals: list[Arrival],
    wrap: Callable[[RecordedCore], Core] = lambda core: core,
    *,
    num_mixed: int = 0,
    refuses_early: bool = False,
) -> Path:
    header = Header(
        seed=7,
        bundle="fcfs",
        config=CoreConfig(
            max_queue_s=1e6, refuses_early=refuses_early, policy=PolicyConfig(chunk_tokens=64, latency=UNEVEN_MODEL)
        ),
        started_at=0.0,
        started_s=0.0,
    )
    mesh = MeshShape(
        num_prefill=num_prefill, num_decode=num_decode, num_mixed=num_mixed, kv_layout=TINY_LAYOUT, num_kv_tokens=8192
    )
    with EventLogWriter(path, header) as log:
        Simulator(wrap(RecordedCore(header, log)), mesh.instances(UNEVEN_MODEL), arrivals).run()
    return path


def long_prompts(number: int = 60, every_s: float = 0.25, seed: int = 3) -> list[Arrival]:
    """Hardly anything to decode: what helps are prefill instances."""
    rng = random.Random(seed)
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
        self.check_integrity = core.check_integrity

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._core.handle(event, now_s)
        self._recent.record(now_s, event, commands)
        return commands


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
        (replace(OPTIONS, last_s=2.0), "9 requests ended in the last 2 s"),
        (replace(OPTIONS, slo_ttft_s=None), "the requests have no targets"),
    ],
)
def test_a_log_that_does_not_tell_enough_is_said(tmp_path: Path, options: AdviceOptions, reason: str) -> None:
    log = recorded(tmp_path / "log", 1, 1, long_prompts(30))
    with pytest.raises(ConfigError, match=reason):
        advise(read_log(log), options, Output.JSON)


def test_what_to_type_for_it() -> None:
    now = Proposal(PoolCounts(prefill=1, decode=3), "fcfs")
    commands = ["pdmesh pool resize --prefill 2 --decode 2 --mixed 0", "pdmesh policy set sjf"]
    assert command_of(now, Proposal(PoolCounts(prefill=2, decode=2), "sjf")) == commands
    assert command_of(now, now) == []


def test_splits_are_all_ways_to_share_instances_out() -> None:
    assert [str(pools) for pools in splits(3)] == ["1 prefill + 2 decode", "2 prefill + 1 decode", "3 mixed"]
    assert [str(pools) for pools in splits(1)] == ["1 mixed"]
    assert all(pools.total == 100 for pools in splits(100))
    beside = ["1 prefill + 2 decode", "1 prefill + 1 decode + 1 mixed", "2 prefill + 1 mixed"]
    assert [str(pools) for pools in neighbours(PoolCounts(prefill=2, decode=1), 1)] == beside


def test_the_advice_is_followed_by_one_instance_at_a_time() -> None:
    there = [row("prefill-0"), row("decode-0", num_decoding=3), row("decode-1", num_decoding=1), row("decode-2")]
    wanted = PoolCounts(prefill=3, decode=1)
    assert next_flip(there, wanted) == ("decode-2", Role.PREFILL)
    there[3] = row("decode-2", draining=True)
    assert next_flip(there, wanted) == ("decode-1", Role.PREFILL), "one that is drained is left alone"
    assert next_flip(there, PoolCounts(prefill=1, decode=3)) is None, "it is there"
    assert next_flip([row("prefill-0"), row("decode-0")], PoolCounts(prefill=0, decode=0, mixed=2)) is not None


def applying(
    monkeypatch: pytest.MonkeyPatch, folder: Path, there: list[InstanceStatus], now: PoolForecast, best: PoolForecast
) -> tuple[Asked, list[OperationRequested]]:
    """What to ask with, and the operations that will be asked for; those that begin have exit code 1."""
    asked_for: list[OperationRequested] = []

    def start(_: object, requested: OperationRequested) -> int:
        asked_for.append(requested)
        return 1

    monkeypatch.setattr("pdmesh_lab.cli.advise.current_state", lambda *_: SimpleNamespace(instances=there))
    monkeypatch.setattr("pdmesh_lab.cli.advise.recording_of", lambda *_: None)
    monkeypatch.setattr("pdmesh_lab.cli.advise.advise", lambda *_, **__: SimpleNamespace(best=best, now=now))
    monkeypatch.setattr("pdmesh_lab.cli.advise.start", start)
    return Asked(MeshConfig(), StateFolder("mesh", folder), Output.TABLE), asked_for


def test_advice_that_is_applied_asks_for_one_change_of_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [row("prefill-0"), row("decode-0"), row("decode-1")]
    now, best = (foretold(PoolCounts(prefill=each, decode=3 - each), 0.4 * each, 0.02) for each in (1, 2))
    asked, asked_for = applying(monkeypatch, tmp_path, there, now, best)
    assert apply_advice(asked, OPTIONS, timeout_s=1.0) == 1
    (requested,) = asked_for
    assert (requested.kind, requested.instance_id) == (OperationKind.ROLE, "decode-0")
    assert (requested.role, requested.timeout_s) == (Role.PREFILL, 1.0)


def test_it_says_where_the_pools_are_as_advised_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is of the minutes before."""
    there = [row("prefill-0"), row("prefill-1"), row("decode-0")]
    better = foretold(PoolCounts(prefill=2, decode=1), 1.0, 0.02)
    asked, _ = applying(monkeypatch, tmp_path, there, better, better)
    said = "pdmesh: 2 prefill + 1 decode, the better pools, are already running\n"
    assert apply_advice(asked, OPTIONS, timeout_s=1.0) == 0
    assert capsys.readouterr() == (said, "")
    assert apply_advice(replace(asked, output=Output.JSON), OPTIONS, timeout_s=1.0) == 0
    assert capsys.readouterr() == ("", said), "standard output is for JSON"


def test_roles_that_follow_the_advice_come_to_rest(tmp_path: Path) -> None:
    """Each time for other requests of the same load."""
    visited = [pools := PoolCounts(prefill=1, decode=3)]
    for window in range(5):
        load = long_prompts(30, 0.1, seed=window)
        log = recorded(tmp_path / str(window), pools.prefill, pools.decode, load, num_mixed=pools.mixed)
        advice = advise(read_log(log), OPTIONS, Output.JSON, same_bundle=True)
        there = [row(f"{role}-{index}") for role in Role for index in range(pools.of(role))]
        if advice.best is not None and (flip := next_flip(there, advice.best.proposal.pools)) is not None:
            left = Counter(each.role for each in there if each.instance_id != flip.instance_id)
            pools = PoolCounts(**{role: left[role] + (role is flip.role) for role in Role})
            visited.append(pools)
    assert 1 < len(set(visited)) == len(visited) <= 4, "no change is taken back"


def test_refused_requests_are_part_of_the_load(tmp_path: Path) -> None:
    load = [replace(each, slo_ttft_s=1.0, max_tokens=3) for each in long_prompts(every_s=0.1)]
    recording = read_log(recorded(tmp_path / "log", 1, 3, load, refuses_early=True))
    assert recording.run.refused
    assert {each.num_output_tokens for each in recording.run.refused} == {3}
    advice = advise(recording, OPTIONS, Output.JSON)
    assert advice.num_requests == len(load)
    assert advice.recorded.attainment < 0.9


def test_the_prior_tells_of_mixed_steps_where_none_was_recorded(tmp_path: Path) -> None:
    """Instances that only prefill or decode have none, and mixed instances would have many."""
    run = read_log(recorded(tmp_path / "log", 2, 2, long_prompts())).run
    prior = replace(UNEVEN_MODEL, interference_s=UNEVEN_MODEL.b_s)
    shape = StepShape((ChunkShape(64, 0),), 32, 2000)
    assert fitted_model(run, prior).step_s(shape) == pytest.approx(prior.step_s(shape), rel=0.1)
    assert fitted_model(run).interference_s == 0.0
