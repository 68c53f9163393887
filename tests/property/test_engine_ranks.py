"""An engine of several ranks computes what one rank does: the same bits where these depend on nothing but the model."""

import random
import socket
import threading
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.base import SequenceSlice, SliceResult, StepFlight
from pdmesh.engine.ranks.leading import LeadingForward
from pdmesh.engine.ranks.pipeline import Pipeline
from pdmesh.engine.ranks.rank_commands import Abandon, Step
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import InstanceUnavailable
from pdmesh.model import SamplingParams
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.worker.measuring import step_s
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.ranks import ranked_engine
from pdmesh_testing.stepping import SteppedRequest, block_table, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = CheckpointShape(hidden_size=128, intermediate_size=192, num_heads=8, num_kv_heads=2, head_dim=32)
ALL = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=2, prompt_logprobs=1)
SEEDED = SamplingParams(max_tokens=1 << 20, temperature=0.8, seed=7, logprobs=0, repetition_penalty=1.1)

#: Where results do not depend on the shapes that are multiplied.
EXACT: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "cpu_level": "baseline"},
    {"dtype": "float32", "deterministic": True},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(SHAPE.vocab_size) for _ in range(length)]


def answers(engine: TorchEngine) -> list[object]:
    """Tokens and log-probabilities of requests in chunks, alone and together."""
    found: list[object] = []
    for params in (ALL, SEEDED):
        alone = generate(engine, prompt_of(37), 4, chunk_tokens=15, params=params)
        found += [alone.output_ids, alone.results]
    tables = separate_tables(engine, [80, 50, 20])
    together = [
        SteppedRequest(new_sequence(prompt_of(length), table, ALL), 6)
        for length, table in zip((70, 33, 1), tables, strict=True)
    ]
    while left := [(request, 16) for request in together if not request.done]:
        step(engine, left)
    return found + [(request.output_ids, request.results) for request in together]


@pytest.mark.parametrize("options", EXACT, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("layouts", [[(2, 1), (4, 1)], [(1, 2)], [(2, 2)]], ids=str)
def test_bits_do_not_depend_on_ranks_and_stages(
    checkpoint: Path, options: dict[str, Any], layouts: list[tuple[int, int]]
) -> None:
    """Four ranks share two key-value heads."""
    found: list[object] = []
    for num_ranks, num_stages in [(1, 1), *layouts]:
        with ranked_engine(checkpoint, num_ranks, num_stages=num_stages, num_blocks=32, **options) as engine:
            answered = answers(engine)
            caches = [sha256(layer.view(torch.uint8).numpy().tobytes()).hexdigest() for layer in engine.kv.layers]
            found.append((answered, engine.arithmetic, caches))
    assert all(each == found[0] for each in found)


#: Architectures with states or latents: several ranks are refused.
UNDIVIDED = {
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "nemotron_h"),
    *("deepseek_v3", "glm4_moe_lite"),
}

#: Architectures whose experts, in the small checkpoints, are too narrow for the arithmetic of one rank on two.
NARROW = {"qwen3_moe", "glm4_moe", "lfm2_moe"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(model_variants().keys() - UNDIVIDED))
def test_every_architecture_is_divided(model_type: str, tmp_path: Path) -> None:
    """Windows, caps, experts, fused projections, partial rotation: norms over all heads: the bits of one class."""
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, seed=1, **model_variants()[model_type][0])
    tokens: list[object] = []
    found: dict[str, list[object]] = {}  # by arithmetic class
    for num_ranks in (1, 2):
        with ranked_engine(checkpoint, num_ranks, num_blocks=32, dtype="float32", deterministic=True) as engine:
            requests = [generate(engine, prompt_of(length), 4, params=ALL) for length in (60, 3)]
            tokens.append([request.output_ids for request in requests])
            found.setdefault(engine.arithmetic, []).append([request.results for request in requests])
    assert tokens[1] == tokens[0]
    assert all(results == same[0] for same in found.values() for results in same)
    assert len(found) == (2 if model_type in NARROW else 1)


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "num_stages", "options"),
    [
        *[("gemma4_text", 2, 1, {}), ("gemma4_text", 2, 2, {}), ("lfm2", 1, 2, {}), ("qwen3_5_text", 1, 2, {})],
        *[("lfm2", 2, 1, {}), ("lfm2", 2, 2, {}), ("lfm2", 2, 2, {"max_frames": 9})],
        ("gemma3_text", 2, 1, {"max_frames": 9}),
        *[
            (model_type, 1, 2, {"max_frames": 9})
            for model_type in ("lfm2", "gemma3_text", "granitemoehybrid", "nemotron_h")
        ],
        ("qwen3_5_text", 1, 4, {"max_frames": 9}),
    ],
)
def test_layers_that_differ_are_divided(
    model_type: str, num_ranks: int, num_stages: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks share the one key-value head of Gemma 4's layers without a window. Stages share frames."""
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, seed=1, **model_variants()[model_type][0])
    found: list[object] = []
    for ranks, stages in ((1, 1), (num_ranks, num_stages)):
        with ranked_engine(
            checkpoint, ranks, num_stages=stages, num_blocks=32, dtype="float32", deterministic=True, **options
        ) as engine:
            assert (engine.kv.frames is not None) == ("max_frames" in options)
            step_s(engine, StepShape((ChunkShape(9, 40),), 1, 50))  # timing needs no states before
            requests = [generate(engine, prompt_of(length), 4, params=ALL, chunk_tokens=17) for length in (60, 3)]
            found.append([(request.output_ids, request.results) for request in requests])
    assert found[1] == found[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_norms_over_all_heads_see_each_head_once(num_ranks: int, tmp_path: Path) -> None:
    """OLMo 2, with as many key-value heads as two ranks have and as four share: bits of one rank, caches included."""
    checkpoint = write_transformers_checkpoint(
        tmp_path, "olmo2", seed=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=256, intermediate_size=256
    )
    found: list[object] = []
    for number in (1, num_ranks):
        with ranked_engine(checkpoint, number, num_blocks=16, dtype="float32", deterministic=True) as engine:
            request = generate(engine, prompt_of(60), 4, params=ALL, chunk_tokens=17)
            caches = [sha256(layer.view(torch.uint8).numpy().tobytes()).hexdigest() for layer in engine.kv.layers]
            found.append((engine.arithmetic, request.output_ids, request.results, caches))
    assert found[1] == found[0]


def test_drafts_are_verified_by_all_ranks(checkpoint: Path) -> None:
    """A draft that is right in part, then the tokens after it."""
    found: list[object] = []
    for num_ranks in (1, 2):
        with ranked_engine(checkpoint, num_ranks, num_blocks=8, dtype="bfloat16") as engine:
            right = generate(engine, prompt_of(20), 4, params=ALL).output_ids
            request = SteppedRequest(new_sequence(prompt_of(20), block_table(engine, 60), ALL), 8)
            step(engine, [(request, 100)])
            draft = (*right[1:3], 5, 6)
            start = len(request.sequence.token_ids) - 1
            (result,) = engine.execute(
                [
                    SequenceSlice(
                        sequence=request.sequence, start=start, num_tokens=1 + len(draft), sample=True, draft=draft
                    )
                ]
            )
            assert [drawn.token_id for drawn in result.drawn[:3]] == right[1:4]
            request.sequence.token_ids.extend(drawn.token_id for drawn in result.drawn)
            request.num_computed = len(request.sequence.token_ids) - 1
            step(engine, [(request, 1)])
            found.append((result, request.results[-1]))
    assert found[1] == found[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_runs_inside_another_and_one_is_given_up(checkpoint: Path, num_ranks: int) -> None:
    """Preempted between layers, or abandoned there and begun again, a prompt comes to the same tokens."""

    class GivenUp(Exception):
        pass

    with ranked_engine(checkpoint, num_ranks, num_blocks=32, dtype="bfloat16") as engine, ExitStack() as stack:
        expected = [generate(engine, prompt_of(length), 3).output_ids for length in (40, 25)]
        tables = list(separate_tables(engine, [60, 60]))
        outer, inner = (
            SteppedRequest(new_sequence(prompt_of(length), table), 3)
            for length, table in zip((40, 25), tables, strict=True)
        )
        part = outer.next_slice(100)
        seen: list[int] = []

        def give_up(layer: int) -> None:
            if layer == 1:
                raise GivenUp

        with pytest.raises(GivenUp):
            engine.execute([part], on_layer=give_up)

        def run_inside(layer: int) -> None:
            seen.append(layer)
            step(engine, [(inner, 20)])

        (result,) = engine.execute([part], on_layer=run_inside)
        outer.accept(part, result)
        assert seen == list(range(SHAPE.num_layers))
        while not (outer.done and inner.done):
            step(engine, [(request, 100) for request in (outer, inner) if not request.done])
        stack.close()
        assert [outer.output_ids, inner.output_ids] == expected


def test_kv_of_all_heads_is_there_when_the_hook_is_called(checkpoint: Path) -> None:
    """Whoever sends a block from the leader sends what other ranks wrote of it."""
    with ranked_engine(checkpoint, 1, num_blocks=8, dtype="bfloat16") as engine:
        generate(engine, prompt_of(64), 1)
        expected = [layer[block_table(engine, 64)].clone() for layer in engine.kv.layers]
    with ranked_engine(checkpoint, 4, num_blocks=8, dtype="bfloat16") as engine:
        table = block_table(engine, 64)
        sequence = new_sequence(prompt_of(64), table)
        found: list[torch.Tensor] = []
        engine.execute(
            [SequenceSlice(sequence=sequence, start=0, num_tokens=64, sample=False)],
            on_layer=lambda layer: found.append(engine.kv.layers[layer][table].clone()),
        )
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_step_without_a_hook_does_not_meet(checkpoint: Path) -> None:
    with ranked_engine(checkpoint, 2, num_blocks=8, dtype="bfloat16") as engine:
        generate(engine, prompt_of(5), 2)
        assert isinstance(engine._forward, LeadingForward)
        commands = [command for command, _ in engine._forward._followers.commands]  # type: ignore[attr-defined]
        steps = [command for command in commands if isinstance(command, Step)]
        assert len(steps) == 2
        assert not any(command.hooked for command in steps)
        assert not any(isinstance(command, Abandon) for command in commands)


def test_a_lost_rank_is_no_failed_engine(checkpoint: Path) -> None:
    with ranked_engine(checkpoint, 2, num_blocks=8, dtype="bfloat16") as engine:
        assert isinstance(engine._forward, LeadingForward)
        engine._forward._followers.group.peers[0].close()  # type: ignore[attr-defined]
        with pytest.raises(InstanceUnavailable):
            generate(engine, prompt_of(5), 2)


# --- stages ---


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_of_a_prompt_follow_each_other_through_stages(checkpoint: Path, num_ranks: int) -> None:
    """Each enters once the one before it has begun, and all hooks of a step come before its end, in any order."""
    prompt, expected = prompt_of(90), []
    with ranked_engine(checkpoint, 1, num_blocks=16, dtype="bfloat16") as engine:
        expected = generate(engine, prompt, 1, params=ALL).output_ids
    with ranked_engine(checkpoint, num_ranks, num_stages=2, num_blocks=16, dtype="bfloat16") as engine:
        sequence = new_sequence(prompt, block_table(engine, 90), ALL)
        written: list[list[int]] = []
        found: list[list[SliceResult]] = [[] for _ in range(6)]

        def execute(number: int, begun: threading.Event) -> None:
            part = SequenceSlice(sequence=sequence, start=15 * number, num_tokens=15, sample=number == 5)
            flight = StepFlight(on_begin=begun.set)
            found[number] = engine.execute([part], on_layer=written[number].append, flight=flight)
            assert flight.queued_s >= 0

        threads: list[threading.Thread] = []
        for number in range(6):
            written.append([])
            begun = threading.Event()
            threads.append(threading.Thread(target=execute, args=(number, begun)))
            threads[-1].start()
            assert begun.wait(30)
        for thread in threads:
            thread.join(30)
    assert [sorted(layers) for layers in written] == [list(range(SHAPE.num_layers))] * 6
    assert [drawn.token_id for drawn in found[5][0].drawn] == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("given_up_in", range(SHAPE.num_layers))
def test_a_step_that_waits_is_given_up_in_any_stage(checkpoint: Path, num_ranks: int, given_up_in: int) -> None:
    class GivenUp(Exception):
        pass

    def give_up(layer: int) -> None:
        if layer == given_up_in:
            raise GivenUp

    with ranked_engine(checkpoint, num_ranks, num_stages=2, num_blocks=8, dtype="bfloat16") as engine:
        expected = generate(engine, prompt_of(40), 3).output_ids
        request = SteppedRequest(new_sequence(prompt_of(40), block_table(engine, 60)), 3)
        part = request.next_slice(100)
        with pytest.raises(GivenUp):
            engine.execute([part], on_layer=give_up, flight=StepFlight(waits=True))
        seen: list[int] = []
        (result,) = engine.execute([part], on_layer=seen.append, flight=StepFlight(waits=True))
        assert seen == list(range(SHAPE.num_layers))
        request.accept(part, result)
        while not request.done:
            step(engine, [(request, 1)])
        assert request.output_ids == expected


def test_a_lost_stage_is_no_failed_engine(checkpoint: Path) -> None:
    """Whoever waits for a step is told, and whoever begins one after that."""
    with ranked_engine(checkpoint, 1, num_stages=2, num_blocks=8, dtype="bfloat16") as engine:
        assert isinstance(engine._forward, Pipeline)
        lost = engine._forward._stages._connections[1]  # type: ignore[attr-defined]

        def lose(layer: int) -> None:
            lost.shutdown(socket.SHUT_RDWR)

        part = SequenceSlice(sequence=new_sequence(prompt_of(9), [0]), start=0, num_tokens=9, sample=True)
        for _ in range(2):
            with pytest.raises(InstanceUnavailable):
                engine.execute([part], on_layer=lose, flight=StepFlight(waits=True))
