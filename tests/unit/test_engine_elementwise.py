"""Functions of single values: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from pdmesh.engine.kernels import Elementwise, TorchKernels, by_value
from pdmesh.engine.model_config import Activation, NormConfig


@pytest.mark.parametrize("width", [1, 3, 8, 33, 40, 64])
def test_a_row_is_rounded_as_it_is_alone(width: int) -> None:
    """torch's own sigmoid of (97, 3) differed from its rows' in 13 of them (AVX-512, torch 2.13)."""
    rows = torch.randn(97, width, generator=torch.Generator().manual_seed(width))
    together = by_value(torch.sigmoid, rows)
    assert together.shape == rows.shape
    torch.testing.assert_close(together, torch.sigmoid(rows))
    for number in range(len(rows)):
        assert torch.equal(by_value(torch.sigmoid, rows[number : number + 1].clone())[0], together[number])


@pytest.mark.parametrize(("activation", "gated"), [(Activation.CLAMPED_SWISH, True), (Activation.GELU_TANH, False)])
def test_activations_of_odd_widths_do_not_depend_on_the_batch(activation: Activation, gated: bool) -> None:
    kernels = TorchKernels(Elementwise(NormConfig(epsilon=1e-6), activation, gated, 1.5))
    rows = torch.randn(61, 80 if gated else 43, generator=torch.Generator().manual_seed(1))
    together = kernels.activate(rows)
    for number in range(len(rows)):
        assert torch.equal(kernels.activate(rows[number : number + 1].clone())[0], together[number])


@pytest.fixture(params=[1, 2, 3, 5])
def num_threads(request: pytest.FixtureRequest) -> Generator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("activation", "gated"), [(Activation.SILU, True), (Activation.GELU_TANH, True), (Activation.GELU_TANH, False)]
)
@pytest.mark.parametrize("num_rows", [31, 64, 187])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_do_not_depend_on_where_threads_share_them(
    num_threads: int, activation: Activation, gated: bool, num_rows: int, dtype: torch.dtype
) -> None:
    """torch gave each of three threads a third of 700 x 1,376 values: six of silu's were rounded otherwise."""
    kernels = TorchKernels(Elementwise(NormConfig(epsilon=1e-6), activation, gated), deterministic=True)
    rows = torch.randn(num_rows, 2 * 1376 if gated else 1376, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = kernels.activate(rows)
    alone = torch.cat([kernels.activate(rows[number : number + 1].clone()) for number in range(num_rows)])
    assert torch.equal(alone, together)
