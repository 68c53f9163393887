"""An instance that drafts tokens: what comes out is what would without, whatever is guessed, wherever it decodes."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import Hold
from pdmesh.core.events import KvLow, KvReleased, RequestFinished, StepDone, TransferSent
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, Role, SamplingParams
from pdmesh.worker.drafts import PromptLookup, most_drafted
from pdmesh.worker.sequences import LocalRequest
from pdmesh_testing.fake_engine import FakeEngine, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.worker import RunningInstance, chunk_plans, hand_over, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)
GREEDY = SamplingParams(max_tokens=40, temperature=0)
PROMPT = list(range(40, 57))


class Oracle:
    """Knows each request's answer, and guesses a part of it; a share of its tokens wrong, and some too many."""

    def __init__(self, outputs: dict[str, list[int]], *, wrong: float = 0.2, seed: int = 0) -> None:
        self.most = 0
        self._outputs = outputs
        self._wrong = wrong
        self._rng = random.Random(seed)

    def draft(self, request: LocalRequest) -> tuple[int, ...]:
        coming = [*self._outputs[request.request_id][request.sequence.num_output_tokens :], 7, 7, 7]
        most = min(most_drafted(request), self._rng.randint(0, 6))
        self.most = max(self.most, most)
        return tuple(7 if self._rng.random() < self._wrong else token for token in coming[:most])


@asynccontextmanager
async def instances(
    drafter: Oracle | PromptLookup, *roles: Role, num_blocks: int = 256
) -> AsyncGenerator[Sequence[RunningInstance]]:
    fabric = MemoryFabric()
    async with anyio.create_task_group() as tasks:
        running: list[RunningInstance] = []
        stopping, stopped = anyio.Event(), anyio.Event()

        async def run(position: int) -> None:
            role = roles[position]
            async with (
                MemoryTransport(CONFIG, fabric) as transport,
                running_instance(
                    FakeEngine(num_blocks=num_blocks),
                    transport,
                    role=role,
                    config=CONFIG,
                    drafter=drafter,
                    instance_id=f"{role}-{position}",
                ) as one,
            ):
                running.append(one)
                if position + 1 < len(roles):
                    await run(position + 1)
                else:
                    stopped.set()
                    await stopping.wait()

        tasks.start_soon(run, 0)
        await stopped.wait()
        yield running
        stopping.set()


def said(request_id: str, *running: RunningInstance) -> list[int]:
    """The request's tokens from all instances, by index; no index twice."""
    tokens = [token for one in running for token in one.tokens_of(request_id)]
    assert sorted(token.index for token in tokens) == list(range(len(tokens)))
    return [token.token_id for token in sorted(tokens, key=lambda token: token.index) if token.token_id is not None]


@pytest.mark.parametrize("seed", range(4))
async def test_answers_are_the_same_whatever_is_drafted_and_beside_what(seed: int) -> None:
    rng = random.Random(seed)
    asked = {
        f"r{number}": (
            [rng.randrange(999) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=rng.randint(1, 30), temperature=rng.choice([0, 1]), seed=number),
        )
        for number in range(8)
    }
    expected = {name: reference_output(prompt, params) for name, (prompt, params) in asked.items()}
    async with instances(Oracle(expected, seed=seed), Role.MIXED) as (running,):
        for name, (prompt, params) in asked.items():
            generation = make_generation(name, prompt, params)
            running.admit(generation, kv_moves=False)
            for chunk in chunk_plans(generation, [rng.randint(1, 9)]):
                running.run([chunk], with_decodes=rng.random() < 0.5)
        for name in asked:
            await running.reported(KvReleased, name)
            assert said(name, running) == expected[name]
        running.assert_all_free()


async def test_a_step_of_good_guesses_gives_many_tokens_and_says_what_it_computed() -> None:
    expected = reference_output(PROMPT, GREEDY)
    async with instances(Oracle({"r": expected}, wrong=0.0), Role.MIXED) as (running,):
        generation = make_generation("r", PROMPT, GREEDY)
        running.admit(generation, kv_moves=False)
        running.run(chunk_plans(generation, [64]))
        done = await running.reported(RequestFinished, "r")
        assert said("r", running) == expected
    assert done.own_steps is not None
    assert done.num_accepted_tokens == done.num_drafted_tokens
    # each token is drawn by a step, but for the first, or comes with one
    assert done.own_steps.num_steps + done.num_accepted_tokens == len(expected) - 1
    assert done.own_steps.num_tokens == done.own_steps.num_steps + done.num_drafted_tokens


async def test_steps_with_chunks_are_as_large_as_they_were_planned() -> None:
    expected = reference_output(PROMPT, GREEDY)
    oracle = Oracle({"r": expected, "other": reference_output(PROMPT, GREEDY)}, wrong=0.0)
    async with instances(oracle, Role.MIXED) as (running,):
        generation, other = make_generation("r", PROMPT, GREEDY), make_generation("other", PROMPT, GREEDY)
        running.admit(generation, kv_moves=False)
        running.admit(other, kv_moves=False)
        first, *rest = chunk_plans(other, [2])
        running.run(chunk_plans(generation, [64]))
        for chunk in (first, *rest):
            running.run([chunk], with_decodes=True, holds_decodes=True)
        await running.until(
            lambda: len([each for each in running.reports if isinstance(each, StepDone)]) == 2 + len(rest)
        )
        assert len(running.tokens_of("r")) == 2 + len(rest)
        steps = [report for report in running.reports if isinstance(report, StepDone)]
        assert [step.num_decodes for step in steps] == [0, *[1] * (1 + len(rest))]
        for name in ("r", "other"):
            running.free(name)
            await running.reported(KvReleased, name)


async def test_drafts_take_no_more_room_than_there_is() -> None:
    expected = reference_output(PROMPT, GREEDY)
    oracle = Oracle({"r": expected}, wrong=0.0)
    async with instances(oracle, Role.MIXED) as (running,):
        generation = make_generation("r", PROMPT, GREEDY)
        num_blocks = num_blocks_for(len(PROMPT), running.block_size)
        running.admit(generation, kv_moves=False, num_blocks=num_blocks)
        running.run(chunk_plans(generation, [64]))
        while not running.reports_of(RequestFinished, "r"):
            room = num_blocks * running.block_size
            # the last token's KV is written with the next step
            await running.until(
                lambda room=room: len(said("r", running)) in (len(expected), room + 1 - len(PROMPT))  # type: ignore[misc]
            )
            assert any(isinstance(report, KvLow) for report in running.reports)
            num_blocks += 1
            running.instance.handle(
                Hold(
                    instance_id=running.instance.instance_id,
                    request_id=RequestId("r"),
                    epoch=generation.epoch,
                    num_blocks=num_blocks,
                )
            )
        assert said("r", running) == expected
        assert 1 <= oracle.most <= running.block_size
        running.assert_all_free()


@pytest.mark.parametrize("seed", range(6))
async def test_a_drafted_stream_is_handed_over_and_moves(seed: int) -> None:
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=300, temperature=rng.choice([0, 1]), seed=seed)
    prompt = [rng.randrange(999) for _ in range(rng.randint(1, 30))]
    expected = reference_output(prompt, params)
    drafter = Oracle({"r": expected}, seed=seed) if seed % 3 else PromptLookup(num_tokens=5, min_ngram=1, max_ngram=2)
    async with instances(drafter, Role.PREFILL, Role.DECODE, Role.DECODE) as (prefill, source, target):
        await hand_over(make_generation("r", prompt, params), prefill, source, [7])
        await source.until(lambda: len(source.tokens_of("r")) >= rng.randint(1, 60))
        source.move("r", target, num_blocks_for(len(prompt) + params.max_tokens - 1, source.block_size))
        await source.reported(TransferSent, "r")
        await target.reported(RequestFinished, "r")
        assert said("r", prefill, source, target) == expected
        for one in (prefill, source, target):
            one.free("r")
            await one.until(lambda one=one: one.pool.num_held == 0)  # type: ignore[misc]
            one.assert_all_free()
