"""``/v1/messages`` as Anthropic's client sees it, in front of a scripted mesh."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam

from pdmesh.apikeys import ApiKey, entry_of, hash_key
from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, TokenOut
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.running_gateway import RunningGateway
from pdmesh_testing.scripted_mesh import Script, ScriptedMesh, echo_prompt, token_out

pytestmark = pytest.mark.anyio

CONTEXT = 512
HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": HELLO}


@asynccontextmanager
async def served(
    model: Path,
    script: Script = echo_prompt,
    *,
    gateway: GatewayConfig | None = None,
    security: SecurityConfig | None = None,
    key: str = "-",
) -> AsyncGenerator[tuple[anthropic.AsyncAnthropic, httpx.AsyncClient, ScriptedMesh, RunningGateway]]:
    headers = {"x-api-key": key}
    async with (
        ready_gateway(model, script, gateway=gateway, security=security, headers=headers) as (http, mesh, running),
        anthropic.AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0) as client,
    ):
        yield client, http, mesh, running


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    assert response.headers["request-id"] == body["request_id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


async def test_the_anthropic_client_works_unmodified(model: Path) -> None:
    async with served(model) as (client, _http, mesh, _running):
        message = await client.messages.create(
            model="tiny", max_tokens=12, messages=HELLO, system="Be kind.", extra_body={"temperature": 0.5, "top_k": 3}
        )
        [block] = message.content
        assert block.type == "text"
        assert block.text.startswith("system\nBe")
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
        assert message.id.startswith("msg_")
        assert message.usage.cache_read_input_tokens == 0
        [submitted] = mesh.submitted
        assert (submitted.generation.params.temperature, submitted.generation.params.top_k) == (0.5, 3)

        async with client.messages.stream(model="tiny", max_tokens=12, messages=HELLO, system="Be kind.") as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert final.content[0].type == "text"
        assert final.content[0].text == text == block.text
        assert final.usage == message.usage

        counted = await client.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.")
        assert counted.input_tokens == message.usage.input_tokens

        ended = await client.messages.create(model="tiny", max_tokens=50, messages=HELLO, stop_sequences=["llo"])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "llo")


async def test_an_answer_that_is_begun_goes_on(model: Path) -> None:
    async with served(model) as (client, http, mesh, _running):
        begun: list[MessageParam] = [*HELLO, {"role": "assistant", "content": "Well, "}]
        await client.messages.create(model="tiny", max_tokens=1, messages=begun)
        [submitted] = mesh.submitted
        count = submitted.generation.num_prompt_tokens
        text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell, "
        tokenized = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        assert tokenized.json()["count"] == count


async def test_more_tokens_than_the_context_has_room_for_may_be_asked_for(model: Path) -> None:
    def endless(generation: Generation) -> list[TokenOut]:
        last = generation.params.max_tokens - 1
        tokens = [token_out(generation, index, 70) for index in range(last)]
        return [*tokens, token_out(generation, last, 70, finish_reason=FinishReason.LENGTH)]

    async with served(model, endless) as (client, _http, mesh, _running):
        message = await client.messages.create(model="tiny", max_tokens=9000, messages=HELLO)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.input_tokens + message.usage.output_tokens == CONTEXT
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await client.messages.create(
                model="tiny", max_tokens=5, messages=[{"role": "user", "content": "a b " * CONTEXT}]
            )
        assert len(mesh.submitted) == 1


async def test_any_name_may_stand_for_the_model(model: Path) -> None:
    names = GatewayConfig(model_aliases="gpt-4o, claude-*")
    async with served(model, gateway=names) as (client, http, _mesh, _running):
        message = await client.messages.create(model="claude-sonnet-5", max_tokens=1, messages=HELLO)
        assert message.model == "claude-sonnet-5"
        assert (await http.post("/v1/completions", json={"model": "gpt-4o", "prompt": "a"})).status_code == 200
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(model="gpt-4o-mini", max_tokens=1, messages=HELLO)
        listed = await client.models.list()
        assert [(card.id, card.type) for card in listed.data] == [("tiny", "model"), ("gpt-4o", "model")]
        assert (await client.models.retrieve("claude-sonnet-5")).id == "claude-sonnet-5"


async def test_keys_come_in_either_header(model: Path) -> None:
    async with served(model, security=SecurityConfig(api_key="secret"), key="secret") as (client, http, _mesh, running):
        assert (await client.messages.create(model="tiny", max_tokens=1, messages=HELLO)).role == "assistant"
        async with anthropic.AsyncAnthropic(base_url=running.url, auth_token="secret", max_retries=0) as bearer:
            assert (await bearer.messages.create(model="tiny", max_tokens=1, messages=HELLO)).role == "assistant"
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
                await stranger.messages.create(model="tiny", max_tokens=1, messages=HELLO)
        both = await http.post("/v1/messages", json=BODY, headers={"authorization": "Bearer wrong"})
        assert error_of(both)[:2] == (401, "authentication_error")


async def test_errors_are_anthropics(model: Path) -> None:
    async with served(model) as (_client, http, mesh, _running):

        async def post(path: str = "/v1/messages", **fields: Any) -> tuple[int, str, str]:
            return error_of(await http.post(path, json={**BODY, **fields}))

        assert await post(max_tokens=0) == (400, "invalid_request_error", "`max_tokens` must be at least 1, got 0.")
        assert (await post(model="gpt"))[:2] == (404, "not_found_error")
        assert (await post(messages=[]))[:2] == (400, "invalid_request_error")
        assert (await post(messages=HELLO * 9000))[2] == "`messages` has 9000 parts; 8192 are allowed."
        assert "missing required field `max_tokens`" in (await post())[2] if BODY.pop("max_tokens") else ""
        BODY["max_tokens"] = 8
        deep: Any = {}
        for _ in range(200):
            deep = {"a": deep}
        call = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
        assert "nested" in (await post(messages=[*HELLO, {"role": "assistant", "content": [call]}, *HELLO]))[2]
        assert "nested" in (await post(tools=[{"name": "f", "input_schema": deep}]))[2]
        response = await http.get("/v1/messages")
        assert error_of(response)[:2] == (405, "invalid_request_error")
        assert error_of(await http.post("/v1/messages", content=b"{"))[:2] == (400, "invalid_request_error")
        assert mesh.submitted == []
        unknown = await http.post("/v1/messages?beta=true", json={**BODY, "context_management": {"edits": []}})
        assert (unknown.status_code, unknown.headers["x-ignored-fields"]) == (200, "context_management")
        skipped = await http.post("/v1/messages", json={**BODY, "tools": [{"type": "web_search_1", "name": "w"}]})
        assert (skipped.status_code, skipped.headers["x-pdmesh-warning"]) == (
            200,
            "tools of type web_search_1 are skipped",
        )


async def test_a_key_needs_the_scope_of_what_it_does(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry_of(ApiKey(name="counter", hash=hash_key("k"), scopes=frozenset({"tokenize"}))))
    async with served(model, security=SecurityConfig(api_keys_file=keys), key="k") as (client, _http, _mesh, _running):
        assert (await client.messages.count_tokens(model="tiny", messages=HELLO)).input_tokens > 0
        with pytest.raises(anthropic.PermissionDeniedError, match="needs the scope"):
            await client.messages.create(model="tiny", max_tokens=1, messages=HELLO)
