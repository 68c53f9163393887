"""Hostile input in small: `benchmarks/faults/fuzz.py` sends 10,000 cases to each."""

from pathlib import Path

import pytest

from pdmesh_testing.fuzz_targets import TARGETS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("target", sorted(TARGETS))
async def test_hostile_input_is_answered_and_ends_nothing(target: str, tmp_path: Path) -> None:
    report = await TARGETS[target](tmp_path, num_cases=200, seed=11)
    assert not report.failures, report.failures[:3]
    assert report.num_cases == 200
