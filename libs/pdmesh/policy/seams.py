"""The seams of scheduling policy: small Protocols over frozen views.

The core asks, checks every hard rule itself (room, roles, seats, plans in flight) and acts; a policy only ranks what is
possible. A policy reads no clock and no global state: what it needs comes as an argument.
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
        """``placed_s`` is when an instance took it; None while it waits.

        ``num_reused_tokens`` of its prompt are no work, since their KV is kept; they count as done, too.
        """
        ...

    def keys(self, ranks: Sequence[Rank], now_s: float) -> Sequence[tuple[float, ...]]:
        """A key for each of ``ranks``, compared with each other now: smaller is earlier.

        Equal keys are served by arrival, then by id. In a bucket the keys never contradict the places; and a key
        depends on the ranks of its own bucket alone, so that they can be kept while those of another bucket change. It
        never grows as time passes, so that one of a later time tells how small it can be until then.
        """
        ...

    def keeps_key_until_s(self, rank: Rank) -> float:
        """Return how long a rank alone in its bucket keeps its key; -inf if that changes with time."""
        ...


class Packing(Protocol):
    """What goes into a step."""

    def num_tokens(
        self,
        instance: InstanceView,
        step: PartialStep,
        request: Request,
        start: int,
        *,
        num_reused_tokens: int = 0,
        shared: bool = False,
    ) -> int:
        """How many tokens of ``request``, from ``start``, to add to ``step``; 0 leaves it out of this step.

        ``num_reused_tokens`` of its prompt are kept. ``shared``: other prompts could use the step too.
        """
        ...

    def step_limit(self, instance: InstanceView) -> StepLimit:
        """Return the limit of a step of ``instance`` that has chunks beside its decodes."""
        ...

    def takes_local(self, instance: InstanceView) -> bool:
        """Whether steps of ``instance``, which only decodes, have room for some of a prompt."""
        ...

    def local_s(self, instance: InstanceView, num_tokens: int, start: int = 0) -> float:
        """Predicted time of so many tokens of a prompt, from ``start`` on, on such an instance; infinite: no room.

        They come behind what is computed there already.
        """
        ...


class PrefillPlacement(Protocol):
    """Chooses where a prompt is computed: the first instance that has room and a step slot for it, and `takes` it.

    The core keeps the instances sorted by their keys, which so depend on nothing but the view.
    """

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Smaller is earlier; of equal keys, the one that was longest given nothing to keep, then the order of ids."""
        ...

    def takes(self, request: Request, instance: InstanceView, num_reused_tokens: int = 0) -> bool:
        """Whether the request may go there now, where so much of its prompt is kept.

        If no instance that could takes it, it waits; others may go past it.
        """
        ...


class DecodePlacement(Protocol):
    """Chooses where output is generated: the first instance with room for it, or the one that computes the prompt."""

    def key(self, instance: InstanceView) -> tuple[float, ...]:
        """Smaller is earlier; of equal keys, the one that was longest given nothing to keep, then the order of ids."""
        ...

    def stays(self, request: Request, prefill: InstanceView, first: InstanceView) -> bool:
        """Whether it decodes on ``prefill``, which has room for all of it, without a transfer, and not on ``first``."""
        ...
