"""A worker and a simulated instance hold their own decode steps, and tell of them, alike."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import AdmitPrefill, RunStep
from pdmesh.core.events import DecodeStepsDone, Event, RequestFinished, StepDone
from pdmesh.core.instances.own_steps import HOLD_LIMIT_S, OwnSteps
from pdmesh.model import Epoch, GatewayId, OwnDecodeSteps, Request, RequestId, RequestKey, Role, SamplingParams
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.worker import plans
from pdmesh_lab.sim.agenda import Agenda
from pdmesh_lab.sim.context import SimContext
from pdmesh_lab.sim.exchange import SimulatedExchange
from pdmesh_lab.sim.instance import SimInstance
from pdmesh_lab.sim.links import SimulatedLinks
from pdmesh_lab.sim.result import RequestRun
from pdmesh_testing.fake_engine import FakeEngine, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.sim import UNEVEN_MODEL
from pdmesh_testing.worker import RunningInstance, a_shard, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)

#: (id, prompt tokens, output tokens)
A, B = ("a", 5, 70), ("b", 3, 40)


def a_plan(
    plan_id: int, *requests: tuple[str, int, int], with_decodes: bool = False, holds: bool = False, urgent: bool = False
) -> StepPlan:
    """Each request's whole prompt."""
    chunks = tuple(
        ChunkPlan(request_id=RequestId(name), epoch=Epoch(0), start=0, num_tokens=num_tokens, is_last=True)
        for name, num_tokens, _ in requests
    )
    return StepPlan(plan_id=plan_id, chunks=chunks, with_decodes=with_decodes, holds_decodes=holds, urgent=urgent)


#: Two prompts while decodes are held, then decode on.
PHASES = (a_plan(0, A, holds=True), a_plan(1, B, holds=True), a_plan(2, with_decodes=True))

ResidentReports = tuple[object, ...]


def told(events: Sequence[Event]) -> list[ResidentReports]:
    """All of the reports but times."""
    found: list[ResidentReports] = []
    for event in events:
        match event:
            case StepDone():
                decodes = event.num_decodes, event.num_decode_context_tokens
                found.append(("step", event.plan_id, *decodes, sizes(event.own_steps)))
            case DecodeStepsDone():
                found.append(("decodes", sizes(event.own_steps)))
            case RequestFinished():
                found.append((event.request_id, event.num_output_tokens, sizes(event.own_steps)))
            case _:
                pass
    return found


def sizes(own: OwnDecodeSteps | None) -> tuple[int, int, int] | None:
    if own is None:
        return None
    assert 0 < own.duration_s <= own.wall_s + 1e-9
    return own.num_steps, own.num_tokens, own.num_context_tokens


def context(first: int, num_steps: int) -> int:
    return sum(range(first, first + num_steps))


#: Of PHASES: `b` has 38 tokens to go after its prompt and the planned decode step, `a` 68.
TOLD_OF_PHASES: list[ResidentReports] = [
    ("step", 0, 0, 0, None),
    ("step", 1, 0, 0, None),
    ("step", 2, 2, 6 + 4, None),
    ("decodes", (32, 64, context(7, 32) + context(5, 32))),
    ("b", 40, (6, 12, context(39, 6) + context(37, 6))),
    ("a", 70, (30, 30, context(45, 30))),
]


def is_done(events: Sequence[Event], plan: StepPlan) -> bool:
    return any(isinstance(event, StepDone) and event.plan_id == plan.plan_id for event in events)


class Simulated:
    """One simulated instance; each plan comes when the one before it was reported."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.events: list[Event] = []
        self.runs: dict[RequestKey, RequestRun] = {}
        self.turn = False
        links = SimulatedLinks(self.agenda, 1e9, lambda flow: None)
        context = SimContext(
            agenda=self.agenda,
            links=links,
            exchange=SimulatedExchange(self.agenda, links),
            runs=self.runs,
            report=self.events.append,
            land=lambda plan, key, duration_s: None,
            land_ranges=lambda plan, key, num_tokens, duration_s: None,
            want_turn=self.want_turn,
            max_decode_steps=128,
        )
        self.instance = SimInstance(modelled_profile("i", Role.MIXED, num_blocks=100), UNEVEN_MODEL, context)

    def want_turn(self, instance_id: str) -> None:
        self.turn = True

    def admit(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        request = Request(
            request_id=RequestId(name),
            epoch=Epoch(0),
            gateway_id=GatewayId("g"),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=num_output_tokens,
            arrival_s=0.0,
        )
        self.runs[request.request_id, request.epoch] = RequestRun(request, num_output_tokens)
        instance_id = self.instance.instance_id
        self.instance.take(
            AdmitPrefill(
                instance_id=instance_id,
                request_id=request.request_id,
                epoch=request.epoch,
                shards=(a_shard(instance_id, 40),),
                transfer=None,
            )
        )

    def plan(self, plan: StepPlan) -> None:
        self.instance.take(RunStep(instance_id=self.instance.instance_id, plan=plan))
        while not is_done(self.events, plan):
            assert self.advance()

    def advance(self) -> bool:
        """To whatever is next; False if nothing is."""
        if self.turn:
            self.turn = False
            self.instance.begin()
            return True
        return self.agenda.advance()


def simulated(story: Sequence[StepPlan]) -> Simulated:
    """To the end of all that it does."""
    sim = Simulated()
    for request in (A, B):
        sim.admit(*request)
    for plan in story:
        sim.plan(plan)
    while sim.advance():
        pass
    return sim


async def served(story: Sequence[StepPlan]) -> RunningInstance:
    """The same of a worker, whose tokens must be right."""
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(FakeEngine(num_blocks=100), transport, config=CONFIG) as running,
    ):
        prompts = {name: [7] * num_tokens for name, num_tokens, _ in (A, B)}
        params = {name: SamplingParams(max_tokens=num_tokens, temperature=0) for name, _, num_tokens in (A, B)}
        for name, prompt in prompts.items():
            running.admit(make_generation(name, prompt, params[name]), kv_moves=False)
        for plan in story:
            running.instance.handle(RunStep(instance_id=running.instance.instance_id, plan=plan))
            await running.until(lambda: is_done(running.reports, plan))  # noqa: B023  # it is awaited here
            await anyio.wait_all_tasks_blocked()  # what it may do by itself it begins
        for name, prompt in prompts.items():
            await running.reported(RequestFinished, name)
            tokens = [token.token_id for token in running.tokens_of(name)]
            assert tokens == reference_output(prompt, params[name])
        return running


async def test_no_resident_decodes_in_a_prefill_phase() -> None:
    assert told(simulated(PHASES).events) == TOLD_OF_PHASES
    assert told((await served(PHASES)).reports) == TOLD_OF_PHASES


async def test_an_urgent_plan_does_not_end_a_phase() -> None:
    story = (a_plan(0, A, holds=True), a_plan(1, B, urgent=True), a_plan(2, with_decodes=True))
    assert told(simulated(story).events) == TOLD_OF_PHASES
    assert told((await served(story)).reports) == TOLD_OF_PHASES


async def test_residents_go_on_if_the_scheduler_has_forgotten_them(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[ResidentReports] = [
        *TOLD_OF_PHASES[:2],
        ("decodes", (32, 64, context(6, 32) + context(4, 32))),
        ("b", 40, (7, 14, context(38, 7) + context(36, 7))),
        ("a", 70, (30, 30, context(45, 30))),
    ]
    sim = simulated(PHASES[:2])
    assert told(sim.events) == expected
    (before,) = (event for event in sim.events if isinstance(event, StepDone) and event.plan_id == 1)
    (after,) = (event for event in sim.events if isinstance(event, DecodeStepsDone))
    assert after.own_steps.began_s == before.ended_s + HOLD_LIMIT_S
    monkeypatch.setattr(plans, "HOLD_LIMIT_S", 0.05)
    assert told((await served(PHASES[:2])).reports) == expected


def test_a_modelled_instance_tells_of_its_steps_as_well() -> None:
    instance = ModelledInstance(modelled_profile("i", Role.MIXED, num_blocks=100))
    for name, _, _ in (A, B):
        key = RequestId(name), Epoch(0)
        admit = AdmitPrefill(
            instance_id=instance.instance_id,
            request_id=key[0],
            epoch=key[1],
            shards=(a_shard(instance.instance_id, 40),),
            transfer=None,
        )
        instance.commands.append(admit)
        instance.take_command()
    for plan in PHASES:
        instance.commands.append(RunStep(instance_id=instance.instance_id, plan=plan))
        instance.take_command()
        instance.begin_step()
        instance.end_step()
        assert instance.can_decode is (plan is PHASES[-1])
    instance.decode(40)
    instance.finish((RequestId("b"), Epoch(0)))
    own = [sizes(event.own_steps) for event in instance.events if isinstance(event, DecodeStepsDone | RequestFinished)]
    assert own == [(32, 64, context(7, 32) + context(5, 32)), (8, 16, context(39, 8) + context(37, 8))]


def test_an_urgent_plan_may_begin_a_phase_and_every_other_says_what_holds() -> None:
    own = OwnSteps()
    held: list[bool] = []
    for plan in (
        a_plan(0, A),
        a_plan(1, B, holds=True, urgent=True),
        a_plan(2, B, urgent=True),
        a_plan(3, A, holds=True),
        a_plan(4, A),
    ):
        own.planned(plan)
        held.append(own.held)
    assert held == [False, True, True, True, False]
