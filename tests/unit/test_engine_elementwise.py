"""Functions of single values: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

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
