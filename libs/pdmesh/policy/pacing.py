"""Number of layers of a chunk's KV that the members of a group send each other at a time.

A piece of one layer costs as much as a piece of eight. Sending, receiving and storing a piece takes half a millisecond
of both event loops (two EPYC cores, 2026-11-23). Where the event loops share cores with the model, this delays the
model's steps. So a member that needs a chunk's KV only several layers later gets that many layers at once, and does
not wait longer.

*In turn*, the next of ``n`` members begins its chunk an ``n``-th part of a chunk later, and is as many layers behind.
The slices of a *parallel prefill* could all be in the same layer. But where more of the prompt follows, later slices
may be layers behind earlier ones, because the earlier members also begin the next slices sooner. So single layers are
sent only in a parallel step that begins together, as the first one does, or ends together, as the last one does.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil
from typing import assert_never

#: Delay, as a share of a step, from the end of a parallel step's first slice to the end of its last one, where more of
#: the prompt follows.
PARALLEL_LAG = 0.5


class ChunkPace(StrEnum):
    """When other members need a chunk's KV. AT_ONCE: in a parallel step that begins together or ends the prompt."""

    IN_TURN = "in turn"
    IN_PARALLEL = "in parallel"
    AT_ONCE = "at once"


def layers_a_piece(pace: ChunkPace, num_layers: int, num_members: int, behind: int) -> int:
    """Return how many layers go at once to a member whose chunk is the ``behind``-th one after the sender's.

    ``behind`` is 0 if the member runs no later chunk of a parallel step. Then the member needs the KV only in the next
    step. The result is at least one layer, and at most half of the layers.
    """
    match pace:
        case ChunkPace.IN_TURN:
            num_behind = behind * num_layers // num_members
        case _ if behind == 0:
            num_behind = num_layers
        case ChunkPace.IN_PARALLEL:
            num_behind = ceil(behind * num_layers * PARALLEL_LAG / max(1, num_members - 1))
        case ChunkPace.AT_ONCE:
            num_behind = 1
        case _:
            assert_never(pace)
    return max(1, min(num_behind, num_layers // 2))


def lag(num_layers: int, num_members: int) -> float:
    """Return the share of a step by which a slice may end after the previous one where more of the prompt follows.

    0 for a single member.
    """
    if num_members < 2:
        return 0.0
    num_layers_behind = layers_a_piece(ChunkPace.IN_PARALLEL, num_layers, num_members, num_members - 1) - 1
    return num_layers_behind / (num_layers * (num_members - 1))
