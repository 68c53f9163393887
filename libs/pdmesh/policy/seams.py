"""The seams of scheduling policy: small Protocols over frozen views.

The core checks every hard rule itself (room, roles, seats, plans in flight) and acts; a policy only ranks the possible
choices. A policy reads no clock and no global state: all inputs are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdmesh.model import Request
from pdmesh.policy.batching_theory import StepLimit
from pdmesh.policy.views import InstanceView, PartialStep, Rank


class PrefillOrder(Protocol):
    """The order in which prompts are served."""

    def rank(self, request: Request, num_done_tokens: int, placed_s: float | None, num_reused_tokens: int = 0) -> Rank:
        """Return the rank of a request, which changes only as its prompt is computed.

        ``placed_s`` is when an instance took the request; None while it waits. The first ``num_reused_tokens`` of the
        prompt are cached and no work; ``num_done_tokens`` include them.
        """
        ...

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        """Return a key for each of ``ranks``, valid at ``now_s``: smaller is earlier.

        Equal keys are served by arrival, then by id. Three rules hold for all orders. Ranks of one ``bucket`` have keys
        in the order of their ``place``. A key depends only on the ranks of its own bucket, so keys can be cached while
        another bucket changes. A key never grows as time passes, so a key for a later time is a lower bound until then.
        """
        ...

    def keeps_key_until_s(self, rank: Rank) -> float:
        """Return until when a rank alone in its bucket keeps its key; -inf if the key changes all the time."""
        ...


class Packing(Protocol):
    """Rule that chooses the chunks of a step."""

    def num_tokens(
        self,
        instance: InstanceView,
        step: PartialStep,
        request: Request,
        start: int,
        *,
        num_reused_tokens: int = 0,
        least_other_tokens: int = 0,
    ) -> int:
        """Return how many tokens of ``request``, from ``start``, to add to ``step``; 0: none in this step.

        ``num_reused_tokens`` of the prompt are cached. ``least_other_tokens``: number of tokens to compute of the
        shortest other prompt that could use the step; 0: there is none.
        """
        ...

    def step_limit(self, instance: InstanceView) -> StepLimit:
        """Return the limit of a step of ``instance`` that has chunks beside its decodes."""
        ...

    def takes_local(self, instance: InstanceView) -> bool:
        """Whether steps of ``instance``, which only decodes, have room for a part of a prompt."""
        ...

    def local_s(self, instance: InstanceView, num_tokens: int, start: int = 0) -> float:
        """Return the predicted seconds to compute ``num_tokens`` of a prompt, from ``start``, on a decode instance.

        The prompt waits for the queued tokens there. The result is infinite if the steps have no room.
        """
        ...


class PrefillPlacement(Protocol):
    """Rule for where a prompt is computed: on the first instance with room and a step slot that `takes` the prompt.

    The core keeps the instances sorted by their keys, so keys must depend only on the view.
    """

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Return the sort key of an instance: smaller is earlier.

        Among equal keys, the instance that has gone longest without a new request comes first, then the lower id.
        """
        ...

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        """Whether the request may go to ``instance`` now, where ``num_reused_tokens`` of its prompt are cached.

        If no instance with room takes the request, it waits, and others may pass it.
        """
        ...


class DecodePlacement(Protocol):
    """Rule for where output is generated: on the first instance with room, or where the prompt is computed."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Return the sort key of an instance: smaller is earlier, and ties as in `PrefillPlacement.key`."""
        ...

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        """Whether to decode on ``prefill``, which has room, without a transfer, instead of on ``first``."""
        ...
