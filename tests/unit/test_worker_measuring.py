"""Timing steps of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdmesh.engine.base import SequenceSlice
from pdmesh.engine.fake import FAKE_LAYOUT, FakeEngine
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import num_blocks_for
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.worker.measuring import fits, measure_at_start, step_s

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
        (256, 0, 0),
        (32, 0, 0),
        (0, 0, 1),
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
