"""GGUF models as people have them: in parts, alone in a folder, of every type, with tensors and fields of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pdmesh.cli.up import resolved
from pdmesh.config import MeshConfig
from pdmesh.engine.files import load_model_info, resolve_model
from pdmesh.engine.gguf.gguf_blocks import GROUPED, values_of
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_gateway.pooling import load_pooling
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.gguf_files import GgufContent, content_of, encoded, write_gguf, write_parts
from pdmesh_testing.stepping import generate

PROMPT = [number * 37 % 300 for number in range(30)]
SHAPE = replace(TINY, num_layers=2)
Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def tokens_of(model: Path, dtype: str = "float32") -> list[int]:
    return generate(TorchEngine(resolve_model(str(model)), num_blocks=4, dtype=dtype), PROMPT, 6).output_ids


def write_model(directory: Path, **options: Any) -> tuple[Path, GgufContent]:
    """Write a checkpoint, and return it with what a GGUF file of it holds."""
    source = write_checkpoint(directory / "source", shape=SHAPE, **options)
    write_gguf(source, directory / "whole.gguf")
    content = content_of(directory / "whole.gguf")
    (directory / "whole.gguf").unlink()
    return source, content


def vector(*values: float) -> tuple[tuple[int, ...], int, bytes]:
    return (len(values),), 0, np.array(values, dtype="<f4").tobytes()


# --- files ---


def test_a_model_in_parts_is_read_from_any_of_them(tmp_path: Path) -> None:
    source, content = write_model(tmp_path)
    paths = write_parts(tmp_path / "parts", content, 3)
    expected = tokens_of(source)
    assert [tokens_of(path) for path in paths] == [expected] * 3
    assert tokens_of(tmp_path / "parts") == expected  # a folder that holds nothing else


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path / "parts", write_model(tmp_path)[1], 3)
    second.unlink()
    with pytest.raises(
        ConfigError, match=r"is split into 3 files, and there is no model-00002-of-00003\.gguf; put all"
    ):
        resolve_model(str(third))
    third.rename(second)
    with pytest.raises(ConfigError, match=r"there is no model-00003-of-00003\.gguf"):
        resolve_model(str(first))


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    content = write_model(tmp_path)[1]
    first, second, third = write_parts(tmp_path / "parts", content, 3)
    second.write_bytes(third.read_bytes())
    with pytest.raises(ConfigError, match="is part 3 of 3 of a split model by its header, but part 2 of 3 by its"):
        resolve_model(str(first))
    write_parts(tmp_path / "parts", content, 3, doubled="output_norm.weight")
    with pytest.raises(ConfigError, match=r"tensor 'output_norm\.weight' is in another part as well"):
        resolve_model(str(first))
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match="is part 1 of 3 of a split model by its header, but part 1 of 1 by its"):
        resolve_model(str(alone))


def test_a_folder_may_hold_one_model(tmp_path: Path) -> None:
    source, content = write_model(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").touch()
    (folder / "mmproj-model.gguf").touch()  # of images
    (folder / "model-Q4_0.gguf").write_bytes(encoded(*content))
    assert tokens_of(folder) == tokens_of(source)
    (folder / "config.json").write_text("{}")  # as some repositories have beside GGUF files
    directory = resolve_model(str(folder))
    assert directory == resolve_model(str(folder / "model-Q4_0.gguf"))
    assert resolve_model(str(directory)) == directory
    (folder / "model-Q8_0.gguf").touch()
    with pytest.raises(
        ConfigError, match=r"holds 2 GGUF models; give the path of one of them: model-Q4_0\.gguf, model-Q8"
    ):
        resolve_model(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)) == folder


def test_a_model_is_called_as_its_file_or_folder_is(tmp_path: Path) -> None:
    content = write_model(tmp_path)[1]
    parts = write_parts(tmp_path / "folder", content, 2)
    names = [resolved(MeshConfig(model=str(path))).worker.served_model_name for path in (parts[1], tmp_path / "folder")]
    assert names == ["model", "folder"]


@pytest.mark.parametrize("type_number", sorted(GROUPED.keys() - {2, 3, 6, 7, 8, 12, 13, 14, 39}))
def test_small_types_are_computed_as_their_values(tmp_path: Path, type_number: int) -> None:
    """The packed form is held to the same values by `tests/property/test_packed_linear.py`."""
    shape = replace(TINY, num_layers=1, hidden_size=256, intermediate_size=256, head_dim=64)
    source = write_checkpoint(tmp_path / "source", shape=shape)
    write_gguf(source, tmp_path / "model.gguf")
    metadata, tensors = content_of(tmp_path / "model.gguf")
    meanings, stored = load_file(source / "model.safetensors"), TYPES[type_number]
    rng = np.random.default_rng(type_number)
    for name, full_name in (("ffn_down", "mlp.down_proj"), ("attn_output", "self_attn.o_proj")):
        size = tensors[f"blk.0.{name}.weight"][0]
        data = rng.integers(0, 256, (size[0] * size[1] // stored.num_values, stored.num_bytes), dtype=np.uint8)
        values = values_of(type_number, torch.from_numpy(data)).numpy()
        data = data[np.isfinite(values).all(1) & (np.abs(values).max(1) < 8)][:1].repeat(len(data), 0)  # one good block
        tensors[f"blk.0.{name}.weight"] = size, type_number, data.tobytes()
        meanings[f"model.layers.0.{full_name}.weight"] = (
            values_of(type_number, torch.from_numpy(data)).numpy().reshape(size)
        )
    (tmp_path / "model.gguf").write_bytes(encoded(metadata, tensors))
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


# --- tensors ---


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_biases_of_a_llama_are_used(tmp_path: Path, options: dict[str, Any]) -> None:
    source, content = write_model(tmp_path, **options)
    (tmp_path / "model.gguf").write_bytes(encoded(*content))
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


def test_some_projections_may_have_biases(tmp_path: Path) -> None:
    """Those that are absent are zeros: llama.cpp adds each where it is."""
    source, (metadata, tensors) = write_model(tmp_path, attention_bias=True)
    meanings = load_file(source / "model.safetensors")
    for number, name, full_name in ((0, "attn_k", "k_proj"), (1, "attn_q", "q_proj"), (1, "attn_output", "o_proj")):
        del tensors[f"blk.{number}.{name}.bias"]
        meanings[f"model.layers.{number}.self_attn.{full_name}.bias"] *= 0
    (tmp_path / "model.gguf").write_bytes(encoded(metadata, tensors))
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.1.attn_norm.bias", "blk.7.ffn_up.weight", "output.bias", "cls.weight"]
)
def test_tensors_that_nothing_reads_are_refused_by_name(tmp_path: Path, name: str) -> None:
    _, (metadata, tensors) = write_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(encoded(metadata, {**tensors, name: vector(1, 2)}))
    with pytest.raises(ConfigError, match=f"no layer of this architecture reads the tensor '{name}', so answers would"):
        tokens_of(tmp_path / "model.gguf")


def test_tensors_that_change_nothing_are_left_alone(tmp_path: Path) -> None:
    """Biases of zeros, rotations of the first files, and layers that guess further tokens."""
    source, (metadata, tensors) = write_model(tmp_path)
    more: Tensors = {"blk.0.attn_norm.bias": vector(0, 0), "blk.0.attn_rot_embd.weight": vector(1, 2)}
    guessing = {name.replace("blk.1.", "blk.2."): each for name, each in tensors.items() if name.startswith("blk.1.")}
    fields = {**metadata, "llama.nextn_predict_layers": 1, "llama.block_count": 3}
    more |= {**guessing, "blk.2.nextn.eh_proj.weight": vector(1)}
    (tmp_path / "model.gguf").write_bytes(encoded(fields, {**tensors, **more}))
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


@pytest.mark.parametrize("gguf_type", ["F32", "Q8_0"])
def test_a_weight_may_have_a_scale_of_its_own(tmp_path: Path, gguf_type: Any) -> None:
    """As NVFP4's have; a scale of activations is left alone."""
    source = write_checkpoint(tmp_path / "source", shape=SHAPE)
    meanings = write_gguf(source, tmp_path / "model.gguf", gguf_type)
    metadata, tensors = content_of(tmp_path / "model.gguf")
    scales: Tensors = {"blk.0.ffn_up.scale": vector(0.5), "blk.0.ffn_up.input_scale": vector(3)}
    (tmp_path / "model.gguf").write_bytes(encoded(metadata, {**tensors, **scales}))
    meanings["model.layers.0.mlp.up_proj.weight"] *= np.float32(0.5)
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(tmp_path / "model.gguf") == tokens_of(source)


# --- fields ---


def test_requests_are_sampled_as_by_llama_cpp_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    _, (metadata, tensors) = write_model(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(encoded(metadata, tensors))
    sampling = load_model_info(resolve_model(str(file))).default_sampling
    assert sampling.fields == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert str(sampling) == "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 of llama.cpp"
    file.write_bytes(encoded({**metadata, "general.sampling.temp": 0.5, "general.sampling.top_k": 20}, tensors))
    sampling = load_model_info(resolve_model(str(file))).default_sampling
    assert sampling.fields == {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert sampling.source == "the model file and llama.cpp"
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 7}))
    info = load_model_info(resolve_model(str(file)))
    assert info.default_sampling.fields == {"temperature": 0.3}
    assert 7 not in info.eos_token_ids


@pytest.mark.parametrize(
    ("kind", "refusal"), [(None, "does not provide embeddings"), (3, ""), (1, "does not pool embeddings")]
)
def test_a_file_says_how_its_embeddings_are_made(tmp_path: Path, kind: int | None, refusal: str) -> None:
    _, (metadata, tensors) = write_model(tmp_path)
    pooling = {} if kind is None else {"llama.pooling_type": kind}
    (tmp_path / "model.gguf").write_bytes(encoded({**metadata, **pooling}, tensors))
    found = load_pooling(resolve_model(str(tmp_path / "model.gguf")), "auto")
    assert refusal in found.refusal
    assert bool(found.refusal) is bool(refusal)
    assert found.normalizes
