"""Contexts that are spread over instances of ranks and stages: the bits of one rank, whoever holds a range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pdmesh.engine.base import SliceResult, StepFlight
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.remote_kv import RemoteKvLost
from pdmesh.model import SamplingParams
from pdmesh_testing.architectures import prompt_of
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.ranges import RANGE_TOKENS, HeldByEngines, spread
from pdmesh_testing.ranks import ranked_engine
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

#: Four ranks share two key-value heads.
pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = CheckpointShape(hidden_size=128, intermediate_size=192, num_heads=8, num_kv_heads=2, head_dim=32)
ALL = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=2)

ENGINE: dict[str, Any] = {"num_blocks": 64, "range_tokens": RANGE_TOKENS, "ordered": True}
BF16: dict[str, Any] = {**ENGINE, "dtype": "bfloat16"}
COMPUTES: list[dict[str, Any]] = [
    BF16,
    {**BF16, "cpu_level": "baseline"},
    {**ENGINE, "dtype": "float32", "deterministic": True},
]


class Layout(NamedTuple):
    """Of an engine: ranks of a stage, and stages."""

    tensor: int
    stages: int = 1

    def __str__(self) -> str:
        return f"{self.tensor}x{self.stages}"


DIVIDED = [Layout(2), Layout(4), Layout(1, 2), Layout(2, 2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


@pytest.fixture(params=COMPUTES, ids=["bfloat16", "bfloat16 at baseline", "float32"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


def drawn(request: SteppedRequest) -> list[object]:
    return [result.drawn for result in request.results if result.drawn]


def begin(engine: TorchEngine, *lengths: int, num_tokens: int = 8) -> list[SteppedRequest]:
    """Prompts whose first tokens have been drawn."""
    tables = separate_tables(engine, [length + num_tokens for length in lengths])
    requests = [
        SteppedRequest(new_sequence(prompt_of(length), table, ALL), num_tokens)
        for length, table in zip(lengths, tables, strict=True)
    ]
    for request in requests:
        while not request.results or not request.results[-1].drawn:
            step(engine, [(request, 50)])
    return requests


def finish(engine: TorchEngine, requests: Sequence[SteppedRequest]) -> None:
    while left := [(request, 1) for request in requests if not request.done]:
        step(engine, left)


@pytest.mark.parametrize("layout", DIVIDED, ids=str)
def test_a_prompt_longer_than_a_range_has_the_bits_of_one_rank(
    checkpoint: Path, options: dict[str, Any], layout: Layout
) -> None:
    """Chunks that end inside ranges, decodes after them, and all that is in the caches."""
    found: list[object] = []
    for tensor, stages in (Layout(1), layout):
        with ranked_engine(checkpoint, tensor, num_stages=stages, **options) as engine:
            answers = [
                drawn(generate(engine, prompt_of(length), 4, chunk_tokens=chunk_tokens, params=ALL))
                for length, chunk_tokens in ((RANGE_TOKENS - 2, 1000), (200, 1000), (230, 50))
            ]
            caches = [sha256(layer.view(torch.uint8).numpy().tobytes()).hexdigest() for layer in engine.kv.layers]
            found.append((engine.arithmetic, answers, caches))
    assert found[1] == found[0]


@pytest.mark.parametrize("home", [Layout(1), *DIVIDED], ids=str)
@pytest.mark.parametrize("member", [Layout(1), Layout(4), Layout(2, 2)], ids=str)
def test_whoever_asks_whom_changes_no_bit(
    checkpoint: Path, options: dict[str, Any], home: Layout, member: Layout
) -> None:
    """Two contexts of three members and one, beside one that is not spread; the second takes on another as it grows."""
    lengths, num_tokens = (200, 2 * RANGE_TOKENS - 4, 20), 12
    with ExitStack() as stack:

        def engine_of(layout: Layout) -> TorchEngine:
            return stack.enter_context(ranked_engine(checkpoint, layout.tensor, num_stages=layout.stages, **options))

        alone = engine_of(Layout(1))
        expected = [drawn(generate(alone, prompt_of(length), num_tokens, params=ALL)) for length in lengths]
        engines = [engine_of(home), engine_of(member), engine_of(Layout(1))]
        requests = begin(engines[0], *lengths, num_tokens=num_tokens)
        for first_block, request in zip((0, 24), requests, strict=False):
            spread(request, engines, first_block)
        while left := [request for request in requests if not request.done]:
            step(engines[0], [(request, 1) for request in left])
            if requests[1].sequence.num_output_tokens == 8:
                assert requests[1].sequence.num_remote_tokens == RANGE_TOKENS
                spread(requests[1], engines, 24)
                assert requests[1].sequence.num_remote_tokens == 2 * RANGE_TOKENS
        assert [drawn(request) for request in requests] == expected


@pytest.fixture(
    scope="module",
    params=[
        ("gemma2", {"sliding_window": 80, "attn_logit_softcapping": 2.0}),
        ("gpt_oss", {"sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ],
    ids=["gemma2", "gpt_oss"],
)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with windows, one of which ends in a range, and capped scores or sinks."""
    family, options = request.param
    return write_transformers_checkpoint(
        tmp_path_factory.mktemp("model"),
        family,
        seed=1,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=8,
        head_dim=32,
        **options,
    )


@pytest.mark.parametrize("home", [Layout(2), Layout(1, 2), Layout(2, 2)], ids=str)
def test_ranks_ask_only_whose_range_is_seen(windowed: Path, home: Layout) -> None:
    """A prompt that is computed in chunks while others hold its first ranges, and decodes; beside one that does not."""
    lengths, num_tokens = (200, 150, 20), 6
    with ExitStack() as stack:

        def engine_of(layout: Layout) -> TorchEngine:
            return stack.enter_context(ranked_engine(windowed, layout.tensor, num_stages=layout.stages, **BF16))

        alone, engines = engine_of(Layout(1)), [engine_of(home), engine_of(Layout(2)), engine_of(Layout(1))]
        expected = [drawn(generate(alone, prompt_of(length), num_tokens, params=ALL)) for length in lengths]
        tables = separate_tables(engines[0], [length + num_tokens for length in lengths])
        requests = [
            SteppedRequest(new_sequence(prompt_of(length), table, ALL), num_tokens)
            for length, table in zip(lengths, tables, strict=True)
        ]
        while left := [request for request in requests if not request.done]:
            step(engines[0], [(request, 50) for request in left])
            for first_block, request in zip((0, 24), requests, strict=False):
                spread(request, engines, first_block)
        assert [drawn(request) for request in requests] == expected
        assert [request.sequence.num_remote_tokens for request in requests] == [192, 128, 0]


def one_silent(held: HeldByEngines) -> list[bytes]:
    raise RemoteKvLost(held, "silent")


def one_short(held: HeldByEngines) -> list[bytes]:
    first, *others = HeldByEngines(held.members, held.asked).answers()
    return [first[:-4], *others]


@pytest.mark.parametrize("answers", [one_silent, one_short])
@pytest.mark.parametrize("lost_in", range(SHAPE.num_layers))
@pytest.mark.parametrize("layout", [Layout(1), *DIVIDED], ids=str)
def test_a_lost_member_ends_the_step_on_all_ranks_and_leaves_them_in_step(
    checkpoint: Path, layout: Layout, lost_in: int, answers: Callable[[HeldByEngines], list[bytes]]
) -> None:
    """Others go on, in a step without the context; it does, once another holds the range."""

    class Losing(HeldByEngines):
        def answers(self) -> list[bytes]:
            return answers(self) if self.asked[-1].layer == lost_in else super().answers()

    lengths = (200, 150, 20)
    with (
        ranked_engine(checkpoint, layout.tensor, num_stages=layout.stages, **BF16) as home,
        ranked_engine(checkpoint, 1, **BF16) as member,
    ):
        expected = [drawn(generate(member, prompt_of(length), 8, params=ALL)) for length in lengths]
        requests = begin(home, *lengths)
        for first_block, request in zip((0, 24), requests, strict=False):
            spread(request, [home, member], first_block)
        first = requests[0].sequence
        held = first.elsewhere
        assert isinstance(held, HeldByEngines)
        first.elsewhere = Losing(held.members)
        for _ in range(2):
            with pytest.raises(RemoteKvLost) as lost:
                step(home, [(request, 1) for request in requests])
            assert lost.value.elsewhere is first.elsewhere
            step(home, [(request, 1) for request in requests[1:]])
        first.elsewhere = held
        finish(home, requests)
        assert [drawn(request) for request in requests] == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_inside_another_loses_a_member(checkpoint: Path, num_ranks: int) -> None:
    """The outer one, which asks too, goes on as if nothing had been."""

    class Silent(HeldByEngines):
        def answers(self) -> list[bytes]:
            raise RemoteKvLost(self, "silent")

    with ranked_engine(checkpoint, num_ranks, **BF16) as home, ranked_engine(checkpoint, 1, **BF16) as member:
        expected = [drawn(generate(member, prompt_of(length), 8, params=ALL)) for length in (200, 150)]
        outer, inner = requests = begin(home, 200, 150)
        for first_block, request in zip((0, 24), requests, strict=True):
            spread(request, [home, member], first_block)
        held = inner.sequence.elsewhere
        assert isinstance(held, HeldByEngines)

        def run_inside(layer: int) -> None:
            inner.sequence.elsewhere = Silent(held.members)
            with pytest.raises(RemoteKvLost):
                step(home, [(inner, 1)])
            inner.sequence.elsewhere = held
            if layer == 1:
                step(home, [(inner, 1)])

        part = outer.next_slice(1)
        (result,) = home.execute([part], on_layer=run_inside)
        outer.accept(part, result)
        finish(home, requests)
        assert [drawn(request) for request in requests] == expected


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 2)], ids=str)
def test_a_step_of_stages_that_waits_may_lose_a_member(checkpoint: Path, layout: Layout) -> None:

    class Losing(HeldByEngines):
        def answers(self) -> list[bytes]:
            if self.asked[-1].layer == 1:
                raise RemoteKvLost(self, "silent")
            return super().answers()

    with (
        ranked_engine(checkpoint, layout.tensor, num_stages=layout.stages, **BF16) as home,
        ranked_engine(checkpoint, 1, **BF16) as member,
    ):
        expected = drawn(generate(member, prompt_of(200), 8, params=ALL))
        (request,) = begin(home, 200)
        spread(request, [home, member])
        held = request.sequence.elsewhere
        assert isinstance(held, HeldByEngines)
        part, seen = request.next_slice(1), list[int]()
        request.sequence.elsewhere = Losing(held.members)
        with pytest.raises(RemoteKvLost):
            home.execute([part], on_layer=seen.append, flight=StepFlight(waits=True))
        assert seen == [0, 1]
        request.sequence.elsewhere = held
        results: list[SliceResult] = home.execute([part], on_layer=seen.append, flight=StepFlight(waits=True))
        assert seen == [0, 1, *range(SHAPE.num_layers)]
        request.accept(part, results[0])
        finish(home, [request])
        assert drawn(request) == expected
