"""KV that is given up behind windows: with frames for what is seen alone, answers are those of an engine with all KV.

What a frame held is NaN once it is given up, so that whoever still read it would say so.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import pytest
import torch

from pdmesh.config import TransferConfig
from pdmesh.core.commands import FreeKv
from pdmesh.core.events import (
    CacheReported,
    KvReleased,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferLanded,
    TransferSent,
)
from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.frames import WindowFrames
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout, num_blocks_for
from pdmesh.model import Epoch, Role, SamplingParams, TransferId
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.ranks import ranked_engine
from pdmesh_testing.reuse import FETCH, a_generation, granules_of, output, run, tell_of_fetch
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint
from pdmesh_testing.worker import RunningInstance, chunk_plans, hand_over, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=1 << 16, num_send_buffers=4, num_receive_buffers=4)
NUM_BLOCKS, BLOCK, WINDOW = 512, 16, 24
#: Of a decode: its window, and what another request that goes on from its last granule sees.
NUM_SEEN = num_blocks_for(WINDOW + GRANULE_TOKENS, BLOCK) + 2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["in pieces", "peer reads"])
def peer_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, peer_reads=request.param == "peer reads"))


@pytest.fixture(
    scope="module", params=["gemma3_text", "gemma4_text", "gpt_oss", "lfm2", "lfm2-2", "mistral", "qwen3_5_text"]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, _, variant = request.param.partition("-")
    options = model_variants()[model_type][int(variant or 0)]
    return write_transformers_checkpoint(tmp_path_factory.mktemp(model_type), model_type, seed=1, **options)


@pytest.fixture(autouse=True)
def nan_in_free_frames(monkeypatch: pytest.MonkeyPatch) -> list[TorchEngine]:
    """The engines whose frames are wiped with NaN when they are given up."""
    engines: list[TorchEngine] = []
    drop = WindowFrames._drop

    def wiping(self: WindowFrames, block_id: int) -> None:
        frame = int(self._map.of_block[block_id])
        drop(self, block_id)
        for engine in engines:
            if engine.kv.frames is self._map and frame != self._map.zeros:
                for layer in engine.kv.layout.windowed_layers:
                    engine.kv.layers[layer][frame] = torch.nan

    monkeypatch.setattr(WindowFrames, "_drop", wiping)
    return engines


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(num_tokens)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def cache_bytes_of(layout: KvLayout, num_blocks: int, num_seen: int) -> int:
    """Return the bytes of blocks in all layers, with ``num_seen`` blocks in layers with a window."""
    return layout.bytes_per_block * num_blocks - layout.bytes_per_frame * (num_blocks - num_seen)


class Answers:
    """What an engine that holds all KV says."""

    def __init__(self, checkpoint: Path) -> None:
        self._engine = TorchEngine(checkpoint, num_blocks=NUM_BLOCKS, num_threads=1)

    def of(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return generate(self._engine, prompt, max_tokens).output_ids


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> Answers:
    return Answers(checkpoint)


@asynccontextmanager
async def instances(
    checkpoint: Path,
    engines: list[TorchEngine],
    *roles: Role,
    max_frames: int = 64,
    num_stages: Sequence[int] = (1, 1),
    num_ranks: int = 1,
) -> AsyncGenerator[list[RunningInstance]]:
    """Instances that hold ``max_frames`` blocks in layers with a window, of which everything is NaN at first."""
    fabric = MemoryFabric()

    @asynccontextmanager
    async def instance(role: Role, number: int) -> AsyncGenerator[RunningInstance]:
        stages, options = num_stages[number], {"block_size": BLOCK, "max_frames": max_frames}
        with ranked_engine(checkpoint, num_ranks, num_stages=stages, num_blocks=NUM_BLOCKS, **options) as engine:
            for layer in engine.kv.layers:
                layer[:-1] = torch.nan  # what is left is always zeros
            engines.append(engine)
            async with running(engine, role, number) as each:
                yield each

    @asynccontextmanager
    async def running(engine: TorchEngine, role: Role, number: int) -> AsyncGenerator[RunningInstance]:
        async with (
            MemoryTransport(CONFIG, fabric) as transport,
            running_instance(engine, transport, role=role, config=CONFIG, instance_id=f"{role}-{number}") as each,
        ):
            yield each

    async with instance(roles[0], 0) as first:
        if len(roles) == 1:
            yield [first]
            return
        async with instance(roles[1], 1) as second:
            yield [first, second]


def frames_of(instance: RunningInstance) -> WindowFrames:
    frames = instance.instance.windows.frames
    assert frames is not None
    return frames


def ids(instance: RunningInstance, name: str) -> list[int]:
    return [cast(int, token.token_id) for token in instance.tokens_of(name)]


@pytest.mark.parametrize("chunk_tokens", [7, 100, 1000])
async def test_answers_are_those_of_all_kv(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine], chunk_tokens: int
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 30, 300)]
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED) as (instance,):
        for number, prompt in enumerate(prompts):
            generation = make_generation(str(number), prompt, params(40))
            instance.admit(generation, kv_moves=False)
            for chunk in chunk_plans(generation, [chunk_tokens]):
                instance.run([chunk], with_decodes=True)
        for number, prompt in enumerate(prompts):
            await instance.reported(KvReleased, str(number))
            assert ids(instance, str(number)) == answers.of(prompt, 40)
        instance.assert_all_free()
        assert frames_of(instance).num_held == 0


async def test_a_decode_holds_its_window_alone(checkpoint: Path, nan_in_free_frames: list[TorchEngine]) -> None:
    generation = make_generation("r", prompt_of(400), params(200))
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, max_frames=20) as (instance,):
        instance.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [64]):
            instance.run([chunk])
        for num_tokens in (1, 50, 100, 150):
            await instance.until(lambda num=num_tokens: len(instance.tokens_of("r")) >= num)  # type: ignore[misc]
            instance.instance.check_integrity()
            assert WINDOW // BLOCK <= frames_of(instance).num_held <= NUM_SEEN
        await instance.reported(KvReleased, "r")
        instance.assert_all_free()


@pytest.mark.usefixtures("peer_reads")
@pytest.mark.parametrize("num_tokens", [20, 256, 333])
async def test_a_hand_over_sends_what_is_still_seen(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine], num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    generation = make_generation("r", prompt, params(40))
    async with instances(checkpoint, nan_in_free_frames, Role.PREFILL, Role.DECODE) as (prefill, decode):
        await hand_over(generation, prefill, decode, [100])
        await decode.reported(RequestFinished, "r")
        await prefill.reported(KvReleased, "r")
        drawn = {token.index: token.token_id for each in (prefill, decode) for token in each.tokens_of("r")}
        assert [drawn[index] for index in range(40)] == answers.of(prompt, 40)
        layout = prefill.engine.kv.layout
        num_blocks = num_blocks_for(num_tokens, BLOCK)
        num_seen = num_blocks - max(0, num_tokens // GRANULE_TOKENS * GRANULE_TOKENS + 1 - layout.window) // BLOCK
        num_bytes = cache_bytes_of(layout, num_blocks, num_seen)
        assert prefill.reports_of(TransferSent, "r")[0].num_bytes == num_bytes
        assert decode.mover.counters().num_bytes_peer_read == (num_bytes if CONFIG.peer_reads else 0)
        await decode.reported(KvReleased, "r")
        for instance in (prefill, decode):
            instance.assert_all_free()


@pytest.mark.usefixtures("peer_reads")
async def test_a_stream_that_moves_to_and_fro_is_the_stream(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    rng, prompt = random.Random(1), prompt_of(200)
    generation = make_generation("r", prompt, params(200))
    num_blocks = num_blocks_for(400, BLOCK)
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, Role.DECODE) as (one, other):
        one.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [64]):
            one.run([chunk])
        source, target = one, other
        for number in range(6):
            before = len(source.tokens_of("r"))
            await source.until(lambda: len(source.tokens_of("r")) >= before + rng.randrange(1, 20))  # noqa: B023
            source.move("r", target, num_blocks, number=number + 2)
            await target.reported(TransferLanded, "r", count=number // 2 + 1)
            await source.reported(KvReleased, "r", count=number // 2 + 1)
            source.instance.check_integrity()
            source, target = target, source
        await source.reported(RequestFinished, "r")
        drawn = {token.index: token.token_id for each in (one, other) for token in each.tokens_of("r")}
        assert [drawn[index] for index in range(200)] == answers.of(prompt, 200)
        await source.reported(KvReleased, "r", count=len(source.reports_of(KvReleased, "r")) or 1)
        for instance in (one, other):
            await instance.until(lambda: instance.pool.num_held == 0)  # noqa: B023
            instance.assert_all_free()


async def test_a_next_turn_goes_on_from_what_the_last_one_saw(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED) as (instance,):
        tokens = prompt_of(250)
        for turn in range(4):
            num_reused = (len(tokens) - 10) // GRANULE_TOKENS if turn else 0  # all but what was said last
            drawn = await run(instance, a_generation(str(turn), tokens, params(50)), num_reused=num_reused)
            assert drawn == answers.of(tokens, 50)
            assert not instance.reports_of(RequestDropped, str(turn))
            tokens += [*drawn, *prompt_of(10, turn)]
        instance.instance.check_integrity()


@pytest.mark.usefixtures("peer_reads")
@pytest.mark.parametrize("num_there", [0, 1, 3])
async def test_what_was_copied_from_another_instance_is_gone_on_from(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine], num_there: int
) -> None:
    """A copy brings what is seen from its end on, whatever was there before; from its middle nothing goes on."""
    tokens = prompt_of(4 * GRANULE_TOKENS + 5)
    chain = granules_of(tokens)
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, Role.MIXED) as (source, destination):
        await run(source, a_generation("first", tokens, params(2)))
        if num_there:
            await run(destination, a_generation("before", tokens[: num_there * GRANULE_TOKENS + 1], params(2)))
        tell_of_fetch(source, destination, chain, num_there=num_there)
        landed = await destination.reported(TransferLanded, FETCH)
        layout = source.engine.kv.layout
        num_blocks, num_seen = (4 - num_there) * GRANULE_TOKENS // BLOCK, num_blocks_for(layout.window - 1, BLOCK)
        assert landed.num_bytes == cache_bytes_of(layout, num_blocks, num_seen)
        for each in (source, destination):
            await each.reported(KvReleased, FETCH)
            each.assert_all_free(num_cached=4)
            assert frames_of(each).num_held == 0
        second = [*tokens, *prompt_of(40, 1)]
        assert await run(destination, a_generation("second", second, params(20)), num_reused=4) == answers.of(
            second, 20
        )
        middle = tokens[: 2 * GRANULE_TOKENS + 50]
        if num_there < 2:
            destination.admit(a_generation("third", middle, params(20)), kv_moves=False, num_reused=2)
            await destination.reported(RequestDropped, "third")
        assert await run(destination, a_generation("fourth", middle, params(20))) == answers.of(middle, 20)


async def test_a_source_without_what_is_seen_from_the_end_of_a_copy_refuses_it(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    tokens = prompt_of(4 * GRANULE_TOKENS + 5)
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, Role.MIXED, max_frames=24) as (source, other):
        await run(source, a_generation("first", tokens, params(2)))
        for seed in range(1, 4):  # which need its frames
            await run(source, a_generation(f"other-{seed}", prompt_of(200, seed), params(2)))
        tell_of_fetch(source, other, granules_of(tokens)[:2])
        await source.reported(RequestDropped, FETCH)
        other.instance.handle(
            FreeKv(instance_id=other.instance.instance_id, request_id=FETCH, epoch=Epoch(0), transfer_id=TransferId(7))
        )
        for each in (source, other):
            await each.reported(KvReleased, FETCH)
            await each.until(lambda: each.pool.num_held == 0)  # noqa: B023
            assert frames_of(each).num_held == 0
            each.instance.check_integrity()
        assert await run(other, a_generation("second", tokens, params(20))) == answers.of(tokens, 20)


async def test_a_copy_that_is_refused_takes_nothing_from_who_goes_on_from_the_end(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    tokens = prompt_of(4 * GRANULE_TOKENS + 5)
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, Role.MIXED, max_frames=20) as (source, other):
        await run(source, a_generation("first", tokens, params(2)))
        tell_of_fetch(source, other, granules_of(tokens)[:1])
        await source.reported(RequestDropped, FETCH)
        await source.reported(KvReleased, FETCH)
        second = [*tokens, *prompt_of(40, 1)]
        assert await run(source, a_generation("second", second, params(20)), num_reused=4) == answers.of(second, 20)


async def test_what_others_needed_the_frames_of_is_not_gone_on_from(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    """A refusal says what is kept, so that the request begins where it can."""
    layout = load_model_config(checkpoint).kv_layout(dtype="auto", block_size=BLOCK, frees_windows=True)
    if layout.window < WINDOW:
        pytest.skip("so short a window leaves the frames of the first prompt")
    first, others = prompt_of(600), [prompt_of(200, seed) for seed in range(1, 7)]
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, max_frames=24) as (instance,):
        await run(instance, a_generation("first", first, params(5)))
        for number, prompt in enumerate(others):
            assert await run(instance, a_generation(str(number), prompt, params(5))) == answers.of(prompt, 5)
        again = a_generation("again", [*first, *prompt_of(30, 9)], params(20))
        instance.admit(again, kv_moves=False, num_reused=4)
        await instance.reported(RequestDropped, "again")
        await instance.reported(KvReleased, "again")
        (said,) = [report for report in instance.reports if isinstance(report, CacheReported)][-1:]
        assert said.kept is not None
        granules = granules_of(first)
        num_cached = next((n for n, granule in enumerate(granules) if granule not in said.kept), len(granules))
        assert num_cached < 4
        unseen = instance.instance._context.metrics.unseen_tokens
        assert next(iter(unseen.collect())).samples[0].value == (4 - num_cached) * GRANULE_TOKENS
        later = a_generation("later", [*first, *prompt_of(30, 9)], params(20))
        drawn = await run(instance, later, num_reused=num_cached)
        assert drawn == answers.of([*first, *prompt_of(30, 9)], 20)
        assert output(instance, "later") == drawn
        instance.instance.check_integrity()


async def test_a_prompt_gives_way_to_one_that_lacks_frames(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    prompts = {"one": prompt_of(240, 1), "other": prompt_of(240, 2)}
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, max_frames=20) as (instance,):
        made = {name: make_generation(name, prompt, params(20)) for name, prompt in prompts.items()}
        plans = {name: chunk_plans(generation, [120]) for name, generation in made.items()}
        for name, generation in made.items():
            instance.admit(generation, kv_moves=False)
            await_done = instance.run([plans[name][0]])
            await instance.until(
                lambda plan_id=await_done: any(  # type: ignore[misc]
                    isinstance(each, StepDone) and each.plan_id == plan_id for each in instance.reports
                )
            )
        instance.run([plans["one"][1]])
        await instance.reported(RequestFinished, "one")
        assert ids(instance, "one") == answers.of(prompts["one"], 20)
        await instance.reported(RequestDropped, "other")
        await instance.until(lambda: instance.pool.num_held == 0)
        instance.assert_all_free()


async def test_a_plan_waits_for_frames_of_what_is_being_sent(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    sent, waiting = prompt_of(160, 1), prompt_of(300, 2)
    async with instances(checkpoint, nan_in_free_frames, Role.PREFILL, Role.DECODE, max_frames=20) as (prefill, decode):
        first = make_generation("first", sent, params(10))
        prefill.admit(first, kv_moves=True)
        for chunk in chunk_plans(first, [160]):
            prefill.run([chunk])
        await prefill.until(lambda: bool(prefill.tokens_of("first")))
        second = make_generation("second", waiting, params(10))
        prefill.admit(second, kv_moves=False)
        for chunk in chunk_plans(second, [300]):
            prefill.run([chunk])
        decode.expect(first, prefill)
        prefill.grant(first, decode)
        await decode.reported(RequestFinished, "first")
        await prefill.reported(RequestFinished, "second")
        assert not prefill.reports_of(RequestDropped, "second")
        assert ids(prefill, "second") == answers.of(waiting, 10)
        for instance in (prefill, decode):
            await instance.until(lambda: instance.pool.num_held == 0)  # noqa: B023
            instance.assert_all_free()


# --- stages ---

STAGED = ["gemma3_text", "granitemoehybrid", "lfm2", "qwen3_5_text"]


@pytest.mark.parametrize(
    ("checkpoint", "num_ranks", "num_stages"),
    [
        *product(STAGED, [1], [2, 3]),
        *product(["gemma3_text", "lfm2"], [2], [1, 2]),
    ],
    indirect=["checkpoint"],
)
async def test_ranks_and_stages_read_frames_that_the_leader_gives(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine], num_ranks: int, num_stages: int
) -> None:
    """Chunks are in several stages while frames are freed. One request is freed as it is computed, and resumed."""
    rng = random.Random(f"{num_ranks} {num_stages}")
    prompts = {f"r{number}": prompt_of(rng.randrange(1, 300), number) for number in range(6)}
    async with instances(
        checkpoint, nan_in_free_frames, Role.MIXED, max_frames=80, num_stages=[num_stages], num_ranks=num_ranks
    ) as (instance,):
        left = {}
        for name, prompt in prompts.items():
            generation = make_generation(name, prompt, params(30))
            instance.admit(generation, kv_moves=False)
            left[name] = chunk_plans(generation, [rng.randrange(1, 60) for _ in range(300)])
        while left:
            name = rng.choice(list(left))
            instance.run([left[name].pop(0)], with_decodes=rng.random() < 0.5)
            left = {name: chunks for name, chunks in left.items() if chunks}
        await instance.until(lambda: len(instance.tokens_of("r1")) > 3)
        instance.free("r1")
        await instance.reported(KvReleased, "r1")
        drawn = ids(instance, "r1")
        resumed = make_generation("r1", [*prompts["r1"], *drawn], params(30 - len(drawn)), epoch=1)
        instance.admit(resumed, kv_moves=False)
        for chunk in chunk_plans(resumed, [20]):
            instance.run([chunk], with_decodes=True)
        await instance.reported(KvReleased, "r1", count=2)
        for name, prompt in prompts.items():
            await instance.reported(KvReleased, name)
            later = [token.token_id for token in instance.tokens_of(name, 1)]
            assert [*ids(instance, name), *later] == answers.of(prompt, 30)
        assert not any(isinstance(report, RequestDropped) for report in instance.reports)
        instance.assert_all_free()
        assert frames_of(instance).num_held == 0


@pytest.mark.parametrize("checkpoint", STAGED, indirect=True)
@pytest.mark.parametrize("num_stages", [(2, 1), (1, 3), (3, 2)], ids=str)
async def test_what_is_seen_moves_between_instances_of_stages(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine], num_stages: tuple[int, int]
) -> None:
    """A prompt is handed over from stage to stage, and the stream moves back and forth."""
    prompt = prompt_of(300)
    generation = make_generation("r", prompt, params(120))
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, Role.MIXED, num_stages=num_stages) as (
        source,
        target,
    ):
        one, other = source, target
        await hand_over(generation, source, target, [50])
        await source.reported(KvReleased, "r")
        for number in range(2):
            source, target = target, source
            before = len(source.tokens_of("r"))
            await source.until(lambda: len(source.tokens_of("r")) > before + 5)  # noqa: B023
            source.move("r", target, num_blocks_for(420, BLOCK), number=number + 2)
            await source.reported(KvReleased, "r", count=number // 2 + 1 + (source is one))
        await target.reported(RequestFinished, "r")
        drawn = {token.index: token.token_id for each in (one, other) for token in each.tokens_of("r")}
        assert [drawn[index] for index in range(120)] == answers.of(prompt, 120)
        for instance in (one, other):
            await instance.until(lambda: instance.pool.num_held == 0)  # noqa: B023
            instance.assert_all_free()


@pytest.mark.parametrize("checkpoint", ["gemma3_text"], indirect=True)
async def test_a_chunk_waits_for_frames_of_chunks_in_other_stages(
    checkpoint: Path, answers: Answers, nan_in_free_frames: list[TorchEngine]
) -> None:
    """Frames for a window and one chunk of 64 tokens, and three follow each other: no prompt is dropped."""
    prompt = prompt_of(400)
    generation = make_generation("r", prompt, params(20))
    async with instances(checkpoint, nan_in_free_frames, Role.MIXED, max_frames=12, num_stages=[2]) as (instance,):
        instance.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [64]):
            instance.run([chunk])
        await instance.reported(KvReleased, "r")
        assert ids(instance, "r") == answers.of(prompt, 20)
