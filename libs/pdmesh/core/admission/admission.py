"""Admission: a request that would not keep its own target is refused as it comes, and told when to come again.

How long it would wait is predicted from the mesh's own pace: the work of the prompts that were placed in the last
seconds in which anybody waited, over those seconds. Whatever limits the mesh, computing prompts or room to decode, is
in that pace; and since the work of those that wait is counted with the same predictions, a model that is wrong by a
factor is wrong in both, and does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdmesh.core.commands import AdmitPrefill, Command, ForgetRequest
from pdmesh.core.config import CoreConfig
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.request import RequestState
from pdmesh.model import Request, RequestKey
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh.policy.seams import PrefillOrder

#: The pace is that of about so many of the last seconds in which anybody waited.
HORIZON_S = 5.0

#: Until the pace is known, each instance that computes prompts is taken to do a second's work in a second. That counts
#: as much as what was seen in so many seconds.
PRIOR_S = 0.25

#: How much one more first token says of how long they take once a request is placed.
NEWS = 1 / 16

#: First tokens that come later than predicted with the margin: one in so many.
ONE_LATE_IN = 50

#: By how much the margin grows for one of them, as a share of what was predicted.
MARGIN_STEP = 0.2

#: Nobody is told to stay away for longer.
MAX_RETRY_AFTER_S = 60.0

#: Others like a refused request are refused unasked for this share of its wait, in which the line gets so much shorter.
REJECT_TTL_SHARE = 1 / 16

#: And for so much of the time by which it would be late, since predictions may be too high.
CLOSED_LATE_SHARE = 0.5

#: What is said of them holds no longer than this: instances join, and those that wait hang up.
MAX_REJECT_TTL_S = 0.25


class Refusal(NamedTuple):
    predicted_s: float  # to its first token, with the margin by which predictions have been exceeded
    limit_s: float  # the target that this would miss
    retry_after_s: float  # when it could be kept, if nobody else came
    reject_ttl_s: float  # others like it would be refused for so long


def work_us(request: Request, latency: LatencyModel, num_reused_tokens: int = 0) -> int:
    """Predicted work of its prompt alone, but for what is kept of it, in microseconds."""
    chunk = ChunkShape(request.num_prompt_tokens - num_reused_tokens, num_reused_tokens)
    return round(1e6 * latency.step_s(StepShape((chunk,), 0, 0)))


class Pace:
    """Seconds of work placed per second, while anybody waited."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._time_s = 0.0
        self._last_s: float | None = None

    def passed(self, now_s: float, *, waited: bool) -> None:
        """Time has passed until now, in which somebody waited or nobody did."""
        if self._last_s is not None and waited and now_s > self._last_s:
            passed_s = now_s - self._last_s
            kept = HORIZON_S / (HORIZON_S + passed_s)
            self._work_s *= kept
            self._time_s = self._time_s * kept + passed_s
        self._last_s = now_s

    def placed(self, work_s: float) -> None:
        self._work_s += work_s

    def per_s(self, num_instances: int) -> float:
        """Return the pace of a mesh with so many instances that compute prompts; never 0 if there is one."""
        return (self._work_s + PRIOR_S * num_instances) / (self._time_s + PRIOR_S)


class Margin:
    """What predictions are exceeded by, but for one in `ONE_LATE_IN` of them: learnt, one first token at a time.

    A step up for each that came later than predicted with the margin, and a small one down for each other, so that it
    comes to rest where they balance. Steps are a share of what was predicted.
    """

    def __init__(self) -> None:
        self.margin_s = 0.0

    def seen(self, predicted_s: float, took_s: float) -> None:
        step_s = MARGIN_STEP * predicted_s
        if took_s > predicted_s + self.margin_s:
            self.margin_s += step_s
        else:
            self.margin_s = max(0.0, self.margin_s - step_s / ONE_LATE_IN)


class Forecast:
    """Predicts when the first token of a request would come, and learns from those that came."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.margin = Margin()
        self._after_placed_s = 0.0  # from a request's place to its first token, beyond its own work

    def wait_s(self, work_before_s: float, num_instances: int) -> float:
        """Return the wait of a request with so much work before it, on so many instances that compute prompts."""
        return work_before_s / self.pace.per_s(max(1, num_instances))

    def ttft_s(self, wait_s: float, work_s: float) -> float:
        """Return the predicted TTFT without the margin."""
        return wait_s + work_s + self._after_placed_s

    def first_token(self, *, placed_for_s: float, work_s: float) -> None:
        """One came so long after its request was placed."""
        self._after_placed_s += NEWS * (max(0.0, placed_for_s - work_s) - self._after_placed_s)


class Admission:
    """Says of each new request whether it can be served in time."""

    def __init__(self, mesh: MeshState, config: CoreConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._forecast = Forecast()
        self._predicted_s: dict[RequestKey, float] = {}  # of those that have no token yet

    def refusal(self, state: RequestState, order: PrefillOrder, now_s: float) -> Refusal | None:
        """Why not to let a new request join the line, if it should not.

        Where nobody is before it and an instance is idle, it is taken: nothing would be better later.
        """
        request, config, forecast = state.request, self._config, self._forecast
        if not config.refuses_early or request.epoch > 0:
            return None
        work_before_s = self._mesh.queue.work_before_s(state, order, now_s)
        wait_s = forecast.wait_s(work_before_s, self._num_computing)
        predicted_s = forecast.ttft_s(wait_s, state.work_us / 1e6)
        if work_before_s or self._all_busy:
            target_s = config.admission_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s
            limit_s = config.max_queue_s if target_s is None else target_s
            # The margin is what others that come later cost one that waits.
            margin_s = forecast.margin.margin_s if work_before_s and target_s is not None else 0.0
            at_most_s = predicted_s + margin_s
            if at_most_s > limit_s:
                late_s = min(wait_s, at_most_s - limit_s)
                return Refusal(at_most_s, limit_s, self._retry_after_s(late_s), _reject_ttl_s(wait_s, late_s))
        self._predicted_s[state.key] = predicted_s
        return None

    def when_full(self, state: RequestState, order: PrefillOrder, now_s: float) -> tuple[float, float]:
        """Return when a request that finds the queue full may come again, and how long similar ones need not ask."""
        if not self._config.refuses_early:
            return self._config.retry_after_s, 0.0
        work_before_s = self._mesh.queue.work_before_s(state, order, now_s)
        wait_s = self._forecast.wait_s(work_before_s, self._num_computing)
        return self._retry_after_s(wait_s), _reject_ttl_s(wait_s, 0.0)

    def passed(self, now_s: float) -> None:
        """Time has passed since the last event."""
        self._forecast.pace.passed(now_s, waited=self._mesh.queue.has_line)

    def note(self, commands: Sequence[Command]) -> None:
        """Take note of what was placed, and of what ended."""
        for command in commands:
            if isinstance(command, AdmitPrefill) and command.leads:
                state = self._mesh.find((command.request_id, command.epoch))
                if state is not None:
                    self._forecast.pace.placed(state.work_us / 1e6)
            elif isinstance(command, ForgetRequest):
                self._predicted_s.pop((command.request_id, command.epoch), None)

    def first_token(self, state: RequestState, now_s: float) -> None:
        """A request drew its first token now."""
        if state.placed_s is not None:
            self._forecast.first_token(placed_for_s=now_s - state.placed_s, work_s=state.work_us / 1e6)
        predicted_s = self._predicted_s.pop(state.key, None)
        if predicted_s is not None:
            self._forecast.margin.seen(predicted_s, now_s - state.request.arrival_s)

    def _retry_after_s(self, wait_s: float) -> float:
        return min(max(wait_s, self._config.retry_after_s), MAX_RETRY_AFTER_S)

    @property
    def _all_busy(self) -> bool:
        """Whether every instance on which prompts are placed has some to compute."""
        return all(i.num_queued_tokens > 0 for i in self._mesh.instances.values() if i.takes_prompts)

    @property
    def _num_computing(self) -> int:
        """Instances on which prompts are placed."""
        return sum(instance.takes_prompts for instance in self._mesh.instances.values())


def _reject_ttl_s(wait_s: float, late_s: float) -> float:
    """How long to refuse requests unasked that are like one that would wait so long, and be late by so much.

    Never as long as the line before it lasts: no request that could be computed at once is turned away.
    """
    return min(max(REJECT_TTL_SHARE * wait_s, CLOSED_LATE_SHARE * late_s), MAX_REJECT_TTL_S)
