"""The Triton kernels against the torch reference: on the device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="needs Triton")

from pdmesh.engine.cuda.cuda_kernels import TritonKernels, write_pages_kernel
from pdmesh.engine.cuda.cuda_linear import row_linear
from pdmesh.engine.cuda.page_tables import lengths_of, write_pages
from pdmesh.engine.kernels import Elementwise, Rotation, TorchKernels
from pdmesh.engine.model_config import NormConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = Elementwise(NormConfig(epsilon=1e-5))


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("shape", [(3, 96), (1, 1024), (2, 5, 64)])
def test_add_norm(shape: tuple[int, ...], with_delta: bool) -> None:
    hidden, weight = draw(1, *shape), draw(2, shape[-1])
    delta = draw(3, *shape) if with_delta else None
    expected_sum, expected = TorchKernels(KINDS).add_norm(hidden, delta, weight)
    total, normed = TritonKernels(KINDS).add_norm(hidden.clone(), delta, weight)
    torch.testing.assert_close(
        total, expected_sum, atol=0, rtol=1e-2
    )  # the interpreter cuts bf16 off instead of rounding
    torch.testing.assert_close(normed, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_gated_silu(size: int) -> None:
    gate_up = 4 * draw(4, 5, 2 * size)
    expected = TorchKernels(KINDS).activate(gate_up)
    torch.testing.assert_close(TritonKernels(KINDS).activate(gate_up), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 48), (1, 1, 128)])
def test_rotate_and_store(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    qkv, angles = draw(5, 7, num_heads + 2 * num_kv_heads, head_dim), draw(6, 7, head_dim // 2)
    slots = torch.tensor([33, 0, 47, 16, 15, 5, 31], device=DEVICE)
    rotation = Rotation(cos=angles.cos(), sin=angles.sin(), slots=slots)
    caches = [torch.zeros(3, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    expected = TorchKernels(KINDS).rotate_and_store(qkv, num_heads, rotation, caches[0])
    query = TritonKernels(KINDS).rotate_and_store(qkv.clone(), num_heads, rotation, caches[1])
    # the reference rounds each product, the kernel only their sum
    torch.testing.assert_close(query, expected, atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(caches[1], caches[0], atol=4e-2, rtol=2e-2)
    assert torch.equal(caches[1][:, 1], caches[0][:, 1])  # values are not rotated


@pytest.mark.parametrize("ends", [[1], [16, 17, 1, 4000], [20000, 3]])
def test_write_pages(ends: list[int]) -> None:
    generator = torch.Generator().manual_seed(7)
    table = torch.randint(0, 1 << 30, (6, 1300), generator=generator, dtype=torch.int32).to(DEVICE)
    rows = torch.tensor([3, 0, 5, 3][: len(ends)], dtype=torch.int32, device=DEVICE)
    indptr = torch.from_numpy(lengths_of(ends, 16).indptr).to(DEVICE)
    total = int(indptr[-1])
    expected, pages = (torch.full((total + 9,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    write_pages(table, rows, indptr, expected)
    write_pages_kernel(table, rows, indptr, pages)
    assert torch.equal(pages[:total], expected[:total])
    assert (pages[total:] == -1).all()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 4096), (50, 1536), (33, 14336), (8, 1024)])
def test_one_row_times_a_weight(num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    row, weight = draw(8, 1, num_inputs), draw(9, num_outputs, num_inputs)
    bias = draw(10, num_outputs) if has_bias else None
    linear = row_linear(weight, bias)
    assert linear is not None
    wide = torch.nn.functional.linear(row.double(), weight.double(), None if bias is None else bias.double())
    error = (linear(row).double() - wide).norm() / wide.norm()
    assert error < 4e-3  # of rounding to bf16, which the interpreter does by cutting off
    rows = draw(11, 3, num_inputs)
    assert torch.equal(linear(rows), torch.nn.functional.linear(rows, weight, bias))


def test_shapes_that_do_not_suit_are_left_to_torch() -> None:
    assert row_linear(draw(1, 8, 96), None) is None
    assert row_linear(draw(1, 8, 1024).float(), None) is None


#: Compiles every kernel as a step launches it, for Hopper, which needs no device.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pdmesh.engine.cuda import cuda_kernels as kernels, cuda_linear as linear

def compiled(kernel, types, **constants):
    signature = dict(zip(kernel.arg_names, types.split() + ["constexpr"] * len(constants), strict=True))
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

compiled(kernels._add_norm_kernel, "*bf16 *bf16 *bf16 *bf16 i32 fp32", HAS_DELTA=True, WIDTH=4096)
compiled(
    kernels._rotate_and_store_kernel, "*bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i32", HALF=64, HALF_WIDTH=64, HEADS_WIDTH=64
)
compiled(kernels._gated_silu_kernel, "*bf16 *bf16 i32", WIDTH=1024)
compiled(kernels._write_pages_kernel, "*i32 *i32 *i32 *i32 i32", WIDTH=1024)
for num_inputs, inputs, outputs in [(4096, 4096, 1), (14336, 2048, 4)]:
    shape = {"NUM_INPUTS": num_inputs, "HAS_BIAS": True, "INPUTS": inputs, "OUTPUTS": outputs}
    compiled(linear._row_kernel, "*bf16 *bf16 *bf16 *bf16 i32", **shape)
"""


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own: here they may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
