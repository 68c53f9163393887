"""The recorded run in a scheduler's event log: the workload, the mesh, and the results.

The figures are the scheduler's: each time is when the scheduler heard of something. Planned steps are reported one by
one, and an instance's own decode steps in sums. Of a request's tokens only the first and the last are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from pdmesh.core.commands import AdmitPrefill, Outcome, RunStep
from pdmesh.core.events import (
    DecodeStepsDone,
    InstanceJoined,
    InstanceLost,
    RequestArrived,
    RequestFinished,
    StepDone,
)
from pdmesh.core.requests.request_histories import Life, RequestHistories
from pdmesh.decisions import Decision
from pdmesh.model import InstanceId, InstanceProfile, OwnDecodeSteps, RequestId
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh_lab.sim.result import InstanceRun, RequestRun, SimResult, StepSpan
from pdmesh_lab.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A planned step as the scheduler saw it, without dropped chunks. `duration_s` is device time."""

    instance_id: InstanceId
    planned_s: float
    done_s: float
    duration_s: float
    chunks: tuple[ChunkPlan, ...]
    num_decodes: int
    num_decode_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run, with a clock that starts at the first arrival.

    Only requests that finished are part of ``arrivals``, which can be simulated, and of ``result.requests``, in the
    same order. Tokens between the first and the last one are set at equal distances. `refused` requests get outputs as
    long as those of finished ones. `profiles` are the latest ones of all instances that ever joined. `own_steps` are of
    all instances. `left_out` counts all but the finished requests by outcome. Instances were lost `num_lost` times; a
    simulation keeps them.
    """

    arrivals: Sequence[Arrival]
    profiles: Sequence[InstanceProfile]
    result: SimResult
    refused: Sequence[RequestRun]
    steps: Sequence[RecordedStep]
    own_steps: Sequence[OwnDecodeSteps]
    left_out: Mapping[str, int]
    num_lost: int


def recorded_run(decisions: Iterable[Decision]) -> RecordedRun:
    """Return the run that a log's decisions describe, given in the order of the log."""
    recorder = _Recorder()
    for decision in decisions:
        recorder.take(decision)
    return recorder.run()


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request, and facts from its instances' steps. `started_s` is the start of the step with its first chunk."""

    life: Life
    started_s: float | None = None
    num_preemptions: int = 0
    last_turn: int | None = None

    def run(self) -> RequestRun:
        """Return the request's run as far as it is known, with the request as it first arrived."""
        life = self.life
        run = RequestRun(
            replace(life.request, arrival_s=life.first_arrival_s),
            num_output_tokens=life.num_output_tokens or 0,
            outcome=life.attempt.outcome,
            placed_s=life.placed_s,
            started_s=self.started_s,
            num_preemptions=self.num_preemptions,
            granted_s=life.granted_s,
            landed_s=life.landed_s,
            exposed_s=life.exposed_s,
            prefill_id=life.prefill_id,
            decode_id=life.decode_id,
        )
        if run.num_output_tokens and life.last_token_s is not None:
            last_s = life.last_token_s
            first_s = last_s if life.first_token_s is None else min(life.first_token_s, last_s)
            run.token_times_s = _spread(first_s, last_s, run.num_output_tokens)
        return run


@dataclass(slots=True)
class _Tracks:
    """An instance's planned steps.

    `plans` are in flight. `urgent` steps lie inside or before a step that has not ended. `idle_s` is the end of the
    last regular step. An urgent step has the turn of the step it interrupted, so `num_turns` omits it.
    """

    profile: InstanceProfile
    plans: dict[int, tuple[float, StepPlan]] = field(default_factory=dict[int, tuple[float, StepPlan]])
    spans: list[StepSpan] = field(default_factory=list[StepSpan])
    urgent: list[StepSpan] = field(default_factory=list[StepSpan])
    idle_s: float = 0.0
    num_turns: int = 0


class _Recorder:
    def __init__(self) -> None:
        self._origin_s: float | None = None
        self._lives = RequestHistories()
        self._requests: dict[RequestId, _Tracked] = {}
        self._instances: dict[InstanceId, _Tracks] = {}
        self._steps: list[RecordedStep] = []
        self._own_steps: list[OwnDecodeSteps] = []
        self._num_events = 0
        self._num_commands = 0
        self._num_lost = 0

    def take(self, decision: Decision) -> None:
        event = decision.event
        if self._origin_s is None and isinstance(event, RequestArrived):
            self._origin_s = decision.now_s
        now_s = 0.0 if self._origin_s is None else decision.now_s - self._origin_s
        self._num_events += 1
        self._num_commands += len(decision.commands)
        if isinstance(event, StepDone | DecodeStepsDone | RequestFinished) and event.own_steps is not None:
            self._own_steps.append(event.own_steps)
        match event:
            case InstanceJoined():
                tracks = self._instances.setdefault(event.profile.instance_id, _Tracks(event.profile))
                tracks.profile = event.profile
                tracks.plans.clear()
            case InstanceLost():
                self._num_lost += event.instance_id in self._instances
            case StepDone():
                self._step_done(event, now_s)
            case _:
                pass
        for life, _, what in self._lives.observe(event, decision.commands, now_s):
            match what:
                case RequestArrived():
                    self._requests.setdefault(life.request.request_id, _Tracked(life))
                case AdmitPrefill():
                    self._requests[life.request.request_id].last_turn = None
                case _:
                    pass
        for command in decision.commands:
            if isinstance(command, RunStep) and (planned := self._instances.get(command.instance_id)):
                planned.plans[command.plan.plan_id] = now_s, command.plan

    def _step_done(self, event: StepDone, now_s: float) -> None:
        tracks = self._instances.get(event.instance_id)
        planned = None if tracks is None else tracks.plans.pop(event.plan_id, None)
        if tracks is None or planned is None:
            return
        planned_s, plan = planned
        done = {(chunk.request_id, chunk.epoch) for chunk in event.chunks if chunk.num_tokens}
        chunks = tuple(chunk for chunk in plan.chunks if (chunk.request_id, chunk.epoch) in done)
        step = RecordedStep(
            event.instance_id,
            planned_s,
            now_s,
            event.duration_s,
            chunks,
            event.num_decodes,
            event.num_decode_context_tokens,
        )
        start_s, nested_s = now_s - max(0.0, event.duration_s) - event.waited_s, 0.0
        nested: list[StepSpan] = []
        if not plan.urgent:
            while tracks.urgent and tracks.urgent[-1].end_s > start_s + 1e-9:
                nested.append(tracks.urgent.pop())
                nested_s += nested[-1].duration_s
                start_s -= nested[-1].duration_s
            start_s = max(tracks.idle_s, start_s)
        span = StepSpan(start_s, now_s, chunks, event.num_decodes, nested_s=nested_s, waited_s=event.waited_s)
        tracks.spans.append(span)
        self._steps.append(step)
        for chunk in chunks:
            if (tracked := self._requests.get(chunk.request_id)) and tracked.started_s is None:
                tracked.started_s = start_s
        if plan.urgent:
            tracks.urgent.append(span)
        else:
            tracks.idle_s = now_s
            self._count_urgent_turns(tracks)
            self._count_turn(tracks, span, *nested)
            for tracked in self._of(span):
                tracked.num_preemptions += len(nested)

    def _count_urgent_turns(self, tracks: _Tracks) -> None:
        """Count the turns of urgent steps that interrupted no step."""
        for span in tracks.urgent:
            self._count_turn(tracks, span)
        tracks.urgent.clear()

    def _count_turn(self, tracks: _Tracks, *spans: StepSpan) -> None:
        """Count a turn of the instance, and a preemption of each prompt in it that missed the turn before."""
        tracks.num_turns += 1
        for tracked in (tracked for span in spans for tracked in self._of(span)):
            tracked.num_preemptions += tracked.last_turn is not None and tracks.num_turns - tracked.last_turn > 1
            tracked.last_turn = tracks.num_turns

    def _of(self, span: StepSpan) -> list[_Tracked]:
        found = (self._requests.get(chunk.request_id) for chunk in span.chunks)
        return [tracked for tracked in found if tracked is not None]

    def run(self) -> RecordedRun:
        for tracks in self._instances.values():
            self._count_urgent_turns(tracks)
        left_out = Counter[str]()
        runs: list[RequestRun] = []
        refused: list[RequestRun] = []
        for tracked in self._requests.values():
            run = tracked.run()
            if run.outcome is Outcome.FINISHED and run.token_times_s:
                runs.append(run)
            else:
                left_out[str(run.outcome or "unfinished")] += 1
                if run.outcome is Outcome.REJECTED:
                    refused.append(run)
        for run, like in zip(refused, cycle(runs), strict=False):
            run.num_output_tokens = min(run.request.max_tokens, like.num_output_tokens)
        instances = [
            InstanceRun(instance_id, tracks.profile.role, tracks.spans)
            for instance_id, tracks in self._instances.items()
        ]
        return RecordedRun(
            arrivals=[arrival_of(run) for run in runs],
            profiles=[tracks.profile for tracks in self._instances.values()],
            result=SimResult(runs, instances, self._num_events, self._num_commands),
            refused=refused,
            steps=self._steps,
            own_steps=self._own_steps,
            left_out=left_out,
            num_lost=self._num_lost,
        )


def arrival_of(run: RequestRun) -> Arrival:
    """Return the request of a recorded run, to be simulated."""
    request = run.request
    return Arrival(
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=run.num_output_tokens,
        max_tokens=max(request.max_tokens, run.num_output_tokens),
        priority=request.priority,
        slo_ttft_s=request.slo_ttft_s,
        slo_tpot_s=request.slo_tpot_s,
    )


def _spread(first_s: float, last_s: float, number: int) -> list[float]:
    """Return ``number`` times at equal distances; the ends are exact."""
    if number == 1:
        return [first_s]
    step_s = (last_s - first_s) / (number - 1)
    return [first_s + index * step_s for index in range(number - 1)] + [last_s]
