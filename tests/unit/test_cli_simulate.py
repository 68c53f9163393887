"""`pdmesh simulate`, as a process."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from pdmesh.profiles import save_profile
from pdmesh_lab.weka_generator import draw_session
from pdmesh_testing.command import pdmesh_here
from pdmesh_testing.profiles import COEFFICIENTS, SUBJECT, profile_file

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:46.75,3960,9\n"


def test_bundles_side_by_side() -> None:
    done = pdmesh_here("simulate", "--limit", "20", "--bundle", "fcfs", "--bundle", "sjf", "--prefill", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    profile, header, *rows = done.stdout.splitlines()
    assert profile.startswith("instances: a100-llama3-8b")
    assert profile.endswith(": 2 prefill + 1 decode")
    assert header.split() == ["fcfs", "sjf"]
    assert rows[0].split() == ["short:", "finished", *["20", "of", "20"] * 2]
    assert all(len(row) <= 80 for row in rows)
    assert "makespan, s" in done.stdout
    assert "goodput" not in done.stdout  # of which there is none without targets
    with_target = pdmesh_here("simulate", "--limit", "20", "--slo-ttft", "10")
    assert "goodput, requests/s" in with_target.stdout


def test_json_is_the_same_bytes_for_the_same_seed() -> None:
    arguments = ("simulate", "--limit", "20", "--mixed", "2", "--long-share", "0.2", "--long-range", "9000,9999")
    once, again, other = (
        pdmesh_here(*arguments, "-o", "json", "--slo-ttft", "1", "--seed", seed) for seed in ("3", "3", "4")
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


def test_deaths_and_noise() -> None:
    """All requests end well; those whose prompts were lost began again."""
    arguments = ("simulate", "--limit", "60", "--prefill", "3", "--bundle", "pdmesh", "-o", "json")
    calm = pdmesh_here(*arguments)
    once, again = (pdmesh_here(*arguments, "--noise", "0.2", "--deaths", "6", "--away", "2") for _ in range(2))
    assert once.returncode == 0, once.stderr
    assert once.stdout == again.stdout
    before, after = (json.loads(done.stdout)["bundles"]["pdmesh"] for done in (calm, once))
    assert before["all"]["num_finished"] == after["all"]["num_finished"] == 60
    assert before["all"]["num_restarts"] == 0
    assert after["makespan_s"] != before["makespan_s"]


def test_a_trace_and_its_timeline(tmp_path: Path) -> None:
    trace, timeline = tmp_path / "azure.csv", tmp_path / "timeline.json"
    trace.write_text(AZURE)
    done = pdmesh_here("simulate", "--trace", trace, "--bundle", "fcfs", "--perfetto", timeline, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bundles"]["fcfs"]["all"]["num_finished"] == 2
    steps = [event for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {step["cat"] for step in steps} == {"prefill", "decode"}
    assert steps[0]["args"]["chunks"] == ["r0000000 0+374"]


def test_agent_sessions(tmp_path: Path) -> None:
    for number in range(2):
        session = draw_session(number, seed=0, scale=64, block_size=16)
        tmp_path.joinpath(f"{number}.json").write_bytes(msgspec.json.encode(session))
    mesh = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--bundle", "pdmesh")
    arguments = ("simulate", "--trace", tmp_path, "--clients", "1", *mesh)
    done = pdmesh_here(*arguments)
    assert done.returncode == 0, done.stderr
    rows = [row.split() for row in done.stdout.splitlines()]
    assert ["of", "the", "possible", "ones", "100.0%"] in rows
    assert {"turns:", "turns", "tokens/s/user", "TTFT"} <= {row[0] for row in rows if row}
    for option in (("--think", "1"), ("--deaths", "1"), ("--max-tokens", "5")):
        assert f"{option[0]} cannot be combined with agent sessions" in pdmesh_here(*arguments, *option).stderr
    refused = pdmesh_here("plan", "--trace", tmp_path, "--slo-ttft", "2", "--slo-tpot", "0.05")
    assert "--trace is a folder: agent sessions have no times of arrival" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--bundle", "lifo"], 2, "no policy bundle is called 'lifo': use one of"),
        (
            ["--prefill", "0", "--mixed", "2", "--group-size", "3"],
            2,
            "--group-size is 3: only 2 instances compute prompts",
        ),
        (
            ["--prefill", "2", "--reserved", "2"],
            2,
            "--reserved is 2: of 2 instances that compute prompts, none is left for short ones",
        ),
        (["--prefill", "4", "--group-size", "3", "--reserved", "2"], 2, "must be at least --group-size, 3"),
        (["--profile", "abacus"], 2, "no latency profile and no file is called 'abacus': use one of"),
        (["--slo-ttft", "-1"], 2, "--slo-ttft is '-1': must be a duration such as 30s or 5m"),
        (["--slo-tpot", "nan"], 2, "--slo-tpot is 'nan': must be a duration such as 30s or 5m"),
        (["--host-gbytes-per-s", "1"], 2, "--host-gbytes-per-s: needs --hosts 2 or more"),
        (["--max-kv-tokens", "100"], 2, "--max-kv-tokens is 100: must be a multiple of 16, a block"),
        (["--rate", "nan"], 2, "--rate is nan: must be a number above 0"),
        (["--prefill", "0"], 2, "no instance could prefill: --prefill or --mixed must be at least 1"),
        (["--batching", "best"], 2, "no batching mode is called 'best': use one of mb, eb, ebplus"),
        (["--batching", "eb", "--threshold", "1"], 2, "the threshold is 1.0: must be a share between 0 and 1"),
        (["--batching", "eb", "--threshold", "nan"], 2, "the threshold is nan: must be a share between 0 and 1"),
        (["--batching", "mb", "--threshold", "0.3"], 2, "--threshold needs --batching eb"),
        (["--batching", "eb", "--bundle", "fcfs"], 2, "--batching eb: no instance has a choice of modes"),
        (["--limit", "5", "--deaths", "1000"], 2, "instances cannot be lost 1000 times in"),
        (["--clients", "4", "--deaths", "1"], 2, "--deaths cannot be combined with --clients"),
        (["--long-range", "many"], 2, "--long-range 'many': must be LOW,HIGH"),
        (["--long-range", "9,1"], 2, "--long-range '9,1': must have 1 <= LOW <= HIGH"),
        (["--trace", "missing.csv"], 2, "cannot read the trace missing.csv"),
        (["--trace", "/dev", "--limit", "1"], 2, "the folder /dev has no file *.json with an agent session"),
        (["--trace", "/dev", "--rate-scale", "2"], 2, "--rate-scale cannot be combined with agent sessions"),
        (["--duration", "5"], 2, "--duration needs a --trace of agent sessions"),
        (["--limit", "5", "--perfetto", "/missing/x.json"], 1, "cannot write /missing/x.json"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments: list[str], code: int, says: str) -> None:
    done = pdmesh_here("simulate", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith("pdmesh: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_profile_without_the_terms_of_mixed_steps_is_one_sentence(tmp_path: Path) -> None:
    content = profile_file(SUBJECT)
    terms = {name: seconds for name, seconds in COEFFICIENTS.items() if name != "mixed_a_s"}
    profile = tmp_path / "old.json"
    save_profile(profile, structs.replace(content, coefficients=terms))
    done = pdmesh_here("simulate", "--limit", "5", "--profile", profile)
    assert done.returncode == 2
    assert done.stderr.startswith("pdmesh: ")
    assert str(profile) in done.stderr
    assert "mixed_a_s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_memory_by_credit_has_many_more_at_once_where_answers_are_shorter_than_asked_for() -> None:
    arguments = ("simulate", "--mixed", "1", "--prefill", "0", "--decode", "0", "--bundle", "pdmesh", "--limit", "60")
    load = ("--clients", "30", "--max-tokens", "4000", "--kv-tokens", "12000", "--long-share", "0", "-o", "json")
    runs = {how: pdmesh_here(*arguments, *load, "--kv-reservation", how) for how in ("full", "on_demand")}
    records = {how: json.loads(done.stdout) for how, done in runs.items()}
    for how, record in records.items():
        assert record["options"]["kv_reservation"] == how
        assert record["bundles"]["pdmesh"]["all"]["num_finished"] == 60
    makespan_s = {how: record["bundles"]["pdmesh"]["makespan_s"] for how, record in records.items()}
    assert makespan_s["on_demand"] < 0.7 * makespan_s["full"]


def test_long_contexts_that_are_spread_are_read_faster() -> None:
    arguments = ("simulate", "--decode", "4", "--bundle", "pdmesh", "--limit", "12", "--rate", "0.02", "-o", "json")
    load = ("--long-share", "1", "--long-range", "400000,500000", "--kv-tokens", "1000000", "--part-exchange-us", "7")
    runs = [pdmesh_here(*arguments, *load, "--max-kv-tokens", limit) for limit in ("0", "128000")]
    whole, spread = (json.loads(done.stdout)["bundles"]["pdmesh"]["all"] for done in runs)
    assert whole["num_finished"] == spread["num_finished"] == 12
    assert spread["tpot_s"]["p50"] < 0.5 * whole["tpot_s"]["p50"]


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE + "2023-11-16 18:15:47,12,none\n")
    done = pdmesh_here("simulate", "--trace", trace)
    assert done.returncode == 2
    assert f"{trace}:4: GeneratedTokens is 'none'" in done.stderr
