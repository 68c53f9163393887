"""KV that a simulated instance loads from its offload tier: one request's after another's, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdmesh.instance.sequence import Sequence
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceProfile, RequestKey
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.planned_step import PlannedStep


class SimulatedLoads:
    """The loads of one instance. ``end`` ends the running step."""

    def __init__(self, profile: InstanceProfile, *, agenda: Agenda, end: Callable[[], None]) -> None:
        self._granule_s = GRANULE_TOKENS * profile.kv_layout.token_bytes / profile.load_bytes_per_s
        self._last_layer_share = 1 / profile.kv_layout.num_layers
        self._agenda = agenda
        self._end = end
        self._ends_s = 0.0  # end of the last load
        self._loaded_s: dict[RequestKey, float] = {}

    def begin(self, sequence: Sequence, landed: Callable[[RequestKey], None] | None = None) -> None:
        """Begin to load the granules that a request reuses from the tier, after the loads of earlier requests.

        ``landed`` is called with the key at the end.
        """
        if num_granules := sequence.prefix.num_loaded:
            self._ends_s = max(self._agenda.now_s, self._ends_s) + num_granules * self._granule_s
            if landed is None:
                self._loaded_s[sequence.key] = self._ends_s
            else:
                self._agenda.at(self._ends_s, partial(landed, sequence.key))

    def forget(self, key: RequestKey) -> None:
        """Forget the load of a prompt whose chunk was computed, or never will be."""
        self._loaded_s.pop(key, None)

    def waits(self, step: PlannedStep) -> bool:
        """Return whether a computed step waits for KV from the tier, and if so schedule its end.

        The step ends a layer's time after the last layer's KV has loaded.
        """
        if not self._loaded_s:
            return False
        keys = [(chunk.request_id, chunk.epoch) for chunk in step.plan.chunks]
        loaded_s = max([self._loaded_s[key] for key in keys if key in self._loaded_s], default=0.0)
        end_s = loaded_s + step.duration_s * self._last_layer_share
        if not loaded_s or end_s <= self._agenda.now_s:
            return False
        step.waits = True
        step.end = self._agenda.at(end_s, self._end)
        return True
