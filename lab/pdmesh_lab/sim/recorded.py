"""What a scheduler's event log tells of the run that it recorded: the workload, the mesh, and what came of it.

The figures are the scheduler's: a time is that of the event by which it heard of something. It hears of planned steps
one by one, and of the decode steps that an instance makes by itself in sums; of a request's tokens it hears of the
first and the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdmesh.core.commands import AdmitPrefill, Outcome, RunStep
from pdmesh.core.events import (
    DecodeStepsDone,
    InstanceJoined,
    InstanceLost,
    RequestArrived,
    RequestFinished,
    StepDone,
)
from pdmesh.core.requests.lives import Life, Lives
from pdmesh.decisions import Decision
from pdmesh.model import InstanceId, InstanceProfile, OwnDecodeSteps, RequestId
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh_lab.sim.result import InstanceRun, RequestRun, SimResult, StepSpan
from pdmesh_lab.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A planned step as the scheduler saw it. Chunks that were dropped are left out."""

    instance_id: InstanceId
    planned_s: float
    done_s: float
    duration_s: float  # device time
    chunks: tuple[ChunkPlan, ...]
    num_decodes: int
    num_decode_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run, its clock starting with the first arrival.

    ``arrivals`` can be simulated: they are the requests that finished, and ``result.requests`` are the same ones in the
    same order. Of their tokens, those between the first and the last are set at equal distances.
    """

    arrivals: Sequence[Arrival]
    profiles: Sequence[InstanceProfile]  # of every instance that ever joined, as it joined last
    result: SimResult
    steps: Sequence[RecordedStep]
    own_steps: Sequence[OwnDecodeSteps]  # of all instances
    left_out: Mapping[str, int]  # requests that are no part of the above, by outcome
    num_lost: int  # times that an instance was lost; a simulation keeps it


def recorded_run(decisions: Iterable[Decision]) -> RecordedRun:
    """What a log and its commands tell. Decisions come in the order of the log."""
    recorder = _Recorder()
    for decision in decisions:
        recorder.take(decision)
    return recorder.run()


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request, and what the steps of its instances tell beyond its life."""

    life: Life
    started_s: float | None = None  # the step with its first chunk
    num_preemptions: int = 0
    last_turn: int | None = None

    def run(self) -> RequestRun:
        """The request's run as far as it is known; the request is as it first arrived."""
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
    """An instance's planned steps."""

    profile: InstanceProfile
    plans: dict[int, tuple[float, StepPlan]] = field(default_factory=dict[int, tuple[float, StepPlan]])  # in flight
    spans: list[StepSpan] = field(default_factory=list[StepSpan])
    urgent: list[StepSpan] = field(default_factory=list[StepSpan])  # inside or before a step that has not ended
    idle_s: float = 0.0  # when its last regular step had ended
    num_turns: int = 0  # urgent steps have the turn of the one they interrupted


class _Recorder:
    def __init__(self) -> None:
        self._origin_s: float | None = None
        self._lives = Lives()
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
        """Count the turns of urgent steps that found nothing to interrupt."""
        for span in tracks.urgent:
            self._count_turn(tracks, span)
        tracks.urgent.clear()

    def _count_turn(self, tracks: _Tracks, *spans: StepSpan) -> None:
        """A running prompt that was not in the turn before was preempted."""
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
        for tracked in self._requests.values():
            run = tracked.run()
            if run.outcome is Outcome.FINISHED and run.token_times_s:
                runs.append(run)
            else:
                left_out[str(run.outcome or "unfinished")] += 1
        instances = [
            InstanceRun(instance_id, tracks.profile.role, tracks.spans)
            for instance_id, tracks in self._instances.items()
        ]
        return RecordedRun(
            arrivals=[_arrival(run) for run in runs],
            profiles=[tracks.profile for tracks in self._instances.values()],
            result=SimResult(runs, instances, self._num_events, self._num_commands),
            steps=self._steps,
            own_steps=self._own_steps,
            left_out=left_out,
            num_lost=self._num_lost,
        )


def _arrival(run: RequestRun) -> Arrival:
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
    """``number`` times at equal distances; the ends are exact."""
    if number == 1:
        return [first_s]
    step_s = (last_s - first_s) / (number - 1)
    return [first_s + index * step_s for index in range(number - 1)] + [last_s]
