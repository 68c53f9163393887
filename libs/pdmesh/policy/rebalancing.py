"""When it pays to move a running decode to another instance: for memory, or for the time between its tokens.

A move costs the transfer of the KV, while the request decodes on. A move for memory is weighed against a restart, which
computes the context again. A move for time is made where residents get tokens more slowly than their targets allow. The
receiving instance must have much to spare, so that a moved request has no reason to move back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.links import LinkRates
from pdmesh.policy.views import InstanceView

#: Seconds that a move takes beside its bytes: messages to both sides, a step of each, and the last piece's way.
OVERHEAD_S = 0.05

#: Largest share of the smallest TPOT target that a step of the receiving instance takes with the moved request.
SPARE = 0.8


#: Share of the receiving instance's memory to leave free after a move for memory, for the growth of its residents.
SPARE_MEMORY = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalancing:
    """Predictions of the costs and the savings of moves.

    ``slo_tpot_s`` applies to requests without a target of their own, and ``links`` until moves have been timed.
    """

    latency: LatencyModel
    slo_tpot_s: float
    links: LinkRates
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def move_s(self, instance: InstanceView, num_bytes: int, bytes_per_s: float | None) -> float:
        """Return the seconds of a move away from an instance at ``bytes_per_s`` of earlier moves; None: no move yet."""
        return OVERHEAD_S + num_bytes / (bytes_per_s or self.links.bytes_per_s(instance, None))

    def spare_blocks(self, instance: InstanceView) -> int:
        """Return the blocks to leave free on an instance that a request moves to for memory."""
        return int(SPARE_MEMORY * instance.num_blocks)

    def again_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Return the seconds to compute a context again, except its first ``num_cached_tokens`` that are cached."""
        chunk = ChunkShape(num_tokens - num_cached_tokens, num_cached_tokens)
        return self.latency.step_s(StepShape((chunk,), 0, 0))

    def step_s(self, instance: InstanceView, num_decodes: int = 0, num_tokens: int = 0) -> float:
        """Return the seconds of an instance's decode step with ``num_decodes`` and ``num_tokens`` of context added."""
        model = self.latency_of_device_class.get(instance.device_class, self.latency)
        shape = StepShape((), instance.num_decoding + num_decodes, instance.num_resident_tokens + num_tokens)
        return model.step_s(shape.shared_by(instance.num_stages))

    def is_behind(self, instance: InstanceView) -> bool:
        """Whether the steps of an instance with several residents take longer than their TPOT targets."""
        return instance.num_decoding > 1 and self.step_s(instance) > self._wanted_s(instance)

    def has_time_for(self, instance: InstanceView, num_tokens: int, slo_tpot_s: float | None) -> bool:
        """Whether an instance stays well within all TPOT targets with one more of ``slo_tpot_s`` (None: the mesh's)."""
        wanted_s = min(self._wanted_s(instance), self.slo_tpot_s if slo_tpot_s is None else slo_tpot_s)
        return self.step_s(instance, 1, num_tokens) <= SPARE * wanted_s

    def gain(self, instance: InstanceView, num_tokens: int, num_bytes: int, bytes_per_s: float | None) -> float:
        """Return by how much an instance's steps get shorter without a resident, per second of the move."""
        saved_s = self.step_s(instance) - self.step_s(instance, -1, -num_tokens)
        return saved_s / self.move_s(instance, num_bytes, bytes_per_s)

    def _wanted_s(self, instance: InstanceView) -> float:
        wanted = [self.slo_tpot_s if slo_s is None else slo_s for slo_s in instance.slo_tpots_s]
        return min(wanted, default=self.slo_tpot_s)
