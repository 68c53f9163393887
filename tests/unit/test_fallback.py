"""Models that transformers' own modules compute give what transformers does, or are refused in a sentence."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from pdmesh.engine.architectures import architectures, undescribed_architectures
from pdmesh.engine.fallback.fallback_attention import Attended
from pdmesh.engine.fallback.transformer import _Step
from pdmesh.engine.files import load_model_info
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.architectures import (
    NUM_OUTPUT_TOKENS,
    PARAMS,
    assert_computes_as_transformers,
    assert_equal,
    prompt_of,
    references_of,
)
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, step
from pdmesh_testing.transformers_checkpoints import undescribed_variants, write_transformers_checkpoint

#: With windows and layers that are not rotated; with layers side by side; with learned positions.
_QUICK = ("cohere2", "gpt_neox", "opt")


def models() -> Iterator[ParameterSet]:
    for model_type, variants in undescribed_variants().items():
        for number, options in enumerate(variants):
            marks = [] if model_type in _QUICK and number == 0 else [pytest.mark.slow]
            yield pytest.param(model_type, options, marks=marks, id="-".join([model_type, *options]))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformers_checkpoint(tmp_path_factory.mktemp("model"), "gpt_neox", seed=1)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("model_type", "options"), list(models()))
def test_greedy_tokens_and_logprobs_equal_transformers(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_transformers_checkpoint(tmp_path, model_type, seed=1, **options)
    assert_computes_as_transformers(directory, references_of(directory))


def test_none_is_described_as_well() -> None:
    """What is described is faster, so it would be served by its description alone."""
    described, undescribed = architectures(), undescribed_architectures()
    assert not described.keys() & undescribed.keys()
    types = [architecture.model_type for architecture in (*described.values(), *undescribed.values())]
    assert len(types) == len(set(types))


def test_a_bf16_checkpoint_is_computed_in_bf16(tmp_path: Path) -> None:
    directory = write_transformers_checkpoint(tmp_path, "cohere", dtype="bfloat16", sharded=True)
    engine = TorchEngine(directory, num_blocks=8)
    assert engine.kv.layout.dtype == "bfloat16"
    assert engine.arithmetic.startswith("bfloat16/")
    assert "transformers-" in engine.arithmetic
    whole, chunks = (generate(engine, prompt_of(40), 1, chunk_tokens=size, params=PARAMS) for size in (1000, 9))
    [first], [second] = ([result.logprobs for result in each.results if result.logprobs] for each in (whole, chunks))
    assert first.logprob == pytest.approx(second.logprob, abs=0.1)


def test_layers_are_told_one_after_the_other_and_another_step_may_run_between_them(checkpoint: Path) -> None:
    """As a preempted prefill does, whose keys and values leave layer by layer."""
    expected = references_of(checkpoint)[75]
    engine = TorchEngine(checkpoint, num_blocks=32)
    request = SteppedRequest(new_sequence(prompt_of(75), list(range(8)), PARAMS), NUM_OUTPUT_TOKENS)
    urgent = SteppedRequest(new_sequence(prompt_of(75), list(range(10, 18)), PARAMS), NUM_OUTPUT_TOKENS)
    written: list[tuple[int, bool]] = []

    def on_layer(number: int) -> None:
        written.append((number, bool(engine.kv.layers[number][:4].any())))
        if not urgent.done:
            step(engine, [(urgent, 30)])

    part = request.next_slice(1000)
    [result] = engine.execute([part], on_layer=on_layer)
    request.accept(part, result)
    assert written == [(number, True) for number in range(engine.kv.layout.num_layers)]
    while not (request.done and urgent.done):
        step(engine, [(each, 30) for each in (request, urgent) if not each.done])
    assert_equal(request.results, expected)
    assert_equal(urgent.results, expected)


def test_blocks_of_a_prefix_that_another_request_computed_are_read(checkpoint: Path) -> None:
    expected = references_of(checkpoint)[75]
    engine = TorchEngine(checkpoint, num_blocks=32)
    prompt = prompt_of(75)
    step(engine, [(SteppedRequest(new_sequence(prompt[:64], list(range(4)), PARAMS), 1), 64)])
    again = SteppedRequest(new_sequence(prompt, [0, 1, 2, 3, 20, 21], PARAMS), NUM_OUTPUT_TOKENS, num_computed=64)
    while not again.done:
        step(engine, [(again, 100)])
    assert_equal(again.results, expected)


def test_the_edge_learns_of_it_without_transformers(checkpoint: Path) -> None:
    with mock.patch.dict("sys.modules", {"transformers": None}):
        info = load_model_info(checkpoint)
    assert (info.architecture, info.max_model_len, info.vocab_size) == ("GPTNeoXForCausalLM", 8192, 320)
    assert info.max_fixed_rope_tokens is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "a quantised GPTNeoXForCausalLM is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "RoPE scaling 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "RoPE scaling 'longrope'"),
        ({"num_hidden_layers": 10**9}, "at most 1024"),
        ({"num_hidden_layers": 5}, "config.json needs .* weights, and the files hold"),
        ({"num_hidden_layers": 3, "vocab_size": 10**9}, "config.json needs .* weights, and the files hold"),
        ({"intermediate_size": 64}, r"dense_.*has shape \(.*96.*\); config.json needs \(.*64.*\)"),
        ({"hidden_size": 63}, "is not supported: transformers cannot"),
        ({"hidden_act": "no such thing"}, "is not supported: transformers cannot make it"),
        ({"layer_norm_eps": "small"}, "is not supported: transformers cannot read config.json"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
    ids=str,
)
def test_what_a_configuration_lies_about_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_transformers_checkpoint(tmp_path, "gpt_neox")
    edit_config(directory, **changes)
    with pytest.raises(ConfigError, match=message):
        TorchEngine(directory, num_blocks=4)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = write_transformers_checkpoint(tmp_path, "gpt_neox")
    tensors = load_file(directory / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("2.attention.dense.weight"))
    spare = {f"{lost}.spare": tensors.pop(lost)}
    save_file({**tensors, **spare}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"hold no tensor '{lost}'"):
        TorchEngine(directory, num_blocks=4)


def test_a_tensor_that_no_module_reads_is_named(tmp_path: Path) -> None:
    """Unless it changes nothing, as masks, frequencies and biases of zeros."""
    directory = write_transformers_checkpoint(tmp_path, "gpt_neox")
    path, layer = directory / "model.safetensors", "gpt_neox.layers.0.attention"
    tensors = {**load_file(path), f"{layer}.masked_bias": torch.ones(1), f"{layer}.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, path, {"format": "pt"})
    assert generate(TorchEngine(directory, num_blocks=4), prompt_of(19), 3).output_ids
    save_file({**tensors, f"{layer}.q_norm.weight": torch.ones(4)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"reads the tensor '{layer}.q_norm.weight', so answers would be wrong"):
        TorchEngine(directory, num_blocks=4)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    directory = write_transformers_checkpoint(tmp_path, "gpt_neox")
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
    for name in ("modeling_gpt_neox.py", "configuration_gpt_neox.py"):
        (directory / name).write_text(trap)
    auto_map = {
        "AutoConfig": "configuration_gpt_neox.GPTNeoXConfig",
        "AutoModelForCausalLM": "modeling_gpt_neox.GPTNeoXForCausalLM",
    }
    edit_config(directory, auto_map=auto_map, attn_implementation="owner/kernels", _attn_implementation="owner/kernels")
    assert generate(TorchEngine(directory, num_blocks=4), prompt_of(19), 3).output_ids
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "worker.deterministic is not supported for a GPTNeoXForCausalLM"),
        ({"lora": Path("adapter")}, "worker.lora is not supported"),
        ({"has_random_weights": True}, "load_format = dummy is not supported"),
        ({"max_model_len": 9000}, "has a context of 8192"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said_in_a_sentence(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEngine(checkpoint, num_blocks=4, **options)


def test_what_to_install_is_said(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install \"pdmesh\[fallback\]\""):
        TorchEngine(checkpoint, num_blocks=4)


def _unscaled(attend: Callable[[_Step, Attended], torch.Tensor], self: _Step, call: Attended) -> torch.Tensor:
    return attend(self, Attended(call.query * 2, call.key, call.value, False, call.scale, None, None))


def _misplaced(attend: Callable[[_Step, Attended], torch.Tensor], self: _Step, call: Attended) -> torch.Tensor:
    return attend(self, Attended(call.query, call.key.roll(1, 2), call.value, False, call.scale, None, None))


@pytest.mark.parametrize("mistake", [_unscaled, _misplaced])
def test_a_model_that_our_cache_computes_otherwise_is_refused_at_start(
    checkpoint: Path, mistake: Callable[..., torch.Tensor]
) -> None:
    attend = _Step.attend
    with (
        mock.patch.object(_Step, "attend", lambda self, call: mistake(attend, self, call)),
        pytest.raises(ConfigError, match="its scores for a prompt in chunks differ"),
    ):
        TorchEngine(checkpoint, num_blocks=4)


@pytest.mark.parametrize(
    ("model_type", "class_name", "message"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM", "queries, keys and values differ in size"),
        ("lfm2", "Lfm2ForCausalLM", "of its 4 layers attend"),
    ],
)
def test_attention_that_our_cache_does_not_hold_is_refused(
    tmp_path: Path, model_type: str, class_name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one were listed that keeps something else of a sequence than keys and values of one size in each layer."""
    small: dict[str, Any] = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 4,
    }
    options: dict[str, Any] = small if model_type == "deepseek_v3" else {"layer_types": ["conv", "full_attention"] * 2}
    directory = write_transformers_checkpoint(tmp_path, model_type, **options)
    edit_config(directory, architectures=["GPTNeoXForCausalLM"])
    monkeypatch.setattr("pdmesh.engine.fallback.modules._class", lambda model: _registered(class_name))
    with pytest.raises(ConfigError, match=message):
        TorchEngine(directory, num_blocks=4)


def _registered(class_name: str) -> Any:
    import transformers

    from pdmesh.engine.fallback.fallback_attention import register

    register()
    return getattr(transformers, class_name)
