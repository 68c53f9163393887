"""When it pays to move a running decode to another instance: for memory, or for the time between its tokens.

A move costs the transfer of its KV, beside which it decodes on. For memory it is weighed against what it would take to
compute the context again, which is what a restart costs; for time, against residents whose tokens come more slowly
than their targets allow. Targets have to have much to spare, so that what has moved has no reason to move back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.links import LinkRates
from pdmesh.policy.views import InstanceView

#: Seconds that a move takes beside its bytes: messages to both sides, a step of each, and the last piece's way.
OVERHEAD_S = 0.05

#: A step of the target takes at most this share of its residents' TPOT targets with the moved request.
SPARE = 0.8


#: Share of a target's memory to leave free after a move for memory. Its residents may come to need it: two instances
#: together run out later than one of them alone.
SPARE_MEMORY = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """Predictions of what a move costs, and what it saves."""

    latency: LatencyModel
    slo_tpot_s: float  # of those without a target of their own
    links: LinkRates  # until moves have been timed
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def move_s(self, instance: InstanceView, num_bytes: int, bytes_per_s: float | None) -> float:
        """How long a move away from an instance takes at the rate of moves before it, if there were any."""
        return OVERHEAD_S + num_bytes / (bytes_per_s or self.links.bytes_per_s(instance, None))

    def spare_blocks(self, instance: InstanceView) -> int:
        """Return the blocks to leave free on an instance that a request moves to for memory."""
        return int(SPARE_MEMORY * instance.num_blocks)

    def again_s(self, num_tokens: int, num_kept_tokens: int = 0) -> float:
        """How long it takes to compute a context again, but for its first tokens that are kept somewhere."""
        chunk = ChunkShape(num_tokens - num_kept_tokens, num_kept_tokens)
        return self.latency.step_s(StepShape((chunk,), 0, 0))

    def step_s(self, instance: InstanceView, num_decodes: int = 0, num_tokens: int = 0) -> float:
        """A decode step of an instance, with so many more or fewer, and their context."""
        model = self.latency_of_device_class.get(instance.device_class, self.latency)
        shape = StepShape((), instance.num_decoding + num_decodes, instance.num_resident_tokens + num_tokens)
        return model.step_s(shape.shared_by(instance.num_stages))

    def is_behind(self, instance: InstanceView) -> bool:
        """Whether an instance's decode steps take longer than its residents' TPOT targets."""
        return instance.num_decoding > 1 and self.step_s(instance) > self._wanted_s(instance)

    def has_time_for(self, instance: InstanceView, num_tokens: int, slo_tpot_s: float | None) -> bool:
        """Whether an instance would stay well within its residents' TPOT targets with one more."""
        wanted_s = min(self._wanted_s(instance), self.slo_tpot_s if slo_tpot_s is None else slo_tpot_s)
        return self.step_s(instance, 1, num_tokens) <= SPARE * wanted_s

    def gain(self, instance: InstanceView, num_tokens: int, num_bytes: int, bytes_per_s: float | None) -> float:
        """Return how much shorter an instance's steps get without a resident, for each second that the move takes."""
        saved_s = self.step_s(instance) - self.step_s(instance, -1, -num_tokens)
        return saved_s / self.move_s(instance, num_bytes, bytes_per_s)

    def _wanted_s(self, instance: InstanceView) -> float:
        wanted = [self.slo_tpot_s if slo_s is None else slo_s for slo_s in instance.slo_tpots_s]
        return min(wanted, default=self.slo_tpot_s)
