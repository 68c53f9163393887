"""Cached states of an instance: kept and evicted by commands, exact for whatever request continues from them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from pdmesh.config import TransferConfig
from pdmesh.core.events import CacheReported, KvReleased, RequestDropped
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import PrefixHashes, Role, SamplingParams
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.reuse import a_generation, granules_of, run
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint
from pdmesh_testing.worker import RunningInstance, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=1 << 16, num_send_buffers=4, num_receive_buffers=4)
PARAMS = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = model_variants()["qwen3_5_text"][0]
    return write_transformers_checkpoint(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5_text", seed=1, **options)


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> TorchEngine:
    torch.set_num_threads(1)
    return TorchEngine(checkpoint, num_blocks=64, block_size=128, num_threads=1)


@asynccontextmanager
async def an_instance(checkpoint: Path, max_frames: int) -> AsyncGenerator[RunningInstance]:
    """Run an instance that holds ``max_frames`` pages of states."""
    engine = TorchEngine(checkpoint, num_blocks=64, block_size=128, num_threads=1, max_frames=max_frames)
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(engine, transport, role=Role.MIXED, config=CONFIG) as instance,
    ):
        yield instance


def a_prompt(num_tokens: int, num_shared: int = 0, seed: int = 1) -> list[int]:
    """Return a prompt whose first ``num_shared`` tokens are those of all others."""
    common, own = random.Random(0), random.Random(seed)
    return [(common if place < num_shared else own).randrange(320) for place in range(num_tokens)]


def states_of(instance: RunningInstance) -> set[bytes]:
    return set(instance.instance.states)


def numbered(tokens: Sequence[int], *numbers: int) -> PrefixHashes:
    granules = granules_of(list(tokens))
    return tuple(granules[number - 1] for number in numbers)


async def test_wanted_states_are_gone_on_from(checkpoint: Path, answers: TorchEngine) -> None:
    """Six frames are enough for 700 tokens in one chunk: two are the request's, two more are cached."""
    first, second = a_prompt(700, 300), a_prompt(720, 300, seed=2)
    async with an_instance(checkpoint, max_frames=6) as instance:
        generation = a_generation("first", first, PARAMS)
        assert await run(instance, generation, states=(2, 5)) == generate(answers, first, 6).output_ids
        assert states_of(instance) == {*numbered(first, 2, 5)}
        (released,) = instance.reports_of(KvReleased, "first")
        assert released.states == ()  # the scheduler asked for both
        drawn = await run(instance, a_generation("second", second, PARAMS), num_reused=2)
        assert drawn == generate(answers, second, 6).output_ids
        instance.instance.check_integrity()


async def test_the_end_of_an_answer_is_gone_on_from(checkpoint: Path, answers: TorchEngine) -> None:
    """The state behind the last granule is reported, and no other is kept."""
    tokens, num_reused = a_prompt(250), 0
    async with an_instance(checkpoint, max_frames=6) as instance:
        for turn in range(3):
            drawn = await run(instance, a_generation(str(turn), tokens, PARAMS), num_reused=num_reused)
            assert drawn == generate(answers, tokens, 6).output_ids
            tokens += drawn
            (released,) = instance.reports_of(KvReleased, str(turn))
            last = (len(tokens) - 1) // GRANULE_TOKENS
            assert released.states == (numbered(tokens, last) if last > num_reused else ())
            tokens += a_prompt(150, seed=turn)
            num_reused = last


async def test_blocks_that_another_request_computed_get_the_state(checkpoint: Path, answers: TorchEngine) -> None:
    """The second prompt computes two cached granules again for want of a state. The third continues from theirs."""
    prompts = [a_prompt(700, 300, seed) for seed in (1, 2, 3)]
    async with an_instance(checkpoint, max_frames=8) as instance:
        await run(instance, a_generation("0", prompts[0], PARAMS))
        await run(instance, a_generation("1", prompts[1], PARAMS), states=(2, 5))
        unseen = instance.instance._context.metrics.unseen_tokens
        assert next(iter(unseen.collect())).samples[0].value == 2 * GRANULE_TOKENS
        (released,) = instance.reports_of(KvReleased, "1")
        assert released.states == numbered(prompts[1], 2)
        instance.instance.check_integrity()
        drawn = await run(instance, a_generation("2", prompts[2], PARAMS), num_reused=2)
        assert drawn == generate(answers, prompts[2], 6).output_ids


async def test_states_are_evicted_by_a_command(checkpoint: Path, answers: TorchEngine) -> None:
    """Their KV stays. A request that should continue from one is refused, and the report names what is there."""
    first, second, third = a_prompt(700, 300), a_prompt(400, seed=2), a_prompt(700, 300, seed=3)
    async with an_instance(checkpoint, max_frames=6) as instance:
        await run(instance, a_generation("first", first, PARAMS), states=(2, 5))
        await run(instance, a_generation("second", second, PARAMS), evicted_states=numbered(first, 2))
        assert states_of(instance) == {*numbered(first, 5), *numbered(second, 3)}
        instance.admit(a_generation("third", third, PARAMS), kv_moves=False, num_reused=2)
        await instance.reported(RequestDropped, "third")
        (report,) = [each for each in instance.reports if isinstance(each, CacheReported)]
        assert report.kept is not None
        assert {*numbered(first, 1, 2)} <= {*report.kept}
        assert set(report.states) == states_of(instance)


async def test_a_state_that_had_to_go_is_reported(checkpoint: Path, answers: TorchEngine) -> None:
    """The scheduler did not evict one, and the frames are too few."""
    first, second = a_prompt(700), a_prompt(400, seed=2)
    async with an_instance(checkpoint, max_frames=5) as instance:
        await run(instance, a_generation("first", first, PARAMS), states=(1, 2, 3))
        drawn = await run(instance, a_generation("second", second, PARAMS))
        assert drawn == generate(answers, second, 6).output_ids
        reports = [each for each in instance.reports if isinstance(each, CacheReported)]
        assert reports
        assert set(reports[-1].states) < {*numbered(first, 1, 2, 3, 5)}
