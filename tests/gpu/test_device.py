"""The CUDA engine on a device, against torch: needs FlashInfer, nvcc and ninja."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from pdmesh.engine.attention import AttentionPlan, QuerySpan, TorchAttention
from pdmesh.engine.cuda.cuda_forward import DeviceForward
from pdmesh.engine.cuda.flashinfer import FlashInfer, FlashInferAttention
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.page_tables import PageTables
from pdmesh.engine.cuda.staging import PLAN_BYTES, Staging
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.runner import TorchEngine
from pdmesh.engine.sampler import draw, sample
from pdmesh.grammars import Grammars
from pdmesh.kv_layout import KvLayout, num_blocks_for
from pdmesh.model import SamplingParams
from pdmesh.transport.buffers import allocate_buffers
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.devices import drawn_in_any_order, drawn_logprobs, prompt_of, scored
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import generate, new_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # the first run compiles kernels

NUM_HEADS, SCALE = 8, 128**-0.5
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def streams() -> CudaStreams:
    return CudaStreams(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize(("only_decodes", "backend"), [(True, "auto"), (False, "auto"), (False, "fa2")])
@pytest.mark.parametrize("seed", range(4))
def test_flashinfer_equals_the_reference(streams: CudaStreams, only_decodes: bool, backend: str, seed: int) -> None:
    library = pytest.importorskip("flashinfer")
    rng = random.Random(seed)
    device = streams.device
    parts = [(rng.randint(0, 900), 1 if only_decodes else rng.choice([1, 7, 300])) for _ in range(9)]
    total = sum(num_blocks_for(start + length, 16) for start, length in parts)
    block_ids = rng.sample(range(total), total)
    spans: list[QuerySpan] = []
    row = block = 0
    for start, length in parts:
        num_blocks = num_blocks_for(start + length, 16)
        spans.append(QuerySpan(row, length, start, block_ids[block : block + num_blocks]))
        row, block = row + length, block + num_blocks
    generator = torch.Generator(device).manual_seed(seed)
    cache = torch.randn(total, 2, 2, 16, 128, generator=generator, device=device).bfloat16()
    expected_cache = cache.float()
    for span in spans:  # what lies behind a sequence's end must not count, whatever it is
        cache[span.block_table[-1], :, :, (span.end - 1) % 16 + 1 :] = torch.nan
    query = torch.randn(row, NUM_HEADS + 4, 128, generator=generator, device=device).bfloat16()[:, :NUM_HEADS]

    flashinfer = FlashInfer(
        library,
        LAYOUT,
        num_heads=NUM_HEADS,
        scale=SCALE,
        max_decodes=16,
        num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        device=device,
        prefill_backend=backend,
    )
    tables = PageTables(block_size=16, max_blocks=total, device=device)
    staging = Staging(streams)
    plans: list[AttentionPlan] = [FlashInferAttention(flashinfer, tables, staging).plan(spans)]
    if only_decodes:
        index = tables.index(spans, staging)
        buffers = [torch.from_numpy(values).to(device) for values in index.lengths]
        decode = flashinfer.graph_decode(buffers[0], index.pages, buffers[1])
        for pinned in (streams.host_buffer(PLAN_BYTES, torch.uint8) for _ in range(2)):
            decode.plan(staging.host(index.lengths.indptr), staging.host(index.lengths.last_page_len), pinned)
        plans.append(decode)
    wide = KvLayout(num_layers=1, num_kv_heads=2, head_dim=128, block_size=16, dtype="float32")
    expected, expected_lse = (
        TorchAttention(wide, SCALE, device).plan(spans).attend(query.float(), expected_cache, with_lse=True)
    )
    for plan in plans:
        output, lse = plan.attend(query, cache, with_lse=True)
        torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
        assert lse is not None
        assert expected_lse is not None
        torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=1e-3)


def test_a_store_moves_blocks_beside_the_computation(streams: CudaStreams) -> None:
    """Through pinned memory; what is told of was written, although a long computation came before it."""
    store = DeviceKvStore(LAYOUT, 8, streams)
    (buffer,) = allocate_buffers(1, 3 * LAYOUT.max_page_bytes)
    told: list[float] = []
    with store.serving([buffer.memory]):
        product = torch.randn(4096, 4096, device=streams.device)
        for _ in range(50):
            product = product @ product / 64
        store.layers[1][2:5] = 3.0

        def gather() -> None:
            store.gather(1, [2, 3, 4], buffer.payload)
            told.append(float(torch.frombuffer(buffer.payload, dtype=torch.bfloat16).min()))

        store.when_written(gather)
    assert told == [3.0]
    buffer.payload[:] = bytes(range(256)) * (len(buffer.payload) // 256)
    sent = bytes(buffer.payload)
    store.scatter(0, [7, 0, 1], buffer.payload)
    out = bytearray(len(sent))
    store.gather(0, [7, 0, 1], memoryview(out))
    assert out == sent


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"),
        dtype="bfloat16",
        num_layers=3,
        hidden_size=512,
        intermediate_size=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,  # one head dim in all tests: each takes FlashInfer minutes to compile
    )


@pytest.mark.parametrize("head_dim", [16, 128])
def test_fp32_draws_the_tokens_of_the_host_and_of_transformers(tmp_path: Path, head_dim: int) -> None:
    write_checkpoint(tmp_path, head_dim=head_dim)
    engines = [TorchEngine(tmp_path, num_blocks=64, device=device) for device in ("cpu", "cuda")]
    reference = HfReference(tmp_path, device="cuda")
    for num_tokens, chunk_tokens in [(1, 1), (60, 17), (333, 64), (500, 500)]:
        prompt = prompt_of(num_tokens)
        expected, actual = (generate(engine, prompt, 40, chunk_tokens=chunk_tokens).output_ids for engine in engines)
        assert actual == expected == reference.greedy(prompt, 40)


def test_fp32_batches_and_chunks_change_no_token(tmp_path: Path) -> None:
    """Against transformers on the device, one by one."""
    write_checkpoint(tmp_path)
    engine = TorchEngine(tmp_path, num_blocks=256, device="cuda")
    lengths = [1, 30, 77, 128, 400, 16, 250]
    generations = drawn_in_any_order(engine, lengths, 30)
    reference = HfReference(tmp_path, device="cuda")
    for length, generation in zip(lengths, generations, strict=True):
        assert generation.output_ids == reference.greedy(prompt_of(length), 30)


def test_chunks_decodes_and_graphs_are_as_good_as_plain_bf16(bf16_checkpoint: Path) -> None:
    """Log-probabilities of the tokens that the fast path drew are as near to fp32's as those of torch's bf16."""
    pytest.importorskip("flashinfer")
    fast = TorchEngine(bf16_checkpoint, num_blocks=128, device="cuda")
    assert isinstance(fast._forward, DeviceForward)
    generations = drawn_in_any_order(fast, [3, 64, 100, 250, 16, 1300], 24)
    actual = drawn_logprobs(generations)
    plain, wide = (
        [logprob for generation in generations for logprob in scored(engine, generation)]
        for engine in (
            TorchEngine(bf16_checkpoint, num_blocks=128, device="cuda", native=False),
            TorchEngine(bf16_checkpoint, num_blocks=128, device="cuda", dtype="float32"),
        )
    )
    assert len(actual) == len(plain) == len(wide) == 24 * len(generations)
    error, usual = (
        statistics.fmean((a - b) ** 2 for a, b in zip(found, wide, strict=True)) ** 0.5 for found in (actual, plain)
    )
    assert 0 < usual < 0.2
    assert error < 1.5 * usual


def test_a_device_draws_what_the_host_does(streams: CudaStreams, bf16_checkpoint: Path) -> None:
    """At a large vocabulary, without waiting for the device; which tokens fp32 cannot tell apart, fp64 does.

    Some rows are held to grammars.
    """
    grammars = Grammars(bf16_checkpoint, vocab_size=128_256, eos_token_ids=(258, 256))
    logits = 3 * torch.randn(48, 128_256, generator=torch.Generator().manual_seed(5))
    choices: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 50, "temperature": 0.6},
        {"min_p": 0.02},
        {"temperature": 0.0},
    ]
    sequences = [
        new_sequence([1, 2], [0], SamplingParams(**{"max_tokens": 100, "temperature": 1.0, "seed": row, **choice}))
        for row, choice in zip(range(48), itertools.cycle(choices), strict=False)
    ]
    for sequence in sequences[::3]:
        sequence.guide = GrammarState(grammars.matcher(LLMatcher.grammar_from_regex("[0-9]+|[a-z]{3}")), (258, 256))
    on_device = logits.to(streams.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw(on_device, sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.tolist() == sample(logits, sequences)
    assert max(drawn[::3].tolist()) < 320 <= max(drawn.tolist())


def test_random_weights_are_made_on_the_device(bf16_checkpoint: Path) -> None:
    engine = TorchEngine(bf16_checkpoint, num_blocks=32, device="cuda", has_random_weights=True)
    assert all(0 <= token < 320 for token in generate(engine, prompt_of(30), 4).output_ids)
