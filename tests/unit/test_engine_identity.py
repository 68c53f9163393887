"""The weights identity: what changes it, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pdmesh.engine import identity
from pdmesh.engine.identity import stand_in_identity, unchanged_weights, weights_identity
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import write_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return a_checkpoint(tmp_path / "model")


def a_checkpoint(directory: Path, num_layers: int = 3) -> Path:
    """Write weights of 400 KiB and what a digest reads of a configuration."""
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "_name_or_path": "somewhere"}
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal((128, 128), dtype=np.float32)
        for layer in range(num_layers)
        for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    save_file(tensors | {"model.norm.weight": np.ones(128, dtype=np.float32)}, directory / "model.safetensors")
    return directory


def change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def set_field(directory: Path, name: str, value: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def transpose(directory: Path) -> None:
    """Keep a tensor's bytes, and give it another shape."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].reshape(64, 256)}, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte of the first tensor": lambda directory: change_byte(directory / "model.safetensors", 4096),
    "the last byte": lambda directory: change_byte(directory / "model.safetensors", -1),
    "a shape": transpose,
    "a field of the configuration": lambda directory: set_field(directory, "rope_theta", 500_000.0),
    "how it is quantised": lambda directory: set_field(directory, "quantization_config", {"quant_method": "fp8"}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_identity(checkpoint: Path, change: Callable[[Path], object]) -> None:
    before = weights_identity(checkpoint)
    change(checkpoint)
    assert weights_identity(checkpoint) != before


def test_the_same_files_elsewhere_have_one_identity(checkpoint: Path, tmp_path: Path) -> None:
    before = weights_identity(checkpoint)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    set_field(copy, "_name_or_path", "elsewhere")
    set_field(copy, "transformers_version", "9.9")
    assert weights_identity(copy) == before
    assert len(before) == 32


def test_shards_count_whatever_their_names_and_a_missing_one_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)

    def write(*files: str) -> None:
        for number, file in enumerate(files):
            save_file({name: tensors[name] for name in names[number :: len(files)]}, checkpoint / file)
        shard_of = {name: files[index % len(files)] for index, name in enumerate(names)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))

    write("a.safetensors", "b.safetensors")
    before = weights_identity(checkpoint)
    write("y.safetensors", "x.safetensors")
    assert weights_identity(checkpoint) == before
    (checkpoint / "x.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"x\.safetensors is missing"):
        weights_identity(checkpoint)


def test_an_adapter_counts(checkpoint: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    save_file({"base_model.model.x.lora_A.weight": np.ones((4, 8), np.float32)}, adapter / "adapter_model.safetensors")
    seen = {weights_identity(checkpoint), weights_identity(checkpoint, lora=adapter)}
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    seen.add(weights_identity(checkpoint, lora=adapter))
    change_byte(adapter / "adapter_model.safetensors", -1)
    seen.add(weights_identity(checkpoint, lora=adapter))
    assert len(seen) == 4


def test_random_weights_depend_on_the_configuration_alone(checkpoint: Path) -> None:
    before = weights_identity(checkpoint, has_random_weights=True)
    assert before != weights_identity(checkpoint)
    change_byte(checkpoint / "model.safetensors", -1)
    assert weights_identity(checkpoint, has_random_weights=True) == before
    set_field(checkpoint, "hidden_size", 128)
    assert weights_identity(checkpoint, has_random_weights=True) != before


def test_stand_ins_of_unlike_settings_differ() -> None:
    assert stand_in_identity("a") == stand_in_identity("a")
    assert stand_in_identity("a") not in (stand_in_identity("b"), stand_in_identity())


# --- larger than what is read -----------------------------------------------------------------------------------------


@pytest.fixture
def reads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 16 blocks of 1 KiB, of weights of 400 KiB."""
    monkeypatch.setattr(identity, "WHOLE_BYTES", 16 << 10)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1 << 10)


@pytest.mark.usefixtures("reads_little")
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_tensor_that_was_trained_is_noticed(checkpoint: Path, layer: int, name: str) -> None:
    before = weights_identity(checkpoint)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    key = f"model.layers.{layer}.{name}.weight"
    save_file(tensors | {key: tensors[key] * np.float32(1.001)}, path)
    assert weights_identity(checkpoint) != before


@pytest.mark.usefixtures("reads_little")
def test_little_is_read(checkpoint: Path) -> None:
    """So most bytes count for nothing; but a file's size and its header do."""
    before, path = weights_identity(checkpoint), checkpoint / "model.safetensors"
    size, num_changed = path.stat().st_size, 0
    for place in range(size // 2, size, 16 << 10):
        change_byte(path, place)
        num_changed += weights_identity(checkpoint) != before
        change_byte(path, place)
    assert 0 <= num_changed <= 2
    assert weights_identity(shutil.copytree(checkpoint, checkpoint.parent / "copy")) == before
    save_file(load_file(path), path, metadata={"of": "another revision"})
    assert weights_identity(checkpoint) != before


@pytest.mark.usefixtures("reads_little")
def test_many_layers_are_read_as_little(tmp_path: Path) -> None:
    """Of 40 layers the last is among those that are looked at."""
    checkpoint = a_checkpoint(tmp_path / "deep", num_layers=40)
    before, path = weights_identity(checkpoint), checkpoint / "model.safetensors"
    tensors = load_file(path)
    key = "model.layers.39.mlp.up_proj.weight"
    save_file(tensors | {key: -tensors[key]}, path)
    assert weights_identity(checkpoint) != before


@pytest.mark.usefixtures("reads_little")
def test_gguf_files_are_sampled_by_their_tensors(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    write_gguf(write_checkpoint(tmp_path / "source"), file)
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.gguf").symlink_to(file)
    before = weights_identity(directory)
    data = bytearray(file.read_bytes())
    data[-len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    assert weights_identity(directory) != before


# --- while they are loaded --------------------------------------------------------------------------------------------


def test_weights_that_change_while_they_are_loaded_are_refused(checkpoint: Path) -> None:
    with unchanged_weights(checkpoint) as loaded:
        pass
    assert loaded == weights_identity(checkpoint)
    with (
        pytest.raises(ConfigError, match="changed while they were loaded"),
        unchanged_weights(checkpoint),
    ):
        change_byte(checkpoint / "model.safetensors", -1)
