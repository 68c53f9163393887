"""Placements. Ties go to the smaller instance id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.model import InstanceId, Request
from pdmesh.policy.base import InstanceView


@dataclass(frozen=True, slots=True)
class LeastQueuedTokens:
    """The instance with the fewest prompt tokens placed and not yet computed."""

    def choose(self, request: Request, candidates: Sequence[InstanceView]) -> InstanceId | None:
        return min(candidates, key=_queued_tokens).instance_id


@dataclass(frozen=True, slots=True)
class Freeness:
    """The freest instance, counting what is promised to it as used; where the prompt is computed, if it can stay.

    Freeness is (free slots - virtual usage) / active batch size (Llumnix, as used by Tetris §4.2).
    """

    def choose(self, request: Request, prefill: InstanceView, candidates: Sequence[InstanceView]) -> InstanceId | None:
        if any(view.instance_id == prefill.instance_id for view in candidates):
            return prefill.instance_id
        return min(candidates, key=_negative_freeness).instance_id


def _queued_tokens(view: InstanceView) -> tuple[int, InstanceId]:
    return view.num_queued_tokens, view.instance_id


def _negative_freeness(view: InstanceView) -> tuple[float, InstanceId]:
    return -view.num_free_blocks / max(1, view.num_seats_taken), view.instance_id
