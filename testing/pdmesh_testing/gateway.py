"""A gateway in the test's own process, in front of a scripted mesh."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import Script, ScriptedMesh, echo_prompt, saying_tokens, scripted_mesh
from pdmesh_testing.tokenizers import EOS_TOKEN

_HELLO = [{"role": "user", "content": "hello, hello"}]

#: By path, a body for six tokens, or one that counts.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _HELLO, "max_tokens": 6},
    "/v1/completions": {"prompt": "hello, hello", "max_tokens": 6},
    "/v1/responses": {"input": "hello, hello", "max_output_tokens": 6},
    "/v1/messages": {"model": "tiny", "messages": _HELLO, "max_tokens": 6},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": _HELLO},
    "/tokenize": {"prompt": "hello, hello"},
}
GENERATING = list(BODIES)[:4]


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


@asynccontextmanager
async def saying(model: Path, text: str) -> AsyncGenerator[tuple[httpx.AsyncClient, ScriptedMesh, RunningGateway]]:
    """Serve ``model`` in front of a mesh that answers each request with ``text``, up to ``max_tokens``."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end_id = tokenizer.token_to_id(EOS_TOKEN)
    assert end_id is not None
    async with ready_gateway(model, saying_tokens([*tokenizer.encode(text).ids, end_id], end_id)) as served:
        yield served
