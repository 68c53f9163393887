from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic, with_long_inputs, with_rate_scaled
from pdmesh_lab.traces import TraceError, read_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51,12,1
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,Conversation log
"""
MOONCAKE = """\
{"timestamp": 1000, "input_length": 758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 4500, "input_length": 732, "output_length": 490, "hash_ids": [0, 14]}
"""
OWN = """\
{"arrival_s": 0.5, "num_prompt_tokens": 7, "num_output_tokens": 3, "slo_ttft_s": 0.2}
{"arrival_s": 0.25, "num_prompt_tokens": 8, "num_output_tokens": 1, "priority": -1}
"""


def arrival(arrival_s: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    return Arrival(arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, "azure.csv", AZURE))
    assert [(a.num_prompt_tokens, a.num_output_tokens) for a in read] == [(374, 44), (396, 109), (12, 1)]
    assert [a.arrival_s for a in read] == pytest.approx([0, 4.314579, 4.31941], abs=1e-6)


def test_burst_gpt(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "burst.csv", BURST_GPT)) == [arrival(0, 472, 18), arrival(40.5, 1087, 230)]


def test_mooncake(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "m.jsonl", MOONCAKE))
    assert replace(first, granules=None) == arrival(0, 758, 500)
    assert replace(second, granules=None) == arrival(3.5, 732, 490)
    assert (first.granules, second.granules) == ((0, 1, 2, 3, 4), (0, 1, 2, 3, 56))  # of 128 tokens, full ones


def test_mooncake_without_hashes(tmp_path: Path) -> None:
    text = '{"timestamp": 1000, "input_length": 758, "output_length": 500}'
    assert read_trace(written(tmp_path, "m.jsonl", text)) == [arrival(0, 758, 500)]


def test_own_rows_are_put_in_order(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "own.jsonl", OWN)) == [
        Arrival(arrival_s=0, num_prompt_tokens=8, num_output_tokens=1, priority=-1),
        Arrival(arrival_s=0.25, num_prompt_tokens=7, num_output_tokens=3, slo_ttft_s=0.2),
    ]


def test_limit(tmp_path: Path) -> None:
    (first,) = read_trace(written(tmp_path, "m.jsonl", MOONCAKE), limit=1)
    assert first.num_prompt_tokens == 758


def test_what_was_drawn_can_be_written_and_read(tmp_path: Path) -> None:
    drawn = synthetic(Synthetic(num_requests=20, long_share=0.5), random.Random(1))
    read = read_trace(written(tmp_path, "own.jsonl", "\n".join(json.dumps(asdict(a)) for a in drawn)))
    assert [a.num_prompt_tokens for a in read] == [a.num_prompt_tokens for a in drawn]


@pytest.mark.parametrize(
    ("name", "text", "line", "says"),
    [
        ("t.csv", AZURE + "yesterday,1,1\n", 5, "yesterday"),
        ("t.csv", AZURE + "2023-11-16 18:15:52,1.5,1\n", 5, "ContextTokens is '1.5': must be a whole number"),
        ("t.csv", AZURE + "2023-11-16 18:15:52,7\n", 5, "GeneratedTokens is None"),
        ("t.csv", AZURE + "2023-11-16 18:15:52,0,1\n", 5, "0 prompt and 1 output tokens"),
        ("t.csv", BURST_GPT + "nan,x,1,1,2,y\n", 4, "the arrival time is nan s"),
        ("t.csv", "a,b\n1,2\n", 1, "no known trace format has the columns a, b"),
        ("t.csv", "", 1, "(none)"),
        ("t.jsonl", MOONCAKE + "{", 4, "not JSON"),
        ("t.jsonl", MOONCAKE + "[1]", 4, "not a JSON object"),
        ("t.jsonl", MOONCAKE + '{"timestamp": 5, "input_length": 3}', 4, "output_length is missing"),
        ("t.jsonl", MOONCAKE + '{"timestamp": 5, "input_length": true, "output_length": 1}', 4, "input_length is True"),
        ("t.jsonl", MOONCAKE + '{"timestamp": 5, "input_length": 2, "output_length": -1}', 4, "2 prompt and -1"),
        (
            "t.jsonl",
            MOONCAKE + '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [3]}',
            4,
            "1 hash_ids for 600 tokens",
        ),
        (
            "t.jsonl",
            MOONCAKE + '{"timestamp": 5, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}',
            4,
            "hash_ids must be",
        ),
        ("t.jsonl", OWN + '{"arrival_s": 1, "num_prompt_tokens": "7", "num_output_tokens": 1}', 3, "num_prompt_tokens"),
        ("t.jsonl", OWN + '{"arrival_s": 1, "num_prompt_tokens": 7, "num_output_tokens": 1, "x": 1}', 3, "field x"),
        (
            "t.jsonl",
            OWN + '{"arrival_s": 1, "num_prompt_tokens": 7, "num_output_tokens": 1, "slo_tpot_s": -0.5}',
            3,
            "slo_tpot_s is -0.5",
        ),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_line(
    tmp_path: Path, name: str, text: str, line: int, says: str
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}:{line}: ")
    assert says in str(refusal.value)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="has no rows"):
        read_trace(written(tmp_path, "empty.jsonl", "\n"))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8 text"):
        read_trace(binary)


def test_rate_and_long_inputs() -> None:
    arrivals = [arrival(float(n), n + 1, 5) for n in range(100)]
    assert [a.arrival_s for a in with_rate_scaled(arrivals, 4)] == [n / 4 for n in range(100)]
    changed = with_long_inputs(arrivals, 95, (1000, 2000), random.Random(0))
    assert changed[:95] == arrivals[:95]
    assert all(1000 <= a.num_prompt_tokens <= 2000 for a in changed[95:])
    assert changed == with_long_inputs(arrivals, 95, (1000, 2000), random.Random(0))
    assert with_long_inputs([], 95, (1, 2), random.Random(0)) == []


def test_synthetic_workloads_have_the_asked_shape() -> None:
    shape = Synthetic(num_requests=4000, requests_per_s=2.0, long_share=0.05, long_range=(20_000, 30_000))
    drawn = synthetic(shape, random.Random(7))
    assert drawn == synthetic(shape, random.Random(7))
    assert drawn[-1].arrival_s == pytest.approx(2000, rel=0.1)
    short = sorted(a.num_prompt_tokens for a in drawn if a.num_prompt_tokens <= shape.max_prompt_tokens)
    assert len(drawn) - len(short) == pytest.approx(200, rel=0.25)
    assert short[len(short) // 2] == pytest.approx(shape.median_prompt_tokens, rel=0.1)
    assert all(1 <= a.num_output_tokens <= shape.max_output_tokens for a in drawn)
