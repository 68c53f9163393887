"""GGUF files that divide or join tensors otherwise than checkpoints do, and damaged ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from pdmesh.engine.files import resolve_model
from pdmesh.engine.gguf.gguf_tokenizer import write_tokenizer
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import MODELS, GgufContent, content_of, encoded, write_gguf
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

PROMPT = [number * 37 % 300 for number in range(30)]
Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def tokens_of(model: Path) -> list[int]:
    return generate(TorchEngine(resolve_model(str(model)), num_blocks=4, dtype="float32"), PROMPT, 6).output_ids


def write_model(directory: Path, model_type: str, number: int = 0) -> tuple[Path, GgufContent]:
    """Write a checkpoint, and return it with what a GGUF file of it holds."""
    if model_type == "llama":
        source = write_checkpoint(directory / "source", attention_bias=True)
    else:
        source = write_transformers_checkpoint(directory / "source", model_type, **MODELS[model_type][number])
    write_gguf(source, directory / "whole.gguf")
    content = content_of(directory / "whole.gguf")
    (directory / "whole.gguf").unlink()
    return source, content


def write_changed(directory: Path, content: GgufContent, gone: str, put: Arrays) -> Path:
    """Write a file without the tensors that match ``gone``, and with these instead."""
    tensors = {name: each for name, each in content.tensors.items() if not re.fullmatch(gone, name)}
    tensors |= {name: (each.shape, 0, each.astype("<f4").tobytes()) for name, each in put.items()}
    (directory / "model.gguf").write_bytes(encoded(content.metadata, tensors))
    return directory / "model.gguf"


def array(content: GgufContent, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    shape, _, data = content.tensors[name]
    return np.frombuffer(data, dtype="<f4").reshape(shape)


# --- divisions of other versions of llama.cpp ---


def test_older_files_have_the_latents_projection_whole(tmp_path: Path) -> None:
    source, content = write_model(tmp_path, "deepseek_v3")
    stored = load_file(source / "model.safetensors")
    whole = {f"blk.{number}.attn_kv_b.weight": stored[f"model.layers.{number}.self_attn.kv_b_proj.weight"]
             for number in range(4)}  # fmt: skip
    for name in ("key", "value"):
        content.metadata[f"deepseek2.attention.{name}_length"] = content.metadata.pop(
            f"deepseek2.attention.{name}_length_mla"
        )
    assert tokens_of(write_changed(tmp_path, content, r".*attn_[kv]_b\.weight", whole)) == tokens_of(source)


def test_older_files_have_the_projections_of_a_key_head_together(tmp_path: Path) -> None:
    source, content = write_model(tmp_path, "qwen3_next")
    stored = load_file(source / "model.safetensors")
    whole = {f"blk.{number}.ssm_in.weight": stored[f"model.layers.{number}.linear_attn.in_proj_qkvz.weight"]
             for number in (0, 2)}  # fmt: skip
    assert tokens_of(write_changed(tmp_path, content, r".*attn_(qkv|gate)\.weight", whole)) == tokens_of(source)


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    source, content = write_model(tmp_path, "mixtral")
    whole = {
        f"blk.{number}.ffn_gate_up_exps.weight": np.concatenate(
            [array(content, f"blk.{number}.ffn_{name}_exps.weight") for name in ("gate", "up")], axis=1
        )
        for number in range(4)
    }
    assert tokens_of(write_changed(tmp_path, content, r".*ffn_(gate|up)_exps\.weight", whole)) == tokens_of(source)


def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path) -> None:
    source, content = write_model(tmp_path, "llama")
    layers = {name.split(".")[1] for name in content.tensors if name.startswith("blk.")}
    whole = {
        f"blk.{layer}.attn_qkv.{end}": np.concatenate(
            [array(content, f"blk.{layer}.attn_{name}.{end}") for name in ("q", "k", "v")]
        )
        for layer in layers
        for end in ("weight", "bias")
    }
    assert tokens_of(write_changed(tmp_path, content, r".*attn_[qkv]\.(weight|bias)", whole)) == tokens_of(source)


def test_layers_that_read_the_kv_of_others_may_have_unused_projections(tmp_path: Path) -> None:
    source, content = write_model(tmp_path, "gemma4_text", 1)
    unused = {f"blk.{layer}.{name}.weight": array(content, f"blk.0.{name}.weight")
              for layer in (3, 4) for name in ("attn_k", "attn_v", "attn_k_norm")}  # fmt: skip
    assert tokens_of(write_changed(tmp_path, content, "", unused)) == tokens_of(source)


def test_a_granite_4_without_states_is_a_granite(tmp_path: Path) -> None:
    options = {**MODELS["granitemoehybrid"][1], "layer_types": ["attention"] * 4}
    source = write_transformers_checkpoint(tmp_path / "source", "granitemoehybrid", **options)
    write_gguf(source, tmp_path / "hybrid.gguf")
    metadata, tensors = content_of(tmp_path / "hybrid.gguf")
    fields = {name.replace("granitehybrid.", "granite."): value for name, value in metadata.items()}
    fields |= {"general.architecture": "granite", "granite.attention.head_count_kv": 2}
    (tmp_path / "model.gguf").write_bytes(encoded(fields, tensors))
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


# --- damage ---


def without(name: str) -> Callable[[GgufContent], None]:
    def change(content: GgufContent) -> None:
        del content.tensors[name]

    return change


def with_rows(name: str, number: int) -> Callable[[GgufContent], None]:
    """Return a change that leaves so many of a tensor's rows, or of its parts."""

    def change(content: GgufContent) -> None:
        shape, kind, data = content.tensors[name]
        content.tensors[name] = ((number, *shape[1:]), kind, data[: len(data) // shape[0] * number])

    return change


def with_field(name: str, value: Any) -> Callable[[GgufContent], None]:
    def change(content: GgufContent) -> None:
        content.metadata[name] = value

    return change


def with_vector(name: str, *values: float) -> Callable[[GgufContent], None]:
    def change(content: GgufContent) -> None:
        content.tensors[name] = (len(values),), 0, np.array(values, dtype="<f4").tobytes()

    return change


@pytest.mark.parametrize(
    ("model_type", "change", "sentence"),
    [
        ("deepseek_v3", without("blk.1.attn_k_b.weight"), "holds no tensor 'blk.1.attn_k_b.weight' with all ex"),
        ("deepseek_v3", with_rows("blk.1.attn_v_b.weight", 3), "'blk.1.attn_v_b.weight' has shape .*, without part 3"),
        ("deepseek_v3", without("blk.2.exp_probs_b.bias"), "holds no tensor 'blk.2.exp_probs_b.bias'"),
        ("deepseek_v3", with_field("deepseek2.expert_gating_func", 1), "that no sigmoid chooses .DeepSeek V2. are not"),
        ("deepseek_v3", with_field("deepseek2.attention.key_length_mla", 4), "qk_nope_head_dim is -4; it must be a p"),
        ("qwen3_next", with_rows("blk.0.ssm_ba.weight", 10), r"has shape \(10, 64\); its header needs \(12, 64\)"),
        ("qwen3_next", without("blk.2.attn_gate.weight"), "holds no tensor 'blk.2.attn_gate.weight'"),
        ("granitehybrid", without("blk.0.ssm_d"), "holds no tensor 'blk.0.ssm_d'"),
        ("granitehybrid", with_rows("blk.0.ssm_norm.weight", 1), r"has shape \(1, 64\); its header needs \(128,\)"),
        ("granitehybrid", with_field("granitehybrid.ssm.state_size", 24), "has 24 values a key; it must be a power of"),
        ("gemma4_text", without("blk.2.ffn_down_exps.scale"), "holds no tensor 'blk.2.ffn_down_exps.scale'"),
        ("gemma4_text", with_vector("rope_freqs.weight", 1, 1, 8, 8), "must have ones, and behind them 1e.30 or more"),
        ("gemma4_text", without("rope_freqs.weight"), "'rope_freqs.weight' must have ones"),
        ("gemma4_text", with_field("gemma4.rope.dimension_count_swa", 8), "rotary embeddings of layers with a window"),
        ("gemma4_text", with_rows("blk.1.ffn_gate_up_exps.weight", 5), "ffn_gate_up_exps.weight' .*, without part 5"),
        ("gpt2", without("position_embd.weight"), "holds no tensor 'position_embd.weight'"),
    ],
)
def test_what_lacks_a_tensor_or_has_another_shape_is_refused(
    tmp_path: Path, model_type: str, change: Callable[[GgufContent], None], sentence: str
) -> None:
    _, content = write_model(tmp_path, model_type.replace("granitehybrid", "granitemoehybrid"))
    change(content)
    (tmp_path / "model.gguf").write_bytes(encoded(*content))
    with pytest.raises(ConfigError, match=sentence) as error:
        tokens_of(tmp_path / "model.gguf")
    assert "\n" not in str(error.value)


# --- Gemma 4's tokenizer ---


def test_pairs_are_merged_in_the_order_that_a_file_lists(tmp_path: Path) -> None:
    """Unlike scores would. A space is not put before a text, the first token always."""
    from tokenizers import Tokenizer

    tokens = ["<bos>", "<unk>", "a", "b", "c", "ab", "bc", "\u2581", "\u2581a", "\n", "\n\n", "<0xC3>", "<0xA9>"]
    fields = {
        "model": "gemma4", "tokens": tokens, "token_type": [3, 2, *[1] * 9, 6, 6], "scores": [0.0] * len(tokens),
        "merges": ["b c", "a b", "\u2581 a", "\n \n"], "bos_token_id": 0, "unknown_token_id": 1, "add_bos_token": False,
    }  # fmt: skip
    write_tokenizer(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in fields.items()}, "model.gguf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "abc a\n\n\n\u00e9"
    assert tokenizer.encode(text).tokens == ["<bos>", "a", "bc", "\u2581a", "\n\n", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
