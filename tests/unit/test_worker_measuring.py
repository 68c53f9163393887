"""Timing steps of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdmesh.config import MeshConfig, WorkerConfig
from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv_layout import num_blocks_for
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.latency_profile import shape_of
from pdmesh.worker import known_steps as known_steps_module
from pdmesh.worker import measuring
from pdmesh.worker.known_steps import KnownSteps, known_steps
from pdmesh.worker.measuring import fits, measure_at_start, step_s
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.fake_engine import FAKE_LAYOUT, FakeEngine, timed_by

MIXED = StepShape((ChunkShape(32, 100), ChunkShape(7, 0)), 3, 60)


def test_a_step_is_what_its_shape_says_in_blocks_of_its_own() -> None:
    seen: list[SequenceSlice] = []

    def keep(batch: Sequence[SequenceSlice]) -> float:
        seen.extend(batch)
        return 0.0

    engine = FakeEngine(num_blocks=64, checks_kv=False, step_s=keep)
    assert step_s(engine, MIXED) > 0
    assert [(part.start, part.num_tokens, part.sample) for part in seen] == [
        (100, 32, False),
        (0, 7, False),
        *[(19, 1, True)] * 3,
    ]
    blocks = [block for part in seen for block in part.sequence.block_table]
    assert (
        len(set(blocks)) == len(blocks) == sum(num_blocks_for(n, FAKE_LAYOUT.block_size) for n in (132, 7, 20, 20, 20))
    )
    assert set(blocks) <= set(range(64))


def test_only_what_the_cache_and_the_context_hold_fits() -> None:
    assert fits(FakeEngine(num_blocks=50), MIXED)
    assert not fits(FakeEngine(num_blocks=49), MIXED)
    assert not fits(FakeEngine(num_blocks=64, max_model_len=132), MIXED)


def test_an_instance_times_what_fits_it(tmp_path: Path) -> None:
    engine = TorchEngine(write_checkpoint(tmp_path, max_position_embeddings=600), num_blocks=64)
    steps = measure_at_start(engine, limit_s=60.0)
    assert [(step.num_tokens, step.num_history_tokens, step.num_decodes) for step in steps] == [
        (32, 0, 0),
        (0, 0, 1),
        (256, 0, 0),
        (64, 0, 8),
        (256, 0, 8),
    ]
    assert all(step.duration_s > 0 for step in steps)


def test_a_slow_engine_is_asked_for_less() -> None:
    num_steps = 0

    def count(_batch: Sequence[SequenceSlice]) -> float:
        nonlocal num_steps
        num_steps += 1
        return 0.0

    engine = FakeEngine(num_blocks=4096, max_model_len=16384, checks_kv=False, step_s=count)
    assert measure_at_start(engine, limit_s=0.0) == ()
    assert num_steps == 1
    assert len(measure_at_start(engine, limit_s=60.0)) == 9


def test_a_core_that_is_taken_for_a_while_does_not_make_tokens_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes that start take nine tenths of it, from the second step on, for 0.3 s."""
    now_s = 0.0
    truth = LinearLatencyModel(a_s=0.002, b_s=1e-4, c_s=1e-9, d_s=1e-9, decode_a_s=0.002, decode_s=1e-4)
    computed_in_s = timed_by(truth)

    def compute(batch: Sequence[SequenceSlice]) -> float:
        nonlocal now_s
        left_s = computed_in_s(batch)
        while left_s > 0:
            share, until_s = (1.0, 0.04) if now_s < 0.04 else (0.1, 0.34) if now_s < 0.34 else (1.0, inf)
            took_s = min(left_s / share, until_s - now_s)
            now_s, left_s = max(now_s + took_s, min(until_s, now_s + 1e-9)), left_s - took_s * share
        return 0.0

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now_s))
    engine = FakeEngine(num_blocks=4096, max_model_len=16384, checks_kv=False, step_s=compute)
    model = fit([(shape_of(step), step.duration_s) for step in measure_at_start(engine)])
    chunk = StepShape((ChunkShape(2048, 0),), 0, 0)
    assert model.step_s(chunk) == pytest.approx(truth.step_s(chunk), rel=0.05)


def engine_that_takes(seconds: float, steps: list[StepShape], now_s: list[float]) -> FakeEngine:
    """An engine whose step takes so long for each token on a clock that it moves, and what it executes."""

    def compute(batch: Sequence[SequenceSlice]) -> float:
        num_decodes = sum(part.sample for part in batch)
        chunks = tuple(ChunkShape(part.num_tokens, part.start) for part in batch if not part.sample)
        steps.append(StepShape(chunks, num_decodes, 0))
        now_s[0] += seconds * sum(part.num_tokens for part in batch)
        return 0.0

    return FakeEngine(num_blocks=4096, max_model_len=16384, checks_kv=False, step_s=compute)


def test_later_starts_time_what_is_not_known_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, steps = [0.0], list[StepShape]()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    engine = engine_that_takes(0.003, steps, now_s)  # 0.77 s for the first step, more than a start for the largest
    known = KnownSteps(tmp_path / "steps" / "model.json")
    found = [measure_at_start(engine, known=known) for _ in range(6)]
    num_known = [len(each) for each in found]
    assert num_known[0] == 5
    assert {step.num_decodes for step in found[0]} == {0, 1, 8}, "a slow machine times decodes at its first start"
    assert num_known == sorted(num_known)
    assert num_known[-1] == 8, "of nine steps one would take longer than a whole start"
    assert max(sum(chunk.num_tokens for chunk in step.chunks) for step in steps) == 256
    steps.clear()
    assert set(measure_at_start(engine, known=known)) == set(found[-1]) == set(known.read())
    assert sum(step.num_decodes + sum(chunk.num_tokens for chunk in step.chunks) for step in steps) < 32 + 64


def test_a_known_step_takes_the_least_time_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    known = KnownSteps(tmp_path / "model.json")
    slow = measure_at_start(engine_that_takes(2e-5, [], now_s), known=known)
    quick = measure_at_start(engine_that_takes(1e-5, [], now_s), known=known)
    assert len(slow) == len(quick) == 9
    assert sum(step.duration_s for step in quick) == pytest.approx(sum(step.duration_s for step in slow) / 2)
    again = measure_at_start(engine_that_takes(2e-5, [], now_s), known=known)
    assert set(again) == set(quick)


@pytest.mark.parametrize("content", [b"", b"[1]", b'[{"num_tokens": -1}]', b"\xff", b"[" * 20000])
def test_a_damaged_file_of_steps_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(content)
    assert KnownSteps(file).read() == ()
    engine = FakeEngine(num_blocks=4096, max_model_len=16384, checks_kv=False)
    assert set(measure_at_start(engine, limit_s=60.0, known=KnownSteps(file))) == set(KnownSteps(file).read())


def test_a_folder_that_cannot_be_written_and_old_files_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    KnownSteps(tmp_path / "file" / "model.json").write(())
    monkeypatch.setattr(known_steps_module, "MAX_FILES", 2)
    for number in range(4):
        KnownSteps(tmp_path / "steps" / f"{number}.json").write(())
    assert len(list((tmp_path / "steps").iterdir())) == 2
    assert KnownSteps(tmp_path / "steps" / "3.json").file.exists()


def test_steps_are_those_of_one_model_computed_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path / "model")
    config = MeshConfig(model=str(checkpoint), worker=WorkerConfig(device="cpu"))
    engine = FakeEngine(num_blocks=8)

    def file(hardware: str = "a processor", num_threads: int = 1) -> Path:
        known = known_steps(config, engine, hardware, num_threads)
        assert known is not None
        return known.file

    first = file()
    assert first == file()
    assert first.is_relative_to(tmp_path / "cache")
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + " ")
    assert len({first, file(), file("another"), file(num_threads=2)}) == 4
    assert known_steps(MeshConfig(worker=WorkerConfig(engine="fake")), engine, "a processor", 1) is None
