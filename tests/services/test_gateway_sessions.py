"""Sessions at the gateway: each request takes its client's name for one to the scheduler, as a hash."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from pdmesh.model import SessionName
from pdmesh.wire.messages import SessionStatus
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_gateway.session_names import SessionNames
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import ScriptedMesh, scripted_mesh

pytestmark = pytest.mark.anyio

NAMES = SessionNames("")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "abc", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"input": "abc", "max_output_tokens": 2}


@asynccontextmanager
async def served(model: Path) -> AsyncGenerator[tuple[ScriptedMesh, RunningGateway, httpx.AsyncClient]]:
    async with (
        scripted_mesh() as mesh,
        running_gateway(model, mesh.address) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        await mesh.until(lambda: len(mesh.registrations) == 1)
        yield mesh, running, client


def a_status(session: str, tenant: str) -> SessionStatus:
    return SessionStatus(
        session=session,
        tenant=tenant,
        state="aside",
        since_s=1.0,
        pause_s=None,
        parent=None,
        num_children=0,
        num_turns=3,
        num_prompt_tokens=400,
        num_reused_tokens=256,
        num_possible_tokens=256,
        cached_on=(),
        longest_aside_s=2.5,
    )


def name(text: str, tenant: str = "") -> SessionName:
    return SessionName(key=NAMES.key(tenant, text))


async def test_every_endpoint_passes_the_name_of_a_session_on(model: Path) -> None:
    async with served(model) as (mesh, _, client):
        asked: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
            ("/v1/chat/completions", CHAT, {"X-Session-Affinity": "a"}, "a"),
            ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "k", "user": "u"}, {}, "k"),
            ("/v1/completions", {**TEXT, "user": "u"}, {}, "u"),
            ("/v1/completions", {**TEXT, "prompt_cache_key": "k"}, {"X-Session-ID": "s"}, "s"),
            ("/v1/responses", {**RESPONSE, "prompt_cache_key": "k"}, {}, "k"),
            ("/v1/messages", {**CHAT, "model": "tiny", "metadata": {"user_id": "u"}}, {}, "u"),
        ]
        for path, body, headers, expected in asked:
            assert (await client.post(path, json=body, headers=headers)).status_code == 200, path
            assert mesh.submitted[-1].session == name(expected), path
        await client.post("/v1/completions", json=TEXT)
        assert mesh.submitted[-1].session is None


async def test_a_request_asks_for_the_longest_lease_of_its_cache_controls(model: Path) -> None:
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    block = {"type": "text", "text": "abc"}
    asked: list[tuple[str, dict[str, Any], float]] = [
        ("/v1/messages", {**CHAT, "cache_control": short}, 300.0),
        ("/v1/messages", {**CHAT, "system": [{**block, "cache_control": long}], "cache_control": short}, 3600.0),
        ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": {}, "cache_control": short}]}, 300.0),
        ("/v1/messages", {**CHAT, "messages": [{"role": "user", "content": [{**block, "cache_control": {}}]}]}, 0.0),
        ("/v1/chat/completions", {**CHAT, "cache_control": long}, 3600.0),
    ]
    async with served(model) as (mesh, _, client):
        for path, body, lease_s in asked:
            answer = await client.post(path, json={"model": "tiny", **body}, headers={"X-Session-ID": "a"})
            assert answer.status_code == 200, answer.text
            assert mesh.submitted[-1].session == name("a")._replace(lease_s=lease_s), path


async def test_the_requests_that_continue_a_response_are_one_session(model: Path) -> None:
    async with served(model) as (mesh, _, client):
        first = (await client.post("/v1/responses", json=RESPONSE)).json()["id"]
        assert mesh.submitted[-1].session is None
        second = (await client.post("/v1/responses", json={**RESPONSE, "previous_response_id": first})).json()["id"]
        await client.post("/v1/responses", json={**RESPONSE, "previous_response_id": second})
        assert [submit.session for submit in mesh.submitted[-2:]] == [name(first), name(first)]


async def test_grpc_takes_names_as_metadata(model: Path) -> None:
    async with served(model) as (mesh, running, _), grpc.aio.insecure_channel(running.facts["grpc_address"]) as channel:
        stub = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(text="abc", sampling=pb.SamplingOptions(max_tokens=2))
        metadata = (("x-dynamo-session-id", "child"), ("x-dynamo-parent-session-id", "top"))
        async for _ in stub.Generate(request, metadata=metadata):
            pass
        assert mesh.submitted[-1].session == (NAMES.key("", "child"), NAMES.key("", "top"), False, 0.0)


async def test_a_client_ends_its_session(model: Path) -> None:
    async with served(model) as (mesh, _, client):
        await client.post("/v1/completions", json=TEXT)  # the gateway is connected then
        answer = await client.delete("/v1/sessions/my/agent")
        assert answer.json() == {"id": "my/agent", "object": "session", "deleted": True}
        await mesh.until(lambda: mesh.ended_sessions == [NAMES.key("", "my/agent")])


async def test_a_client_sees_the_sessions_of_its_own_key(model: Path) -> None:
    async with served(model) as (mesh, _, client):
        await client.post("/v1/completions", json=TEXT)
        for tenant, text in (("", "mine"), ("other", "theirs")):
            key = NAMES.key(tenant, text).hex()
            mesh.sessions.append(a_status(key, tenant))
        listed = (await client.get("/v1/sessions")).json()
        assert [each["id"] for each in listed["data"]] == [NAMES.key("", "mine").hex()]
        one = (await client.get("/v1/sessions/mine")).json()
        assert (one["object"], one["state"], one["turns"], one["longest_aside_s"]) == ("session", "aside", 3, 2.5)
        for name_of_none in ("theirs", "unknown"):
            answer = await client.get(f"/v1/sessions/{name_of_none}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_names_change_no_token_and_no_answer(model: Path) -> None:
    async with served(model) as (_, _, client):
        answers: list[tuple[Any, Any]] = []
        named: list[dict[bytes, bytes]] = [
            {},
            {b"X-Session-ID": b"x" * 8000},
            {b"X-Dynamo-Session-ID": b"\xff", b"X-Dynamo-Session-Final": b"true"},
        ]
        for headers in named:
            answer = (await client.post("/v1/chat/completions", json={**CHAT, "seed": 1}, headers=headers)).json()
            answers.append((answer["choices"], answer["usage"]))
        assert answers[0] == answers[1] == answers[2]
