"""Batching state of an instance: the chosen mode, the phases, and the counts behind the choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdmesh.policy.batching import Batching, Mode, ModeChoice
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.probing import CycleMeter, Probing, SimultaneousStarts

_UNDECIDED = ModeChoice(Mode.MIXED)


@dataclass(slots=True, eq=False)
class BatchingState:
    """The batching mode and phase of one instance.

    * Phases: ``holds_decodes`` in a prefill phase, as the last sent plan says. ``decodes_from_s`` and
      ``prefills_from_s``: when the last prefill phase ended and began. ``phase_s``: predicted time of that phase's
      steps. ``resumes_s``: when the prompts resume that the phase had no time for. ``gathers_s``: since when enough
      seats are idle for a prefill phase.
    * The present cycle: ``num_ended`` requests, ``num_computed`` of them with prompts computed here. ``sum_taken`` and
      ``sum_waiting``: sums of the taken seats and the queue's length over the ends of requests.
    * The choice: ``model`` is the latency model that was used. ``share_computed``: mean share of requests with prompts
      computed here, 1 on an instance that prefills by role. ``num_slots``: mean number of requests that are or could be
      here. ``home``: chosen mode, also while the other is probed. ``num_dwelt``: cycles in that mode.
    """

    choice: ModeChoice = _UNDECIDED
    chosen_by: Batching | None = None
    holds_decodes: bool = False
    decodes_from_s: float = 0.0
    prefills_from_s: float = 0.0
    phase_s: float = 0.0
    resumes_s: float = -inf
    gathers_s: float | None = None
    model: LinearLatencyModel | None = None
    num_ended: int = 0
    num_computed: int = 0
    share_computed: float | None = None
    num_slots: float | None = None
    sum_taken: int = 0
    sum_waiting: int = 0
    home: Mode = Mode.MIXED
    num_dwelt: int = 0
    meter: CycleMeter = field(default_factory=CycleMeter)
    probing: Probing = field(default_factory=Probing)
    together: SimultaneousStarts = field(default_factory=SimultaneousStarts)
