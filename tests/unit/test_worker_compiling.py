"""A grammar that takes long to compile: the request that has it waits, and those beside it go on."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from llguidance import LLMatcher

from pdmesh.config import TransferConfig
from pdmesh.core.events import KvReleased, StepDone
from pdmesh.grammars import Grammars
from pdmesh.model import SamplingParams
from pdmesh.worker.compiling import GrammarCompiler
from pdmesh_testing.fake_engine import FakeEngine, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.tokenizers import write_tokenizer
from pdmesh_testing.worker import RunningInstance, chunk_plans, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)
PLAIN = SamplingParams(max_tokens=40, temperature=0)
SLOW = SamplingParams(max_tokens=3, temperature=0, grammar="slow")


class Engine(FakeEngine):
    """Compiles until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.compiled = threading.Event(), threading.Event()
        self.asked: list[str] = []

    def prepare(self, grammar: str) -> None:
        self.asked.append(grammar)
        self.begun.set()
        self.compiled.wait(20)


@asynccontextmanager
async def compiling() -> AsyncGenerator[tuple[RunningInstance, Engine]]:
    engine = Engine()
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(engine, transport, config=CONFIG) as running,
    ):
        try:
            yield running, engine
        finally:
            engine.compiled.set()


@pytest.mark.parametrize("holds_decodes", [False, True])
async def test_residents_decode_while_a_plan_waits_for_its_grammar(holds_decodes: bool) -> None:
    plain, slow = make_generation("plain", [1] * 5, PLAIN), make_generation("slow", [2] * 5, SLOW)
    async with compiling() as (running, engine):
        running.admit(plain, kv_moves=False)
        running.run(chunk_plans(plain, [5]), holds_decodes=holds_decodes)
        await running.until(lambda: len(running.tokens_of("plain")) == 1)
        running.admit(slow, kv_moves=False)
        for chunk in chunk_plans(slow, [2, 3]):
            running.run([chunk])
        await running.reported(KvReleased, "plain")
        assert [token.token_id for token in running.tokens_of("plain")] == reference_output([1] * 5, PLAIN)
        assert await to_thread.run_sync(engine.begun.wait, 20), "on a thread, which may begin late"
        assert (running.tokens_of("slow"), engine.asked) == ([], ["slow"])
        engine.compiled.set()
        await running.reported(KvReleased, "slow")
        assert [token.token_id for token in running.tokens_of("slow")] == reference_output([2] * 5, SLOW)
        running.assert_all_free()


async def test_prompts_that_are_planned_behind_one_that_waits_overtake_it() -> None:
    slow, plain = make_generation("slow", [2] * 5, SLOW), make_generation("plain", [1] * 9, PLAIN)
    other, held = make_generation("other", [3] * 5, SLOW), make_generation("held", [4] * 5, PLAIN)
    async with compiling() as (running, engine):
        for generation in (slow, plain, other, held):
            running.admit(generation, kv_moves=False)
        [of_slow, of_other] = [*chunk_plans(slow, [5]), *chunk_plans(other, [5])]
        [first, second, third] = chunk_plans(plain, [3, 3, 3])
        running.run([of_slow])
        running.run([first])
        running.run([of_other, second])  # waits, and what follows of the same prompt waits with it
        running.run([third])
        running.run(chunk_plans(held, [5]), holds_decodes=True)  # says something else of the residents
        await running.until(lambda: any(isinstance(report, StepDone) for report in running.reports))
        await anyio.wait_all_tasks_blocked()
        done = [report.chunks for report in running.reports if isinstance(report, StepDone)]
        assert [[chunk.request_id for chunk in chunks] for chunks in done] == [["plain"]]
        assert running.tokens_of("held") == []
        engine.compiled.set()
        for generation, prompt in ((slow, [2] * 5), (plain, [1] * 9), (other, [3] * 5), (held, [4] * 5)):
            await running.reported(KvReleased, generation.request_id)
            tokens = [token.token_id for token in running.tokens_of(generation.request_id)]
            assert tokens == reference_output(prompt, generation.params)
        running.assert_all_free()


async def test_a_request_that_is_freed_while_it_waits_keeps_nobody_waiting() -> None:
    slow, plain = make_generation("slow", [2] * 5, SLOW), make_generation("plain", [1] * 5, PLAIN)
    async with compiling() as (running, _engine):
        running.admit(slow, kv_moves=False)
        running.run(chunk_plans(slow, [5]))
        running.admit(plain, kv_moves=False)
        running.run(chunk_plans(plain, [5]))
        running.free(slow.request_id, slow.epoch)
        await running.reported(KvReleased, "plain")
        assert running.tokens_of("slow") == []
        running.assert_all_free()


async def test_one_that_takes_long_or_fails_does_not_keep_others_waiting() -> None:
    slow, woken = threading.Event(), anyio.Event()

    def compile(grammar: str) -> None:
        if grammar == "slow":
            slow.wait(20)
        if grammar == "wrong":
            raise ValueError(grammar)

    compiler = GrammarCompiler(lambda: woken.set())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(compiler.run, compile)
        for grammar in ("slow", "", "slow", "wrong", "right"):
            compiler.begin(grammar)
        assert compiler.is_ready("")
        with anyio.fail_after(20):
            while not (compiler.is_ready("wrong") and compiler.is_ready("right")):
                await woken.wait()
                woken = anyio.Event()
        assert not compiler.is_ready("slow")
        slow.set()
        with anyio.fail_after(20):
            while not compiler.is_idle:
                await woken.wait()
                woken = anyio.Event()
        tasks.cancel_scope.cancel()


async def test_compiling_keeps_nobody_waiting_who_wants_a_compiled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path, vocab_size=320, model_max_length=100)
    grammars = Grammars(tmp_path, vocab_size=320, eos_token_ids=[258])
    grammars.matcher("start: /a+/")
    reached, may_go_on = threading.Event(), threading.Event()

    def slow(*args: object, **kwargs: object) -> object:
        reached.set()
        may_go_on.wait(20)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    original = LLMatcher
    monkeypatch.setattr("pdmesh.grammars.LLMatcher", slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(to_thread.run_sync, grammars.matcher, "start: /b+/")
        await to_thread.run_sync(reached.wait)
        assert not grammars.matcher("start: /a+/").is_error()
        may_go_on.set()
    assert not grammars.matcher("start: /b+/").is_error()
