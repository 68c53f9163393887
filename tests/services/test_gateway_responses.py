"""``/v1/responses`` as OpenAI's client sees it, in front of a scripted mesh."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdmesh.apikeys import ApiKey, entry_of, hash_key
from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, TokenOut, unpack_token_ids
from pdmesh_gateway.http.responses.background_responses import MAX_EVENT_BYTES
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.running_gateway import RunningGateway
from pdmesh_testing.scripted_mesh import Script, ScriptedMesh, echo_prompt, token_out
from pdmesh_testing.sse import named_events

pytestmark = pytest.mark.anyio

CONTEXT = 512
BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 8}


@asynccontextmanager
async def served(
    model: Path,
    script: Script = echo_prompt,
    *,
    gateway: GatewayConfig | None = None,
    security: SecurityConfig | None = None,
    key: str = "-",
) -> AsyncGenerator[tuple[openai.AsyncOpenAI, httpx.AsyncClient, ScriptedMesh, RunningGateway]]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        ready_gateway(model, script, gateway=gateway, security=security, headers=headers) as (http, mesh, running),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, http, mesh, running


async def prompt_of(model: Path, mesh: ScriptedMesh, index: int) -> str:
    """The prompt of a submitted request, as text."""
    generation = mesh.submitted[index].generation
    token_ids = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens]
    return await ModelTokenizer.load(model).decode(token_ids, skip_special_tokens=False)


async def test_the_openai_client_works_unmodified(model: Path) -> None:
    async with served(model) as (client, _http, mesh, _running):
        response = await client.responses.create(
            model="tiny", input="hello", instructions="Be kind.", max_output_tokens=12, temperature=0.5
        )
        assert response.output_text.startswith("system\nBe")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert response.usage.output_tokens == 12
        assert mesh.submitted[0].generation.params.temperature == 0.5

        async with client.responses.stream(
            model="tiny", input="hello", instructions="Be kind.", max_output_tokens=50
        ) as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert types[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert types[-1] == "response.completed"
        assert final.output_text.startswith(response.output_text)

        counted = await client.responses.input_tokens.count(model="tiny", input="hello", instructions="Be kind.")
        assert counted.input_tokens == response.usage.input_tokens


async def test_log_probabilities_come_with_the_text(model: Path) -> None:
    async with served(model) as (client, _http, _mesh, _running):
        asked: dict[str, Any] = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        response = await client.responses.create(**asked)
        assert response.top_logprobs == 2
        [part] = response.output[0].to_dict()["content"]
        assert "".join(token["token"] for token in part["logprobs"]).endswith(part["text"])
        assert {token["logprob"] for token in part["logprobs"]} == {-1 / 8}
        assert {len(token["top_logprobs"]) for token in part["logprobs"]} == {2}

        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
        told = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
        assert [token.token for token in told] == [token["token"] for token in part["logprobs"]]
        without = await client.responses.create(**BODY)
        assert without.output[0].to_dict()["content"] == [{**part, "logprobs": []}]


async def test_a_conversation_goes_on_from_the_response_before(model: Path) -> None:
    async with served(model) as (client, _http, mesh, _running):
        first = await client.responses.create(model="tiny", input="one", instructions="Be kind.", max_output_tokens=3)
        second = await client.responses.create(
            model="tiny", input="two", max_output_tokens=3, previous_response_id=first.id
        )
        await client.responses.create(model="tiny", input="three", max_output_tokens=1, previous_response_id=second.id)
        turn = "<|im_start|>{}\n{}<|im_end|>\n"
        turns = [
            *(("user", "one"), ("assistant", first.output_text)),
            *(("user", "two"), ("assistant", second.output_text)),
            ("user", "three"),
        ]
        expected = "".join(turn.format(role, text) for role, text in turns) + "<|im_start|>assistant\n"
        assert await prompt_of(model, mesh, 2) == expected  # instructions are each request's own

        again = await client.responses.retrieve(first.id)
        assert again.output == first.output
        assert (await client.responses.retrieve(second.id)).previous_response_id == first.id
        items = await client.responses.input_items.list(second.id)
        [item] = [item.to_dict() for item in items.data]
        assert (item["type"], item["content"]) == ("message", [{"type": "input_text", "text": "two"}])
        named: list[Any] = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "four"}]
        await client.responses.create(model="tiny", input=named, max_output_tokens=1)
        assert f"assistant\n{first.output_text}<|im_end|>\n" in await prompt_of(model, mesh, 3)

        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(model="tiny", input="a", previous_response_id=first.id)
        assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
        unkept = await client.responses.create(model="tiny", input="a", max_output_tokens=1, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_a_streamed_response_is_kept_as_it_was_told(model: Path) -> None:
    async with served(model) as (_client, http, _mesh, _running):
        streamed = await http.post("/v1/responses", json={**BODY, "stream": True})
        events = named_events(streamed.text)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        last = events[-1][1]["response"]
        assert (await http.get(f"/v1/responses/{last['id']}")).json() == last
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "[DONE]" not in streamed.text


async def test_nobody_reads_what_another_key_asked(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("".join(entry_of(ApiKey(name=name, hash=hash_key(name))) for name in ("alice", "mallory")))
    async with served(model, security=SecurityConfig(api_keys_file=path), key="alice") as (client, http, mesh, _r):
        secret = await client.responses.create(model="tiny", input="my secret", max_output_tokens=2)
        other = {"authorization": "Bearer mallory"}
        url = f"/v1/responses/{secret.id}"
        unknown = await http.get("/v1/responses/resp_none", headers=other)
        for response in (
            await http.get(url, headers=other),
            await http.delete(url, headers=other),
            await http.get(f"{url}/input_items", headers=other),
        ):
            assert response.status_code == unknown.status_code == 404
        body = {**BODY, "previous_response_id": secret.id}
        assert (await http.post("/v1/responses", json=body, headers=other)).status_code == 400
        named = {**BODY, "input": [{"type": "item_reference", "id": secret.output[0].id}]}
        assert (await http.post("/v1/responses", json=named, headers=other)).status_code == 404
        assert len(mesh.submitted) == 1
        assert (await client.responses.retrieve(secret.id)).id == secret.id


async def test_another_gateways_response_is_told_apart_from_one_that_is_gone(model: Path) -> None:
    async with served(model) as (client, http, _mesh, _running):
        first = await client.responses.create(model="tiny", input="a", max_output_tokens=1)
        name, _, mark = first.id.partition(".")

        async def why(response_id: str) -> str:
            return str((await http.get(f"/v1/responses/{response_id}")).json()["error"]["message"])

        assert "Another gateway created it" in await why(f"{name}.{'0' * len(mark)}")
        assert "kept for an hour" in await why(f"resp_0.{mark}")
    async with served(model, gateway=GatewayConfig(kept_responses_bytes=0)) as (client, http, _mesh, _running):
        first = await client.responses.create(model="tiny", input="a", max_output_tokens=1)
        assert first.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await client.responses.create(model="tiny", input="a", previous_response_id=first.id)


async def test_bad_requests_are_refused_by_field(model: Path) -> None:
    deep: Any = "a"
    for _ in range(201):
        deep = {"a": deep}
    cut_deep = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":' * 200 + "1" + "}" * 200}
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"role": "user", "content": "a"}] * 9000}, "input", "9000 parts; 8192 are allowed"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 9000}]}, "input", "9000 parts"),
        ({"input": "a b " * CONTEXT}, "messages", "maximum context length"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"model": "gpt"}, "model", "does not exist"),
        ({"background": True, "store": False}, "background", "requires `store`"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"messages": []}, "messages", "not supported"),
        ({"tools": [{"type": "function", "name": "f", "parameters": deep}]}, "tools", "nested"),
        ({"input": [cut_deep]}, "input", "nested"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "`text.format.schema` is missing"),
    ]
    async with served(model) as (_client, http, mesh, _running):
        for fields, param, message in cases:
            error = (await http.post("/v1/responses", json={**BODY, **fields})).json()["error"]
            assert (error["param"], message in error["message"]) == (param, True), error
        assert mesh.submitted == []
        skipped = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "a"}]
        tools = [{"type": "custom", "name": "p"}, {"type": "name\r\nspace"}]
        response = await http.post(
            "/v1/responses", json={**BODY, "input": skipped, "tools": tools, "client_metadata": {}}
        )
        assert response.status_code == 200
        assert response.headers.get_list("x-pdmesh-warning") == [
            "items of type web_search_call are skipped",
            "tools of type custom are skipped",
            "tools of type name??space are skipped",
        ]
        of_call = [{"type": f"call_{i}"} for i in range(9)]
        of_part = {"role": "assistant", "content": [{"type": f"part_{i}"} for i in range(9)]}
        many = {"input": [*of_call, of_part, *skipped], "tools": [{"type": f"tool_{i}"} for i in range(9)]}
        warned = (await http.post("/v1/responses", json={**BODY, **many})).headers.get_list("x-pdmesh-warning")
        assert (len(warned), warned[-1]) == (17, "12 more")
        response_id = response.json()["id"]
        for query, status in (("limit=0", 400), ("limit=1&order=asc", 200), ("limit=99999", 400), ("after=x", 200)):
            listed = await http.get(f"/v1/responses/{response_id}/input_items?{query}")
            assert listed.status_code == status, query
        assert (await http.get(f"/v1/responses/{response_id}?stream=true")).status_code == 400
        put = await http.put(f"/v1/responses/{response_id}")
        assert (put.status_code, put.headers["allow"]) == (405, "GET, HEAD, DELETE")


def silent(_generation: Generation) -> list[TokenOut]:
    """An instance that says nothing by itself."""
    return []


async def test_a_response_goes_on_in_the_background_and_is_told_again(model: Path) -> None:
    async with served(model, silent) as (client, http, mesh, _running):
        begun = await client.responses.create(**BODY, background=True)
        assert (begun.status, begun.background) == ("in_progress", True)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        generation = (await mesh.next_submit()).generation
        mesh.send_tokens(token_out(generation, 0, 70), token_out(generation, 1, 71))
        async with http.stream("GET", f"/v1/responses/{begun.id}", params={"stream": "true"}) as told:
            text = ""
            async for piece in told.aiter_text():  # it is told while it goes on
                text += piece
                if text.count("output_text.delta\n") == 1:
                    mesh.send_tokens(token_out(generation, 2, 72, finish_reason=FinishReason.STOP))
        whole = named_events(text)
        assert [data["sequence_number"] for _, data in whole] == list(range(len(whole)))
        assert (whole[0][0], whole[-1][0]) == ("response.created", "response.completed")
        ended = await client.responses.retrieve(begun.id)
        assert ended.status == "completed"
        assert ended.to_dict() == {**whole[-1][1]["response"]}
        again = await http.get(f"/v1/responses/{begun.id}", params={"stream": "true", "starting_after": "3"})
        assert named_events(again.text) == whole[4:]
        for wrong in ("-1", "x", "9" * 20):
            query = {"stream": "true", "starting_after": wrong}
            assert (await http.get(f"/v1/responses/{begun.id}", params=query)).status_code == 400
        nothing = await http.get(f"/v1/responses/{begun.id}", params={"stream": "true", "starting_after": "1000"})
        assert (nothing.status_code, nothing.text) == (200, "")
        await client.responses.delete(begun.id)
        assert (await http.get(f"/v1/responses/{begun.id}", params={"stream": "true"})).status_code == 404


async def test_what_was_deleted_while_it_was_under_way_stays_away(model: Path) -> None:
    async with served(model, silent) as (client, _http, mesh, _running):
        begun = await client.responses.create(**BODY, background=True)
        await mesh.next_submit()
        await client.responses.delete(begun.id)
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(begun.id)


async def test_a_gateway_that_holds_too_much_begins_nothing_in_the_background(model: Path) -> None:
    gateway = GatewayConfig(max_queued_bytes=MAX_EVENT_BYTES + 100_000)
    async with served(model, silent, gateway=gateway) as (client, _http, mesh, _running):
        begun = await client.responses.create(**BODY, background=True)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**BODY, background=True)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        again = await client.responses.create(**BODY, background=True)
        await client.responses.delete(again.id)
        # Those that began may have ended before they were submitted.
        assert len(mesh.submitted) <= 2


async def test_a_conversation_does_not_grow_for_ever(model: Path) -> None:
    gateway = GatewayConfig(max_body_bytes=4000)
    async with served(model, gateway=gateway) as (client, _http, mesh, _running):
        skipped: list[Any] = [{"type": "web_search_call", "note": "x" * 1500}, {"role": "user", "content": "hello"}]
        asked: dict[str, Any] = {"model": "tiny", "input": skipped, "max_output_tokens": 1}
        previous: str | None = None
        for _ in range(3):
            previous = (await client.responses.create(**asked, previous_response_id=previous)).id
        with pytest.raises(openai.BadRequestError, match=r"too long\. Start a new one"):
            await client.responses.create(**asked, previous_response_id=previous)
        answer = await client.responses.create(model="tiny", input="hello")
        named: list[Any] = [{"type": "item_reference", "id": answer.output[0].id}] * 30
        with pytest.raises(openai.BadRequestError, match="more than 4000 bytes"):
            await client.responses.create(model="tiny", input=named)
        assert len(mesh.submitted) == 4


async def test_a_streamed_response_goes_on_when_its_client_leaves(model: Path) -> None:
    async with served(model, silent) as (client, http, mesh, _running):
        asked = {**BODY, "background": True, "stream": True}
        async with http.stream("POST", "/v1/responses", json=asked) as told:
            first = await anext(told.aiter_text())
        response_id = named_events(first)[0][1]["response"]["id"]
        generation = (await mesh.next_submit()).generation
        mesh.send_tokens(token_out(generation, 0, 70, finish_reason=FinishReason.STOP))
        text = (await http.get(f"/v1/responses/{response_id}", params={"stream": "true"})).text
        assert named_events(text)[-1][0] == "response.completed"
        assert mesh.cancelled == []
        assert (await client.responses.cancel(response_id)).status == "completed"  # it had ended


async def test_a_response_in_the_background_is_cancelled_by_its_own_key(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("".join(entry_of(ApiKey(name=name, hash=hash_key(name))) for name in ("one", "two")))
    security = SecurityConfig(api_keys_file=path)
    async with served(model, silent, security=security, key="one") as (client, http, mesh, _running):
        begun = await client.responses.create(**BODY, background=True)
        await mesh.next_submit()
        for method, below in (("POST", "/cancel"), ("GET", ""), ("GET", "?stream=true"), ("DELETE", "")):
            strange = await http.request(
                method, f"/v1/responses/{begun.id}{below}", headers={"authorization": "Bearer two"}
            )
            assert strange.status_code == 404
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        waiting = await client.responses.create(**{**BODY, "store": True}, background=True)
        await client.responses.delete(waiting.id)
        await mesh.until(lambda: len(mesh.cancelled) == 2)
        with pytest.raises(openai.BadRequestError, match="requires `store`"):
            await client.responses.create(**BODY, background=True, store=False)
        with pytest.raises(openai.BadRequestError, match="context length"):
            await client.responses.create(model="tiny", input="a " * CONTEXT * 20, background=True)


async def test_a_response_that_fails_in_the_background_is_kept_so(model: Path) -> None:
    async with served(model, silent) as (client, http, mesh, _running):
        begun = await client.responses.create(**BODY, background=True)
        generation = (await mesh.next_submit()).generation
        mesh.send_tokens(token_out(generation, 0, None, finish_reason=FinishReason.ERROR, error="the engine broke"))
        text = (await http.get(f"/v1/responses/{begun.id}", params={"stream": "true"})).text
        assert [name for name, _ in named_events(text)][-2:] == ["error", "response.failed"]
        failed = await client.responses.retrieve(begun.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.message == "the engine broke"


async def test_what_the_model_read_and_wrote_is_told_if_asked_for(model: Path) -> None:
    async with served(model) as (client, http, mesh, _running):
        asked = {**BODY, "enable_response_messages": True}
        whole = (await http.post("/v1/responses", json=asked)).json()
        [prompt], [answer] = whole["input_messages"], whole["output_messages"]
        assert {prompt["type"], answer["type"]} == {"raw_message_tokens"}
        assert prompt["message"] == await prompt_of(model, mesh, 0)
        assert len(prompt["tokens"]) == whole["usage"]["input_tokens"]
        assert len(answer["tokens"]) == whole["usage"]["output_tokens"]
        streamed = named_events((await http.post("/v1/responses", json={**asked, "stream": True})).text)
        assert streamed[0][1]["response"]["output_messages"] == []
        assert streamed[-1][1]["response"]["output_messages"] == whole["output_messages"]
        plain = await client.responses.create(**BODY)
        assert "input_messages" not in plain.to_dict()
