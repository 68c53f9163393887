"""How many layers of a chunk's KV the members of a group send each other at a time.

A piece costs what it costs, be it of one layer or of eight: sending, taking and landing one takes half a millisecond of
both event loops (two EPYC cores, 2026-11-23), which is what the model's steps are late by where the cores are theirs,
too. So whoever needs a chunk's KV only layers later is sent that many layers at once, and waits no longer for it.

*In turn*, the next member of ``n`` begins its chunk an ``n``-th part of one later, and is as many layers behind. The
slices of a *parallel prefill* could all be in the same layer; but where more of the prompt follows, later slices may be
layers behind earlier ones, as those begin the next slices sooner by as much. So only a parallel step that begins
together, as the first one does, or is to end together, as the last one is, has each layer waited for.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil
from typing import assert_never

#: Of a step: so much later ends the last slice of a parallel step than the first, where more of the prompt follows.
PARALLEL_LAG = 0.5


class ChunkPace(StrEnum):
    """When other members need a chunk's KV."""

    IN_TURN = "in turn"
    IN_PARALLEL = "in parallel"
    AT_ONCE = "at once"  # in a parallel step that begins together, or that ends the prompt


def layers_a_piece(pace: ChunkPace, num_layers: int, num_members: int, behind: int) -> int:
    """Return how many layers go at once to a member that is ``behind`` by so many of the running chunks.

    0: by more. At least one layer, and no more than half of them.
    """
    match pace:
        case ChunkPace.IN_TURN:
            num_behind = behind * num_layers // num_members
        case _ if behind == 0:
            num_behind = num_layers  # it needs none before the next parallel step
        case ChunkPace.IN_PARALLEL:
            num_behind = ceil(behind * num_layers * PARALLEL_LAG / max(1, num_members - 1))
        case ChunkPace.AT_ONCE:
            num_behind = 1
        case _:
            assert_never(pace)
    return max(1, min(num_behind, num_layers // 2))


def lag(num_layers: int, num_members: int) -> float:
    """Return by what share of a step a slice may end later than the one before it, where more of the prompt follows."""
    if num_members < 2:
        return 0.0
    num_layers_behind = layers_a_piece(ChunkPace.IN_PARALLEL, num_layers, num_members, num_members - 1) - 1
    return num_layers_behind / (num_layers * (num_members - 1))
