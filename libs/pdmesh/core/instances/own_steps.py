"""Decode steps that an instance makes by itself: the hold that forbids them, and the report that is due.

Real workers, simulated and modelled instances all use this class, so they hold and report alike.
"""

from __future__ import annotations

from pdmesh.model import OWN_STEPS_PER_REPORT, OwnDecodeSteps
from pdmesh.plans import StepPlan

#: Time after its last plan at which an instance that holds its decodes resumes them: the scheduler has forgotten the
#: instance, or hangs. Longer than a loaded control path takes, shorter than a lease.
HOLD_LIMIT_S = 1.0


class OwnSteps:
    """Hold and unreported own steps of one instance. Times are on the instance's own clock, in seconds.

    ``held``: a plan lets the residents decode in planned steps only.
    """

    def __init__(self) -> None:
        self.held = False
        self._made: OwnDecodeSteps | None = None

    def planned(self, plan: StepPlan) -> None:
        """Begin or end the hold as a plan says. An urgent plan ends no hold, since it runs inside another's step."""
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
        """Add ``num_steps`` steps. Token counts, duration and lent share are sums over these steps."""
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
        """Number of own steps until they are due to be reported without a planned step; 0: now."""
        return OWN_STEPS_PER_REPORT - (0 if self._made is None else self._made.num_steps)

    def take(self) -> OwnDecodeSteps | None:
        """Return the unreported steps, which count as reported from now on; None if there are none."""
        made, self._made = self._made, None
        return made
