"""Linear layers in torch: each processor computes with bf16 weights, whatever oneDNN can do there."""

from __future__ import annotations

import pytest
import torch

from pdmesh.engine import linear
from pdmesh.engine.bf16 import onednn_multiplies_bf16
from pdmesh.engine.linear import OneDnnLinear, WeightMemory, WidenedLinear, fastest_linear, fastest_vocabulary

_SHAPE = (48, 40)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_bf16_layer_computes_on_this_processor(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, has_bias: bool
) -> None:
    monkeypatch.setattr(linear, "_PANEL_ELEMENTS", 7 * _SHAPE[1])  # several panels, the last one smaller
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(_SHAPE, generator=generator).bfloat16()
    bias = torch.randn(_SHAPE[0], generator=generator).bfloat16() if has_bias else None
    rows = torch.randn(num_rows, _SHAPE[1], generator=generator).bfloat16()
    layers = [fastest_linear(weight, bias, WeightMemory(), None), WidenedLinear(weight, bias)]
    expected = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for layer in layers:
        product = layer(rows)
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product.double(), expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("works", [False, True])
def test_onednn_is_used_only_where_it_multiplies_bf16(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    if works and not onednn_multiplies_bf16():
        pytest.skip("a processor on which oneDNN multiplies no bf16")
    monkeypatch.setattr(linear, "onednn_multiplies_bf16", lambda: works)
    weight = torch.ones(_SHAPE, dtype=torch.bfloat16)
    assert isinstance(fastest_linear(weight, None, WeightMemory(), None), OneDnnLinear if works else WidenedLinear)
    assert isinstance(fastest_vocabulary(weight, WeightMemory(), None), WidenedLinear) is not works
