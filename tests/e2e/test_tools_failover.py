"""Calls of tools, drawn by chance with random weights, whose instance is killed: the same calls, and they fit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(300)]

NUM_STREAMS = 6
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 150, "maxLength": 200},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}


async def call(client: httpx.AsyncClient, model: str, seed: int, begun: anyio.Event) -> tuple[Any, str]:
    """The calls of a streamed answer, and why it ended."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"How is the weather in town {seed}?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
        "temperature": 1,
        "max_tokens": 600,
        "stream": True,
    }
    name, arguments, finish = "", "", ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            [choice] = event["choices"]
            for piece in choice["delta"].get("tool_calls", []):
                name += piece["function"].get("name", "")
                arguments += piece["function"].get("arguments", "")
            finish = choice["finish_reason"] or finish
            if len(arguments) > 40:
                begun.set()
    return (name, json.loads(arguments)), finish


async def test_calls_survive_a_killed_instance(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", seed=3, template=TOOL_TEMPLATE)
    with running_mesh(tmp_path, model=checkpoint, prefill=1, decode=2) as mesh:
        got: dict[int, Any] = {}
        again: dict[int, Any] = {}

        async def run(client: httpx.AsyncClient, seed: int, results: dict[int, Any], begun: anyio.Event) -> None:
            results[seed] = await call(client, mesh.model, seed, begun)

        async with mesh.client() as client:
            with anyio.fail_after(200):
                for results in (got, again):
                    begun = [anyio.Event() for _ in range(NUM_STREAMS)]
                    async with anyio.create_task_group() as tasks:
                        for seed in range(NUM_STREAMS):
                            tasks.start_soon(run, client, seed, results, begun[seed])
                        await begun[0].wait()
                        if results is again:
                            os.kill(mesh.pids()["decode-0"], signal.SIGKILL)
    assert again == got
    for (name, arguments), finish in got.values():
        assert (name, finish) == ("get_weather", "tool_calls")
        assert 150 <= len(arguments["city"]) <= 200
        assert arguments["days"] in range(1, 10)
