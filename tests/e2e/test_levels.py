"""Instances at unlike processor levels of one arithmetic class: handed over, moved, killed, and the same bits."""

from pathlib import Path

import pytest

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.levels import ordered_levels
from pdmesh_testing.unlike_levels import unlike_levels

pytestmark = [pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = CheckpointShape()


def test_a_mesh_of_two_levels_answers_as_one_engine(tmp_path: Path) -> None:
    levels = ordered_levels()
    if len(levels) < 2:
        pytest.skip(f"this machine has the ordered levels {levels}: two are needed")
    checkpoint = write_checkpoint(tmp_path / "model", shape=SHAPE, dtype="bfloat16", seed=3)
    prompts = random_prompts([5, 33, 100, 257], SHAPE.vocab_size, seed=11)
    found = unlike_levels(tmp_path, checkpoint, (levels[-1], levels[0]), prompts, max_tokens=200)
    assert found.differ == []
    assert found.num_moved == found.num_killed == len(prompts)
