"""What is known of an instance's batching mode: its choice, its phases, and what was counted to choose by."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdmesh.policy.batching import Batching, Mode, ModeChoice
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.probing import Meter, Probing, Together

_UNDECIDED = ModeChoice(Mode.MIXED)


@dataclass(slots=True, eq=False)
class BatchingState:
    """The batching mode and phase of one instance."""

    choice: ModeChoice = _UNDECIDED
    chosen_by: Batching | None = None
    holds_decodes: bool = False  # the last plan sent says so: a prefill phase
    decodes_from_s: float = 0.0  # when the last prefill phase was ended
    prefills_from_s: float = 0.0  # when the last one began
    phase_s: float = 0.0  # predicted, of the steps of the last one
    resumes_s: float = -inf  # it had no time left for all: when those go on
    gathers_s: float | None = None  # enough seats are idle for a prefill phase since then
    model: LinearLatencyModel | None = None  # that the choice was made with
    num_ended: int = 0  # requests, of this cycle
    num_computed: int = 0  # ended requests whose prompts were computed here
    share_computed: float | None = None  # mean share of such requests; 1 on a mixed instance
    num_slots: float | None = None  # requests that are there or could be, in the mean
    sum_taken: int = 0  # seats taken when each of this cycle's requests ended, itself included
    sum_waiting: int = 0  # in the queue, the same
    home: Mode = Mode.MIXED  # what is chosen, also while the other mode is probed
    num_dwelt: int = 0  # cycles in this mode
    meter: Meter = field(default_factory=Meter)
    probing: Probing = field(default_factory=Probing)
    together: Together = field(default_factory=Together)
