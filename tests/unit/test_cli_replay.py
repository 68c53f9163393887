"""`pdmesh replay`, over recorded runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pdmesh.core.scheduler import SchedulerCore
from pdmesh.eventlog import EventLogReader, EventLogWriter, replay
from pdmesh.policy.bundles import make_bundle
from pdmesh_testing.command import pdmesh_here
from pdmesh_testing.recorded import record_run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The log of a run in which a short prompt waits behind a long one."""
    path = tmp_path / "events.log"
    record_run(path)
    return path


def test_a_recorded_run_replays_to_the_same_commands(recorded: Path) -> None:
    done = pdmesh_here("replay", recorded)
    assert done.returncode == 0, done.stderr
    assert "identical to the recorded run (fcfs)" in done.stdout
    with EventLogReader(recorded) as log:
        num_commands = [len(commands) for _, commands in replay(log)]
    assert done.stdout.startswith(f"{len(num_commands)} events, {sum(num_commands)} commands: ")


def test_another_bundle_says_where_it_would_differ(recorded: Path) -> None:
    done = pdmesh_here("replay", recorded, "--bundle", "sjf", "-o", "json")
    assert done.returncode == 0, done.stderr
    difference = json.loads(done.stdout)["difference"]
    assert difference["recorded"] != difference["instead"]
    assert "sjf decides the same until event" in pdmesh_here("replay", recorded, "--bundle", "sjf").stdout
    assert "fcfs decides the same" in pdmesh_here("replay", recorded, "--bundle", "fcfs").stdout


def test_other_commands_than_recorded_are_found(tmp_path: Path, recorded: Path) -> None:
    changed = tmp_path / "changed.log"
    with EventLogReader(recorded) as log, EventLogWriter(changed, log.header) as copy:
        core = SchedulerCore(log.header.config, make_bundle("sjf", log.header.config.policy), random.Random(7))
        for entry in log:
            copy.record(entry.now_s, entry.event)
            copy.record_commands(core.handle(entry.event, entry.now_s))
    done = pdmesh_here("replay", changed)
    assert done.returncode == 1
    assert "the commands differ from the recorded ones" in done.stdout


def test_the_last_event_before_a_crash_has_no_commands(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    done = pdmesh_here("replay", recorded)
    assert done.returncode == 0, done.stderr
    assert "1 events have no recorded commands and were not compared" in done.stdout


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text("hello")
    for path, says in ((other, "other.log"), (tmp_path / "missing.log", "cannot read the event log")):
        done = pdmesh_here("replay", path)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


# --- what if ---


def test_what_if_is_figures_side_by_side(recorded: Path) -> None:
    """The record, its own bundle simulated (the same, for it was simulated), and the other one."""
    done = pdmesh_here("replay", recorded, "--bundle", "sjf")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    (header,) = (line for line in lines if line[:1] == ["recorded"])
    assert header == ["recorded", "fcfs,", "simulated", "sjf,", "simulated"]
    finished = next(line for line in lines if line[:2] == ["short:", "finished"])
    assert len(finished) == 11
    assert finished[2:5] == finished[5:8] == finished[8:]
    assert "simulated with a latency model fitted to this log" in done.stdout

    what_if = json.loads(pdmesh_here("replay", recorded, "--bundle", "sjf", "-o", "json").stdout)["what_if"]
    runs = what_if["runs"]
    assert list(runs) == ["recorded", "fcfs, simulated", "sjf, simulated"]
    for group in ("short", "long"):
        for figure in ("ttft_s", "jct_s"):
            for percent in ("p50", "p90"):
                value = runs["recorded"][group][figure][percent]
                assert runs["fcfs, simulated"][group][figure][percent] == pytest.approx(value, rel=0.05)
    assert runs["sjf, simulated"]["short"]["ttft_s"]["p90"] < runs["recorded"]["short"]["ttft_s"]["p90"]


def test_what_if_with_a_profile(recorded: Path) -> None:
    done = pdmesh_here("replay", recorded, "--bundle", "fcfs", "--profile", "h100-llama3-8b", "-o", "json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["what_if"]["runs"]
    assert list(runs) == ["recorded", "fcfs, simulated"]
    assert runs["fcfs, simulated"]["makespan_s"] < runs["recorded"]["makespan_s"]


def test_the_recorded_timeline(tmp_path: Path, recorded: Path) -> None:
    timeline = tmp_path / "timeline.json"
    done = pdmesh_here("replay", recorded, "--perfetto", timeline)
    assert done.returncode == 0, done.stderr
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"recorded", "prefill-000"}
    assert {event["name"] for event in events if event["ph"] == "b"} >= {"queued", "prefill", "KV transfer", "decode"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bundle", "lifo"], "no policy bundle is called 'lifo': use one of"),
        (["--bundle", "sjf", "--profile", "abacus"], "'abacus'"),
        (["--profile", "h100-llama3-8b"], "--profile and --long-tokens need --bundle"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(recorded: Path, arguments: list[str], says: str) -> None:
    done = pdmesh_here("replay", recorded, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("pdmesh: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_log_without_a_finished_request_has_nothing_to_simulate(tmp_path: Path, recorded: Path) -> None:
    begun = tmp_path / "begun.log"
    with EventLogReader(recorded) as log, EventLogWriter(begun, log.header) as copy:
        for entry in list(log)[:6]:
            copy.record(entry.now_s, entry.event)
    done = pdmesh_here("replay", begun, "--bundle", "sjf")
    assert (done.returncode, done.stderr) == (
        2,
        "pdmesh: no request in the log finished, so there is nothing to simulate\n",
    )
