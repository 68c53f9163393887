"""Quantised checkpoints, gpt-oss and adapters through a mesh of real processes, handed over and in mixed instances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import safetensors.numpy
import safetensors.torch

from pdmesh.engine.files import resolve_model
from pdmesh.engine.levels import choose_kernels
from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.adapters import write_adapter
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.exactness import engine_reference, mismatches, random_prompts, reference
from pdmesh_testing.gguf_files import write_gguf
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.quantized_checkpoints import Format, write_mxfp4, write_quantized

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow]

PROMPTS = random_prompts([1, 17, 100, 400], 300, seed=3)

#: Prefill, decode and mixed instances.
TOPOLOGIES = [(1, 1, 0), (0, 0, 2)]

#: Two logits that rounding may swap.
_TIE = 1e-4

#: Writes what is served and what it stands for below a directory. Settings name an adapter.
Written = tuple[Path, Path, dict[str, str]]


def _quantized(quantized_format: Format) -> Callable[[Path], Written]:
    def write(directory: Path) -> Written:
        quantized, plain = write_quantized(write_checkpoint(directory / "source"), directory, quantized_format)
        return quantized, plain, {}

    return write


def _gguf(directory: Path) -> Written:
    plain = write_checkpoint(directory / "source", architecture="qwen3")
    meanings = write_gguf(plain, directory / "model.gguf", "Q4_0")
    safetensors.numpy.save_file(meanings, plain / "model.safetensors", metadata={"format": "pt"})
    return directory / "model.gguf", plain, {}


def _gpt_oss(directory: Path) -> Written:
    return *write_mxfp4(directory), {}


def _adapted(directory: Path) -> Written:
    source = write_checkpoint(directory / "source")
    merged = write_adapter(directory / "adapter", source)
    plain = copytree(source, directory / "plain")
    safetensors.torch.save_file(merged, plain / "model.safetensors", metadata={"format": "pt"})
    return source, plain, {"WORKER_LORA": str(directory / "adapter")}


KINDS = {
    "int4": _quantized("int4-group"),
    "int8": _quantized("int8-channel"),
    "awq": _quantized("awq"),
    "fp8": _quantized("fp8-blocks"),
    "nf4": _quantized("bnb-nested"),
    "gguf": _gguf,
    "gpt-oss": _gpt_oss,
    "lora": _adapted,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "topology"), [(kind, TOPOLOGIES[n % 2]) for n, kind in enumerate(KINDS)], ids=str)
async def test_fp32_says_what_transformers_says_of_what_weights_stand_for(
    kind: str, topology: tuple[int, int, int], tmp_path: Path
) -> None:
    model, plain, settings = KINDS[kind](tmp_path)
    references = [reference(plain, prompt, 16) for prompt in PROMPTS]
    references = [each for each in references if each.smallest_margin > _TIE]
    prefill, decode, mixed = topology
    settings |= {"WORKER_DTYPE": "float32", "SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": "64"}
    with running_mesh(tmp_path, model=model, prefill=prefill, decode=decode, mixed=mixed, settings=settings) as mesh:
        async with mesh.client() as client:
            assert await mismatches(client, mesh.model, references * 2, concurrency=8) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "nf4", "gguf", "gpt-oss"])
async def test_packed_weights_say_the_same_everywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over, in mixed instances, and in one engine alone, to the last bit."""
    if choose_kernels("bfloat16").library is None:
        pytest.skip("no kernels: built without a compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, _, _ = KINDS[kind](tmp_path)
    engine = TorchEngine(resolve_model(str(model)), num_blocks=64, dtype="bfloat16", ordered=True)
    assert ("packed" in engine.arithmetic) is (kind not in ("fp8", "nf4"))  # which give the bits of plain weights
    references = [engine_reference(engine, prompt, 16) for prompt in PROMPTS]
    settings = {"WORKER_DTYPE": "bfloat16", "WORKER_DETERMINISTIC": "true", "SCHEDULER_BUNDLE": "fcfs"}
    settings["POLICY_CHUNK_TOKENS"] = "64"
    for number, (prefill, decode, mixed) in enumerate(TOPOLOGIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with running_mesh(folder, model=model, prefill=prefill, decode=decode, mixed=mixed, settings=settings) as mesh:
            async with mesh.client() as client:
                assert await mismatches(client, mesh.model, references * 2, concurrency=8, tolerance=0.0) == []
