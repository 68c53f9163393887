"""One of two decode instances runs out of memory: `benchmarks/rebalancing.py`, in small."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.ucx]


@pytest.fixture(scope="module")
def rebalancing() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("rebalancing")
    finally:
        sys.path.remove(folder)


@pytest.mark.timeout(300)
def test_what_would_be_computed_again_moves_and_is_the_same_stream(rebalancing: ModuleType) -> None:
    def measure(rebalances: bool) -> Any:
        return rebalancing.measure(6, 100, 250, "fake", rebalances=rebalances)

    with ThreadPoolExecutor() as executor:  # each has a mesh of its own
        on, off = executor.map(measure, (True, False))
    assert on.differ == off.differ == []
    assert on.num_moves > off.num_moves == 0
    assert on.num_preemptions < off.num_preemptions
