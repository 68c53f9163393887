"""Directories that can be served, and a clear sentence for those that cannot."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.engine.files import load_model_config, load_model_info, resolve_model, served_name
from pdmesh.engine.model_config import ModelConfig, QkNorm
from pdmesh.engine.rope_config import RopeConfig
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint, write_safetensors
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import generate

PROMPT = list(range(20))
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
_QWEN = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention"] * 2}


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture is 'MambaForCausalLM', which is not supported"),
        ({"architectures": ..., "model_type": "mamba"}, "architecture is 'mamba'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"quantization_config": {"bits": 4}}, "quantised by None"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "RoPE scaling 'ntk' is not supported"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8 numbers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 1024"),
        ({**_DEEPSEEK, "num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000; at most 1024"),
        ({**_DEEPSEEK, "q_lora_rank": 10**9}, "q_lora_rank is 1000000000; at most 65536"),
        ({**_DEEPSEEK, "n_routed_experts": 2, "n_group": 2}, "groups must have equal sizes of 2 or more"),
        ({**_QWEN, "linear_num_value_heads": 512, "linear_value_head_dim": 4096}, "channels; at most 1048576"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2; it must make an even part"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ],
    ids=str,
)
def test_an_unserved_configuration_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    edit_config(directory, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        TorchEngine(directory, num_blocks=1)
    assert str(directory / "config.json") in str(error.value)


def test_sliding_windows_are_only_where_they_are_used(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture="qwen2")

    def windows(**changes: Any) -> list[int | None]:
        edit_config(directory, **changes)
        return [layer.window for layer in load_model_config(directory).layers]

    assert windows(use_sliding_window=False, sliding_window=32) == [None, None]
    assert windows(use_sliding_window=True, max_window_layers=2) == [None, None]
    assert windows(max_window_layers=1) == [None, 32]
    assert windows(layer_types=["sliding_attention", "full_attention"]) == [32, None]
    assert windows(sliding_window=8192) == [None, None]  # the whole context
    with pytest.raises(ConfigError, match="layer_types must say one of full_attention and sliding_attention for each"):
        windows(layer_types=["full_attention"])


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def drop_tensor(directory: Path) -> None:
    write_safetensors(directory / "model.safetensors", {"model.norm.weight": np.ones(64, np.float32)}, "float32")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda directory: (directory / "config.json").unlink(), "config.json is missing"),
        (overwrite("config.json", b"{"), "config.json cannot be read"),
        (overwrite("config.json", b"\xff"), "config.json cannot be read: 'utf-8'"),
        (overwrite("config.json", b"[]"), "config.json does not hold a JSON object"),
        (lambda directory: (directory / "model.safetensors").unlink(), "holds no model.safetensors"),
        (overwrite("model.safetensors", b"garbage"), "not a readable safetensors file"),
        (
            overwrite("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
            "model.safetensors is not a readable",
        ),
        (drop_tensor, "hold no tensor 'model.embed_tokens.weight'"),
        (
            lambda directory: edit_config(directory, vocab_size=321),
            r"has shape \(320, 64\); config.json needs \(321, 64\)",
        ),
        (lambda directory: edit_config(directory, num_hidden_layers=3), "hold no tensor 'model.layers.2"),
    ],
)
def test_a_broken_directory_is_named(break_it: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    break_it(directory)
    with pytest.raises(ConfigError, match=message):
        TorchEngine(directory, num_blocks=1)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    single, sharded = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "2", sharded=True)
    outputs = [generate(TorchEngine(path, num_blocks=4), PROMPT, 10).output_ids for path in (single, sharded)]
    assert outputs[0] == outputs[1]
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors is missing, but .*index.json names it"):
        TorchEngine(sharded, num_blocks=1)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weight_map"):
        TorchEngine(sharded, num_blocks=1)


def test_a_model_goes_by_the_name_of_its_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("one.gguf", "two-00001-of-00003.gguf"):
        (tmp_path / name).touch()
    given = ["folder", "one.gguf", "two-00001-of-00003.gguf"]
    assert [served_name(str(tmp_path / each)) for each in given] == ["folder", "one", "two"]
    assert served_name("org/model") == "org/model"


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture="qwen3")
    absent = dict.fromkeys(
        ("head_dim", "rope_theta", "rope_scaling", "tie_word_embeddings", "max_position_embeddings", "torch_dtype"), ...
    )
    edit_config(directory, **absent)
    config = load_model_config(directory)
    assert isinstance(config, ModelConfig)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (128, 32768, False)
    assert (config.ropes, config.dtype) == ((RopeConfig(theta=10_000.0),), "float32")
    edit_config(directory, architectures=["LlamaForCausalLM"])
    config = load_model_config(directory)
    assert isinstance(config, ModelConfig)
    assert (config.head_dim, config.max_position_embeddings, config.qk_norm) == (16, 2048, QkNorm.NONE)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 500}, 1500),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1000),
    ],
    ids=str,
)
def test_scaled_rope_stretches_the_context(rope: dict[str, Any], max_model_len: int, tmp_path: Path) -> None:
    for rope_parameters_key in (False, True):
        directory = write_checkpoint(
            tmp_path, rope_scaling=rope, rope_parameters_key=rope_parameters_key, max_position_embeddings=1000
        )
        assert load_model_info(directory).max_model_len == max_model_len


def test_model_info_tells_ends_and_default_sampling(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    info = load_model_info(directory)
    assert (info.architecture, info.vocab_size, info.eos_token_ids) == ("LlamaForCausalLM", 320, (258, 256))
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 5}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    info = load_model_info(directory)
    assert info.eos_token_ids == (5,)
    sampling = info.default_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.9, 20, None)
    (directory / "generation_config.json").unlink()
    assert load_model_info(directory).eos_token_ids == (258,)
    for broken in ({"temperature": "hot"}, {"eos_token_id": "end"}):
        (directory / "generation_config.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"temperature is 'hot'|eos_token_id is 'end'"):
            load_model_info(directory)


def test_resolving_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
    for absent, told in (
        (str(tmp_path / "nowhere"), "there is no such file or directory"),
        ("./nowhere", "there is no such file or directory"),
        ("nowhere.gguf", "there is no such file"),
        ("llama3:8b", "is another tool's name for a model: give a Hugging Face hub id such as"),
        ("", "neither a directory nor a Hugging Face hub id"),
        ("a b", "neither a directory nor a Hugging Face hub id"),
    ):
        with pytest.raises(ConfigError, match=told):
            resolve_model(absent)

    asked: list[str] = []

    def downloads(repo_id: str, **_: object) -> str:
        asked.append(repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloads)
    assert resolve_model("owner/name") == tmp_path
    assert asked == ["owner/name"]

    def unreachable(repo_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="not in the Hugging Face cache, and the hub cannot be reached"):
        resolve_model("owner/name")


def test_the_demo_model_can_be_served() -> None:
    directory = demo_checkpoint()
    assert load_model_info(directory).max_model_len == 8192
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is pdmesh?"}], tokenize=False, add_generation_prompt=True
    )
    token_ids = tokenizer(text).input_ids
    assert tokenizer.decode(token_ids) == text == "<|im_start|>user\nWhat is pdmesh?<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == load_model_info(directory).vocab_size
    answer = tokenizer.decode(generate(TorchEngine(directory, num_blocks=8), token_ids, 24).output_ids)
    assert isinstance(answer, str)
    assert answer.startswith("pdmesh is a disaggregated serving mesh for large language models.")


def test_what_gateways_use_does_not_import_torch() -> None:
    code = "import sys, pdmesh.demo.demo_checkpoint, pdmesh.engine.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LOAD = """
import sys
from pathlib import Path
from pdmesh.engine.runner import TorchEngine

def private_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

TorchEngine(Path(sys.argv[1]), num_blocks=1, num_threads=1)
before_bytes = private_bytes()
engine = TorchEngine(Path(sys.argv[2]), num_blocks=1, num_threads=1, dtype="bfloat16")
print(private_bytes() - before_bytes)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc alone is told to give memory back")
def test_a_loaded_model_takes_the_memory_of_its_weights(tmp_path: Path) -> None:
    shape = CheckpointShape(hidden_size=512, intermediate_size=3072, num_layers=8, num_heads=8, head_dim=64)
    checkpoint = write_checkpoint(tmp_path / "model", shape=shape, dtype="bfloat16")
    other = write_checkpoint(tmp_path / "other")
    answer = subprocess.run(
        [sys.executable, "-c", LOAD, str(other), str(checkpoint)], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    weight_bytes = (checkpoint / "model.safetensors").stat().st_size
    assert int(answer.splitlines()[-1]) < 1.05 * weight_bytes


def add_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint; ``__`` in a name stands for a dot."""
    path = directory / "model.safetensors"
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(path), **added}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model__layers__0__self_attn__q_norm__weight",
        "model__layers__0__self_attn__q_proj__bias",
        "model__layers__2__mlp__up_proj__weight",
        "score__weight",
    ],
)
def test_tensors_that_no_layer_reads_are_refused_by_name(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path)
    add_tensors(directory, **{name: torch.ones(4)})
    with pytest.raises(ConfigError, match=f"reads the tensor '(model.)?{name.replace('__', '.')}', so answers would"):
        TorchEngine(directory, num_blocks=1)


def test_tensors_that_change_nothing_are_left_alone(tmp_path: Path) -> None:
    """Frequencies, masks, what sees images, drafts, scales of activations, and biases of zeros."""
    directory = write_checkpoint(tmp_path)
    expected = generate(TorchEngine(directory, num_blocks=4), PROMPT, 6).output_ids
    add_tensors(
        directory,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(64),
        model__layers__0__self_attn__q_proj__input_scale=torch.ones(1),
        model__visual__patch_embed__weight=torch.ones(4),
        mtp__layers__0__input_layernorm__weight=torch.ones(64),
    )
    assert generate(TorchEngine(directory, num_blocks=4), PROMPT, 6).output_ids == expected


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_head_that_is_stored_counts_if_it_is_another(tmp_path: Path, is_same: bool) -> None:
    """As in transformers: what a configuration says of tied weights yields to the weights."""
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(directory, lm_head__weight=embedding.clone() if is_same else embedding.flip(0))
    found = generate(TorchEngine(directory, num_blocks=4), PROMPT, 6).output_ids
    assert found == HfReference(directory).greedy(PROMPT, 6)
