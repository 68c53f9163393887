"""Fixtures every test may use, and what is skipped where a machine lacks it."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """grpc.aio runs on asyncio alone, so everything that meets it does."""
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device; torch is loaded only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
