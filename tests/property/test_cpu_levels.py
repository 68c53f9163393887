"""Ordered kernels give the same bits at every level that this machine has, and those of their definition in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.kernels import Elementwise, Rotation
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import KernelLibrary, choose_kernels, load_library, processor_levels
from pdmesh.engine.linear import WeightMemory, tile_linear
from pdmesh.engine.model_config import NormConfig
from pdmesh.engine.native import NativeAttention, NativeKernels
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import KvLayout
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import TINY, Family, write_checkpoint
from pdmesh_testing.examples import examples
from pdmesh_testing.levels import ordered_levels
from pdmesh_testing.stepping import generate

DTYPES = ["bfloat16", "float16"]
#: Of both signs where it matters; bf16 has them too.
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0, 6e-8, 2.0**-14, 1e-5]


def libraries(dtype: str) -> list[KernelLibrary]:
    found = [load_library(level, dtype) for level in ordered_levels()]
    if not found:
        pytest.skip("no kernels: built without a compiler")
    return [library for library in found if library is not None]


def draw(generator: torch.Generator, dtype: str, *shape: int, special: int = 0) -> torch.Tensor:
    """Normal values, ``special`` of them replaced by unusual ones."""
    values = torch.randn(shape, generator=generator)
    for _ in range(special):
        place = int(torch.randint(values.numel(), (), generator=generator))
        values.view(-1)[place] = SPECIAL[int(torch.randint(len(SPECIAL), (), generator=generator))]
    return values.to(TORCH_DTYPES[dtype])


def bits(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    return values.contiguous().view(torch.uint8).numpy()


def summed_in_order(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer by its definition: products in fp32, which are exact, summed input after input."""
    left, right = rows.float().numpy(), weight.float().numpy()
    sums = np.zeros((len(left), len(right)), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for number in range(left.shape[1]):
            sums = sums + left[:, number, None] * right[None, :, number]
        if bias is not None:
            sums = sums + bias.float().numpy()
    return torch.from_numpy(sums).to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=examples(30))
@given(
    num_rows=st.one_of(st.integers(1, 14), st.integers(15, 260)),
    num_outputs=st.integers(1, 70),
    num_inputs=st.integers(1, 300),
    with_bias=st.booleans(),
    special=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)
def test_a_linear_layer_is_summed_in_order(
    dtype: str, num_rows: int, num_outputs: int, num_inputs: int, with_bias: bool, special: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = draw(generator, dtype, num_outputs, num_inputs, special=special)
    bias = draw(generator, dtype, num_outputs) if with_bias else None
    rows = draw(generator, dtype, num_rows, num_inputs, special=special)
    outputs = [tile_linear(weight, bias, WeightMemory(), library)(rows) for library in libraries(dtype)]
    torch.testing.assert_close(outputs[0], summed_in_order(rows, weight, bias), rtol=0, atol=0, equal_nan=True)
    for output in outputs[1:]:
        np.testing.assert_array_equal(bits(output), bits(outputs[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=examples(20))
@given(
    num_tokens=st.integers(1, 60),
    start=st.integers(0, 300),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (7, 7)]),
    head_dim=st.sampled_from([8, 24, 64, 80, 128]),
    special=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_every_level_gives_the_same_bits(
    dtype: str, num_tokens: int, start: int, heads: tuple[int, int], head_dim: int, special: int, seed: int
) -> None:
    """Norms, rotation, SiLU and attention, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    block_size, num_blocks = 5, -(-(start + num_tokens) // 5)
    layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    size = (num_heads + 2 * num_kv_heads) * head_dim
    hidden, weight = draw(generator, dtype, num_tokens, size, special=special), draw(generator, dtype, size)
    delta, cache = (
        draw(generator, dtype, num_tokens, size),
        draw(generator, dtype, num_blocks, 2, num_kv_heads, block_size, head_dim),
    )
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator)
    table = torch.randperm(num_blocks, generator=generator)
    positions = torch.arange(start, start + num_tokens)
    rotation = Rotation(
        cos=angles.cos().to(hidden.dtype),
        sin=angles.sin().to(hidden.dtype),
        slots=table[positions // block_size] * block_size + positions % block_size,
    )
    results: list[list[npt.NDArray[np.uint8]]] = []
    for library in libraries(dtype):
        kernels, pages = NativeKernels(library, Elementwise(NormConfig(epsilon=1e-6))), cache.clone()
        added, normed = kernels.add_norm(hidden.float(), delta.float(), weight.float())
        of_heads, wide = kernels.norm(delta, weight.float()), kernels.norm(added, weight.float())
        beside = torch.cat((normed, delta), dim=1).view(num_tokens, -1, head_dim)  # heads in a wider row
        own, gates = beside.tensor_split(2, dim=1)
        turned = kernels.norm_heads(own[:, :1], weight.float()[:head_dim]).clone()
        query = kernels.rotate_and_store(own, num_heads, rotation, pages)
        plan = NativeAttention(library, layout, head_dim**-0.5).plan([QuerySpan(0, num_tokens, start, table.tolist())])
        output, lse = plan.attend(query, pages, with_lse=True)
        assert lse is not None
        gated = kernels.activate(output.flatten(1)[:, : num_heads * head_dim // 2 * 2])
        values = (added, normed, of_heads, wide, turned, pages, output, lse, gated)
        results.append([*map(bits, values), bits(kernels.gate(output.clone(), gates[:, :num_heads]))])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", get_args(Family))
def test_a_whole_model_gives_the_same_bits_at_every_level(tmp_path: Path, architecture: Family, dtype: str) -> None:
    """Every token's score among them: as many log-probabilities are asked for as the vocabulary has tokens."""
    directory = write_checkpoint(
        tmp_path, dtype="bfloat16", architecture=architecture, hidden_size=72, num_heads=6, num_kv_heads=2, head_dim=24
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=TINY.vocab_size, prompt_logprobs=TINY.vocab_size)
    prompt = [number * 37 % 300 for number in range(90)]
    generations = [
        generate(
            TorchEngine(directory, num_blocks=16, device="cpu", dtype=dtype, cpu_level=level), prompt, 8, params=params
        )
        for level in ordered_levels()
    ]
    for generation in generations[1:]:
        assert generation.output_ids == generations[0].output_ids
        assert generation.results == generations[0].results
    assert all(len(result.logprobs.top) == TINY.vocab_size for result in generations[0].results if result.logprobs)


def test_a_level_can_be_capped_and_one_that_is_missing_is_refused() -> None:
    if not processor_levels():
        pytest.skip("no kernels: built without a compiler")
    for level in ordered_levels():
        choice = choose_kernels("float16", cpu_level=level)
        assert choice.library is not None
        assert choice.library.level is level
        assert choice.reason == f"worker.cpu_level is {level}"
    foreign = "neon" if "baseline" in processor_levels() else "baseline"
    with pytest.raises(ConfigError, match=f"worker.cpu_level is {foreign}, but this processor has only"):
        choose_kernels("bfloat16", cpu_level=foreign)


def test_ordered_kernels_can_be_asked_for() -> None:
    if not processor_levels():
        pytest.skip("no kernels: built without a compiler")
    library = choose_kernels("bfloat16", ordered=True).library
    assert library is not None
    assert library.level is ordered_levels()[0]
    assert choose_kernels("float32").library is None
