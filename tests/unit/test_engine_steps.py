"""What a step promises beyond its tokens: hooks, isolation, KV that can move, generations that end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdmesh.engine.base import SequenceSlice, SliceResult
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import FinishReason, SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.stepping import (
    SteppedRequest,
    assert_nothing_changes_when_computed_again,
    block_table,
    generate,
    new_sequence,
    separate_tables,
    step,
)

PROMPT = list(range(3, 60))


@pytest.fixture
def engine(tmp_path: Path) -> TorchEngine:
    return TorchEngine(write_checkpoint(tmp_path, num_layers=3), num_blocks=32, num_threads=1, device="cpu")


def layer_bytes(engine: TorchEngine, layer: int, blocks: list[int]) -> bytes:
    out = bytearray(len(blocks) * engine.kv.layout.max_page_bytes)
    engine.kv.gather(layer, blocks, memoryview(out))
    return bytes(out)


def test_the_hook_sees_each_layers_kv_complete_and_in_order(engine: TorchEngine) -> None:
    blocks = block_table(engine, len(PROMPT))
    seen: list[tuple[int, bytes]] = []
    part = SequenceSlice(sequence=new_sequence(PROMPT, blocks), start=0, num_tokens=len(PROMPT), sample=True)
    engine.execute([part], on_layer=lambda layer: seen.append((layer, layer_bytes(engine, layer, blocks))))
    assert seen == [(layer, layer_bytes(engine, layer, blocks)) for layer in range(3)]
    assert len({content for _, content in seen}) == 3


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interrupted_step_is_bit_identical(tmp_path: Path, dtype: str, native: bool) -> None:
    """A chunk with history and a decode, interrupted in any layer by another prompt: the same KV and the same draws.

    Layer-boundary preemption needs this: nothing of a step lives outside its call.
    """
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=5)
    write_checkpoint(tmp_path, num_layers=3, hidden_size=128, head_dim=32, num_heads=4, num_kv_heads=2)
    long, decoding, other = (list(range(first, first + 48)) for first in (3, 60, 120))

    def run(interrupt_at: int | None) -> tuple[list[SliceResult], list[SliceResult], list[bytes]]:
        engine = TorchEngine(tmp_path, num_blocks=16, num_threads=1, device="cpu", dtype=dtype, native=native)
        tables = list(separate_tables(engine, [64, 64, 64]))
        sequences = [new_sequence(*each, params) for each in zip((long, decoding, other), tables, strict=True)]
        for sequence, end in zip(sequences[:2], (20, 47), strict=True):
            engine.execute([SequenceSlice(sequence=sequence, start=0, num_tokens=end, sample=False)])
        inner = [SequenceSlice(sequence=sequences[2], start=0, num_tokens=48, sample=True)]
        nested: list[SliceResult] = []

        def on_layer(layer: int) -> None:
            if layer == interrupt_at:
                nested.extend(engine.execute(inner, on_layer=lambda _: None))

        outer = [
            SequenceSlice(sequence=sequences[0], start=20, num_tokens=28, sample=True),
            SequenceSlice(sequence=sequences[1], start=47, num_tokens=1, sample=True),
        ]
        results = engine.execute(outer, on_layer=on_layer)
        if interrupt_at is None:
            nested = engine.execute(inner)
        return results, nested, [layer_bytes(engine, layer, [*tables[0], *tables[1], *tables[2]]) for layer in range(3)]

    undisturbed = run(None)
    for layer in range(3):
        assert run(layer) == undisturbed


def test_two_chunks_of_one_request_may_share_a_step(engine: TorchEngine) -> None:
    sequence = new_sequence(PROMPT, block_table(engine, len(PROMPT)))
    first = SequenceSlice(sequence=sequence, start=0, num_tokens=20, sample=False)
    second = SequenceSlice(sequence=sequence, start=20, num_tokens=len(PROMPT) - 20, sample=True)
    results = engine.execute([first, second])
    assert [result.token_id for result in results] == [None, *generate(engine, PROMPT, 1).output_ids]


def test_an_empty_step_is_nothing(engine: TorchEngine) -> None:
    assert engine.execute([]) == []


def test_garbage_in_freed_blocks_reaches_no_other_request(engine: TorchEngine) -> None:
    expected = generate(engine, PROMPT, 20, chunk_tokens=10).output_ids
    for cache in engine.kv.layers:
        cache.fill_(torch.nan)
    assert generate(engine, PROMPT, 20, chunk_tokens=10).output_ids == expected


def test_what_is_computed_again_changes_no_byte_meanwhile(engine: TorchEngine) -> None:
    """A step that began again, or a chunk that was given up: other instances may be reading what is there by now."""
    assert_nothing_changes_when_computed_again(engine)


def test_a_resumed_request_goes_on_as_if_nothing_happened(tmp_path: Path) -> None:
    """A new epoch prefills prompt and delivered output; dynamic RoPE must treat the output as output."""
    directory = write_checkpoint(
        tmp_path, max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 8.0}
    )
    engine = TorchEngine(directory, num_blocks=16)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=11, repetition_penalty=1.2, min_tokens=3)
    expected = generate(engine, PROMPT, 30, params=params).output_ids
    resumed = SteppedRequest(new_sequence(PROMPT, block_table(engine, 100, first=6), params), max_tokens=30)
    resumed.sequence.token_ids.extend(expected[:13])
    while not resumed.done:
        step(engine, [(resumed, 21)])
    assert resumed.output_ids == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, temperature=0.0, logprobs=4, frequency_penalty=1.1, presence_penalty=0.4),
        SamplingParams(
            max_tokens=24,
            temperature=1.2,
            top_p=0.95,
            seed=11,
            logprobs=2,
            repetition_penalty=1.4,
            frequency_penalty=0.7,
            logit_bias=((7, 3.0), (9, -2.0)),
            min_tokens=20,
            stop_token_ids=(40, 41, 42, 43),
        ),
    ],
    ids=["greedy", "sampled"],
)
def test_penalties_and_logprobs_are_the_same_through_a_preemption_at_every_token(
    tmp_path: Path, params: SamplingParams
) -> None:
    """A preempted request computes its prompt and what it drew as one prompt, on any instance: nobody can tell."""
    write_checkpoint(tmp_path, num_layers=2)
    engine = TorchEngine(tmp_path, num_blocks=32, num_threads=1, device="cpu", deterministic=True)
    undisturbed = generate(engine, PROMPT, 24, params=params)
    drawn: list[int] = []
    results: list[SliceResult] = []
    for number in range(24):
        table = block_table(engine, len(PROMPT) + 24, first=number % 3)
        sequence = new_sequence(PROMPT, table, params)
        sequence.token_ids.extend(drawn)
        resumed = SteppedRequest(sequence, number + 1)
        while not resumed.done:
            step(engine, [(resumed, 16 + number)])
        results.append(resumed.results[-1])
        drawn = resumed.output_ids
    assert drawn == undisturbed.output_ids
    assert [result.logprobs for result in results] == [result.logprobs for result in undisturbed.results]
    assert all(result.logprobs is not None for result in results)


@pytest.mark.parametrize(
    ("changes", "reason", "stop_token_id"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH, None),
        ({"max_tokens": 2}, None, None),
        ({"max_tokens": 2, "eos_token_ids": "drawn"}, FinishReason.STOP, None),
        ({"max_tokens": 2, "stop_token_ids": "drawn"}, FinishReason.STOP, "drawn"),
    ],
)
def test_how_a_generation_ends(
    engine: TorchEngine, changes: dict[str, object], reason: FinishReason | None, stop_token_id: str | None
) -> None:
    drawn = generate(engine, PROMPT, 1).output_ids[0]
    values = {name: (drawn,) if value == "drawn" else value for name, value in changes.items()}
    params = SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **values})  # type: ignore[arg-type]
    result = generate(engine, PROMPT, 1, params=params).results[-1]
    assert (result.token_id, result.drawn[0].finish_reason) == (drawn, reason)
    assert result.drawn[0].stop_token_id == (drawn if stop_token_id else None)


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len is 10000, but .* 8192 tokens"):
        TorchEngine(directory, num_blocks=1, max_model_len=10_000)
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        TorchEngine(directory, num_blocks=1, dtype="int8")
    with pytest.raises(ConfigError, match="device is 'abacus'"):
        TorchEngine(directory, num_blocks=1, device="abacus")
    assert TorchEngine(directory, num_blocks=1, max_model_len=100).max_model_len == 100


class AlternatingCores:
    """Cores that are lent for every other layer, or always, or never."""

    num_own = 1

    def __init__(self, *nums: int) -> None:
        self.taken: list[int] = []
        self.is_taken = False
        self._nums = nums

    def take(self) -> int:
        self.taken.append(self._nums[len(self.taken) % len(self._nums)])
        self.is_taken = True
        return self.taken[-1]

    def give_back(self) -> None:
        assert self.is_taken
        self.is_taken = False


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lent_cores_change_no_bit(dtype: str, tmp_path: Path) -> None:
    """Of tokens, log-probabilities and KV: in chunks, in decodes, and in a step inside another step."""
    directory = write_checkpoint(tmp_path, num_layers=3, dtype="bfloat16", head_dim=32, hidden_size=64)
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=3)
    found: list[tuple[object, ...]] = []
    for nums in ((1,), (2,), (1, 2), (3, 1, 2)):
        engine = TorchEngine(directory, num_blocks=64, num_threads=1, device="cpu", dtype=dtype)
        if not engine.any_num_threads:
            pytest.skip("no kernels were compiled for this processor")
        cores = AlternatingCores(*nums)
        engine.use(cores)
        made = [generate(engine, PROMPT * 4, 5, chunk_tokens=num, params=params) for num in (1 << 20, 29)]
        assert torch.get_num_threads() == 1, "sampling and all else has the own cores"
        num_steps = sum(len(each.results) for each in made)
        assert len(cores.taken) >= 4 * num_steps, "for each layer, and for the scores"
        blocks = block_table(engine, len(PROMPT) * 4)
        found.append(([each.results for each in made], [layer_bytes(engine, layer, blocks) for layer in range(3)]))
    assert all(each == found[0] for each in found)


def test_a_step_inside_another_leaves_lent_cores_to_the_outer_one(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, num_layers=3, dtype="bfloat16", head_dim=32, hidden_size=64)
    engine = TorchEngine(directory, num_blocks=64, num_threads=1, device="cpu")
    if not engine.any_num_threads:
        pytest.skip("no kernels were compiled for this processor")
    expected = generate(engine, PROMPT, 1).output_ids
    engine.use(AlternatingCores(2))
    first, second = separate_tables(engine, [len(PROMPT), len(PROMPT)])
    num_threads: list[int] = []

    def interrupt(layer: int) -> None:
        num_threads.append(torch.get_num_threads())
        inner = new_sequence(PROMPT, second)
        engine.execute([SequenceSlice(sequence=inner, start=0, num_tokens=len(PROMPT), sample=True)])

    outer = SequenceSlice(sequence=new_sequence(PROMPT, first), start=0, num_tokens=len(PROMPT), sample=True)
    (result,) = engine.execute([outer], on_layer=interrupt)
    assert num_threads == [2, 2, 2]
    assert [result.token_id] == expected
    assert torch.get_num_threads() == 1


def test_what_torch_sums_is_computed_with_the_own_cores(engine: TorchEngine) -> None:
    """In float32 all is torch's, and its libraries sum by the number of threads."""
    assert not engine.any_num_threads
