"""The CUDA engine's logic on the host: its device, FlashInfer and graphs are stand-ins with the real ones' rules."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pdmesh.engine import model_loading as loading
from pdmesh.engine import runner
from pdmesh.engine.base import SequenceSlice, SliceResult
from pdmesh.engine.compute import Cache, Compute, Loaded
from pdmesh.engine.cuda import layer_graphs
from pdmesh.engine.cuda.cuda_forward import DeviceForward, paced
from pdmesh.engine.cuda.graphs import MAX_BATCH_SIZE, graph_batch_size
from pdmesh.engine.cuda.staging import Turns
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.cuda import FakeRecorder, FakeStreams, fake_cuda_compute
from pdmesh_testing.flashinfer import FakeFlashInfer
from pdmesh_testing.stepping import (
    GREEDY,
    SteppedRequest,
    assert_nothing_changes_when_computed_again,
    generate,
    new_sequence,
    separate_tables,
    step,
)

MAX_TOKENS = 20
NUM_LAYERS = 3
NUM_SEGMENTS = NUM_LAYERS + 1  # graphs of a step with chunks: before, between and after its layers' attention
PARAMS = [GREEDY, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=3, logprobs=1)]


@dataclass
class FakeDevice:
    library: FakeFlashInfer = field(default_factory=FakeFlashInfer)
    streams: FakeStreams = field(default_factory=FakeStreams)
    recorder: FakeRecorder = field(default_factory=FakeRecorder)

    def engine(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, num_blocks: int = 64, max_num_seqs: int = 256
    ) -> TorchEngine:
        def choose(loaded: Loaded, cache: Cache) -> Compute:
            return fake_cuda_compute(loaded, cache, self.library, self.streams, self.recorder)

        with monkeypatch.context() as patched:
            patched.setattr(loading, "choose_compute", choose)
            return TorchEngine(directory, num_blocks=num_blocks, max_num_seqs=max_num_seqs, num_threads=1, device="cpu")

    def calls(self, method: str) -> int:
        return sum(call.method == method for call in self.library.calls)


def prefilled(engine: TorchEngine, lengths: list[int]) -> list[SteppedRequest]:
    """Generations whose prompts have been computed."""
    tables = separate_tables(engine, [length + MAX_TOKENS for length in lengths])
    generations = [
        SteppedRequest(
            new_sequence(prompt_of(length), table, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)), MAX_TOKENS
        )
        for length, table in zip(lengths, tables, strict=True)
    ]
    step(engine, [(generation, 1000) for generation in generations])
    return generations


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def reference(tmp_path: Path) -> TorchEngine:
    write_checkpoint(tmp_path, num_layers=NUM_LAYERS)
    return TorchEngine(tmp_path, num_blocks=64, num_threads=1, device="cpu", native=False)


@pytest.fixture
def engine(reference: TorchEngine, tmp_path: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    return fake.engine(tmp_path, monkeypatch)


def prompt_of(num_tokens: int) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(320) for _ in range(num_tokens)]


@pytest.mark.parametrize("sizes", [layer_graphs.SIZES, (4, 16), (1,)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_chunks_and_decodes_equals_the_reference(
    engine: TorchEngine, reference: TorchEngine, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], seed: int
) -> None:
    """In graphs between the layers' attention, or, what has more tokens than these sizes, without."""
    monkeypatch.setattr(layer_graphs, "SIZES", sizes)
    schedule = random.Random(seed)
    for cache in engine.kv.layers:
        cache.fill_(torch.nan)  # the scratch block included: nothing unwritten may be read
    requests = [(schedule.randint(1, 60), schedule.choice(PARAMS)) for _ in range(schedule.randint(1, 6))]
    expected = [generate(reference, prompt_of(length), MAX_TOKENS, params=params) for length, params in requests]
    tables = separate_tables(engine, [length + MAX_TOKENS for length, _ in requests])
    generations = [
        SteppedRequest(new_sequence(prompt_of(length), table, params), MAX_TOKENS)
        for (length, params), table in zip(requests, tables, strict=True)
    ]
    while running := [generation for generation in generations if not generation.done]:
        chosen = schedule.sample(running, schedule.randint(1, len(running)))
        step(engine, [(generation, schedule.choice([1, 2, 15, 16, 17, 1000])) for generation in chosen])
    assert [g.output_ids for g in generations] == [g.output_ids for g in expected]
    for actual, wanted in zip(generations, expected, strict=True):
        chances = [result.logprobs.logprob for result in actual.results if result.logprobs]
        assert chances == pytest.approx([result.logprobs.logprob for result in wanted.results if result.logprobs], 1e-4)


@pytest.mark.parametrize("sizes", [layer_graphs.SIZES, (1,)], ids=str)
def test_what_a_prompt_leaves_of_its_last_block_is_wiped(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """It may be read by another instance, whose attention masks by a product."""
    monkeypatch.setattr(layer_graphs, "SIZES", sizes)
    for cache in engine.kv.layers:
        cache.fill_(torch.nan)
    table = [7, 3, 5]
    step(engine, [(SteppedRequest(new_sequence(prompt_of(40), table), MAX_TOKENS), 40)])
    for cache in engine.kv.layers:
        assert cache[table[:2]].isfinite().all()
        assert cache[5, :, :, :8].isfinite().all()
        assert not cache[5, :, :, 8:].any()
        assert cache[[1, 2, 4, 6]].isnan().all()


@pytest.mark.parametrize("sizes", [layer_graphs.SIZES, (1,)], ids=str)
def test_what_is_computed_again_changes_no_byte_meanwhile(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """A step that began again, or a chunk that was given up: other instances may be reading what is there by now."""
    monkeypatch.setattr(layer_graphs, "SIZES", sizes)
    assert_nothing_changes_when_computed_again(engine)


def test_decodes_run_as_few_graphs_whose_padding_changes_nothing(
    engine: TorchEngine, reference: TorchEngine, fake: FakeDevice
) -> None:
    lengths = [3, 16, 17, 40, 33]
    expected = [generate(reference, prompt_of(length), MAX_TOKENS).output_ids for length in lengths]
    tables = separate_tables(engine, [length + MAX_TOKENS for length in lengths])
    generations = [
        SteppedRequest(new_sequence(prompt_of(length), table), MAX_TOKENS)
        for length, table in zip(lengths, tables, strict=True)
    ]
    step(engine, [(generation, 1000) for generation in generations])
    assert fake.recorder.num_recorded == NUM_SEGMENTS
    fake.recorder.num_recorded = 0
    fake.library.calls.clear()
    while running := [generation for generation in generations if not generation.done]:
        step(engine, [(generation, 1) for generation in running[: 1 + len(running[0].output_ids) % 5]])
    assert [generation.output_ids for generation in generations] == expected
    assert fake.recorder.num_recorded == len({graph_batch_size(size) for size in (1, 2, 3, 4, 5)})
    assert not [call for call in fake.library.calls if call.wrapper.startswith("BatchPrefill")]
    assert fake.calls("plan") == fake.recorder.num_recorded  # the first of each size, which chooses its kernels


@pytest.mark.parametrize("length", [10, 16, 31])
def test_a_step_is_prepared_while_the_one_before_is_computed(
    engine: TorchEngine, reference: TorchEngine, fake: FakeDevice, length: int
) -> None:
    """The same sequences, one token on: the step finds its integers, its plan and its tokens on the device."""
    expected = [generate(reference, prompt_of(length + i), MAX_TOKENS).output_ids for i in range(3)]
    generations = prefilled(engine, [length, length + 1, length + 2])
    step(engine, [(generation, 1) for generation in generations])
    for _ in range(MAX_TOKENS - 3):
        planned, sent = fake.calls("fast_decode_plan"), fake.streams.num_recorded
        step(engine, [(generation, 1) for generation in generations])
        assert fake.calls("fast_decode_plan") == planned + 1  # the next one's
        assert fake.streams.num_recorded == sent + 2  # its turn, and the tokens; no other wait
    step(engine, [(generation, 1) for generation in generations])
    planned = fake.calls("fast_decode_plan")
    assert [generation.output_ids for generation in generations] == expected
    assert all(generation.done for generation in generations)
    assert fake.calls("fast_decode_plan") == planned  # nothing follows the last token


def test_what_was_prepared_for_another_batch_changes_nothing(
    engine: TorchEngine, reference: TorchEngine, fake: FakeDevice
) -> None:
    lengths = [10, 20, 30]
    expected = [generate(reference, prompt_of(length), MAX_TOKENS).output_ids for length in lengths]
    generations = prefilled(engine, lengths)
    a, b, c = generations
    orders = itertools.cycle([[a, b], [a, b], [b, a], [a, b, c], [a, c], [c], [c], [a, b, c], [c, b, a]])
    while any(not generation.done for generation in generations):
        if running := [generation for generation in next(orders) if not generation.done]:
            step(engine, [(generation, 1) for generation in running])
    assert [generation.output_ids for generation in generations] == expected


def test_a_token_that_is_not_the_drawn_one_is_computed(engine: TorchEngine, reference: TorchEngine) -> None:
    """The engine believes the sequence, not what it prepared."""
    outputs: list[list[int]] = []
    for tested in (engine, reference):
        (generation,) = prefilled(tested, [12])
        for forced in (None, 7, None, 9, 11):
            step(tested, [(generation, 1)])
            if forced is not None:
                generation.sequence.token_ids[-1] = forced
        step(tested, [(generation, 1)])
        outputs.append(generation.sequence.token_ids.tolist())
    assert outputs[0] == outputs[1]


def test_pinned_memory_is_written_again_only_when_the_device_has_read_it() -> None:
    streams = FakeStreams()
    turns = Turns(streams)
    first, second = turns.next(), turns.next()
    assert first is not second
    streams.held = True
    assert turns.next() is first  # read long ago
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(turns.next)
        assert not wait([waiting], timeout=0.05).done
        streams.events[-2].complete()
        assert waiting.result(10) is second


def test_a_warm_up_compiles_everything_and_touches_no_requests_kv(engine: TorchEngine, fake: FakeDevice) -> None:
    forward = engine._forward
    assert isinstance(forward, DeviceForward)
    forward.warm_up()
    assert {(call.wrapper, call.method) for call in fake.library.calls} == {
        (wrapper, method)
        for wrapper in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
        for method in ("__init__", "plan", "run")
    }
    sizes = [
        len(call.kwargs["paged_kv_last_page_len_buffer"])
        for call in fake.library.calls
        if "use_cuda_graph" in call.kwargs
    ]
    assert sizes == [256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]  # the largest first
    assert fake.recorder.num_recorded == 16 + len(layer_graphs.SIZES) * NUM_SEGMENTS
    backends = [
        call.kwargs["backend"]
        for call in fake.library.calls
        if call.wrapper.startswith("BatchPrefill") and call.method == "__init__"
    ]
    assert backends == ["auto", "fa2"]
    for cache in engine.kv.layers:
        assert not cache[: engine.kv.num_blocks].any()


def test_graph_sizes() -> None:
    sizes = sorted({graph_batch_size(number) for number in range(1, MAX_BATCH_SIZE + 1)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for number in range(1, MAX_BATCH_SIZE + 1):
        assert graph_batch_size(number) == min(size for size in sizes if size >= number)


def test_batches_too_large_for_one_graph_are_computed_layer_by_layer(
    reference: TorchEngine, tmp_path: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake.engine(tmp_path, monkeypatch, max_num_seqs=2)
    expected = [generate(reference, prompt_of(length), MAX_TOKENS).output_ids for length in (5, 6, 7)]
    generations = prefilled(engine, [5, 6, 7])
    while not generations[0].done:
        step(engine, [(generation, 1) for generation in generations])
    assert [generation.output_ids for generation in generations] == expected
    assert fake.recorder.num_recorded == NUM_SEGMENTS


@pytest.mark.parametrize("nested_decodes", [False, True])
def test_a_hook_may_run_another_step(engine: TorchEngine, reference: TorchEngine, nested_decodes: bool) -> None:
    prompts = [prompt_of(40), prompt_of(30)]
    expected, other_expected = (generate(reference, prompt, 3).output_ids for prompt in prompts)
    outer, inner = (
        SteppedRequest(new_sequence(prompt, table), 3)
        for prompt, table in zip(prompts, separate_tables(engine, [50, 40]), strict=True)
    )
    if nested_decodes:  # decodes inside decodes: the same graph
        step(engine, [(outer, 1000)])
        step(engine, [(inner, 1000)])

    def interrupt(layer: int) -> None:
        if layer == 1 and not inner.done:
            step(engine, [(inner, 1000)])

    while not outer.done:
        part = outer.next_slice(1000)
        outer.accept(part, engine.execute([part], on_layer=interrupt)[0])
    while not inner.done:
        step(engine, [(inner, 1)])
    assert (outer.output_ids, inner.output_ids) == (expected, other_expected)


def test_a_step_ends_with_its_own_event_and_is_never_far_ahead(engine: TorchEngine, fake: FakeDevice) -> None:
    layers: list[int] = []
    part = SequenceSlice(sequence=new_sequence(prompt_of(20), [0, 1]), start=0, num_tokens=20, sample=True)
    (result,) = engine.execute([part], on_layer=layers.append)
    assert isinstance(result, SliceResult)
    assert layers == [0, 1, 2]
    assert len(fake.streams.events) == 4  # one a layer, and the step's

    streams = FakeStreams()
    streams.held = True
    seen: list[int] = []
    hook = paced(seen.append, streams, 2)
    hook(0)
    hook(1)
    assert seen == [0, 1]
    streams.events[0].complete()
    hook(2)  # layer 0 is done; 1 may be under way
    assert seen == [0, 1, 2]
    assert [event._done.is_set() for event in streams.events] == [True, False, False]


def test_what_is_sent_of_block_tables_is_what_is_new(engine: TorchEngine, fake: FakeDevice) -> None:
    """Observed where the table is written: once a whole table, then what it has gained."""
    forward = engine._forward
    assert isinstance(forward, DeviceForward)
    tables = forward._tables
    table = [9, 4, 7]
    generation = SteppedRequest(new_sequence(prompt_of(40), table), 1000)
    step(engine, [(generation, 16)])
    assert tables.num_sent == 3
    for _ in range(6):
        step(engine, [(generation, 7)])
    assert tables.num_sent == 4  # and the scratch block, for the first graph
    generation.sequence.block_table.append(2)
    while generation.num_computed < 49:
        step(engine, [(generation, 1)])
    assert tables.num_sent == 5


def test_a_device_promises_no_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is loaded: until 2026-11 it was ignored there."""
    monkeypatch.setattr(runner, "torch_device", lambda name: torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"set worker\.device to cpu"):
        TorchEngine(tmp_path, num_blocks=8, deterministic=True)
