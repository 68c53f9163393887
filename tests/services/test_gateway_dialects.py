"""What every dialect of the API says in its own words, as clients of each hear it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pdmesh.config import GatewayConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, TokenOut
from pdmesh_testing.gateway import BODIES, GENERATING, ready_gateway
from pdmesh_testing.running_gateway import RunningGateway
from pdmesh_testing.scripted_mesh import silence, token_out

pytestmark = pytest.mark.anyio


def begin(generation: Generation) -> list[TokenOut]:
    return [token_out(generation, 0, 70)]


def fail(generation: Generation) -> list[TokenOut]:
    return [token_out(generation, 1, None, finish_reason=FinishReason.ERROR, error="the engine broke")]


def data_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


async def streamed(path: str, running: RunningGateway) -> AsyncIterator[Any]:
    """What the dialect's own client hears of a stream."""
    body = {"model": "tiny", **BODIES[path], "stream": True}
    if path == "/v1/messages":
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="-", max_retries=0) as client:
            async for event in await client.messages.create(**body):
                yield event
        return
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as api:
        create: Any = {
            "/v1/chat/completions": api.chat.completions.create,
            "/v1/completions": api.completions.create,
            "/v1/responses": api.responses.create,
        }[path]
        async for event in await create(**body):
            yield event


@pytest.mark.parametrize("path", GENERATING)
async def test_a_failure_in_the_middle_of_a_stream_is_its_end(model: Path, path: str) -> None:
    async with ready_gateway(model, begin) as (http, mesh, running):
        async with http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            pieces = response.aiter_text()
            seen = await anext(pieces)
            mesh.send_tokens(*fail(mesh.submitted[0].generation))
            seen += "".join([piece async for piece in pieces])
        *_, before, last = data_in(seen)
        if path == "/v1/responses":
            assert (before["message"], before["error"]["message"]) == ("the engine broke", "the engine broke")
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert (await http.get(f"/v1/responses/{last['response']['id']}")).status_code == 404
        else:
            assert last["error"]["message"] == "the engine broke"
        if path == "/v1/messages":
            names = ["message_start", "content_block_start", "content_block_delta", "error"]
            assert [each["type"] for each in data_in(seen)] == names
            assert last["error"]["type"] == "api_error"

        events = streamed(path, running)
        await anext(events)
        mesh.send_tokens(*fail(mesh.submitted[1].generation))
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="the engine broke"):
            async for _ in events:
                pass
        mesh.script = fail
        whole = await http.post(path, json=BODIES[path])
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "the engine broke")


@pytest.mark.parametrize("path", GENERATING)
async def test_an_overload_says_when_to_come_again(model: Path, path: str) -> None:
    async with ready_gateway(model) as (http, mesh, _running):

        def refuse(generation: Generation) -> list[TokenOut]:
            mesh.refuse(generation, retry_after_s=2.0)
            return []

        mesh.script = refuse
        response = await http.post(path, json=BODIES[path])
        told = response.json()
        assert (response.headers["retry-after"], told["error"]["message"]) == ("2", "no room")
        if path == "/v1/messages":
            assert (response.status_code, told["type"], told["error"]["type"]) == (529, "error", "overloaded_error")
            assert response.headers["request-id"] == told["request_id"]
        else:
            assert (response.status_code, told["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize("path", GENERATING)
async def test_a_stream_that_waits_is_kept_alive(model: Path, path: str) -> None:
    sign = "event: ping" if path == "/v1/messages" else ": keep-alive"
    async with ready_gateway(model, silence, gateway=GatewayConfig(sse_keep_alive_s=0.01)) as (http, mesh, _running):
        async with http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            seen = ""
            async for text in response.aiter_text():
                seen += text
                if seen.count(sign) >= 2:
                    break
        if path == "/v1/messages":
            assert [each["type"] for each in data_in(seen)][:3] == ["message_start", "ping", "ping"]
        await mesh.until(lambda: len(mesh.cancelled) == 1)
