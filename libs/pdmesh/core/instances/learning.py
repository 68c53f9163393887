"""Learning of the core's latency models, from the instances' own measurements and from their steps."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.core.config import LatencyLearning
from pdmesh.core.events import StepDone
from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import InstanceProfile, OwnDecodeSteps
from pdmesh.plans import StepPlan
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.latency_profile import device_class_of, self_measured
from pdmesh.policy.refine import Refinement

#: A step that borrowed more cores on average, relative to the instance's own ones, says nothing about the own ones.
#: Predictions are promises: they must hold when the lenders need their cores again.
MAX_LENT_SHARE = 0.05


class LatencyLearner:
    """Latency models by device class: instances that compute the same model on the same hardware.

    ``model`` belongs to the first device class that prefills; until there is one, to the first of any. ``num_stages``
    is the number of the first instance that prefills, or else of any. Each method that learns returns whether a model
    has changed.
    """

    def __init__(self, prior: LinearLatencyModel, learning: LatencyLearning, num_stages: int) -> None:
        """``num_stages`` is assumed until an instance joins."""
        self.num_stages = num_stages
        self._prior = prior
        self._learning = learning
        self._of_device_class: dict[str, Refinement] = {}
        #: Device classes in which an instance that prefills has timed itself.
        self._timed_prefill: set[str] = set()
        self._main = ""
        self._main_prefills = False
        self._stages_are_known = False

    @property
    def model(self) -> LinearLatencyModel:
        main = self._of_device_class.get(self._main)
        return self._prior if main is None else main.model

    @property
    def steps_are_predictable(self) -> bool:
        """Whether steps of the device class of ``model`` take about the predicted time; True if nothing is learnt."""
        main = self._of_device_class.get(self._main)
        return self._learning is LatencyLearning.FIXED or (main is not None and main.is_predictable)

    @property
    def models(self) -> Mapping[str, LinearLatencyModel]:
        """Latency models by device class, where something is known."""
        return {device_class: refinement.model for device_class, refinement in self._of_device_class.items()}

    def estimate(self, device_class: str) -> LinearLatencyModel:
        """Return the latest estimate for a device class, or `model` while nothing is known of the class."""
        refinement = self._of_device_class.get(device_class)
        return self.model if refinement is None else refinement.estimate

    def joined(self, profile: InstanceProfile) -> bool:
        """Learn a new instance's stages and, with ``MEASURED``, its timed steps; return whether anything changed.

        The first instance of a device class that prefills and timed its steps sets the class's latency model. Until
        then each instance with timed steps does. Likewise the first instance that prefills sets `num_stages`.
        """
        device_class = device_class_of(profile)
        has_moved = self._note_stages(profile)
        if self._learning is not LatencyLearning.MEASURED or device_class in self._timed_prefill:
            return has_moved
        model = self_measured(profile)
        if model is None:
            return has_moved
        if profile.role.can_prefill:
            self._timed_prefill.add(device_class)
        self._of_device_class[device_class] = Refinement(model)
        self._consider(device_class, profile.role.can_prefill)
        return True

    def _note_stages(self, profile: InstanceProfile) -> bool:
        before = self.num_stages
        if not self._stages_are_known:
            self.num_stages, self._stages_are_known = profile.num_stages, profile.role.can_prefill
        return self.num_stages != before

    def step_done(self, instance: InstanceState, plan: StepPlan, event: StepDone) -> bool:
        """Learn from a planned step, and from the decode steps that the instance made by itself before it.

        Return whether the latency model, or whether steps are predictable, has changed.
        """
        moved = event.own_steps is not None and self.own_steps(instance, event.own_steps)
        computed = {(chunk.request_id, chunk.epoch): chunk.num_tokens for chunk in event.chunks}
        chunks = tuple(
            ChunkShape(chunk.num_tokens, chunk.start)
            for chunk in plan.chunks
            if computed.get((chunk.request_id, chunk.epoch)) == chunk.num_tokens
        )
        if event.num_decodes and not chunks:
            instance.switches.decoded(event.began_s, event.ended_s)
        elif chunks and not event.num_decodes and instance.allocated.num_decoding:
            instance.switches.prefilled(event.duration_s)
        else:
            instance.switches.forget()
        shape = StepShape(chunks, event.num_decodes, event.num_decode_context_tokens)
        instance.batching.meter.step(event.began_s, event.ended_s, shape)
        return self._observe(instance, shape, event.duration_s, event.lent_share) or moved

    def own_steps(self, instance: InstanceState, own: OwnDecodeSteps) -> bool:
        """Learn from decode steps that an instance made by itself, as from equal steps of their mean size.

        Return whether the latency model has changed.
        """
        instance.switches.decoded(own.began_s, own.ended_s)
        number = max(1, own.num_steps)
        shape = StepShape((), own.num_tokens / number, own.num_context_tokens / number)
        instance.batching.meter.step(own.began_s, own.ended_s, shape, number)
        return self._observe(instance, shape, own.duration_s / number, own.lent_share / number)

    def _observe(self, instance: InstanceState, shape: StepShape, seconds: float, lent_share: float) -> bool:
        if self._learning is LatencyLearning.FIXED:
            return False
        if shape.num_decodes:
            instance.note_context(shape.num_decodes, shape.num_decode_context_tokens)
        if lent_share > MAX_LENT_SHARE:
            return False
        refinement = self._of_device_class.get(instance.device_class)
        if refinement is None:
            refinement = self._of_device_class[instance.device_class] = Refinement(self.model)
            self._consider(instance.device_class, instance.role.can_prefill)
        return refinement.observe(shape, seconds)

    def _consider(self, device_class: str, can_prefill: bool) -> None:
        """Make a new device class the main one, unless the main one prefills."""
        if not self._main_prefills:
            self._main, self._main_prefills = device_class, can_prefill
