"""A gateway in the test's own process, in front of a scripted mesh."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import Script, ScriptedMesh, echo_prompt, scripted_mesh


@asynccontextmanager
async def ready_gateway(
    model: Path,
    script: Script = echo_prompt,
    *,
    gateway: GatewayConfig | None = None,
    security: SecurityConfig | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[tuple[httpx.AsyncClient, ScriptedMesh, RunningGateway]]:
    """Serve ``model`` in front of a mesh that follows ``script``; yields a client once requests are taken."""
    async with (
        scripted_mesh(script) as mesh,
        running_gateway(model, mesh.address, gateway=gateway, security=security) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30, headers=headers) as client,
    ):
        await mesh.until(lambda: len(mesh.registrations) == 1)
        while (await client.get("/ready")).status_code != 200:
            pass
        yield client, mesh, running
