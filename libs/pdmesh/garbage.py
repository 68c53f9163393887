"""Garbage collection in processes whose pauses somebody waits for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects between two collections of the young ones, and those between two of the older ones. Python's own are
#: 700, 10, 10.
THRESHOLDS = (50_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Leave what is there now out of garbage collection, and collect the rest less often, until the block is left.

    Nearly everything of ours is freed by counting references; a full collection walks all objects to find the few
    cycles of others. Modules and the state of thousands of requests made that a pause of up to 73 ms inside one
    scheduling decision. What is left out already stays so at the end, and costs nothing here.
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
