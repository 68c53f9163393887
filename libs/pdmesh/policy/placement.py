"""Placements: which instance computes a prompt, and which one decodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pdmesh.model import Request, Role
from pdmesh.policy.seams import PrefillPlacement
from pdmesh.policy.views import InstanceView


@dataclass(frozen=True, slots=True)
class LeastQueuedTokens:
    """Placement on the instance with the fewest prompt tokens placed and not yet computed."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (instance.num_queued_tokens,)

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ShortAroundLong:
    """Placement of PecSched (§5): first instances without long work, then with a long decode, then with a long prefill.

    An instance with ``colocate_tokens`` or more queued tokens counts as one with a long prefill. Within a kind, the
    instance with the fewest queued tokens comes first, and among equals the one with the fewest seats taken. Without
    ``preempts``, a short prompt waits while all instances compute long ones.

    A long prompt waits for its turn, because a second one on an instance helps neither. The exception is a prompt that
    is ``give_way`` times shorter, which preempts the other.
    """

    long_prompt_tokens: int
    colocate_tokens: int
    preempts: bool = True
    give_way: float = inf

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        full = instance.num_queued_tokens >= self.colocate_tokens
        tier = 2 if full or instance.num_long_prefilling else bool(instance.num_long_decoding)
        return tier, instance.num_queued_tokens, instance.num_seats_taken

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        num_tokens = request.num_prompt_tokens - num_reused_tokens
        if num_tokens >= self.long_prompt_tokens:
            return (instance.shortest_long_prefill_tokens or inf) >= self.give_way * num_tokens
        return self.preempts or not instance.num_long_prefilling


@dataclass(frozen=True, slots=True)
class InGroups:
    """Placement ``around``, with long prompts computed one after the other by groups of a fixed size.

    Two long prompts at a time would delay each other, and a group's steps would delay the tokens of a long request that
    decodes. With ``need_idle``, groups take only instances without any work; under many short requests there may never
    be enough. Without ``interrupt``, short prompts go to instances that compute no long one.
    """

    around: PrefillPlacement
    long_prompt_tokens: int
    need_idle: bool = False
    interrupt: bool = False

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return self.around.key(instance)

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        if request.num_prompt_tokens - num_reused_tokens < self.long_prompt_tokens:
            is_free = self.interrupt or not instance.num_long_prefilling
        elif self.need_idle:
            is_free = not (instance.num_prefilling or instance.num_seats_taken)
        else:
            is_free = not (instance.num_long_prefilling or instance.num_long_decoding)
        return is_free and self.around.takes(request, instance, num_reused_tokens)


@dataclass(frozen=True, slots=True)
class Freeness:
    """Decode placement on the prompt's instance if the request can stay there, else on the freest instance.

    Freeness is (free slots - virtual usage) / active batch size (Llumnix, as used by Tetris §4.2). Promised blocks
    count as used.
    """

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return (-_freeness(instance),)

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Apart:
    """Decode placement of long prompts where they are computed if possible, else on the freest decode instance.

    Without a decode instance that has room, a short request stays where its prompt is computed.
    """

    long_prompt_tokens: int

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        return instance.role is not Role.DECODE, -_freeness(instance)

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        return request.num_prompt_tokens >= self.long_prompt_tokens or first.role is not Role.DECODE


def _freeness(view: InstanceView) -> float:
    return view.num_free_blocks / max(1, view.num_seats_taken)
