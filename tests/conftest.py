"""Fixtures every test may use."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """grpc.aio runs on asyncio alone, so everything that meets it does."""
    return "asyncio"
