"""Garbage collection in processes whose pauses somebody waits for."""

from __future__ import annotations

import gc

#: New objects between two collections of the young ones; Python's default is 700 (or 2,000).
YOUNG_OBJECTS = 50_000


def collect_rarely() -> None:
    """Leave what is there now out of garbage collection, and collect the rest less often. Call it when all is set up.

    Nearly everything of ours is freed by counting references; a full collection walks all objects to find the few
    cycles of others. Modules and books of thousands of requests made that a pause of up to 73 ms inside one scheduling
    decision.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
