"""What the live benchmark of batching modes makes of windows whose answer is known."""

from __future__ import annotations

import importlib
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdmesh.core.batching.modes import BatchingView
from pdmesh.policy.batching import Mode
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape

MODEL = LinearLatencyModel(a_s=0.012, b_s=0.0003, c_s=0.0, d_s=0.0, decode_a_s=0.008, decode_s=0.0004, mixed_a_s=0.012)


@pytest.fixture(scope="module")
def live() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("modes_live")
    finally:
        sys.path.remove(folder)


def a_window(live: ModuleType, mode: str, overhead_s: float, rng: random.Random) -> Any:
    """Steps of 32 decodes and of prompts, as many as come by chance; each decode costs so much beside its work."""
    spans, now_s = [], rng.random()
    for _ in range(40):
        for shape in (
            StepShape((ChunkShape(rng.randint(50, 900), 0),), 0, 0),
            StepShape((), 32, 3200),
        ):
            seconds = live.token_s(MODEL, shape) * 1 + shape.num_decodes * overhead_s
            spans.append(live.Span(now_s, now_s + seconds, shape))
            now_s += seconds
    view = BatchingView(Mode(mode), False, 32, 0.2, 0.1 if mode == "eb" else None, "")
    return live.Window(mode, spans, view)


@pytest.mark.parametrize("eb_overhead_s", [0.0002, 0.0003])
def test_the_ratio_is_found_whatever_prompts_a_window_had(live: ModuleType, eb_overhead_s: float) -> None:
    rng = random.Random(0)
    overheads_s = {"mb": 0.00025, "eb": eb_overhead_s}
    windows = [a_window(live, mode, overheads_s[mode], rng) for mode in live.ROUND * 8]
    found = live.verdict(windows, MODEL)
    work_s = 0.0004 + 475 / 32 * 0.0003  # of a decode and its share of prompts
    ratio = math.log((work_s + 0.00025) / (work_s + eb_overhead_s))
    assert found.measured == pytest.approx(ratio, rel=0.1)
    assert found.is_clear
    assert found.agrees is (ratio > 0)  # +10 % is predicted


def test_a_difference_within_the_noise_judges_no_prediction(live: ModuleType) -> None:
    rng = random.Random(1)
    windows = [a_window(live, mode, 0.00025 * rng.uniform(0.5, 1.5), rng) for mode in live.ROUND * 4]
    found = live.verdict(windows, MODEL)
    assert not found.is_clear
    assert found.agrees


def test_windows_without_a_cycle_are_not_judged(live: ModuleType) -> None:
    rng = random.Random(2)
    windows = [a_window(live, mode, 0.00025, rng) for mode in live.ROUND * 3]
    for at in (1, 5):
        windows[at].spans = windows[at].spans[:3]
    with pytest.raises(live.NothingToJudge, match="1 of 3 rounds"):
        live.verdict(windows, MODEL)


def test_a_spoilt_round_does_not_move_the_interval_and_19_of_20_intervals_hold_the_truth(live: ModuleType) -> None:
    rng = random.Random(4)
    runs = [[rng.gauss(0.01, 0.02) for _ in range(12)] for _ in range(2000)]
    held = sum(abs(mean - 0.01) <= half for mean, half in map(live.trimmed, runs))
    assert 0.93 < held / len(runs) < 0.97
    mean, half_width = live.trimmed([*(0.01 + 0.001 * (index % 3) for index in range(11)), -0.4])
    assert mean - half_width > 0.009
    assert live.trimmed([0.1, 0.2])[0] == pytest.approx(0.15)
