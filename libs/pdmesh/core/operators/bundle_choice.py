"""The bundle that decides now: chosen by operators, and built anew when predictions of latency have moved."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.config import CoreConfig
from pdmesh.core.instances.learning import LatencyLearner
from pdmesh.core.instances.link_rates import LinksAsMeasured
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import BatchingChangeRequested, BundleChangeRequested
from pdmesh.errors import ConfigError
from pdmesh.model import InstanceProfile
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig


class BundleChoice:
    """Keeps ``bundle``, and what ``learner`` knows of latency."""

    def __init__(self, mesh: MeshState, config: CoreConfig, bundle: Bundle) -> None:
        self._mesh = mesh
        self._configured = self.policy = config.policy
        self.bundle = bundle
        self._configured_name = bundle.name
        self.learner = LatencyLearner(config.policy.latency, config.learning)
        mesh.broker.computed_first = bundle.sends_computed_first

    def joined(self, profile: InstanceProfile) -> None:
        """An instance joined, which may have timed itself."""
        if self.learner.joined(profile):
            self.rebuild()

    def rebuild(self) -> None:
        """Decide by what is known of latency now."""
        self._build(self.bundle.name, self.policy)

    def change(self, event: BundleChangeRequested) -> None:
        """Decide by another bundle from here on, if there is one of this name, and batch as that does by itself.

        A mode that was chosen beside the bundle before goes with it; a configured one stays.
        """
        try:
            self._build(event.bundle, self._configured)
        except ConfigError:
            self._mesh.ignore("BundleChangeRequested")
        else:
            self.policy = self._configured

    def change_batching(self, event: BatchingChangeRequested) -> None:
        """Batch in another mode from here on, if there is one of this name, and whatever the bundle."""
        policy = replace(self.policy, batching=event.batching, eb_threshold=event.threshold)
        try:
            self._build(self.bundle.name, policy)
        except ConfigError:
            self._mesh.ignore("BatchingChangeRequested")
        else:
            self.policy = policy

    @property
    def desired_bundle(self) -> str | None:
        """The bundle that operators chose; None: the configured one."""
        return None if self.bundle.name == self._configured_name else self.bundle.name

    @property
    def desired(self) -> BatchingChangeRequested | None:
        """The mode that was chosen beside the bundle; None: nobody has."""
        if self.policy is self._configured:
            return None
        return BatchingChangeRequested(self.policy.batching, self.policy.eb_threshold)

    def _build(self, name: str, policy: PolicyConfig) -> None:
        """Raises ConfigError, and changes nothing, if there is no such bundle."""
        learner = self.learner
        links = LinksAsMeasured(self._mesh.links, policy.link_bytes_per_s)
        self.bundle = make_bundle(
            name,
            replace(
                policy,
                latency=learner.model,
                num_stages=learner.num_stages,
                latency_of_device_class=learner.models,
                links=links,
            ),
        )
        self._mesh.broker.computed_first = self.bundle.sends_computed_first
        self._mesh.queue.reorder(self.bundle.order)
        for state in self._mesh.requests.values():
            if state.is_in_prefill:
                state.rank_by(self.bundle.order)
