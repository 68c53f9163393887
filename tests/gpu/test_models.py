"""Models and checkpoints of every kind on a device, in fp32: the tokens of transformers.

``GPU_TESTS_DEVICE=cpu`` runs them where there is no device.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from tokenizers import Tokenizer

from pdmesh.config import InstanceDegrees, MeshConfig, WorkerConfig
from pdmesh.engine.files import resolve_model
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh.worker.engines import build_engine, check_ranks_can_compute
from pdmesh.worker.runtime import prompt_lookup
from pdmesh_testing.adapters import write_adapter
from pdmesh_testing.architectures import assert_computes_as_transformers, references_of
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.devices import DEVICE, HAS_DEVICE, MARKS, prompt_of
from pdmesh_testing.gguf_files import write_gguf
from pdmesh_testing.quantized_checkpoints import Format, write_mxfp4, write_quantized
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import model_variants, undescribed_variants, write_transformers_checkpoint

pytestmark = [*MARKS, pytest.mark.timeout(120)]

#: What each has that FlashInfer's path has not: experts, windows and caps, sinks, rotations that depend on lengths,
#: norms over all heads; and learned positions, layer norms, products that are not gated.
MODELS = ["mixtral", "qwen3_moe", "gemma2", "gpt_oss", "phi3", "olmo2", "gpt2", "starcoder2"]

#: One of each way in which weights are stored.
FORMATS: list[Format] = ["int8-channel", "int4-zeros", "fp8-blocks", "awq", "gptq-order", "bnb-nested", "bnb-int8"]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["one", "two"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_an_architecture(tmp_path: Path, model_type: str) -> None:
    options = model_variants()[model_type][0]
    if model_type == "gpt_oss":
        options["swiglu_limit"] = 7.0  # the only one of older versions of transformers
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, **options)
    assert_computes_as_transformers(checkpoint, references_of(checkpoint), device=DEVICE)


@pytest.mark.parametrize("model_type", ["gpt_neox", "cohere2"])
def test_a_model_that_transformers_modules_compute(tmp_path: Path, model_type: str) -> None:
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, **undescribed_variants()[model_type][0])
    assert_computes_as_transformers(checkpoint, references_of(checkpoint), device=DEVICE)


@pytest.mark.parametrize("quantized_format", FORMATS)
def test_a_quantised_checkpoint(tmp_path: Path, quantized_format: Format) -> None:
    quantized, plain = write_quantized(write_checkpoint(tmp_path / "source"), tmp_path, quantized_format)
    assert_computes_as_transformers(quantized, references_of(plain), device=DEVICE)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    quantized, plain = write_mxfp4(tmp_path)
    assert_computes_as_transformers(quantized, references_of(plain), device=DEVICE)


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_checkpoint(tmp_path / "source", architecture="qwen3")
    meanings = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    save_arrays(meanings, source / "model.safetensors", metadata={"format": "pt"})
    directory = resolve_model(str(tmp_path / "model.gguf"))
    assert_computes_as_transformers(directory, references_of(source), device=DEVICE, dtype="float32")


def test_an_adapter(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    merged = write_adapter(tmp_path / "adapter", source)
    shutil.copytree(source, tmp_path / "merged")
    save_file(merged, tmp_path / "merged/model.safetensors", metadata={"format": "pt"})
    references = references_of(tmp_path / "merged")
    assert_computes_as_transformers(source, references, device=DEVICE, lora=tmp_path / "adapter")


def test_drafts_change_no_token(tmp_path: Path) -> None:
    """Right ones, wrong ones, and some of either, of several sequences at once."""
    checkpoint = write_checkpoint(tmp_path)
    engine, reference = TorchEngine(checkpoint, num_blocks=64, device=DEVICE), HfReference(checkpoint)
    lengths, num_tokens = [1, 40, 130], 30
    expected = {length: reference.greedy(prompt_of(length), num_tokens) for length in lengths}
    tables = separate_tables(engine, [length + num_tokens for length in lengths])
    requests = {
        length: SteppedRequest(new_sequence(prompt_of(length), table), num_tokens)
        for length, table in zip(lengths, tables, strict=True)
    }
    num_steps = 0
    while left := {length: request for length, request in requests.items() if not request.done}:
        batch = []
        for length, request in left.items():
            first = len(request.output_ids)
            draft = expected[length][first : first + 5]
            if (num_steps + length) % 3 == 0:
                draft = [*draft[:2], *((token + 1) % 320 for token in draft[2:])]
            batch.append((request, request.next_slice(1000, draft)))
        for (request, part), result in zip(batch, engine.execute([part for _, part in batch]), strict=True):
            request.accept(part, result)
        num_steps += 1
    assert {length: request.output_ids for length, request in requests.items()} == expected
    assert num_steps < num_tokens / 2


def test_answers_held_to_a_schema_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Drawn at random, several at once, beside one that is held to nothing."""
    checkpoint = write_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    drawn, expected = (held_to_schemas(TorchEngine(checkpoint, num_blocks=64, device=d)) for d in (DEVICE, "cpu"))
    assert drawn == expected
    for output in drawn[1:]:
        answer = json.loads(tokenizer.decode(output))
        assert list(answer) == ["name", "kind", "sizes"]
        assert answer["kind"] in ("one", "two")


def held_to_schemas(engine: TorchEngine) -> list[list[int]]:
    """What is drawn by five requests in steps of all; the first one is free."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
    options: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "eos_token_ids": (258, 256)}
    params = [
        SamplingParams(**options, seed=seed, grammar="" if seed == 0 else grammar, top_p=0.9 if seed == 1 else 1.0)
        for seed in range(5)
    ]
    tables = separate_tables(engine, [100] * 5)
    left = [
        SteppedRequest(new_sequence([5, 6, 7], table, each), 80) for table, each in zip(tables, params, strict=True)
    ]
    requests = list(left)
    while left:
        step(engine, [(request, 100) for request in left])
        left = [request for request in left if request.results[-1].drawn[0].finish_reason is None]
    return [request.output_ids for request in requests]


@pytest.mark.skipif(not HAS_DEVICE, reason="it is about devices")
def test_what_computes_on_cpus_only_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Also where the device is found, not named."""
    checkpoint = write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the device is cuda:0: there, decodes"):
        prompt_lookup(WorkerConfig(speculation="ngram"), "cuda:0")
    config = MeshConfig(model=str(checkpoint), worker=WorkerConfig(device="cuda"))
    with pytest.raises(ConfigError, match="several ranks computes on CPUs only"):
        check_ranks_can_compute(config, InstanceDegrees(2, 1))
    found: Any = object()  # other ranks, which are not asked for anything
    with pytest.raises(ConfigError, match="several ranks computes on CPUs only"):
        build_engine(MeshConfig(model=str(checkpoint)), 1, found)


@pytest.mark.parametrize("devices", [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=["to the host", "from the host"])
def test_a_rest_of_a_prompt_is_computed_over_what_was_moved(tmp_path: Path, devices: tuple[str, str]) -> None:
    """KV in two parts, gathered from one engine's cache into another's, where a turn goes on."""
    checkpoint = write_checkpoint(tmp_path)
    first, second = (TorchEngine(checkpoint, num_blocks=32, device=device) for device in devices)
    prompt = prompt_of(200)
    answered = generate(first, prompt, 20)
    turn = [*prompt, *answered.output_ids, *prompt_of(30)]
    layout, blocks = first.kv.layout, answered.sequence.block_table[:13]  # whole ones
    moved = [5 * number % 32 for number in range(17)]
    for layer in range(layout.num_layers):
        for part in (slice(0, 4), slice(4, 13)):
            data = memoryview(bytearray(len(blocks[part]) * layout.max_page_bytes))
            first.kv.gather(layer, blocks[part], data)
            second.kv.scatter(layer, moved[:13][part], data)
    request = SteppedRequest(new_sequence(turn, moved), 10, num_computed=13 * 16)
    while not request.done:
        step(second, [(request, 64)])
    assert request.output_ids == HfReference(checkpoint).greedy(turn, 10)
