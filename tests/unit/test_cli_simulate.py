"""`pdmesh simulate` and `pdmesh replay`, as processes and over recorded runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.core.commands import Command
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.eventlog import EventLogReader, EventLogWriter, Header, core_of, replay
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.bundles import make_bundle
from pdmesh.sim.mesh import MeshShape
from pdmesh.sim.simulator import Simulator
from pdmesh.sim.workload import Synthetic, synthetic
from pdmesh.testing.sim import BINARY_MODEL, TINY_LAYOUT

TIMEOUT_S = 60.0
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:46.75,3960,9\n"


def pdmesh(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdmesh.cli", *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT_S
    )


class RecordedCore:
    """A core with its event log, as the service drives it."""

    def __init__(self, header: Header, log: EventLogWriter) -> None:
        self._core = core_of(header)
        self._log = log

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self._log.record(now_s, event)
        commands = self._core.handle(event, now_s)
        self._log.record_commands(commands)
        return commands

    def check_integrity(self) -> None:
        self._core.check_integrity()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The log of a run in which a short prompt waits behind a long one."""
    header = Header(
        seed=7, bundle="fcfs", config=CoreConfig(policy=PolicyConfig(chunk_tokens=16)), started_at=0.0, started_s=0.0
    )
    mesh = MeshShape(num_prefill=1, num_decode=1, num_mixed=1, kv_layout=TINY_LAYOUT, num_kv_tokens=4096)
    shape = Synthetic(
        num_requests=20,
        requests_per_s=2.0,
        median_prompt_tokens=20,
        median_output_tokens=4,
        long_share=0.3,
        long_range=(100, 300),
    )
    path = tmp_path / "events.log"
    with EventLogWriter(path, header) as log:
        arrivals = synthetic(shape, random.Random(1))
        Simulator(RecordedCore(header, log), mesh.instances(BINARY_MODEL), arrivals).run()
    return path


# --- simulate ---


def test_bundles_side_by_side() -> None:
    done = pdmesh("simulate", "--limit", "20", "--bundle", "fcfs", "--bundle", "sjf", "--prefill", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["fcfs", "sjf"]
    assert rows[0].split() == ["short:", "finished", *["20", "of", "20"] * 2]
    assert all(len(row) <= 80 for row in rows)
    assert "makespan, s" in done.stdout


def test_json_is_the_same_bytes_for_the_same_seed() -> None:
    arguments = ("simulate", "--limit", "20", "--mixed", "2", "--long-share", "0.2", "--long-range", "9000,9999")
    once, again, other = (
        pdmesh(*arguments, "-o", "json", "--slo-ttft", "1", "--seed", seed) for seed in ("3", "3", "4")
    )
    assert once.returncode == 0, once.stderr
    assert once.stdout == again.stdout
    assert once.stdout != other.stdout
    record = json.loads(once.stdout)
    assert record["options"]["seed"] == 3
    assert record["mesh"]["num_mixed"] == 2
    assert set(record["bundles"]) == {"fcfs", "pdmesh"}
    for figures in record["bundles"].values():
        assert figures["all"]["num_finished"] == 20
        assert figures["long"]["num_requests"] > 0
        assert 0 <= figures["all"]["slo_attainment"] <= 1


def test_a_trace_and_its_timeline(tmp_path: Path) -> None:
    trace, timeline = tmp_path / "azure.csv", tmp_path / "timeline.json"
    trace.write_text(AZURE)
    done = pdmesh("simulate", "--trace", trace, "--bundle", "fcfs", "--perfetto", timeline, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bundles"]["fcfs"]["all"]["num_finished"] == 2
    steps = [event for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {step["cat"] for step in steps} == {"prefill", "decode"}
    assert steps[0]["args"]["chunks"] == ["r0000000 0+374"]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    done = pdmesh("simulate", "--limit", "20", "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--bundle", "lifo"], 2, "no policy bundle is called 'lifo': use one of"),
        (["--profile", "abacus"], 2, "no profile is called 'abacus': use one of"),
        (["--prefill", "0"], 2, "a mesh needs prefill and decode instances, or mixed ones"),
        (["--long-range", "many"], 2, "--long-range 'many': wanted LOW,HIGH"),
        (["--long-range", "9,1"], 2, "--long-range '9,1': wanted 1 <= LOW <= HIGH"),
        (["--trace", "missing.csv"], 1, "cannot read the trace missing.csv"),
        (["--limit", "5", "--perfetto", "/missing/x.json"], 1, "cannot write /missing/x.json"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments: list[str], code: int, says: str) -> None:
    done = pdmesh("simulate", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith("pdmesh: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE + "2023-11-16 18:15:47,12,none\n")
    done = pdmesh("simulate", "--trace", trace)
    assert done.returncode == 1
    assert f"{trace}:4: GeneratedTokens is 'none'" in done.stderr


# --- replay ---


def test_a_recorded_run_replays_to_the_same_commands(recorded: Path) -> None:
    done = pdmesh("replay", recorded)
    assert done.returncode == 0, done.stderr
    assert "identical to the recorded run (fcfs)" in done.stdout
    with EventLogReader(recorded) as log:
        num_commands = [len(commands) for _, commands in replay(log)]
    assert done.stdout.startswith(f"{len(num_commands)} events, {sum(num_commands)} commands: ")


def test_another_bundle_says_where_it_would_differ(recorded: Path) -> None:
    done = pdmesh("replay", recorded, "--bundle", "sjf", "-o", "json")
    assert done.returncode == 0, done.stderr
    difference = json.loads(done.stdout)["difference"]
    assert difference["recorded"] != difference["instead"]
    assert "sjf would have decided otherwise from event" in pdmesh("replay", recorded, "--bundle", "sjf").stdout
    assert "fcfs would have decided the same" in pdmesh("replay", recorded, "--bundle", "fcfs").stdout


def test_other_commands_than_recorded_are_found(tmp_path: Path, recorded: Path) -> None:
    changed = tmp_path / "changed.log"
    with EventLogReader(recorded) as log, EventLogWriter(changed, log.header) as copy:
        core = SchedulerCore(log.header.config, make_bundle("sjf", log.header.config.policy), random.Random(7))
        for entry in log:
            copy.record(entry.now_s, entry.event)
            copy.record_commands(core.handle(entry.event, entry.now_s))
    done = pdmesh("replay", changed)
    assert done.returncode == 1
    assert "the commands are not those recorded" in done.stdout


def test_the_last_event_before_a_crash_has_no_commands(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    done = pdmesh("replay", recorded)
    assert done.returncode == 0, done.stderr
    assert "1 events have no recorded commands to compare with" in done.stdout


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text("hello")
    for path, says in ((other, "other.log"), (tmp_path / "missing.log", "cannot read the event log")):
        done = pdmesh("replay", path)
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
