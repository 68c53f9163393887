"""Garbage collection in processes whose pauses delay requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects between two collections of the young generation, then numbers of collections of one generation before the
#: next older one is collected. Python's defaults are 700, 10, 10.
THRESHOLDS = (50_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude present objects from garbage collection, and collect others less often, within the block.

    Nearly all our objects are freed by reference counting. A full collection walks all objects to find the few cycles
    of libraries. With all modules and the state of thousands of requests that took up to 73 ms inside one scheduling
    decision. Objects that were excluded before stay so at the end.
    """
    had_frozen = gc.get_freeze_count() > 0
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not had_frozen:
            gc.unfreeze()
