"""Early admission: refuse a new request that would miss its own time-to-first-token target.

The wait is predicted from the mesh's pace: the work placed per second, over the last seconds in which requests waited.
The pace covers whatever limits the mesh, prompt computation or room to decode. The work of the waiting requests is
predicted by the same latency model as the work placed. A model that is wrong by a constant factor therefore cancels
out.
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

#: Time constant, in seconds with a line, of the decaying average that gives the pace.
HORIZON_S = 5.0

#: Weight of the prior pace, in seconds of observation. By the prior, each instance that takes prompts does one second
#: of work per second.
PRIOR_S = 0.25

#: Weight of one new first token in the running mean of the delay after placement.
NEWS = 1 / 16

#: Target share of first tokens that come later than predicted with the margin: one in `ONE_LATE_IN`.
ONE_LATE_IN = 50

#: Growth of the margin for one late first token, as a share of the prediction.
MARGIN_STEP = 0.2

#: Upper bound of the retry delay.
MAX_RETRY_AFTER_S = 60.0

#: Share of a refused request's predicted wait for which the gateway refuses similar requests by itself.
REJECT_TTL_SHARE = 1 / 16

#: Share of the predicted lateness that counts likewise, since predictions may be too high; the larger of the two
#: applies.
CLOSED_LATE_SHARE = 0.5

#: Upper bound of that period: the prediction soon becomes stale, since instances join and clients cancel.
MAX_REJECT_TTL_S = 0.25


class Refusal(NamedTuple):
    """Refusal of a new request.

    `predicted_s` is the time to the first token with the margin, `limit_s` the target that it exceeds. By
    `retry_after_s` the target could be met if no other request came. Similar requests are refused for `reject_ttl_s`
    without asking the core.
    """

    predicted_s: float
    limit_s: float
    retry_after_s: float
    reject_ttl_s: float


def work_us(request: Request, latency: LatencyModel, num_reused_tokens: int = 0) -> int:
    """Predict the work of the request's prompt without the reused tokens, computed alone, in microseconds."""
    chunk = ChunkShape(request.num_prompt_tokens - num_reused_tokens, num_reused_tokens)
    return round(1e6 * latency.step_s(StepShape((chunk,), 0, 0)))


class Pace:
    """Seconds of work placed per second, over the time in which requests waited in line."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._time_s = 0.0
        self._last_s: float | None = None

    def passed(self, now_s: float, *, waited: bool) -> None:
        """Advance the clock to `now_s`. The time since the last call counts only if requests waited during it."""
        if self._last_s is not None and waited and now_s > self._last_s:
            passed_s = now_s - self._last_s
            kept = HORIZON_S / (HORIZON_S + passed_s)
            self._work_s *= kept
            self._time_s = self._time_s * kept + passed_s
        self._last_s = now_s

    def placed(self, work_s: float) -> None:
        self._work_s += work_s

    def per_s(self, num_instances: int) -> float:
        """Return the pace of a mesh with `num_instances` that take prompts; never 0 if there is one."""
        return (self._work_s + PRIOR_S * num_instances) / (self._time_s + PRIOR_S)


class Margin:
    """Margin that about one in `ONE_LATE_IN` predictions is exceeded by, learnt from one first token at a time.

    Each first token later than predicted plus the margin raises the margin; each other one lowers it a little. The
    margin settles where both balance. Steps are a share of the prediction.
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
    """Predictor of the time to a request's first token, learning from the first tokens that were drawn."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.margin = Margin()
        self._after_placed_s = 0.0

    def wait_s(self, work_before_s: float, num_instances: int) -> float:
        """Predict the wait in line behind `work_before_s` of work, on `num_instances` that take prompts."""
        return work_before_s / self.pace.per_s(max(1, num_instances))

    def ttft_s(self, wait_s: float, work_s: float) -> float:
        """Return the predicted TTFT without the margin."""
        return wait_s + work_s + self._after_placed_s

    def first_token(self, *, placed_for_s: float, work_s: float) -> None:
        """Learn from a first token: drawn `placed_for_s` after placement with `work_s` of predicted work."""
        self._after_placed_s += NEWS * (max(0.0, placed_for_s - work_s) - self._after_placed_s)


class Admission:
    """Decision whether a new request can be served in time."""

    def __init__(self, mesh: MeshState, config: CoreConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._forecast = Forecast()
        self._predicted_s: dict[RequestKey, float] = {}

    def refusal(self, state: RequestState, order: PrefillOrder, now_s: float) -> Refusal | None:
        """Return why to refuse a new request; None if it may join the line.

        A request with no work before it is accepted if an instance is idle, since coming later could not help. Only
        first epochs are refused, and only if the configuration refuses early.
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
            # Requests that come later may be served first and so delay a waiting one: the margin covers that.
            margin_s = forecast.margin.margin_s if work_before_s and target_s is not None else 0.0
            at_most_s = predicted_s + margin_s
            if at_most_s > limit_s:
                late_s = min(wait_s, at_most_s - limit_s)
                return Refusal(at_most_s, limit_s, self._retry_after_s(late_s), _reject_ttl_s(wait_s, late_s))
        self._predicted_s[state.key] = predicted_s
        return None

    def forget(self, state: RequestState) -> None:
        """Drop the prediction of a turn that is set aside: its wait says nothing of other requests'."""
        self._predicted_s.pop(state.key, None)

    def when_full(self, state: RequestState, order: PrefillOrder, now_s: float) -> tuple[float, float]:
        """Return the seconds until a request that finds the queue full may come again, and to refuse similar ones."""
        if not self._config.refuses_early:
            return self._config.retry_after_s, 0.0
        work_before_s = self._mesh.queue.work_before_s(state, order, now_s)
        wait_s = self._forecast.wait_s(work_before_s, self._num_computing)
        return self._retry_after_s(wait_s), _reject_ttl_s(wait_s, 0.0)

    def passed(self, now_s: float) -> None:
        """Advance the pace's clock to `now_s`."""
        self._forecast.pace.passed(now_s, waited=self._mesh.queue.has_line)

    def note(self, commands: Sequence[Command]) -> None:
        """Count the work of placed prompts into the pace, and drop the predictions of requests that ended."""
        for command in commands:
            if isinstance(command, AdmitPrefill) and command.leads:
                state = self._mesh.find((command.request_id, command.epoch))
                if state is not None:
                    self._forecast.pace.placed(state.work_us / 1e6)
            elif isinstance(command, ForgetRequest):
                self._predicted_s.pop((command.request_id, command.epoch), None)

    def first_token(self, state: RequestState, now_s: float) -> None:
        """Learn from the first token that a request drew at `now_s`."""
        if state.placed_s is not None:
            self._forecast.first_token(placed_for_s=now_s - state.placed_s, work_s=state.work_us / 1e6)
        predicted_s = self._predicted_s.pop(state.key, None)
        if predicted_s is not None:
            self._forecast.margin.seen(predicted_s, now_s - state.request.arrival_s)

    def _retry_after_s(self, wait_s: float) -> float:
        return min(max(wait_s, self._config.retry_after_s), MAX_RETRY_AFTER_S)

    @property
    def _all_busy(self) -> bool:
        """Whether every instance that takes prompts has prompt tokens to compute."""
        return all(i.num_queued_tokens > 0 for i in self._mesh.instances.values() if i.takes_prompts)

    @property
    def _num_computing(self) -> int:
        """Number of instances that take prompts."""
        return sum(instance.takes_prompts for instance in self._mesh.instances.values())


def _reject_ttl_s(wait_s: float, late_s: float) -> float:
    """Return how long to refuse requests like one that would wait `wait_s` and be late by `late_s`.

    The period stays shorter than the predicted wait, so no request that could be computed at once is refused.
    """
    return min(max(REJECT_TTL_SHARE * wait_s, CLOSED_LATE_SHARE * late_s), MAX_REJECT_TTL_S)
