"""One instance that prefills and decodes: what comes out, what is reported, and that nothing is held afterwards."""

import dataclasses
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio import to_thread

from pdmesh.config import TransferConfig
from pdmesh.core.commands import AdmitPrefill, ExpectCopy, RunStep, SendCopy, SetRole
from pdmesh.core.events import KvReleased, RequestDropped, RequestFinished, StepDone
from pdmesh.engine.base import LayerHook, SequenceSlice, SliceResult, StepFlight
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKvLost
from pdmesh.model import FinishReason, InstanceId, RequestId, Role, SamplingParams
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.wire.messages import Generation, PeersHere, Prompt, PromptLogprobs
from pdmesh.worker import steps
from pdmesh.worker.plans import MAX_QUEUED_PLANS
from pdmesh_testing.fake_engine import FAKE_LAYOUT, FakeEngine, StepGate, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.worker import (
    RunningInstance,
    a_shard,
    a_transfer,
    chunk_plans,
    make_generation,
    prompt_of,
    running_instance,
)

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@asynccontextmanager
async def mixed(engine: FakeEngine | None = None) -> AsyncGenerator[RunningInstance]:
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(engine or FakeEngine(), transport, config=CONFIG) as running,
    ):
        yield running


def free(running: RunningInstance, generation: Generation) -> None:
    running.free(generation.request_id, generation.epoch)


def output_of(running: RunningInstance, request_id: str, epoch: int = 0) -> list[int]:
    """The request's tokens; their indices must follow each other, and only the last one ends it."""
    tokens = running.tokens_of(request_id, epoch)
    assert [token.index for token in tokens] == list(range(tokens[0].index, tokens[0].index + len(tokens)))
    assert all(token.finish_reason is None for token in tokens[:-1])
    return [token.token_id for token in tokens if token.token_id is not None]


@pytest.mark.parametrize("sizes", [[1], [3], [4], [5, 2], [17]])
async def test_output_does_not_depend_on_chunks(sizes: list[int]) -> None:
    prompt = list(range(40, 57))
    generation = make_generation("r", prompt, GREEDY)
    async with mixed() as running:
        running.admit(generation, kv_moves=False)
        plans = chunk_plans(generation, sizes)
        for chunk in plans:
            running.run([chunk])
        await running.reported(KvReleased, "r")
        assert output_of(running, "r") == reference_output(prompt, GREEDY)
        assert running.tokens_of("r")[-1].finish_reason is FinishReason.LENGTH
        steps = [report for report in running.reports if isinstance(report, StepDone)]
        assert [step.plan_id for step in steps] == list(range(len(plans)))
        assert sum(done.num_tokens for step in steps for done in step.chunks) == len(prompt)
        own_steps = running.reports_of(RequestFinished, "r")[0].own_steps
        assert own_steps is not None
        assert (own_steps.num_steps, own_steps.num_tokens, own_steps.num_context_tokens) == (7, 7, sum(range(18, 25)))
        assert 0 < own_steps.duration_s <= own_steps.wall_s
        assert running.reports_of(RequestFinished, "r") == [
            RequestFinished(
                instance_id=running.instance.instance_id,
                request_id=RequestId("r"),
                epoch=generation.epoch,
                reason=FinishReason.LENGTH,
                num_output_tokens=8,
                own_steps=own_steps,
            )
        ]
        assert len(running.reports_of(KvReleased, "r")) == 1
        running.assert_all_free()


@pytest.mark.parametrize("seed", range(6))
async def test_output_does_not_depend_on_company(seed: int) -> None:
    """Several requests, their chunks interleaved in random plans with and without decodes."""
    rng = random.Random(seed)
    async with mixed(FakeEngine(num_blocks=256)) as running:
        requests: dict[str, Generation] = {}
        waiting: list[list[ChunkPlan]] = []
        for number in range(8):
            params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=rng.choice([0, 1]), seed=number)
            generation = make_generation(f"r{number}", [rng.randrange(999) for _ in range(rng.randint(1, 30))], params)
            requests[generation.request_id] = generation
            running.admit(generation, kv_moves=False)
            waiting.append(chunk_plans(generation, [rng.randint(1, 9) for _ in range(4)]))
        while waiting:
            together = rng.sample(waiting, rng.randint(1, min(3, len(waiting))))
            running.run([chunks.pop(0) for chunks in together], with_decodes=rng.random() < 0.5)
            waiting = [chunks for chunks in waiting if chunks]
            await anyio.lowlevel.checkpoint()
        for request_id, generation in requests.items():
            await running.reported(KvReleased, request_id)
            prompt = list(memoryview(generation.token_ids).cast("i"))
            assert output_of(running, request_id) == reference_output(prompt, generation.params)
        running.assert_all_free()


async def test_a_resumed_request_goes_on_where_it_was() -> None:
    prompt, whole = [9, 8, 7], reference_output([9, 8, 7], GREEDY)
    generation = make_generation("r", prompt, GREEDY, output=whole[:3], epoch=1)
    async with mixed() as running:
        running.admit(generation, kv_moves=False)
        running.run(chunk_plans(generation, [4]))  # both in one plan: the second cannot follow
        await running.reported(RequestDropped, "r")
        again = make_generation("r", prompt, GREEDY, output=whole[:3], epoch=2)
        running.admit(again, kv_moves=False)
        for chunk in chunk_plans(again, [4]):
            running.run([chunk])
        await running.reported(RequestFinished, "r")
        assert output_of(running, "r", epoch=2) == whole[3:]
        assert running.tokens_of("r", epoch=2)[0].index == 3
        await running.until(lambda: len(running.reports_of(KvReleased, "r")) == 2)
        running.assert_all_free()


@pytest.mark.parametrize("sizes", [[1], [4], [7], [50]])
async def test_every_prompt_token_but_the_first_gets_its_logprobs(sizes: list[int]) -> None:
    prompt = list(range(200, 223))
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, logprobs=2)
    generation = make_generation("r", prompt, params)
    async with mixed() as running:
        running.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, sizes):
            running.run([chunk])
        await running.reported(KvReleased, "r")
        parts = [message for message in running.tokens if isinstance(message, PromptLogprobs)]
        tops = {part.start + i: one.top for part in parts for i, one in enumerate(part.logprobs)}
        assert {position: top[0][0] for position, top in tops.items()} == dict(list(enumerate(prompt))[1:])
        assert sum(len(part.logprobs) for part in parts) == len(prompt) - 1
        logprobs = [token.logprobs for token in running.tokens_of("r")]
        assert all(one is not None and len(one.top) == 2 for one in logprobs)


async def test_a_chunk_of_what_was_freed_does_no_harm_to_what_is_received_since() -> None:
    """A helper that was lost may be named as the receiver, before the chunks come up that it was to compute."""
    generation = make_generation("r", [3] * 8, GREEDY)
    async with mixed() as running:
        running.expect(generation, running)
        plan_id = running.run(chunk_plans(generation, [4])[:1])
        await running.until(lambda: any(isinstance(report, StepDone) for report in running.reports))
        (step,) = [report for report in running.reports if isinstance(report, StepDone)]
        assert (step.plan_id, [done.num_tokens for done in step.chunks]) == (plan_id, [0])
        assert running.reports_of(RequestDropped, "r") == []
        free(running, generation)
        await running.reported(KvReleased, "r")
        running.assert_all_free()


async def test_what_a_chunk_says_of_its_prompt_is_told_though_the_request_was_freed_meanwhile() -> None:
    """As a helper is, whose leader was done before it left its last layer."""
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        generation = make_generation("r", [3] * 9, SamplingParams(max_tokens=2, prompt_logprobs=0))
        running.admit(generation, kv_moves=False)
        running.run(chunk_plans(generation, [4])[:1])
        await to_thread.run_sync(gate.arrived)
        free(running, generation)
        gate.open()
        await running.reported(KvReleased, "r")
        await running.until(lambda: len(running.tokens) == 1)
        (told,) = running.tokens
        assert isinstance(told, PromptLogprobs)
        assert (told.start, len(told.logprobs)) == (1, 4)
        running.assert_all_free()


async def test_a_free_that_finds_nothing_is_answered() -> None:
    async with mixed() as running:
        free(running, make_generation("r", [1], GREEDY, epoch=4))
        assert running.reports == [
            KvReleased(
                running.instance.instance_id,
                request_id=RequestId("r"),
                epoch=make_generation("r", [1], GREEDY, epoch=4).epoch,
            )
        ]


async def test_a_free_takes_older_epochs_with_it() -> None:
    async with mixed() as running:
        running.admit(make_generation("r", [1] * 9, GREEDY, epoch=0), kv_moves=False)
        free(running, make_generation("r", [1], GREEDY, epoch=1))
        assert sorted(report.epoch for report in running.reports_of(KvReleased, "r")) == [0, 1]
        running.assert_all_free()


async def test_a_chunk_of_a_freed_request_is_skipped() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        other, generation = make_generation("o", [1] * 5, GREEDY), make_generation("r", [2] * 8, GREEDY)
        running.admit(other, kv_moves=False)
        running.admit(generation, kv_moves=False)
        running.run(chunk_plans(other, [5]))
        plan_id = running.run(chunk_plans(generation, [8]))
        await to_thread.run_sync(gate.arrived)  # the other's step runs, ours waits
        free(running, generation)
        assert len(running.reports_of(KvReleased, "r")) == 1
        gate.open()
        await running.reported(KvReleased, "o")
        (step,) = [report for report in running.reports if isinstance(report, StepDone) and report.plan_id == plan_id]
        assert [done.num_tokens for done in step.chunks] == [0]
        assert running.tokens_of("r") == []
        assert output_of(running, "o") == reference_output([1] * 5, GREEDY)
        running.assert_all_free()


@pytest.mark.parametrize("num_layers_before", [1, 2, 3, 4, 5])
async def test_a_free_during_a_step_waits_for_its_end(num_layers_before: int) -> None:
    """Freed in the first or second layer of its first chunk, of its second, or of its first decode step."""
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        generation = make_generation("r", [3] * 8, GREEDY)
        running.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [4]):
            running.run([chunk])
        for _ in range(num_layers_before - 1):
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        await to_thread.run_sync(gate.arrived)
        num_tokens = len(running.tokens_of("r"))
        free(running, generation)
        assert running.reports_of(KvReleased, "r") == []  # the step still uses the blocks
        gate.open()
        await running.reported(KvReleased, "r")
        await anyio.wait_all_tasks_blocked()
        assert len(running.reports_of(KvReleased, "r")) == 1
        assert len(running.tokens_of("r")) == num_tokens
        running.assert_all_free()


SLOW, URGENT = make_generation("slow", [1] * 9, GREEDY), make_generation("urgent", [2] * 5, GREEDY)


def run_urgent(running: RunningInstance, plan_id: int = 1000) -> None:
    plan = StepPlan(plan_id=plan_id, chunks=tuple(chunk_plans(URGENT, [5])), with_decodes=False, urgent=True)
    running.instance.handle(RunStep(instance_id=running.instance.instance_id, plan=plan))


async def begin_slow(running: RunningInstance, gate: StepGate, *, chunk_tokens: int = 9) -> None:
    """Until the slow request's first step is in its first layer, with the urgent one admitted."""
    for generation in (SLOW, URGENT):
        running.admit(generation, kv_moves=False)
    for chunk in chunk_plans(SLOW, [chunk_tokens]):
        running.run([chunk])
    await to_thread.run_sync(gate.arrived)


@pytest.mark.parametrize("num_layers_before", [1, 2, 3])
async def test_an_urgent_plan_runs_inside_the_running_step(num_layers_before: int) -> None:
    """Two layers to a step. In the last one it is too late: it runs next, before the plan that waits."""
    gate = StepGate()
    engine = FakeEngine(gate=gate)
    async with mixed(engine) as running:
        await begin_slow(running, gate, chunk_tokens=4)
        for _ in range(num_layers_before - 1):  # to a layer of the first or the second step of the slow one
            gate.let_through()
            await to_thread.run_sync(gate.arrived)
        run_urgent(running)
        free(running, make_generation("nobody", [1], GREEDY))  # the event loop goes on
        is_first_layer = num_layers_before % 2 == 1
        if is_first_layer:
            for _ in range(2):  # through this layer, then through both of the urgent step
                gate.let_through()
                await to_thread.run_sync(gate.arrived)
            gate.let_through()
            await running.until(lambda: len(running.tokens_of("urgent")) == 1)
            num_done = (num_layers_before - 1) // 2
            reports = [report for report in running.reports if isinstance(report, StepDone)]
            assert [step.plan_id for step in reports] == [*range(num_done), 1000]  # at once: the outer step still runs
            await to_thread.run_sync(gate.arrived)
        gate.open()
        for request_id in ("slow", "urgent"):
            await running.reported(KvReleased, request_id)
        assert output_of(running, "slow") == reference_output([1] * 9, GREEDY)
        assert output_of(running, "urgent") == reference_output([2] * 5, GREEDY)
        begun = [batch[0][0] for batch in engine.batches[:4]]
        assert begun.index(RequestId("urgent")) == num_layers_before // 2 + is_first_layer
        running.assert_all_free()


async def test_the_time_of_an_urgent_step_is_not_the_interrupted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is read: from 1 to 6, of which the urgent step has four.

    A device is 10 s behind when the outer step is interrupted: these are the outer step's.
    """
    clock = itertools.count(1)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    gate = StepGate()

    class Device(FakeEngine):
        def settle(self) -> None:
            for _ in range(10):
                next(clock)

    async with mixed(Device(gate=gate)) as running:
        await begin_slow(running, gate)
        run_urgent(running)
        gate.open()
        for request_id in ("slow", "urgent"):
            await running.reported(KvReleased, request_id)
        inner, outer = (report for report in running.reports if isinstance(report, StepDone))
        assert (inner.plan_id, inner.duration_s) == (1000, 1.0)
        assert (outer.plan_id, outer.duration_s) == (0, 12.0)


async def test_an_urgent_plan_of_a_freed_request_is_answered_and_leaves_nothing() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        await begin_slow(running, gate)
        free(running, URGENT)
        run_urgent(running, plan_id=7)
        (step,) = [report for report in running.reports if isinstance(report, StepDone)]
        assert (step.plan_id, [done.num_tokens for done in step.chunks]) == (7, [0])
        running.admit(URGENT, kv_moves=False)
        run_urgent(running, plan_id=8)
        free(running, URGENT)  # it waits for its turn at the engine: the blocks are in use
        assert len(running.reports_of(KvReleased, "urgent")) == 1
        gate.open()
        await running.reported(KvReleased, "urgent", count=2)
        await running.reported(KvReleased, "slow")
        assert running.tokens_of("urgent") == []
        assert output_of(running, "slow") == reference_output([1] * 9, GREEDY)
        running.assert_all_free()


async def test_a_failure_inside_a_step_ends_both_requests() -> None:
    gate = StepGate()
    engine = FakeEngine(gate=gate, fails=lambda batch: batch[0].sequence.request_id == "urgent")
    async with mixed(engine) as running:
        await begin_slow(running, gate)
        run_urgent(running)
        gate.open()
        await running.until(lambda: running.failure is not None)
        for request_id in ("slow", "urgent"):
            assert [token.finish_reason for token in running.tokens_of(request_id)] == [FinishReason.ERROR]


async def test_a_scheduler_that_is_met_again_knows_nothing_of_urgent_plans() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        await begin_slow(running, gate)
        run_urgent(running)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.instance.drop_all_but_decoding)
            await running.reported(KvReleased, "urgent")
            gate.open()
        await running.reported(KvReleased, "slow")
        running.assert_all_free()


Break = Callable[[Generation, RunningInstance], None]


def too_few_blocks(generation: Generation, running: RunningInstance) -> None:
    admit(generation, running, num_blocks=1)


def too_many_blocks(generation: Generation, running: RunningInstance) -> None:
    admit(generation, running, num_blocks=10_000)


def torn_tokens(generation: Generation, running: RunningInstance) -> None:
    running.admit(replace(generation, token_ids=generation.token_ids[:-1]), kv_moves=False)


def no_tokens(generation: Generation, running: RunningInstance) -> None:
    admit(replace(generation, token_ids=b""), running, num_blocks=9)


def too_long(generation: Generation, running: RunningInstance) -> None:
    params = SamplingParams(max_tokens=100_000)
    admit(replace(generation, params=params), running, num_blocks=60)


def nothing_left(generation: Generation, running: RunningInstance) -> None:
    running.admit(replace(generation, params=SamplingParams(max_tokens=0)), kv_moves=True)


def absurd_context(generation: Generation, running: RunningInstance) -> None:
    expect(replace(generation, token_ids=b""), running, num_context_tokens=1 << 40)


def negative_context(generation: Generation, running: RunningInstance) -> None:
    expect(replace(generation, token_ids=b""), running, num_context_tokens=-1)


def context_of_another_length(generation: Generation, running: RunningInstance) -> None:
    expect(generation, running, num_context_tokens=3)


def second_chunk_first(generation: Generation, running: RunningInstance) -> None:
    running.admit(generation, kv_moves=False)
    running.run([chunk_plans(generation, [4])[1]])


def chunk_beyond_the_prompt(generation: Generation, running: RunningInstance) -> None:
    running.admit(generation, kv_moves=False)
    running.run([first_chunk(generation, num_tokens=99, is_last=True)])


def empty_chunk(generation: Generation, running: RunningInstance) -> None:
    running.admit(generation, kv_moves=False)
    running.run([first_chunk(generation, num_tokens=0, is_last=False)])


def last_chunk_not_called_so(generation: Generation, running: RunningInstance) -> None:
    running.admit(generation, kv_moves=False)
    running.run([first_chunk(generation, num_tokens=12, is_last=False)])


def admitted_while_stopping(generation: Generation, running: RunningInstance) -> None:
    running.instance.stop_admitting()
    running.admit(generation, kv_moves=False)


def begun_by_other_weights(generation: Generation, running: RunningInstance) -> None:
    running.admit(replace(generation, weights="others"), kv_moves=False)


def begun_elsewhere_by_other_weights(generation: Generation, running: RunningInstance) -> None:
    expect(replace(generation, weights="others"), running, num_context_tokens=12)


def admit(generation: Generation, running: RunningInstance, *, num_blocks: int) -> None:
    running.instance.handle(admission(generation, running, num_blocks=num_blocks), prompt_of(generation))


def admission(generation: Generation, running: RunningInstance, *, num_blocks: int = 9) -> AdmitPrefill:
    instance_id = running.instance.instance_id
    return AdmitPrefill(
        instance_id=instance_id,
        request_id=generation.request_id,
        epoch=generation.epoch,
        shards=(a_shard(instance_id, num_blocks),),
        transfer=None,
    )


def admitted_without_a_prompt(generation: Generation, running: RunningInstance) -> None:
    running.instance.handle(admission(generation, running))


def admitted_with_the_prompt_of_another(generation: Generation, running: RunningInstance) -> None:
    other = make_generation("another", [1, 2], GREEDY)
    running.instance.handle(admission(generation, running), prompt_of(other))


def sent_from_nowhere(generation: Generation, running: RunningInstance) -> None:
    running.instance.handle(placement(generation, running, "nowhere"), prompt_of(generation))


def granted_to_nobody(generation: Generation, running: RunningInstance) -> None:
    running.admit(generation, kv_moves=True)
    instance_id = running.instance.instance_id
    grant = SendCopy(
        instance_id=instance_id,
        request_id=generation.request_id,
        epoch=generation.epoch,
        transfer=a_transfer(a_shard(instance_id, 3), a_shard("nowhere", 3)),
    )
    running.instance.handle(grant)


def placement(generation: Generation, running: RunningInstance, source_id: str) -> ExpectCopy:
    instance_id = running.instance.instance_id
    return ExpectCopy(
        instance_id=instance_id,
        request_id=generation.request_id,
        epoch=generation.epoch,
        transfer=a_transfer(a_shard(source_id, 9), a_shard(instance_id, 9)),
    )


def expect(generation: Generation, running: RunningInstance, *, num_context_tokens: int) -> None:
    command = placement(generation, running, "elsewhere")
    running.instance.handle(PeersHere(data_addresses={InstanceId("elsewhere"): b"?"}))
    running.instance.handle(command, Prompt(generation=generation, num_context_tokens=num_context_tokens))


def first_chunk(generation: Generation, *, num_tokens: int, is_last: bool) -> ChunkPlan:
    return ChunkPlan(
        request_id=generation.request_id, epoch=generation.epoch, start=0, num_tokens=num_tokens, is_last=is_last
    )


def replace(generation: Generation, **changes: object) -> Generation:
    return msgspec.structs.replace(generation, **changes)


@pytest.mark.parametrize(
    "break_it",
    [
        too_few_blocks,
        too_many_blocks,
        torn_tokens,
        no_tokens,
        too_long,
        nothing_left,
        absurd_context,
        negative_context,
        context_of_another_length,
        second_chunk_first,
        chunk_beyond_the_prompt,
        empty_chunk,
        last_chunk_not_called_so,
        admitted_while_stopping,
        begun_by_other_weights,
        begun_elsewhere_by_other_weights,
        admitted_without_a_prompt,
        admitted_with_the_prompt_of_another,
        sent_from_nowhere,
        granted_to_nobody,
    ],
)
async def test_what_cannot_be_done_is_refused_and_harms_nobody(break_it: Break) -> None:
    async with mixed() as running:
        other = make_generation("other", [5] * 6, GREEDY)
        running.admit(other, kv_moves=False)
        break_it(make_generation("r", list(range(12)), GREEDY), running)
        running.run(chunk_plans(other, [6]))
        await running.reported(KvReleased, "other")
        assert len(running.reports_of(RequestDropped, "r")) == 1
        assert len(running.reports_of(KvReleased, "r")) == 1
        assert output_of(running, "other") == reference_output([5] * 6, GREEDY)
        running.assert_all_free()


async def test_a_plan_of_unknown_requests_is_answered() -> None:
    async with mixed() as running:
        stranger = make_generation("stranger", [1, 2], GREEDY)
        plan_id = running.run(chunk_plans(stranger, [2]), with_decodes=True)
        await running.until(lambda: bool(running.reports))
        (step,) = running.reports
        assert isinstance(step, StepDone)
        assert (step.plan_id, [done.num_tokens for done in step.chunks], step.num_decodes) == (plan_id, [0], 0)


async def test_a_flood_of_plans_is_answered() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        running.admit(make_generation("r", [1] * 4, GREEDY), kv_moves=False)
        running.run(chunk_plans(make_generation("r", [1] * 4, GREEDY), [4]))
        await to_thread.run_sync(gate.arrived)
        for _ in range(MAX_QUEUED_PLANS + 3):
            running.run(chunk_plans(make_generation("stranger", [1], GREEDY), [1]))
        assert len(running.reports) == 3
        gate.open()
        await running.reported(KvReleased, "r")
        assert sum(isinstance(report, StepDone) for report in running.reports) == 1 + MAX_QUEUED_PLANS + 3


async def test_a_broken_engine_ends_its_batch_with_an_error() -> None:
    engine = FakeEngine(fails=lambda batch: any(part.sequence.request_id == "bad" for part in batch))
    async with mixed(engine) as running:
        good, bad = make_generation("good", [1] * 3, GREEDY), make_generation("bad", [2] * 3, GREEDY)
        for generation in (good, bad):
            running.admit(generation, kv_moves=False)
        running.run(chunk_plans(bad, [3]))
        await running.until(lambda: running.failure is not None)
        (token,) = running.tokens_of("bad")
        assert (token.token_id, token.finish_reason, token.index) == (None, FinishReason.ERROR, 0)
        assert token.error is not None
        assert running.reports_of(RequestFinished, "bad")[0].reason is FinishReason.ERROR
        assert len(running.reports_of(KvReleased, "bad")) == 1
        free(running, good)
        running.assert_all_free()


async def test_only_decoding_requests_survive_a_new_registration() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        decoding = make_generation("decoding", [1] * 4, GREEDY)
        prefilling = make_generation("prefilling", [2] * 8, GREEDY)
        queued = make_generation("queued", [3] * 4, GREEDY)
        for generation in (decoding, prefilling, queued):
            running.admit(generation, kv_moves=False)
        running.run(chunk_plans(decoding, [4]))
        running.run([chunk_plans(prefilling, [4])[0]])
        running.run(chunk_plans(queued, [4]))
        for _ in range(2):  # both layers of the first step
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        await to_thread.run_sync(gate.arrived)  # the second step is in its first layer
        async with anyio.create_task_group() as tasks:
            dropped = anyio.Event()

            async def drop() -> None:
                await running.instance.drop_all_but_decoding()
                dropped.set()

            tasks.start_soon(drop)
            await anyio.wait_all_tasks_blocked()
            assert not dropped.is_set()  # the step that uses its blocks has not ended
            gate.open()
            await dropped.wait()
        assert running.instance.dropped == [("prefilling", 0), ("queued", 0)]
        running.instance.registered()
        assert not running.instance.dropped
        (resident,) = running.instance.residents()
        assert (resident.request_id, resident.decoding) == ("decoding", True)
        assert resident.num_blocks == 3  # 4 + 8 - 1 tokens in blocks of 4
        await running.reported(KvReleased, "decoding")
        assert output_of(running, "decoding") == reference_output([1] * 4, GREEDY)
        assert running.tokens_of("prefilling") == running.tokens_of("queued") == []
        running.assert_all_free()


LONG = SamplingParams(max_tokens=40, temperature=0)


def begin_with_little_room(running: RunningInstance, *request_ids: str) -> None:
    """Admit requests of 4 and 40 tokens, which need 11 blocks of 4, with 3."""
    for number, request_id in enumerate(request_ids):
        generation = make_generation(request_id, [number] * 4, LONG)
        admit(generation, running, num_blocks=3)
        running.run(chunk_plans(generation, [4]))


def num_standing(running: RunningInstance) -> int:
    return running.instance.num_of_stage()["out_of_credit"]


async def test_residents_go_on_without_a_scheduler_from_blocks_that_are_free() -> None:
    """They stood still where the room ended that the last one had granted."""
    async with mixed(FakeEngine(num_blocks=14)) as running:
        begin_with_little_room(running, "older", "younger")
        await running.until(lambda: num_standing(running) == 2)
        assert len(running.tokens_of("older")) == len(running.tokens_of("younger")) == 9  # 12 with KV, one without
        running.instance.lose_scheduler()
        await running.reported(KvReleased, "younger")  # which waits for what the older one gives back
        for number, request_id in enumerate(("older", "younger")):
            assert output_of(running, request_id) == reference_output([number] * 4, LONG)
        ended = [report.request_id for report in running.reports if isinstance(report, KvReleased)]
        assert ended == ["older", "younger"]
        running.assert_all_free()


async def test_what_residents_took_is_told_with_the_next_registration_and_nothing_is_taken_after_that() -> None:
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        begin_with_little_room(running, "r")
        running.instance.lose_scheduler()
        gate.let_through(2 * 8)
        await running.until(lambda: len(running.tokens_of("r")) == 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.instance.drop_all_but_decoding)
            gate.open()
        (resident,) = running.instance.residents()
        assert resident.num_blocks == 11
        await running.reported(KvReleased, "r")
        assert output_of(running, "r") == reference_output([0] * 4, LONG)


async def test_emptied_waits_for_the_last_release() -> None:
    async with mixed() as running:
        generation = make_generation("r", [1] * 4, GREEDY)
        running.admit(generation, kv_moves=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.instance.emptied)
            running.run(chunk_plans(generation, [4]))
        assert len(running.reports_of(KvReleased, "r")) == 1


async def test_role_changes_and_books_are_told() -> None:
    async with mixed() as running:
        running.instance.handle(SetRole(instance_id=running.instance.instance_id, role=Role.DECODE))
        assert running.instance.role is Role.DECODE
        running.admit(make_generation("r", [1] * 4, GREEDY), kv_moves=False)
        books = running.instance.load()
        assert (books.num_free_blocks, books.num_held_blocks, books.num_quarantined_blocks) == (61, 3, 0)


# --- several stages ---


class Watched(FakeEngine):
    """Notes how many slices each step has."""

    num_slices: list[int]

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        self.num_slices.append(len(batch))
        return super().execute(batch, on_layer=on_layer, flight=flight)


async def test_a_chunk_enters_as_the_one_before_leaves_the_first_stage() -> None:
    """Of one prompt: both wait at the gate, each in a stage of its own, before either has ended."""
    prompt, gate = list(range(8)), StepGate()
    async with mixed(FakeEngine(gate=gate, num_stages=2)) as running:
        generation = make_generation("r", prompt, GREEDY)
        running.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [4]):
            running.run([chunk])
        await to_thread.run_sync(gate.arrived)
        gate.let_through()
        await to_thread.run_sync(gate.arrived)
        await to_thread.run_sync(gate.arrived)
        assert not [report for report in running.reports if isinstance(report, StepDone)]
        gate.open()
        gate.let_through()
        await running.reported(KvReleased, "r")
        assert output_of(running, "r") == reference_output(prompt, GREEDY)


@pytest.mark.parametrize("seed", range(3))
async def test_output_does_not_depend_on_stages(seed: int) -> None:
    """Chunks of one prompt follow each other through the stages, others' and decodes between them; some are freed."""
    rng = random.Random(seed)
    async with mixed(FakeEngine(num_blocks=256, num_stages=2)) as running:
        requests: dict[str, Generation] = {}
        for number in range(8):
            params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=rng.choice([0, 1]), seed=number)
            generation = make_generation(f"r{number}", [rng.randrange(999) for _ in range(rng.randint(20, 60))], params)
            requests[generation.request_id] = generation
            running.admit(generation, kv_moves=False)
            for chunk in chunk_plans(generation, [rng.randint(1, 9) for _ in range(4)]):
                running.run([chunk], with_decodes=rng.random() < 0.5)
        free(running, requests.pop("r5"))
        for request_id, generation in requests.items():
            await running.reported(KvReleased, request_id)
            prompt = list(memoryview(generation.token_ids).cast("i"))
            assert output_of(running, request_id) == reference_output(prompt, generation.params)
        await running.reported(KvReleased, "r5")
        steps = [report for report in running.reports if isinstance(report, StepDone)]
        computed = [step.plan_id for step in steps if step.num_decodes or any(c.num_tokens for c in step.chunks)]
        assert computed == sorted(computed)
        running.assert_all_free()


async def test_an_urgent_chunk_enters_between_two_others() -> None:
    """Behind the one that is computed and the one that waits for it, and before those that were planned earlier."""
    gate = StepGate()
    engine = FakeEngine(gate=gate, num_stages=2)
    async with mixed(engine) as running:
        long, short = make_generation("long", list(range(16)), GREEDY), make_generation("short", [1, 2], GREEDY)
        running.admit(long, kv_moves=False)
        running.admit(short, kv_moves=False)
        for chunk in chunk_plans(long, [4]):
            running.run([chunk])
        await to_thread.run_sync(gate.arrived)
        plan = StepPlan(plan_id=9, chunks=tuple(chunk_plans(short, [2])), with_decodes=False, urgent=True)
        running.instance.handle(RunStep(instance_id=running.instance.instance_id, plan=plan))
        gate.open()
        for generation in (long, short):
            await running.reported(KvReleased, generation.request_id)
        order = [batch[0][0] for batch in engine.batches]
        assert order[:5] == ["long", "long", "short", "long", "long"]


@dataclass
class LostBesideChunks:
    """`RemoteKv` that gives no answer in the fourth layer of a step that has others' rows, too."""

    num_tokens = 0
    layer = 0  # of the last question
    has_others: bool = False
    is_lost: bool = False

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        self.layer = question.layer

    def answers(self) -> list[bytes]:
        if self.has_others and self.layer == 3:
            self.is_lost = True
            raise RemoteKvLost(self, "silent")
        return [b""]


class Asking(FakeEngine):
    """One request decodes with some of its KV elsewhere."""

    elsewhere: LostBesideChunks

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        for part in batch:
            if part.sequence.request_id == "asks":
                part.sequence.elsewhere = self.elsewhere
                self.elsewhere.has_others = len(batch) > 1
        return super().execute(batch, on_layer=on_layer, flight=flight)


async def test_a_request_that_comes_in_a_later_epoch_frees_its_kv_of_earlier_ones() -> None:
    """Its hand-over waits for an acknowledgement that was lost; the scheduler knows that it has landed."""
    async with mixed(FakeEngine(num_blocks=64)) as running:
        for epoch in (0, 1):
            generation = make_generation("r", [1, 2, 3], GREEDY, epoch=epoch)
            running.admit(generation, kv_moves=True)
            running.run(chunk_plans(generation, [3]))
        await running.until(lambda: len(running.tokens_of("r", 1)) == 1)
        released = await running.reported(KvReleased, "r")
        assert released.epoch == 0
        free(running, generation)
        await running.reported(KvReleased, "r", count=2)


async def test_no_chunk_follows_one_that_is_computed_again() -> None:
    """In a step of stages, beside a context whose member is lost: the next chunk needs it."""
    prompt, layout = list(range(40)), dataclasses.replace(FAKE_LAYOUT, num_layers=6)
    engine = Asking(layout, num_blocks=256, num_stages=2, step_s=lambda batch: 0.02)
    engine.elsewhere = LostBesideChunks()
    async with mixed(engine) as running:
        asks = make_generation("asks", [1], SamplingParams(max_tokens=500, temperature=0))
        running.admit(asks, kv_moves=False)
        running.run(chunk_plans(asks, [1]))
        await running.until(lambda: len(running.tokens_of("asks")) > 1)
        long = make_generation("long", prompt, GREEDY)
        running.admit(long, kv_moves=False)
        for chunk in chunk_plans(long, [8] * 4):
            running.run([chunk], with_decodes=True)
        await running.reported(KvReleased, "long")
        assert engine.elsewhere.is_lost
        assert output_of(running, "long") == reference_output(prompt, GREEDY, layout=layout)


async def test_decodes_pass_stages_in_as_many_parts() -> None:
    engine = Watched(num_stages=2)
    engine.num_slices = []
    async with mixed(engine) as running:
        for number in range(5):
            generation = make_generation(f"r{number}", [number], SamplingParams(max_tokens=30, temperature=0))
            running.admit(generation, kv_moves=False)
            running.run(chunk_plans(generation, [1]))
        for number in range(5):
            await running.reported(KvReleased, f"r{number}")
            assert output_of(running, f"r{number}") == reference_output(
                [number], SamplingParams(max_tokens=30, temperature=0)
            )
    assert max(engine.num_slices) <= 3


class AlwaysAnswered(LostBesideChunks):
    """`RemoteKv` that is never lost."""

    def answers(self) -> list[bytes]:
        return [b""]


async def test_residents_take_turns_in_steps_that_do_not_overlap() -> None:
    """A step with chunks beside a context on other instances is awaited, so the next share is chosen after its end."""
    engine = Asking(num_blocks=1024, num_stages=2)
    engine.elsewhere = AlwaysAnswered()
    async with mixed(engine) as running:
        params = SamplingParams(max_tokens=500, temperature=0)
        names = ["asks", "second", "third", "fourth"]
        for request_id in names:
            generation = make_generation(request_id, [1], params)
            running.admit(generation, kv_moves=False)
            running.run(chunk_plans(generation, [1]))
        await running.until(lambda: all(len(running.tokens_of(name)) > 1 for name in names))
        long = make_generation("long", list(range(200)), GREEDY)
        running.admit(long, kv_moves=False)
        for chunk in chunk_plans(long, [4] * 50):
            running.run([chunk], with_decodes=True)
        before = {name: len(running.tokens_of(name)) for name in names}
        await running.reported(KvReleased, "long")
        drawn = [len(running.tokens_of(name)) - before[name] for name in names]
        assert min(drawn) > max(drawn) / 2
        for name in names:
            free(running, make_generation(name, [1], params))


async def test_a_chunk_does_not_follow_at_once_where_there_is_one_stage() -> None:
    """What is urgent and of a request that is being computed would run inside its own step."""
    gate = StepGate()
    async with mixed(FakeEngine(gate=gate)) as running:
        generation = make_generation("r", list(range(20)), GREEDY)
        running.admit(generation, kv_moves=False)
        first, second, *_ = chunk_plans(generation, [4])
        running.run([first])
        await to_thread.run_sync(gate.arrived)
        plan = StepPlan(plan_id=7, chunks=(second,), with_decodes=False, urgent=True)
        running.instance.handle(RunStep(instance_id=running.instance.instance_id, plan=plan))
        gate.open()
        await running.reported(RequestDropped, "r")
