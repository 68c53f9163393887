"""One prompt on several instances gives the bits of one: KV and log-probabilities, with the real engine.

Members run side by side in threads over the real transport, with random chunks, owners and late joins; some chunks are
computed in turn, some by a parallel step: one after the other on as many members, at the same time.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.events import KvReleased, RequestFinished
from pdmesh.engine.levels import choose_kernels
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.examples import examples
from pdmesh_testing.groups import admit_member, block_chunks, regroup, running_members
from pdmesh_testing.kv import SMALL_TRANSFER, TransportMaker
from pdmesh_testing.stepping import generate
from pdmesh_testing.worker import RunningInstance, make_generation

#: What is bit-identical whatever the chunks: the compiled kernels always are, others in deterministic mode.
COMPUTES = ["bfloat16", "float32"]
MAX_MEMBERS = 4
MAX_TOKENS = 4
NUM_BLOCKS = 40
BLOCK = 16
CONFIG = replace(SMALL_TRANSFER, max_payload_bytes=1 << 16, group_no_progress_s=60.0)
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=3, prompt_logprobs=1)


@pytest.fixture(scope="module", params=COMPUTES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TorchEngine]:
    if request.param == "bfloat16" and choose_kernels("bfloat16").library is None:
        pytest.skip("built without a compiler")
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        dtype=request.param,
        architecture="qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
    return [
        TorchEngine(
            directory,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            num_threads=1,
            device="cpu",
            deterministic=request.param == "float32",
        )
        for _ in range(MAX_MEMBERS + 1)
    ]


def prompt_of(num_tokens: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]


def pages_of(engine: TorchEngine, table: list[int], num_tokens: int) -> list[torch.Tensor]:
    """Keys and values of the prompt's tokens, of each layer: (2, heads, tokens, head_dim)."""
    return [layer[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens].clone() for layer in engine.kv.layers]


async def group_policy(
    engines: list[TorchEngine], prompt: list[int], maker: TransportMaker, schedule: random.Random
) -> dict[str, Any]:
    """Compute it in a group that grows; returns tokens, log-probabilities, and the leader's KV."""
    number = len(engines)
    generation = make_generation("r", prompt, PARAMS)
    chunks = block_chunks(generation, BLOCK, [schedule.randint(1, 6) for _ in range(NUM_BLOCKS)])
    config = maker.config(CONFIG)
    async with AsyncExitStack() as stack:
        transports = [await stack.enter_async_context(maker.open(config)) for _ in range(number)]
        running = await stack.enter_async_context(running_members(engines, transports, config=config))
        known = schedule.randint(1, number)
        running[0].admit(generation, kv_moves=False)
        for member in running[1:known]:
            admit_member(member, generation, running[:known])
        if known > 1:
            regroup(running[0], generation, running[:known])
        parallel: list[RunningInstance] = []  # who of it has no chunk yet
        for chunk in chunks:
            while known < number and schedule.random() < 0.4:
                known += 1
                for member in schedule.sample(running[:known], known):
                    if member is running[known - 1]:
                        admit_member(member, generation, running[:known])
                    else:
                        regroup(member, generation, running[:known])
                for _ in range(schedule.choice([1, 1, 20])):
                    await anyio.lowlevel.checkpoint()
            if not parallel and schedule.random() < 0.4:
                parallel = schedule.sample(running[:known], known)
            in_parallel = bool(parallel)
            member = parallel.pop() if parallel else running[schedule.randrange(known)]
            at_once = in_parallel and schedule.random() < 0.5
            (running[0] if chunk.is_last else member).run([chunk], in_parallel=in_parallel, at_once=at_once)
        table = table_of(running[0])
        await running[0].reported(RequestFinished, "r")
        found = {
            "tokens": [token.token_id for token in running[0].tokens_of("r")],
            "logprobs": [token.logprobs for token in running[0].tokens_of("r")],
            "kv": pages_of(engines[0], table, len(prompt)),
        }
        for member in running[1:known]:
            member.free("r")
            await member.reported(KvReleased, "r")
        for member in running:
            member.assert_all_free()
        return found


def table_of(member: RunningInstance) -> list[int]:
    (request,) = member.instance._sequences
    return list(request.sequence.block_table)


@settings(max_examples=examples(8))
@given(
    num_tokens=st.integers(1, 500),
    number=st.integers(1, MAX_MEMBERS),
    schedule=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("peer_reads", [False, True], ids=["in pieces", "peer reads"])
@pytest.mark.parametrize("kind", ["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_a_group_gives_the_bits_of_one_instance(
    engines: list[TorchEngine], kind: str, peer_reads: bool, num_tokens: int, number: int, schedule: random.Random
) -> None:
    prompt = prompt_of(num_tokens)
    alone = generate(engines[-1], prompt, MAX_TOKENS, params=PARAMS)
    expected = pages_of(engines[-1], alone.sequence.block_table, num_tokens)
    found = anyio.run(group_policy, engines[:number], prompt, TransportMaker(kind, peer_reads=peer_reads), schedule)
    assert found["tokens"] == alone.output_ids
    logprobs = [(result.logprobs.logprob, result.logprobs.top) for result in alone.results if result.logprobs]
    assert [(part.logprob, part.top) for part in found["logprobs"]] == logprobs
    for layer, (ours, theirs) in enumerate(zip(found["kv"], expected, strict=True)):
        assert torch.equal(ours, theirs), f"layer {layer}"
