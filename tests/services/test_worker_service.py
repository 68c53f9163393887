"""A worker between a real scheduler's stream and a real gateway's, both scripted, on loopback."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import msgspec
import pytest
from anyio import to_thread

from pdmesh.config import MeshConfig, SecurityConfig, TransferConfig, WorkerConfig
from pdmesh.core.commands import AdmitPrefill, FreeKv, RunStep
from pdmesh.core.events import (
    DrainRequested,
    KvReleased,
    LoadReported,
    RequestDropped,
    RequestFinished,
    StepDone,
    TokenLinkReported,
)
from pdmesh.errors import InstanceUnavailable, ProtocolError, leaves
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import Epoch, FinishReason, InstanceId, RequestId, Role, SamplingParams
from pdmesh.plans import StepPlan
from pdmesh.service import ServiceContext
from pdmesh.wire.messages import (
    Generation,
    Goodbye,
    RegisterTokens,
    RegisterWorker,
    TokenOut,
    TokensAccepted,
    TokensHeard,
)
from pdmesh.worker import plans, token_links
from pdmesh.worker.runtime import run_worker, serve_instance
from pdmesh.worker.threads import EngineThread
from pdmesh.worker.token_links import NUM_REMEMBERED, Unconfirmed, open_token_links
from pdmesh_testing.fake_engine import FakeEngine, StepGate, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.scripted_peers import ScriptedGateway, ScriptedScheduler, serving_gateway, serving_scheduler
from pdmesh_testing.worker import a_shard, chunk_plans, make_generation, prompt_of

W = InstanceId("w")

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TRANSFER = TransferConfig(max_payload_bytes=4096, num_send_buffers=2, num_receive_buffers=2)


@dataclass
class Worker:
    """A worker being served, its engine, and its peers."""

    scheduler: ScriptedScheduler
    gateway: ScriptedGateway
    token_address: str
    engine: FakeEngine
    context: ServiceContext = field(default_factory=lambda: ServiceContext(ready_fd=None))
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: BaseException | None = None
    num_plans: int = 0

    def admit(self, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> Generation:
        generation = msgspec.structs.replace(make_generation(name, prompt, params), token_address=self.token_address)
        num_blocks = num_blocks_for(len(prompt) + params.max_tokens - 1, self.engine.kv.layout.block_size)
        command = AdmitPrefill(
            instance_id=W,
            request_id=generation.request_id,
            epoch=generation.epoch,
            shards=(a_shard(W, num_blocks),),
            transfer=None,
        )
        self.scheduler.post(command, prompt_of(generation))
        return generation

    def start(self, name: str, prompt: list[int], *, chunk: int = 100, holds_decodes: bool = False) -> None:
        """Do what the scheduler does for a request that prefills and decodes here."""
        generation = self.admit(name, prompt)
        for part in chunk_plans(generation, [chunk]):
            plan = StepPlan(plan_id=self.num_plans, chunks=(part,), with_decodes=False, holds_decodes=holds_decodes)
            self.scheduler.post(RunStep(instance_id=W, plan=plan))
            self.num_plans += 1

    async def serve(self, config: MeshConfig) -> None:
        try:
            async with (
                EngineThread() as thread,
                MemoryTransport(config.transfer, MemoryFabric()) as transport,
            ):
                await serve_instance(
                    config, self.context, Role.MIXED, thread=thread, engine=self.engine, transport=transport
                )
        except Exception as error:
            (self.error,) = leaves(error)
        finally:
            self.ended.set()


@asynccontextmanager
async def served_worker(engine: FakeEngine | None = None) -> AsyncGenerator[Worker]:
    scheduler, gateway = ScriptedScheduler(), ScriptedGateway()
    async with (
        serving_scheduler(scheduler) as scheduler_address,
        serving_gateway(gateway) as token_address,
        anyio.create_task_group() as tasks,
    ):
        config = MeshConfig(
            scheduler_address=scheduler_address, worker=WorkerConfig(instance_id="w", engine="fake"), transfer=TRANSFER
        )
        worker = Worker(scheduler, gateway, token_address, engine or FakeEngine(num_blocks=512))
        tasks.start_soon(worker.serve, config)
        await scheduler.reported(RegisterWorker)
        yield worker
        tasks.cancel_scope.cancel()


async def test_it_registers_serves_and_reports() -> None:
    async with served_worker() as worker:
        register = worker.scheduler.reports_of(RegisterWorker)[0]
        assert (register.profile.instance_id, register.profile.role, register.residents) == ("w", Role.MIXED, ())
        assert register.profile.num_blocks == 512
        await worker.scheduler.reported(LoadReported)
        worker.start("r", list(range(9)), chunk=4)
        assert await worker.gateway.finished("r") == reference_output(list(range(9)), GREEDY)
        await worker.scheduler.reported(KvReleased, "r")
        assert worker.scheduler.reports_of(RequestFinished, "r")[0].num_output_tokens == GREEDY.max_tokens
        assert len(worker.scheduler.reports_of(StepDone)) == 3


async def test_a_steps_tokens_come_in_one_frame() -> None:
    gate = StepGate()
    async with served_worker(FakeEngine(num_blocks=512, gate=gate)) as worker:
        for number in range(4):
            worker.start(f"r{number}", [number] * 5)
        for _ in range(2 * 4 + 2 * 3):  # four prefills and three decode steps, two layers each
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        gate.open()
        for number in range(4):
            await worker.gateway.finished(f"r{number}")
        for frame in worker.gateway.frames:
            decoded = [message for message in frame if isinstance(message, TokenOut) and message.index > 0]
            by_request = {name: sum(token.request_id == name for token in decoded) for name in ("r0", "r1", "r2", "r3")}
            assert len(set(by_request.values())) == 1, "a decode step of four residents was torn"
        assert worker.gateway.num_streams == 1


async def test_decoding_goes_on_while_the_scheduler_restarts() -> None:
    gate = StepGate()
    gateway = ScriptedGateway()
    first, second = ScriptedScheduler(), ScriptedScheduler()
    async with serving_gateway(gateway) as token_address, anyio.create_task_group() as tasks:
        async with serving_scheduler(first) as address:
            worker = Worker(first, gateway, token_address, FakeEngine(num_blocks=512, gate=gate))
            config = MeshConfig(
                scheduler_address=address, worker=WorkerConfig(instance_id="w", engine="fake"), transfer=TRANSFER
            )
            tasks.start_soon(worker.serve, config)
            await first.reported(RegisterWorker)
            worker.start("r", [7] * 6)
            never_begun = worker.admit("p", [8] * 6)
            for _ in range(2):
                await to_thread.run_sync(gate.arrived)
                gate.let_through()
            await to_thread.run_sync(gate.arrived)  # the first decode step is under way
        for _ in range(4):  # two decode steps without a scheduler
            gate.let_through()
            await to_thread.run_sync(gate.arrived)
        await gateway.until(lambda: len(gateway.tokens_of("r")) == 3)
        async with serving_scheduler(second, port=int(address.rpartition(":")[2])):
            worker.scheduler = second
            register = await second.reported(RegisterWorker)
            assert [(resident.request_id, resident.decoding) for resident in register.residents] == [("r", True)]
            gate.open()
            assert await gateway.finished("r") == reference_output([7] * 6, GREEDY)
            worker.start("next", [9] * 3)
            assert await gateway.finished("next") == reference_output([9] * 3, GREEDY)
            second.post(FreeKv(instance_id=W, request_id=never_begun.request_id, epoch=never_begun.epoch))
            await second.reported(KvReleased, "p")
            tasks.cancel_scope.cancel()


async def test_what_a_scheduler_held_goes_on_when_its_stream_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "HOLD_LIMIT_S", 1e6)
    async with served_worker() as worker:
        worker.start("r", [7] * 6, holds_decodes=True)
        await worker.scheduler.reported(StepDone)
        await worker.gateway.until(lambda: 0 in worker.gateway.tokens_of("r"))
        await anyio.wait_all_tasks_blocked()
        assert list(worker.gateway.tokens_of("r")) == [0]
        worker.scheduler.cut_streams()
        assert await worker.gateway.finished("r") == reference_output([7] * 6, GREEDY)


async def test_a_broken_token_stream_costs_no_token() -> None:
    gate = StepGate()
    async with served_worker(FakeEngine(num_blocks=512, gate=gate)) as worker:
        worker.start("r", [7] * 6)
        for _ in range(2 * 3):
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        await worker.gateway.until(lambda: len(worker.gateway.tokens_of("r")) == 3)
        worker.gateway.cut_streams()
        gate.open()
        assert await worker.gateway.finished("r") == reference_output([7] * 6, GREEDY)
        await worker.gateway.until(lambda: worker.gateway.num_streams == 2)


async def test_a_gateway_that_does_not_read_loses_tokens_and_nothing_else() -> None:
    gateway = ScriptedGateway()
    async with (
        serving_gateway(gateway) as address,
        open_token_links(W, SecurityConfig(), max_queued=NUM_REMEMBERED + 2) as links,
    ):
        generation = make_generation("r", [1], GREEDY)

        def token(index: int) -> TokenOut:
            return TokenOut(request_id=generation.request_id, epoch=generation.epoch, index=index, token_id=1)

        links.send(address, generation.gateway_id, token(0))
        await gateway.until(lambda: 0 in gateway.tokens_of("r"))
        for index in range(1, NUM_REMEMBERED + 100):  # in one go: the stream cannot take them
            links.send(address, generation.gateway_id, token(index))
        links.send(address, generation.gateway_id, token(1_000_000))
        await gateway.until(lambda: 1_000_000 in gateway.tokens_of("r"))
        assert gateway.num_streams == 2
        assert len(gateway.tokens_of("r")) < NUM_REMEMBERED + 101, "what overflowed must have been dropped"


async def test_flush_waits_until_gateways_have_read() -> None:
    gateway = ScriptedGateway()
    async with serving_gateway(gateway) as address:
        async with open_token_links(W, SecurityConfig()) as links:
            generation = make_generation("r", [1], GREEDY)
            for index in range(500):
                message = TokenOut(request_id=generation.request_id, epoch=generation.epoch, index=index, token_id=1)
                links.send(address, generation.gateway_id, message)
            await links.flush()
        assert sorted(gateway.tokens_of("r")) == list(range(500))


async def test_a_gateway_that_answers_no_heartbeat_is_told_to_the_scheduler_and_so_is_its_return() -> None:
    gateway, told = ScriptedGateway(heartbeat_s=0.02), list[TokenLinkReported]()
    gateway.answers = False
    async with (
        serving_gateway(gateway) as address,
        open_token_links(W, SecurityConfig(), report=told.append) as links,
    ):
        generation = make_generation("r", [1], GREEDY)
        links.open(address, generation.gateway_id)
        await gateway.until(lambda: gateway.num_streams == 2)  # the first was given up
        gateway.answers = True
        links.send(
            address,
            generation.gateway_id,
            TokenOut(request_id=generation.request_id, epoch=generation.epoch, index=0, token_id=1),
        )
        await gateway.until(lambda: 0 in gateway.tokens_of("r"))
    assert told == []  # a stream that is opened again at once has lost nothing


async def test_what_no_answered_heartbeat_followed_is_told_with_a_gateway_that_fell_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the others it has heard: nothing of them starts again elsewhere."""
    monkeypatch.setattr(token_links, "SILENT_OPEN_LIMIT_S", 0.0)
    channel: Any = None
    told, reported = list[tuple[bool, list[str]]](), anyio.Event()

    def report(is_up: bool, unconfirmed: Unconfirmed) -> None:
        told.append((is_up, [request_id for request_id, _ in unconfirmed]))
        reported.set()

    link = token_links._GatewayLink(channel, RegisterTokens(instance_id=W), report, 10)

    def send(request_id: str) -> None:
        link.send(TokenOut(request_id=RequestId(request_id), epoch=Epoch(0), index=0, token_id=1))

    with pytest.raises(ProtocolError):
        link.handle(TokensHeard())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link._watch)
        link.welcomed(TokensAccepted(heartbeat_s=1.0, max_unanswered=4))
        await anyio.wait_all_tasks_blocked()
        send("heard")
        link.heartbeat()
        send("heard, too")
        link.heartbeat()
        send("late")
        link.handle(TokensHeard())
        link.handle(TokensHeard())
        link.heartbeat()
        send("later")
        send("late")
        link._session.was_silent = True
        link.lost()
        await reported.wait()
        tasks.cancel_scope.cancel()
    assert told == [(False, ["late", "later"])]


async def test_a_gateway_that_cannot_be_reached_is_told_to_the_scheduler_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_links, "FIRST_OPEN_LIMIT_S", 0.05)
    monkeypatch.setattr(token_links, "REPEAT_S", 0.05)
    told, gateway = list[bool](), ScriptedGateway()
    generation = make_generation("r", [1], GREEDY)
    said = anyio.Event()

    def hear(report: TokenLinkReported) -> None:
        assert (report.instance_id, report.gateway_id) == (W, generation.gateway_id)
        told.append(report.is_up)
        if told.count(False) == 2 or report.is_up:
            said.set()

    async with open_token_links(W, SecurityConfig(), report=hear) as links:
        async with serving_gateway(ScriptedGateway()) as address:
            pass  # nobody listens there any more
        links.open(address, generation.gateway_id)
        await said.wait()
        said = anyio.Event()
        async with serving_gateway(gateway, port=int(address.rpartition(":")[2])):
            await said.wait()
    assert told[-1]
    assert not any(told[:-1])


async def test_a_gateway_that_is_back_is_told_at_once_however_often_it_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what the scheduler keeps from the pair stays away for as long as it takes until the next look."""
    monkeypatch.setattr(token_links, "OPEN_LIMIT_S", 0.0)
    channel: Any = None
    told, gone = list[bool](), anyio.Event()

    def report(is_up: bool, _unconfirmed: Unconfirmed) -> None:
        told.append(is_up)
        gone.set()

    link = token_links._GatewayLink(channel, RegisterTokens(instance_id=W), report, 10)
    accepted = TokensAccepted(heartbeat_s=1.0, max_unanswered=4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link._watch)
        link.welcomed(accepted)
        await anyio.wait_all_tasks_blocked()
        link.lost()
        await gone.wait()
        await anyio.wait_all_tasks_blocked()
        link.lost()  # another attempt failed
        link.welcomed(accepted)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert told == [False, True]


async def test_a_broken_engine_is_told_to_everybody() -> None:
    engine = FakeEngine(num_blocks=512, fails=lambda batch: batch[0].sequence.num_output_tokens == 2)
    async with served_worker(engine) as worker:
        worker.start("r", [7] * 6)
        await worker.ended.wait()
        assert isinstance(worker.error, InstanceUnavailable)
        last = worker.gateway.tokens_of("r")[2]
        assert (last.token_id, last.finish_reason) == (None, FinishReason.ERROR)
        assert len(worker.scheduler.reports_of(Goodbye)) == 1


async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    gate = StepGate()
    async with served_worker(FakeEngine(num_blocks=512, gate=gate)) as worker:
        worker.start("r", [7] * 6)
        await to_thread.run_sync(gate.arrived)
        worker.context.stopping.set()
        await worker.scheduler.reported(DrainRequested)
        worker.start("late", [8] * 6)
        await worker.scheduler.reported(RequestDropped, "late")
        await worker.scheduler.reported(KvReleased, "late")
        gate.open()
        await worker.ended.wait()
        assert worker.error is None
        assert await worker.gateway.finished("r") == reference_output([7] * 6, GREEDY)
        assert isinstance(worker.scheduler.reports[-1], Goodbye)


async def test_a_scheduler_that_cuts_the_stream_gets_the_residents_again() -> None:
    gate = StepGate()
    async with served_worker(FakeEngine(num_blocks=512, gate=gate)) as worker:
        worker.start("r", [7] * 6)
        for _ in range(2):
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        await worker.gateway.until(lambda: 0 in worker.gateway.tokens_of("r"))
        worker.scheduler.cut_streams()
        again = await worker.scheduler.reported(RegisterWorker, count=2)
        (resident,) = again.residents
        assert (resident.request_id, resident.decoding, resident.num_context_tokens) == ("r", True, 7)
        gate.open()
        await worker.gateway.finished("r")
        await worker.scheduler.reported(KvReleased, "r")


async def test_a_worker_that_stops_says_so_again_to_a_scheduler_that_cut_its_stream() -> None:
    """Found by simulation: it was given what it had to refuse, until clients were told to try again."""
    gate = StepGate()
    async with served_worker(FakeEngine(num_blocks=512, gate=gate)) as worker:
        worker.start("r", [7] * 6)
        for _ in range(2):
            await to_thread.run_sync(gate.arrived)
            gate.let_through()
        await worker.gateway.until(lambda: 0 in worker.gateway.tokens_of("r"))
        worker.context.stopping.set()
        await worker.scheduler.reported(DrainRequested)
        worker.scheduler.cut_streams()
        again = await worker.scheduler.reported(RegisterWorker, count=2)
        assert again.stopping
        assert not worker.scheduler.reports_of(RegisterWorker)[0].stopping
        gate.open()
        await worker.ended.wait()


async def test_run_worker_builds_it_all_from_the_configuration() -> None:
    scheduler, gateway = ScriptedScheduler(), ScriptedGateway()
    async with (
        serving_scheduler(scheduler) as address,
        serving_gateway(gateway) as token_address,
        anyio.create_task_group() as tasks,
    ):
        context = ServiceContext(ready_fd=None)
        worker_config = WorkerConfig(engine="fake", served_model_name="m", kv_cache_bytes=8 << 20)
        config = MeshConfig(
            scheduler_address=address,
            worker=worker_config,
            transfer=replace(TRANSFER, max_payload_bytes=1 << 16),
        )
        tasks.start_soon(run_worker, config, context, Role.DECODE)
        register = await scheduler.reported(RegisterWorker)
        assert (register.profile.model, register.profile.role, register.profile.num_blocks) == ("m", Role.DECODE, 256)
        engine = FakeEngine(register.profile.kv_layout, num_blocks=8)
        worker = Worker(scheduler, gateway, token_address, engine)
        worker.start("r", [5] * 40)
        assert len(await gateway.finished("r")) == GREEDY.max_tokens
        context.stopping.set()
        await scheduler.reported(Goodbye)


def test_the_runtime_needs_no_torch() -> None:
    code = (
        "import sys, pdmesh.worker.runtime, pdmesh.worker.engines, pdmesh_prefill.main, pdmesh_decode.main,"
        " pdmesh_testing.fake_engine; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
