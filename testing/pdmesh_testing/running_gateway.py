"""A gateway in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from pdmesh.config import GatewayConfig, MeshConfig, SecurityConfig
from pdmesh.service import ServiceContext
from pdmesh_gateway.main import serve


@dataclass(slots=True)
class RunningGateway(ServiceContext):
    """A gateway's addresses in tests. Set ``stopping`` to drain it."""

    facts: dict[str, str] = field(default_factory=dict[str, str])
    serving: anyio.Event = field(default_factory=anyio.Event)

    def announce(self, **facts: Any) -> None:
        self.facts.update(facts)
        self.serving.set()

    @property
    def url(self) -> str:
        return f"http://{self.facts['http_address']}"


@asynccontextmanager
async def running_gateway(
    model: Path,
    scheduler_address: str,
    *,
    gateway: GatewayConfig | None = None,
    security: SecurityConfig | None = None,
) -> AsyncGenerator[RunningGateway]:
    """Serve ``model`` on free ports within the block, and drain at its end."""
    running = RunningGateway(ready_fd=None)
    config = MeshConfig(
        model=str(model),
        scheduler_address=scheduler_address,
        gateway=replace(gateway or GatewayConfig(), port=0),
        security=security or SecurityConfig(),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, config, running)
        with anyio.fail_after(30):
            await running.serving.wait()
        yield running
        running.stopping.set()
