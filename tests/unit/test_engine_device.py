"""Which device an engine takes."""

from __future__ import annotations

import pytest
import torch

from pdmesh.engine.runner import torch_device
from pdmesh.errors import ConfigError


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_cuda_device_has_a_number(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """`torch.cuda.set_device` refuses one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch_device(name) == torch.device("cuda", number)


def test_auto_is_the_host_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        torch_device("cuda:1")
