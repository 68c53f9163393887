"""Placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pdmesh.model import Request, Role
from pdmesh.policy.base import InstanceView


@dataclass(frozen=True, slots=True)
class LeastQueuedTokens:
    """The instance with the fewest prompt tokens placed and not yet computed."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (instance.num_queued_tokens,)

    def takes(self, request: Request, instance: InstanceView) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Reservation:
    """A static pool: instances that form groups are for long prompts, the others for short ones."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (instance.num_queued_tokens,)

    def takes(self, request: Request, instance: InstanceView) -> bool:
        return not instance.grouped


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

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        full = instance.num_queued_tokens >= self.colocate_tokens
        tier = 2 if full or instance.num_long_prefilling else bool(instance.num_long_decoding)
        return tier, instance.num_queued_tokens

    def takes(self, request: Request, instance: InstanceView) -> bool:
        if request.num_prompt_tokens >= self.long_prompt_tokens:
            return (instance.shortest_long_prefill_tokens or inf) >= self.give_way * request.num_prompt_tokens
        return self.preempts or not instance.num_long_prefilling


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

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (-_freeness(instance),)

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Apart:
    """Long prompts decode where they are computed, if they can; the others on the freest instance that only decodes."""

    long_prompt_tokens: int

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return instance.role is not Role.DECODE, -_freeness(instance)

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        return request.num_prompt_tokens >= self.long_prompt_tokens or first.role is not Role.DECODE


def _has_long(view: InstanceView) -> bool:
    return view.num_long_prefilling + view.num_long_decoding > 0


def _freeness(view: InstanceView) -> float:
    return view.num_free_blocks / max(1, view.num_seats_taken)
