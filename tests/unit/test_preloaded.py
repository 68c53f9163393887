"""Weights that forks share are what the files hold; where a file has changed, it is read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdmesh.config import MeshConfig, WorkerConfig
from pdmesh.engine import preloaded as preloaded_module
from pdmesh.engine.model_loading import load_model
from pdmesh.engine.preloaded import preload_model
from pdmesh.engine.ranks.share import RankShare
from pdmesh.worker.engines import build_engine, preload
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gguf_files import write_gguf
from pdmesh_testing.stepping import generate

PROMPT = list(range(20))


class Loads:
    """Counts what is read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(preloaded_module, "load_model", self._counted)

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        return load_model(*arguments)


def config_of(checkpoint: Path, **worker: Any) -> MeshConfig:
    settings = WorkerConfig(device="cpu", num_threads=1, kv_cache_bytes=1 << 22, max_num_seqs=2, **worker)
    return MeshConfig(model=str(checkpoint), worker=settings)


@pytest.mark.parametrize("window", [None, 16])
def test_an_engine_computes_with_what_was_preloaded(
    tmp_path: Path, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    if window is not None:
        raw = json.loads((checkpoint / "config.json").read_text())
        raw |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        (checkpoint / "config.json").write_text(json.dumps(raw))
    config = config_of(checkpoint)
    loads = Loads(monkeypatch)
    preloaded = preload(config)
    assert preloaded is not None
    engine = build_engine(config, 1, preloaded=preloaded)
    assert loads.count == 1
    assert engine.kv.layout.window == (window or 0)
    expected = generate(build_engine(config, 1), PROMPT, 24)
    assert generate(engine, PROMPT, 24).output_ids == expected.output_ids


def _rewrite(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    times = weights.stat()
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def _replace(checkpoint: Path) -> None:
    other = write_checkpoint(checkpoint.parent / "other", seed=1)
    os.replace(other / "model.safetensors", checkpoint / "model.safetensors")


@pytest.mark.parametrize("change", [_rewrite, _replace, lambda checkpoint: (checkpoint / "more.json").touch()])
def test_another_version_of_a_file_is_read_again(
    tmp_path: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(write_checkpoint(tmp_path / "model"))
    loads = Loads(monkeypatch)
    preloaded = preload(config)
    assert preloaded is not None
    assert preloaded.is_current
    change(tmp_path / "model")
    assert not preloaded.is_current
    engine = build_engine(config, 1, preloaded=preloaded)
    assert loads.count == 2
    expected = generate(build_engine(config, 1), PROMPT, 8)
    assert generate(engine, PROMPT, 8).output_ids == expected.output_ids


def test_what_else_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(write_checkpoint(tmp_path / "model"))
    other = write_checkpoint(tmp_path / "other")
    loads = Loads(monkeypatch)
    preloaded = preload(config)
    assert preloaded is not None
    build_engine(config_of(tmp_path / "model", dtype="float32", max_model_len=64), 1, preloaded=preloaded)
    build_engine(config_of(other), 1, preloaded=preloaded)
    preloaded.load(preloaded.directory, preloaded.options, RankShare(0, 1, 0, 2), None)
    assert loads.count == 4


def test_files_that_change_while_they_are_read_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    preloaded = preload(config_of(checkpoint))
    assert preloaded is not None

    def load(*arguments: Any) -> Any:
        _rewrite(checkpoint)
        return preloaded.model

    monkeypatch.setattr(preloaded_module, "load_model", load)
    assert preload_model(checkpoint, preloaded.options) is None


_PRELOAD = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from pdmesh.config import MeshConfig, WorkerConfig
from pdmesh.worker.engines import preload
assert preload(MeshConfig(model=sys.argv[1], worker=WorkerConfig(device="cpu"))) is not None
assert "sympy" not in sys.modules, "meta tensors were indexed"
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_preloading_leaves_no_threads_and_imports_no_symbolic_shapes(tmp_path: Path) -> None:
    """Of a model whose rows are put in the order of the rotation, as in all GGUF files of Llama."""
    write_gguf(write_checkpoint(tmp_path / "model"), tmp_path / "model.gguf", "Q4_0")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", _PRELOAD, str(tmp_path / "model.gguf")], env=environment, check=True)
