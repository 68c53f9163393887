"""The active policy bundle: chosen by operators, and rebuilt when predictions of latency change."""

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
    """The active ``bundle``, and the ``learner`` of latency that it is built with."""

    def __init__(self, mesh: MeshState, config: CoreConfig, bundle: Bundle) -> None:
        self._mesh = mesh
        self._configured = self.policy = config.policy
        self.bundle = bundle
        self._configured_name = bundle.name
        self.learner = LatencyLearner(config.policy.latency, config.learning, config.policy.num_stages)
        mesh.broker.computed_first = bundle.sends_computed_first

    def joined(self, profile: InstanceProfile) -> None:
        """Learn from the profile of an instance that joined.

        Rebuild the bundle if that changed a latency model or the number of pipeline stages.
        """
        if self.learner.joined(profile):
            self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the bundle with the current predictions of latency."""
        self._build(self.bundle.name, self.policy)

    def change(self, event: BundleChangeRequested) -> None:
        """Switch to another bundle with its own batching mode; an unknown name is ignored.

        A batching mode chosen by an operator is dropped, and a configured one stays.
        """
        try:
            self._build(event.bundle, self._configured)
        except ConfigError:
            self._mesh.ignore("BundleChangeRequested")
        else:
            self.policy = self._configured

    def change_batching(self, event: BatchingChangeRequested) -> None:
        """Switch to another batching mode, whatever the bundle; an unknown name or an invalid threshold is ignored."""
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
        """The batching mode that operators chose; None: the configured one."""
        if self.policy is self._configured:
            return None
        return BatchingChangeRequested(self.policy.batching, self.policy.eb_threshold)

    def _build(self, name: str, policy: PolicyConfig) -> None:
        """Build the bundle and rank all requests by its order.

        Raises ConfigError for an unknown name or an invalid batching mode, and then changes nothing.
        """
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
                steps_are_predictable=learner.steps_are_predictable,
            ),
        )
        self._mesh.broker.computed_first = self.bundle.sends_computed_first
        self._mesh.queue.reorder(self.bundle.order)
        for state in self._mesh.requests.values():
            if state.is_in_prefill:
                state.rank_by(self.bundle.order)
