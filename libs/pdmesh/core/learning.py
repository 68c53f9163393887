"""How the core's latency model follows the mesh: from what instances measured of themselves, and from their steps."""

from __future__ import annotations

from pdmesh.core.config import LatencyLearning
from pdmesh.core.events import StepDone
from pdmesh.core.state import InstanceBooks
from pdmesh.model import InstanceProfile, StepPlan
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.profile import self_measured
from pdmesh.policy.refine import Refinement


class LatencyLearner:
    """Keeps ``model``. Each call says whether it is another one now."""

    def __init__(self, prior: LinearLatencyModel, learning: LatencyLearning) -> None:
        self._learning = learning
        self._refinement = Refinement(prior)
        self._has_prefill_model = learning is not LatencyLearning.MEASURED

    @property
    def model(self) -> LinearLatencyModel:
        return self._refinement.model

    def joined(self, profile: InstanceProfile) -> bool:
        """Start from the first instance that prefills and timed itself; until there is one, from any that did."""
        if self._has_prefill_model:
            return False
        model = self_measured(profile)
        if model is None:
            return False
        self._has_prefill_model = profile.role.can_prefill
        self._refinement = Refinement(model)
        return True

    def step_done(self, instance: InstanceBooks, plan: StepPlan, event: StepDone) -> bool:
        if self._learning is LatencyLearning.FIXED:
            return False
        computed = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        chunks = tuple(
            ChunkShape(chunk.num_tokens, chunk.start)
            for chunk in plan.chunks
            if computed.get((chunk.request_id, chunk.epoch)) == chunk.num_tokens
        )
        # What each resident has room for stands for its context: the core does not know how far they have come.
        num_context_tokens = instance.view.num_resident_tokens * event.num_decodes // max(1, instance.num_decoding)
        return self._refinement.observe(StepShape(chunks, event.num_decodes, num_context_tokens), event.duration_s)
