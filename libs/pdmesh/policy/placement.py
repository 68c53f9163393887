"""Placements. Ties go to the smaller instance id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pdmesh.model import InstanceId, Request, Role
from pdmesh.policy.base import InstanceView


@dataclass(frozen=True, slots=True)
class LeastQueuedTokens:
    """The instance with the fewest prompt tokens placed and not yet computed."""

    def choose(self, request: Request, candidates: Sequence[InstanceView]) -> InstanceId | None:
        return min(candidates, key=_queued_tokens).instance_id


@dataclass(frozen=True, slots=True)
class Reservation:
    """A static pool: instances that form groups are for long prompts, the others for short ones."""

    def choose(self, request: Request, candidates: Sequence[InstanceView]) -> InstanceId | None:
        pool = [view for view in candidates if not view.grouped]
        return min(pool, key=_queued_tokens).instance_id if pool else None


@dataclass(frozen=True, slots=True)
class ShortAroundLong:
    """PecSched's (§5): an instance without long work, else one with a long decode, else one with a long prefill.

    The first two take more up to ``colocate_tokens`` queued; of several the one with the fewest. Without ``preempts`` a
    short prompt waits while all compute long ones.

    A long prompt waits as well, for to begin a second one on an instance helps neither: except that one at least
    ``give_way`` times as long would give way to it.
    """

    long_prompt_tokens: int
    colocate_tokens: int
    preempts: bool = True
    give_way: float = inf

    def choose(self, request: Request, candidates: Sequence[InstanceView]) -> InstanceId | None:
        if request.num_prompt_tokens >= self.long_prompt_tokens:
            least = self.give_way * request.num_prompt_tokens
            candidates = [v for v in candidates if (v.shortest_long_prefill_tokens or inf) >= least]
        elif not self.preempts:
            candidates = [view for view in candidates if not view.num_long_prefilling]
        return min(candidates, key=self._key).instance_id if candidates else None

    def _key(self, view: InstanceView) -> tuple[int, int, InstanceId]:
        full = view.num_queued_tokens >= self.colocate_tokens
        tier = 2 if full or view.num_long_prefilling else bool(view.num_long_decoding)
        return tier, *_queued_tokens(view)


@dataclass(frozen=True, slots=True)
class LeastQueuedGroup:
    """The group with the fewest prompt tokens placed and not yet computed, of those that serve no long prompt.

    A group so serves one long prompt after the other. To begin a second would help neither while the first is computed;
    and while it decodes, every step of the group, with its large constant time, would cost it a token's delay.
    """

    def choose(self, request: Request, groups: Mapping[str, Sequence[InstanceView]]) -> str | None:
        free = [name for name, views in groups.items() if not any(map(_has_long, views))]
        return min(free, key=lambda name: (sum(view.num_queued_tokens for view in groups[name]), name), default=None)


@dataclass(frozen=True, slots=True)
class IdleGroup:
    """A group of which no member has any work. Among many short requests there may never be one."""

    def choose(self, request: Request, groups: Mapping[str, Sequence[InstanceView]]) -> str | None:
        idle = (name for name, views in groups.items() if not any(v.num_prefilling or v.num_seats_taken for v in views))
        return min(idle, default=None)


@dataclass(frozen=True, slots=True)
class Freeness:
    """The freest instance, counting what is promised to it as used; where the prompt is computed, if it can stay.

    Freeness is (free slots - virtual usage) / active batch size (Llumnix, as used by Tetris §4.2).
    """

    def choose(self, request: Request, prefill: InstanceView, candidates: Sequence[InstanceView]) -> InstanceId | None:
        if any(view.instance_id == prefill.instance_id for view in candidates):
            return prefill.instance_id
        return min(candidates, key=_negative_freeness).instance_id


@dataclass(frozen=True, slots=True)
class Apart:
    """Long prompts decode where they are computed, if they can; the others on the freest instance that only decodes."""

    long_prompt_tokens: int

    def choose(self, request: Request, prefill: InstanceView, candidates: Sequence[InstanceView]) -> InstanceId | None:
        can_stay = any(view.instance_id == prefill.instance_id for view in candidates)
        apart = [view for view in candidates if view.role is Role.DECODE]
        if can_stay and (request.num_prompt_tokens >= self.long_prompt_tokens or not apart):
            return prefill.instance_id
        return min(apart or candidates, key=_negative_freeness).instance_id


def _has_long(view: InstanceView) -> bool:
    return view.num_long_prefilling + view.num_long_decoding > 0


def _queued_tokens(view: InstanceView) -> tuple[int, InstanceId]:
    return view.num_queued_tokens, view.instance_id


def _negative_freeness(view: InstanceView) -> tuple[float, InstanceId]:
    return -view.num_free_blocks / max(1, view.num_seats_taken), view.instance_id
