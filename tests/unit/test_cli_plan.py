"""`pdmesh plan` on workloads whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh_testing.command import pdmesh_here


def trace_of(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("together", [1, 3, 4])
def test_as_many_prefill_instances_as_prompts_come_at_once(tmp_path: Path, together: int) -> None:
    """A prompt takes 0.59 s, the target is 1 s: none can wait for another. One instance decodes them all."""
    rows: list[dict[str, object]] = [
        {"arrival_s": 20.0 * burst, "num_prompt_tokens": 8192, "num_output_tokens": 4}
        for burst in range(3)
        for _ in range(together)
    ]
    done = pdmesh_here(
        "plan", "--trace", trace_of(tmp_path, rows), "--slo-ttft", "1.0", "--bundle", "fcfs", "--chunk-tokens", "8192",
        "--max-instances", "8", "-o", "json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["pools"] == {"num_prefill": together, "num_decode": 1}
    assert record["figures"]["all"]["slo_attainment"] == 1.0
    assert {"num_prefill": together, "num_decode": 1, "slo_attainment": 1.0} in record["tried"]


def test_as_many_decode_instances_as_the_pace_asks_for(tmp_path: Path) -> None:
    """Of two requests with 500,000 tokens of context each, no instance can decode both in 40 ms a token."""
    rows: list[dict[str, object]] = [
        {"arrival_s": 0.0, "num_prompt_tokens": 100_000, "num_output_tokens": 200} for _ in range(2)
    ]
    trace = trace_of(tmp_path, rows)
    for tpot_s, num_decode in (("0.02", 2), ("0.05", 1)):
        done = pdmesh_here("plan", "--trace", trace, "--slo-tpot", tpot_s, "--max-instances", "4", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["pools"] == {"num_prefill": 1, "num_decode": num_decode}


def test_contexts_that_decode_too_slowly_on_one_instance_are_spread(tmp_path: Path) -> None:
    row: dict[str, object] = {"arrival_s": 0.0, "num_prompt_tokens": 400_000, "num_output_tokens": 50}
    command = ("plan", "--trace", trace_of(tmp_path, [row]), "--slo-tpot", "0.02", "--max-instances", "8")
    alone = pdmesh_here(*command)
    assert alone.returncode == 2
    assert "with 400,000 tokens of context" in alone.stderr
    spread = pdmesh_here(*command, "--spread", "--part-exchange-us", "7", "-o", "json")
    assert spread.returncode == 0, spread.stderr
    record = json.loads(spread.stdout)
    limit = record["options"]["max_kv_tokens"]
    assert limit % 16 == 0
    assert 0 < limit < 400_000
    assert record["pools"] == {"num_prefill": 1, "num_decode": -(-400_050 // limit)}
    told = pdmesh_here(*command, "--spread", "--part-exchange-us", "7").stdout
    assert f"\ncontexts of more than {limit:,} tokens are spread: worker.max_kv_tokens_per_instance = {limit}\n" in told


def test_a_table_says_what_was_tried() -> None:
    done = pdmesh_here("plan", "--limit", "30", "--slo-ttft", "2", "--slo-tpot", "0.1", "--max-instances", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    instances, header, *_ = done.stdout.splitlines()
    assert instances.startswith("instances: a100-llama3-8b")
    assert header.split() == ["prefill", "decode", "within", "targets"]
    assert done.stdout.count("the smallest") == 1
    assert "makespan, s" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "no target is given"),
        (["--slo-ttft", "-1"], 2, "--slo-ttft is '-1': must be a duration such as 30s or 5m"),
        (["--slo-tpot", "nan"], 2, "--slo-tpot is 'nan': must be a duration such as 30s or 5m"),
        (["--slo-ttft", "1", "--attainment", "1.5"], 2, "--attainment is 1.5: must be a share"),
        (["--slo-ttft", "1", "--attainment", "nan"], 2, "--attainment is nan: must be a share"),
        (["--slo-ttft", "1", "--bundle", "lifo"], 2, "no policy bundle is called 'lifo'"),
        (["--slo-ttft", "1", "--profile", "abacus"], 2, "'abacus'"),
        (["--slo-ttft", "1", "--trace", "missing.csv"], 2, "cannot read the trace missing.csv"),
        (["--slo-ttft", "0.001"], 2, "miss their targets on any number of instances"),
        (["--slo-ttft", "1", "--spread"], 2, "--spread needs --slo-tpot"),
        (["--slo-tpot", "0.02", "--spread", "--max-kv-tokens", "1024"], 2, "give one"),
        (["--slo-tpot", "0.001", "--spread"], 2, "a decode step takes longer whatever the context"),
        (["--slo-ttft", "0.5", "--attainment", "0.95", "--rate", "1000", "--max-instances", "1"], 1, "not 95.00%"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments: list[str], code: int, says: str) -> None:
    done = pdmesh_here("plan", "--limit", "20", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("pdmesh: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"arrival_s": 0.0, "num_prompt_tokens": 1, "num_output_tokens": 1},
        {"arrival_s": 0.0, "num_prompt_tokens": 1, "num_output_tokens": 1, "slo_ttft_s": -1},
    ]
    trace = trace_of(tmp_path, rows)
    done = pdmesh_here("plan", "--trace", trace, "--slo-ttft", "1")
    assert (done.returncode, done.stderr) == (2, f"pdmesh: {trace}:2: slo_ttft_s is -1.0: must be above 0\n")
    trace.write_text("")
    done = pdmesh_here("plan", "--trace", trace, "--slo-ttft", "1")
    assert (done.returncode, done.stderr) == (2, f"pdmesh: the trace {trace} has no rows\n")
