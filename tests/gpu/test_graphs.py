"""What came after the first session on a device, in bf16 by FlashInfer and graphs.

``GPU_TESTS_DEVICE=cpu`` runs them where there is no device, over stand-ins.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdmesh.engine import model_loading as loading
from pdmesh.engine.cuda.cuda_forward import DeviceForward
from pdmesh.engine.cuda.graphs import DecodeGraphs, GraphOutput
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import FinishReason, SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.cuda import FakeRecorder, FakeStreams, fake_cuda_compute
from pdmesh_testing.devices import DEVICE, HAS_DEVICE, MARKS, drawn_in_any_order, drawn_logprobs, scored
from pdmesh_testing.flashinfer import FakeFlashInfer
from pdmesh_testing.quantized_checkpoints import write_quantized
from pdmesh_testing.stepping import SteppedRequest, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

pytestmark = [*MARKS, pytest.mark.timeout(600)]  # the first run compiles kernels

#: One head dim in all tests: each takes FlashInfer minutes to compile.
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
}
LENGTHS, NUM_TOKENS = [3, 50, 100, 400], 16

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


def fast_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    if HAS_DEVICE:
        pytest.importorskip("flashinfer")
        engine = TorchEngine(checkpoint, num_blocks=128, max_num_seqs=8, device=DEVICE)
    else:

        def choose(loaded: Any, cache: Any) -> Any:
            return fake_cuda_compute(loaded, cache, FakeFlashInfer(), FakeStreams(), FakeRecorder())

        with monkeypatch.context() as patched:
            patched.setattr(loading, "choose_compute", choose)
            engine = TorchEngine(checkpoint, num_blocks=128, max_num_seqs=8, device=DEVICE, native=False)
    assert isinstance(engine._forward, DeviceForward)
    return engine


def test_quantised_weights_are_computed_like_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: they are dequantised into the same bf16."""
    source = write_checkpoint(tmp_path / "source", **SHAPE)
    drawn: list[list[list[int]]] = []
    for path in write_quantized(source, tmp_path, "int4-group"):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
        engine = fast_engine(path, monkeypatch)
        assert engine.kv.layout.dtype == "bfloat16"
        drawn.append([each.output_ids for each in drawn_in_any_order(engine, LENGTHS, NUM_TOKENS)])
    assert drawn[0] == drawn[1]


#: Norms of heads and of all of them, layers without rotation, layer norms with biases, learned positions, scalings.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {},
    "gpt2": {},
    "granite": {"attention_multiplier": 0.08, "logits_scaling": 0.8, "residual_multiplier": 0.6},
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Probabilities are as near to fp32's as usual."""
    shape = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {**shape, **ARCHITECTURES[model_type]}
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, dtype="bfloat16", **options)
    assert_as_in_fp32(checkpoint, drawn_in_any_order(fast_engine(checkpoint, monkeypatch), LENGTHS, NUM_TOKENS))


def test_rotations_that_depend_on_lengths_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities are as near to fp32's as usual, before and behind the length from which on they change.

    None of the answers passes it: the prompt that they are compared with is rotated as a whole.
    """
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.01 * pair for pair in range(64)],
        "long_factor": [1.5 + 0.1 * pair for pair in range(64)],
        "original_max_position_embeddings": 70,
        "factor": 4.0,
    }
    checkpoint = write_checkpoint(tmp_path, dtype="bfloat16", rope_scaling=scaling, **SHAPE)
    generations = drawn_in_any_order(fast_engine(checkpoint, monkeypatch), LENGTHS, NUM_TOKENS)
    assert_as_in_fp32(checkpoint, generations)


def test_steps_with_grammars_are_graphs_and_answers_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are drawn at random, some are the most likely; one is penalised, too, which the host computes."""
    checkpoint = write_checkpoint(tmp_path, dtype="bfloat16", **SHAPE)
    engine, num_graphs = fast_engine(checkpoint, monkeypatch), 0
    graph_step: Callable[..., GraphOutput] = DecodeGraphs.step

    def counted(*arguments: Any) -> GraphOutput:
        nonlocal num_graphs
        num_graphs += 1
        return graph_step(*arguments)

    monkeypatch.setattr(DecodeGraphs, "step", counted)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
    options: dict[str, Any] = {"max_tokens": 80, "grammar": grammar, "eos_token_ids": (258, 256)}
    params = [
        SamplingParams(**options, temperature=number % 3 / 2, seed=number, top_p=0.9 if number == 1 else 1.0)
        for number in range(5)
    ]
    params.append(SamplingParams(**options, temperature=1.0, seed=5, presence_penalty=0.1))
    requests = [
        SteppedRequest(new_sequence([5, 6, 7 + number], table, each), 80)
        for number, (table, each) in enumerate(zip(separate_tables(engine, [100] * 6), params, strict=True))
    ]
    num_steps, left = 0, requests
    while left:
        step(engine, [(request, 100) for request in left])
        left = [request for request in left if request.results[-1].drawn[0].finish_reason is None]
        num_steps += 1
    assert num_graphs == num_steps - 1  # all but that of the prompts
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for request in requests:
        assert request.results[-1].drawn[0].finish_reason is FinishReason.STOP
        answer = json.loads(tokenizer.decode(request.output_ids))
        assert list(answer) == ["name", "sizes"]
        assert len(answer["name"]) <= 6
        assert all(0 <= size <= 9 for size in answer["sizes"])
    assert len({tuple(request.output_ids) for request in requests}) > 2


def test_a_batch_with_a_draft_comes_between_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes beside it go on, and what was prepared for them is not used for another batch."""
    checkpoint = write_checkpoint(tmp_path, dtype="bfloat16", **SHAPE)
    engine = fast_engine(checkpoint, monkeypatch)
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=0)
    requests = [
        SteppedRequest(new_sequence([number, 6, 7], table, params), 80)
        for number, table in enumerate(separate_tables(engine, [100, 100]))
    ]
    step(engine, [(request, 100) for request in requests])
    for _ in range(8):
        step(engine, [(request, 1) for request in requests])
        num_drawn = len(requests[1].output_ids)
        parts = [request.next_slice(1, [9, 9, 9] if number == 0 else []) for number, request in enumerate(requests)]
        for request, part, result in zip(requests, parts, engine.execute(parts), strict=True):
            request.accept(part, result)
        assert len(requests[1].output_ids) == num_drawn + 1
    assert_as_in_fp32(checkpoint, requests)


def assert_as_in_fp32(checkpoint: Path, generations: list[SteppedRequest]) -> None:
    """Assert that log-probabilities of what was drawn are as near to those in fp32 as bf16 usually is."""
    wide = TorchEngine(checkpoint, num_blocks=128, device=DEVICE, native=False, dtype="float32")
    expected = [logprob for generation in generations for logprob in scored(wide, generation)]
    found = drawn_logprobs(generations)
    assert len(found) == len(expected) == sum(len(generation.output_ids) for generation in generations)
    assert statistics.fmean((a - b) ** 2 for a, b in zip(found, expected, strict=True)) ** 0.5 < 0.15
