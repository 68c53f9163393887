"""The decode steps that an instance makes by itself: whether it may now, and what it has yet to tell of them.

Real workers, simulated and modelled instances all obey this one object, so they hold and report alike.
"""

from __future__ import annotations

from pdmesh.model import OWN_STEPS_PER_REPORT, OwnDecodeSteps
from pdmesh.plans import StepPlan

#: An instance that holds its decodes, and was planned nothing for so long after its last plan, goes on decoding: the
#: scheduler has forgotten it, or hangs. Longer than a loaded control path takes, shorter than a lease.
HOLD_LIMIT_S = 1.0


class OwnSteps:
    """See the module's docstring. Times are on the instance's own clock, in seconds."""

    def __init__(self) -> None:
        self.held = False  # by a plan: the residents decode in planned steps only
        self._made: OwnDecodeSteps | None = None

    def planned(self, plan: StepPlan) -> None:
        """Obey a plan that begins. An urgent one can begin a hold, and ends none: it runs inside another's step."""
        self.held = plan.holds_decodes or (plan.urgent and self.held)

    def made(
        self,
        *,
        num_tokens: int,
        num_context_tokens: int,
        duration_s: float,
        began_s: float,
        ended_s: float,
        num_steps: int = 1,
        lent_share: float = 0.0,
    ) -> None:
        """Add steps, of which all sizes are sums."""
        before = self._made
        if before is not None:
            num_steps += before.num_steps
            num_tokens += before.num_tokens
            num_context_tokens += before.num_context_tokens
            duration_s += before.duration_s
            lent_share += before.lent_share
            began_s = before.began_s
        self._made = OwnDecodeSteps(
            num_steps=num_steps,
            num_tokens=num_tokens,
            num_context_tokens=num_context_tokens,
            duration_s=duration_s,
            wall_s=ended_s - began_s,
            began_s=began_s,
            lent_share=lent_share,
        )

    @property
    def num_left(self) -> int:
        """Steps until they are to be told of by themselves; 0: now."""
        return OWN_STEPS_PER_REPORT - (0 if self._made is None else self._made.num_steps)

    def take(self) -> OwnDecodeSteps | None:
        """What was made since it was last told of; from now on it is."""
        made, self._made = self._made, None
        return made
