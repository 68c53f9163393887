"""The core's latency model follows the mesh, and its policies follow the model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdmesh.core.commands import RunStep
from pdmesh.core.config import CoreConfig, LatencyLearning
from pdmesh.core.events import (
    DecodeStepsDone,
    Event,
    GatewayJoined,
    InstanceJoined,
    RequestArrived,
    RequestFinished,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import KvLayout
from pdmesh.model import Epoch, FinishReason, InstanceProfile, MeasuredStep, OwnDecodeSteps, RequestId, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh_testing.core import GATEWAY, a_request, of, step_done
from pdmesh_testing.modelled import modelled_profile

PRIOR = LinearLatencyModel(a_s=0.01, b_s=1e-4, c_s=1e-9, d_s=1e-9)
CHUNK = StepShape((ChunkShape(512, 0),), 0, 0)


def measured(token_s: float, name: str = "m", role: Role = Role.MIXED) -> InstanceProfile:
    """An instance that took ``token_s`` a token in its only step."""
    step = MeasuredStep(
        num_tokens=256, num_history_tokens=0, num_decodes=0, num_decode_context_tokens=0, duration_s=256 * token_s
    )
    return replace(
        modelled_profile(name, role, num_blocks=8192, block_size=16, max_model_len=1 << 15, max_num_seqs=64),
        kv_layout=KvLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16"),
        num_parameters=82_000_000,
        num_heads=12,
        measured_steps=(step,),
    )


def core_of(learning: LatencyLearning) -> SchedulerCore:
    config = CoreConfig(learning=learning, policy=PolicyConfig(latency=PRIOR))
    core = SchedulerCore(config, make_bundle("pdmesh", config.policy), random.Random(0))
    core.handle(GatewayJoined(GATEWAY, ()), 0.0)
    return core


def run_prompts(core: SchedulerCore, number: int, factor: float, *, lent_share: float = 0.0) -> list[Event]:
    """Prompts one after the other, each step ``factor`` times as long as the prior says; the events it took."""
    events: list[Event] = []
    now_s = 1.0

    def feed(event: Event) -> list[RunStep]:
        events.append(event)
        return of(RunStep, core.handle(event, now_s))

    for index in range(number):
        steps = feed(RequestArrived(a_request(f"r{index}", 2000, 4, arrival_s=now_s)))
        while steps:
            plan = steps.pop(0).plan
            shape = StepShape(tuple(ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks), 0, 0)
            duration_s = factor * PRIOR.step_s(shape)
            now_s += duration_s
            steps += feed(step_done("m", plan, duration_s, lent_share=lent_share))
    return events


def test_a_model_that_was_given_stays() -> None:
    core = core_of(LatencyLearning.FIXED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    run_prompts(core, 5, 3.0)
    assert core.latency is PRIOR


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_steps_refine_it_and_switching_the_bundle_keeps_what_was_learnt(factor: float) -> None:
    core = core_of(LatencyLearning.REFINED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    assert core.latency is PRIOR
    run_prompts(core, 20, factor)
    learnt = core.latency
    assert learnt.step_s(CHUNK) == pytest.approx(factor * PRIOR.step_s(CHUNK), rel=0.2)
    core.handle(BundleChangeRequested("lars"), 1e6)
    core.handle(BundleChangeRequested("abacus"), 1e6)
    assert (core.bundle, core.latency) == ("lars", learnt)


def test_it_starts_from_what_the_first_instance_that_prefills_measured() -> None:
    core = core_of(LatencyLearning.MEASURED)
    core.handle(InstanceJoined(modelled_profile("silent", Role.PREFILL), ()), 0.0)
    assert core.latency is PRIOR
    for profile, token_s in (
        (measured(0.004, "d", Role.DECODE), 0.004),
        (measured(0.001, "p", Role.PREFILL), 0.001),
        (measured(0.003, "late", Role.PREFILL), 0.001),
    ):
        core.handle(InstanceJoined(profile, ()), 0.0)
        assert core.latency.step_s(CHUNK) == pytest.approx(512 * token_s, rel=0.4), profile.instance_id


def test_adaptive_chunks_follow_what_was_learnt() -> None:
    """The steps of a machine that is five times slower than said get shorter, so that they keep their budget."""

    def first_chunk() -> int:
        step, *_ = of(RunStep, core.handle(RequestArrived(a_request("probe", 8000, 4)), 1e6))
        return step.plan.chunks[0].num_tokens

    core = core_of(LatencyLearning.FIXED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    told = first_chunk()
    core = core_of(LatencyLearning.REFINED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)

    run_prompts(core, 20, 5.0)
    assert first_chunk() < told / 3


def test_the_same_events_give_the_same_commands() -> None:
    first, second = core_of(LatencyLearning.MEASURED), core_of(LatencyLearning.MEASURED)
    joined = InstanceJoined(measured(0.001), ())
    assert first.handle(joined, 0.0) == second.handle(joined, 0.0)
    for event in run_prompts(first, 10, 2.0):
        second.handle(event, 1.0)
    assert first.latency == second.latency


def own_steps(duration_s: float, *, num_steps: int = 32, num_tokens: int = 8, context: int = 4096) -> OwnDecodeSteps:
    """So many steps of ``duration_s`` each."""
    return OwnDecodeSteps(
        num_steps=num_steps,
        num_tokens=num_steps * num_tokens,
        num_context_tokens=num_steps * context,
        duration_s=num_steps * duration_s,
        wall_s=num_steps * duration_s,
    )


@pytest.mark.parametrize(("lent_share", "is_learnt"), [(0.0, True), (0.04, True), (0.06, False), (1.0, False)])
def test_steps_with_lent_cores_are_not_learnt_from(lent_share: float, is_learnt: bool) -> None:
    """Predictions are promises, which must hold once the lenders need their cores again."""
    core = core_of(LatencyLearning.MEASURED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    before = core.latency
    for number in range(40):
        own = replace(own_steps(0.05), lent_share=32 * lent_share)
        core.handle(DecodeStepsDone(measured(1.0).instance_id, own), float(number))
    assert (core.latency is not before) == is_learnt
    before = core.latency
    run_prompts(core, 40, 9.0, lent_share=lent_share)
    assert (core.latency is not before) == is_learnt


@pytest.mark.parametrize("learning", LatencyLearning)
def test_decode_steps_that_an_instance_makes_by_itself_are_learnt_from(learning: LatencyLearning) -> None:
    """Whatever is learnt of them, they are nothing to decide by where nobody waits."""
    core = core_of(learning)
    core.handle(InstanceJoined(replace(measured(0.001), measured_steps=()), ()), 0.0)
    before, decodes = core.latency, StepShape((), 8, 4096)
    for number in range(40):
        step = DecodeStepsDone(measured(1.0).instance_id, own_steps(0.05))
        assert core.handle(step, float(number)) == []
    if learning is LatencyLearning.FIXED:
        assert core.latency is before
    else:
        assert core.latency.step_s(decodes) == pytest.approx(0.05, rel=0.1)


def test_steps_that_end_a_request_or_precede_a_plan_are_learnt_from_too() -> None:
    core = core_of(LatencyLearning.REFINED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    (run,) = of(RunStep, core.handle(RequestArrived(a_request("r", 100, 4000)), 0.0))
    name = measured(1.0).instance_id
    core.handle(step_done(name, run.plan, PRIOR.step_s(CHUNK), own_steps=own_steps(0.05)), 1.0)
    for number in range(40):  # repeated ones are learnt from, and change nothing else
        finished = RequestFinished(name, RequestId("x"), Epoch(0), FinishReason.STOP, 9, own_steps(0.05))
        core.handle(finished, 2.0 + number)
    assert core.latency.step_s(StepShape((), 8, 4096)) == pytest.approx(0.05, rel=0.1)


def test_the_context_of_residents_is_what_they_attend_to_not_what_they_have_room_for() -> None:
    core = core_of(LatencyLearning.REFINED)
    core.handle(InstanceJoined(measured(0.001), ()), 0.0)
    (run,) = of(RunStep, core.handle(RequestArrived(a_request("r", 100, 4000)), 0.0))
    name = measured(1.0).instance_id
    core.handle(step_done(name, run.plan), 1.0)
    assert core.instances[0].num_resident_tokens >= 4099
    core.handle(DecodeStepsDone(name, own_steps(0.02, num_tokens=1, context=120)), 2.0)
    assert core.instances[0].num_resident_tokens == pytest.approx(120, abs=1)


def test_instances_of_unlike_speed_have_models_of_their_own() -> None:
    """Neither what they measured nor their steps are mixed, and each gets chunks that fit it."""
    core = core_of(LatencyLearning.MEASURED)
    fast = replace(measured(0.0001, "fast"), device_name="Abacus 9000")
    slow = replace(measured(0.001, "slow"), device_name="Abacus 1")
    for profile in (fast, slow):
        core.handle(InstanceJoined(profile, ()), 0.0)
    runs = [of(RunStep, core.handle(RequestArrived(a_request(f"r{n}", 8000, 4)), 1.0)) for n in range(2)]
    first = {run.instance_id: run.plan.chunks[0].num_tokens for steps in reversed(runs) for run in reversed(steps)}
    assert first[slow.instance_id] < first[fast.instance_id] / 5
    model = core.latency
    for number in range(100):
        core.handle(DecodeStepsDone(slow.instance_id, own_steps(5.0)), 2.0 + number)
    assert core.latency is model
