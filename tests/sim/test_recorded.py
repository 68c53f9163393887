"""A recorded run tells what was simulated, and simulating what it tells gives the run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdmesh.core.commands import Command, Outcome, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFinished,
    StepDone,
)
from pdmesh.decisions import Decision
from pdmesh.model import Epoch, FinishReason, InstanceId, RequestId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh_lab.sim.recorded import RecordedRun, recorded_run
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.samples import fitted_model, step_overhead_s
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, of
from pdmesh_testing.decisions import RememberingCore
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.sim import UNEVEN_MODEL, InstanceCounts, a_workload, tiny_mesh

POLICY = PolicyConfig(
    chunk_tokens=16, latency=UNEVEN_MODEL, long_prompt_tokens=200, prefill_step_s=0.1, local_step_share=4.0
)
MESHES: list[InstanceCounts] = [{"prefill": 1, "decode": 1}, {"mixed": 2}, {"prefill": 2, "decode": 2, "mixed": 1}]
PORT = SimConfig(port_bytes_per_s=1e6)


def arrivals_from_0(seed: int, requests_per_s: float = 4.0) -> list[Arrival]:
    arrivals = a_workload(seed, num_requests=80, requests_per_s=requests_per_s)
    start_s = arrivals[0].arrival_s
    return [replace(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in arrivals]


def simulated(
    arrivals: Sequence[Arrival],
    mesh: InstanceCounts,
    bundle: str,
    *,
    model: LatencyModel = UNEVEN_MODEL,
    config: SimConfig = PORT,
) -> tuple[SimResult, RecordedRun]:
    core = RememberingCore(CoreConfig(policy=POLICY), bundle, seed=3)
    result = Simulator(core, tiny_mesh(mesh).instances(model), arrivals, config).run()
    return result, recorded_run(core.decisions)


@pytest.mark.parametrize("bundle", ["fcfs", "sjf", "pdmesh"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_record_of_a_simulated_run_tells_of_it(mesh: InstanceCounts, bundle: str) -> None:
    arrivals = [replace(arrival, max_tokens=arrival.num_output_tokens + 9) for arrival in arrivals_from_0(1)]
    result, recorded = simulated(arrivals, mesh, bundle)
    assert recorded.arrivals == arrivals
    assert recorded.left_out == {}
    assert recorded.num_lost == 0
    assert [profile.instance_id for profile in recorded.profiles] == [run.instance_id for run in result.instances]
    assert any(run.num_preemptions for run in result.requests) == (bundle != "fcfs")
    for told, run in zip(recorded.result.requests, result.requests, strict=True):
        assert told.ttft_s == run.ttft_s
        assert told.jct_s == run.jct_s
        assert told.tpot_s == pytest.approx(run.tpot_s)
        assert told.queueing_s == pytest.approx(run.queueing_s)
        assert len(told.token_times_s) == len(run.token_times_s)
        assert (told.prefill_id, told.placed_s, told.outcome) == (run.prefill_id, run.placed_s, run.outcome)
        assert (told.num_preemptions, told.exposed_s) == (run.num_preemptions, run.exposed_s)
        if run.landed_s is not None:
            assert (told.granted_s, told.landed_s, told.decode_id) == (run.granted_s, run.landed_s, run.decode_id)
    for told_instance, instance in zip(recorded.result.instances, result.instances, strict=True):
        planned = [step for step in instance.steps if step.chunks]
        assert [(step.chunks, step.num_decodes, step.end_s) for step in told_instance.steps] == [
            (step.chunks, step.num_decodes, step.end_s) for step in planned
        ]
        assert [step.start_s for step in told_instance.steps] == pytest.approx([step.start_s for step in planned])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_a_record_tells_can_be_simulated_and_is_the_same_run(mesh: InstanceCounts) -> None:
    result, recorded = simulated(arrivals_from_0(2), mesh, "pdmesh")
    core = RememberingCore(CoreConfig(policy=POLICY), "pdmesh", seed=3)
    again = Simulator(core, [(profile, UNEVEN_MODEL) for profile in recorded.profiles], recorded.arrivals, PORT).run()
    assert [list(run.token_times_s) for run in again.requests] == [list(run.token_times_s) for run in result.requests]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_fitted_to_a_record_is_the_one_it_was_made_with(mesh: InstanceCounts) -> None:
    """It predicts planned steps and decode steps, which are known in sums, within 1 %."""
    _, recorded = simulated(arrivals_from_0(3, requests_per_s=2.0), mesh, "fcfs")
    fitted = fitted_model(recorded)
    shapes = [StepShape((ChunkShape(tokens, history),), 0, 0) for tokens in (4, 16) for history in (0, 100, 400)]
    assert [fitted.step_s(s) for s in shapes] == pytest.approx([UNEVEN_MODEL.step_s(s) for s in shapes], rel=0.01)
    shapes = [StepShape((), number, number * context) for number in (1, 3) for context in (40, 400)]
    assert [fitted.step_s(s) for s in shapes] == pytest.approx([UNEVEN_MODEL.step_s(s) for s in shapes], rel=0.01)


class Noisy:
    """A latency model whose steps take up to twice or down to half as long."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def step_s(self, shape: StepShape) -> float:
        return UNEVEN_MODEL.step_s(shape) * 2 ** self._rng.uniform(-1, 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_fitted_to_noisy_steps_is_right_in_sum(mesh: InstanceCounts) -> None:
    result, recorded = simulated(arrivals_from_0(5, requests_per_s=1.0), mesh, "fcfs", model=Noisy())
    model = fitted_model(recorded)
    shapes = [
        (StepShape(tuple(ChunkShape(c.num_tokens, c.start) for c in step.chunks), step.num_decodes, 0), step)
        for instance in result.instances
        for step in instance.steps
        if step.chunks
    ]
    took_s = sum(step.end_s - step.start_s for _, step in shapes)
    assert sum(model.step_s(shape) for shape, _ in shapes) == pytest.approx(took_s, rel=0.05)


def test_time_between_steps_is_measured() -> None:
    """A control delay is idle time between the steps of an instance with one plan in flight."""
    config = replace(PORT, control_delay_s=0.004)
    core = RememberingCore(CoreConfig(policy=POLICY, plans_in_flight=1), "fcfs", seed=3)
    Simulator(core, tiny_mesh({"prefill": 1, "decode": 1}).instances(UNEVEN_MODEL), arrivals_from_0(4), config).run()
    recorded = recorded_run(core.decisions)
    assert step_overhead_s(recorded) == pytest.approx(0.008)
    assert fitted_model(recorded).a_s == pytest.approx(UNEVEN_MODEL.a_s + 0.008)


# --- what does not go its way ---


class Log(CoreBench):
    """A mixed instance ``m``; remembers its decisions."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.num_done = 0
        super().__init__(modelled_profile("m", Role.MIXED))

    def feed(self, event: Event, at_s: float | None = None) -> list[Command]:
        commands = super().feed(event, at_s)
        self.decisions.append(Decision(self.now_s, event, tuple(commands)))
        return commands

    def step(self, at_s: float) -> None:
        """The instance does its oldest plan until then."""
        self.now_s = at_s
        self.done("m", of(RunStep, self.commands)[self.num_done].plan)
        self.num_done += 1

    def finished(self, request_id: str, num_output_tokens: int, at_s: float, epoch: int = 0) -> None:
        key = RequestId(request_id), Epoch(epoch)
        self.feed(RequestFinished(InstanceId("m"), *key, FinishReason.STOP, num_output_tokens), at_s)
        self.released("m", request_id, epoch)


def test_requests_that_did_not_finish_are_left_out_and_counted() -> None:
    log = Log()
    log.now_s = 10.0
    log.arrive("done", output=8)
    log.arrive("cancelled")
    log.arrive("open")
    log.step(11.0)
    log.feed(RequestCancelled(GATEWAY, RequestId("cancelled"), Epoch(0)))
    log.finished("done", 3, 12.0)
    run = recorded_run(log.decisions)
    assert run.arrivals == [
        Arrival(arrival_s=0.0, num_prompt_tokens=8, num_output_tokens=3, max_tokens=8, priority=0),
    ]
    assert run.left_out == {"cancelled": 1, "unfinished": 1}
    (done,) = run.result.requests
    assert list(done.token_times_s) == [1.0, 1.5, 2.0]


def test_a_resumed_request_is_one_request() -> None:
    """Its prompt and arrival are those of its first epoch, its tokens those of all."""
    log = Log()
    log.arrive("r", prompt=8, output=6)
    log.step(1.0)
    log.feed(RequestDropped(InstanceId("m"), RequestId("r"), Epoch(0), "lost"), 2.0)
    log.released("m", "r")
    log.feed(RequestArrived(a_request("r", 11, 3, epoch=1, arrival_s=3.0)), 3.0)
    log.step(4.0)
    log.finished("r", 6, 5.0, epoch=1)
    run = recorded_run(log.decisions)
    (arrival,) = run.arrivals
    (told,) = run.result.requests
    assert (arrival.arrival_s, arrival.num_prompt_tokens, arrival.num_output_tokens) == (0.0, 8, 6)
    assert (told.ttft_s, told.jct_s, told.outcome) == (1.0, 5.0, Outcome.FINISHED)


def test_an_instance_that_joins_again_is_one_instance_and_has_no_plans() -> None:
    log = Log()
    log.arrive("r")
    log.feed(InstanceLost(InstanceId("m")), 1.0)
    log.feed(InstanceJoined(modelled_profile("m", Role.PREFILL), ()), 2.0)
    log.feed(StepDone(InstanceId("m"), 0, 0.5, (), 0), 2.5)
    run = recorded_run(log.decisions)
    assert [(profile.instance_id, profile.role) for profile in run.profiles] == [("m", Role.PREFILL)]
    assert run.num_lost == 1
    assert run.steps == []


def test_an_empty_record_is_an_empty_run() -> None:
    run = recorded_run([])
    assert [*run.arrivals, *run.profiles, *run.steps] == []
    with pytest.raises(ValueError, match="samples"):
        fitted_model(run)
