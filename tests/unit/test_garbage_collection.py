"""Garbage collection in processes whose pauses somebody waits for."""

import gc
from collections.abc import Iterator

import pytest

from pdmesh.garbage import THRESHOLDS, rare_collections


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """As ``conftest.py`` had it."""
    yield
    gc.freeze()


def test_what_is_there_is_left_out_until_the_end() -> None:
    before = gc.get_threshold()
    gc.unfreeze()
    with rare_collections():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_what_was_left_out_before_stays_so() -> None:
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 0
