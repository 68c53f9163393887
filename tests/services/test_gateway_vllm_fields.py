"""Fields of vLLM's that evaluation harnesses send."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.config import GatewayConfig
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.scripted_mesh import ScriptedMesh
from pdmesh_testing.sse import data_events

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(model: Path) -> AsyncGenerator[tuple[httpx.AsyncClient, ScriptedMesh]]:
    async with ready_gateway(model) as (client, mesh, _):
        yield client, mesh


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


async def test_what_may_be_drawn_reaches_the_workers(model: Path) -> None:
    async with served(model) as (client, mesh):
        fields = {"allowed_token_ids": [70, 71], "bad_words": ["ab", " c"], "logprob_token_ids": [70, 72]}
        for path, body in (
            ("chat/completions", {**CHAT, "logprobs": True}),
            ("completions", {"prompt": "a", "max_tokens": 2, "logprobs": 0}),
        ):
            assert (await client.post(f"/v1/{path}", json={**body, **fields})).status_code == 200
        words = [
            tuple((await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"])
            for text in ("ab", " ab", "c", " c")
        ]
        for submit in mesh.submitted:
            params = submit.generation.params
            assert (params.allowed_token_ids, params.logprob_token_ids) == ((70, 71), (70, 72))
            assert params.bad_token_sequences == tuple(words)


async def test_prompt_logprobs_have_vllms_shape(model: Path) -> None:
    async with served(model) as (client, _mesh):
        body = {"prompt": [[70, 71, 72], [73]], "max_tokens": 1, "prompt_logprobs": 1}
        first, second = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert first["prompt_logprobs"] == [
            None,
            {"71": {"logprob": -0.125, "rank": 1, "decoded_token": "h"}},
            {"72": {"logprob": -0.125, "rank": 1, "decoded_token": "i"}},
        ]
        assert second["prompt_logprobs"] == [None]
        plain = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert plain.json()["choices"][0]["prompt_logprobs"] is None
        chat = (await client.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0})).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["prompt_logprobs"][0] is None


async def test_tokens_may_be_named_by_their_ids(model: Path) -> None:
    async with served(model) as (client, _mesh):
        asked = {"logprobs": 1, "return_tokens_as_token_ids": True, "prompt_logprobs": 0}
        response = await client.post("/v1/completions", json={"prompt": [70, 71], "max_tokens": 2, **asked})
        [choice] = response.json()["choices"]
        assert choice["logprobs"]["tokens"] == ["token_id:70", "token_id:71"]
        assert choice["logprobs"]["top_logprobs"][0] == {"token_id:70": -0.125}
        assert choice["prompt_logprobs"][1]["71"]["decoded_token"] == "token_id:71"
        chat = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        content = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
        assert all(entry["token"].startswith("token_id:") for entry in content)
        assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)


async def test_a_prompt_is_cut_on_the_side_that_is_asked_for(model: Path) -> None:
    async with served(model) as (client, _mesh):
        body = {"prompt": [70, 71, 72, 73], "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 3}
        kept = {
            side: (await client.post("/v1/completions", json={**body, "truncation_side": side})).json()["choices"][0]
            for side in (None, "left", "right")
        }
        assert [kept[side]["prompt_token_ids"][0] for side in (None, "left", "right")] == [71, 71, 70]
        refused = await client.post("/v1/completions", json={**body, "truncation_side": "middle"})
        assert refused.json()["error"]["param"] == "truncation_side"


async def test_what_clients_of_vllm_ask_of_the_server(model: Path) -> None:
    async with served(model) as (client, _mesh):
        info = (await client.get("/tokenizer_info")).json()
        assert (info["tokenizer_class"], info["eos_token"]) == ("PreTrainedTokenizerFast", "<|im_end|>")
        assert "<|im_start|>" in info["chat_template"]
        assert (await client.get("/load")).json() == {"server_load": 0}
        choice = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).json()["choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)
        bias = await client.post("/v1/completions", json={"prompt": "a", "logit_bias": {"one": 1, "2": 1, "two": 1}})
        assert "the keys 'one', 'two'" in bias.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", {"prompt": "a", "max_tokens": 2})]
)
async def test_usage_so_far_is_a_part_of_usage(model: Path, path: str, body: dict[str, Any]) -> None:
    async with served(model) as (client, _mesh):
        asked: dict[str, Any] = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        assert '"usage"' not in (await client.post(f"/v1/{path}", json=asked)).text
        asked["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
        chunks = data_events((await client.post(f"/v1/{path}", json=asked)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0] == 0, counts[-1]) == (body is CHAT, 2)  # a chat's first chunk has the role alone


async def test_what_of_an_answer_was_given_comes_with_it_if_asked_for(model: Path) -> None:
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "An apple"}]
    continued = {"messages": given, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 2}
    async with served(model) as (client, _mesh):
        for stream in (False, True):
            texts = []
            for echo in (False, True):
                body = {**continued, "echo": echo, "stream": stream}
                response = await client.post("/v1/chat/completions", json=body)
                texts.append(_text_of(response))
            assert texts[1] == "An apple" + texts[0]
        plain = await client.post("/v1/chat/completions", json={**CHAT, "echo": True})
        assert _text_of(plain) == _text_of(await client.post("/v1/chat/completions", json=CHAT))


def _text_of(response: httpx.Response) -> str:
    if response.headers["content-type"] == "application/json":
        return str(response.json()["choices"][0]["message"]["content"])
    return "".join(
        choice["delta"].get("content", "") for chunk in data_events(response.text) for choice in chunk["choices"]
    )


async def test_a_router_may_send_the_prompts_ids_with_a_chat(model: Path) -> None:
    async with served(model) as (client, mesh):
        first = await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})
        ids = first.json()["prompt_token_ids"]
        other = {**CHAT, "messages": [{"role": "user", "content": "b"}]}
        sent = {**other, "kv_transfer_params": {"prompt_token_ids": ids}}
        assert (await client.post("/v1/chat/completions", json=sent)).status_code == 200
        assert mesh.submitted[1].generation.token_ids == mesh.submitted[0].generation.token_ids
        for wrong in ("ab", [1.5], [True], [10**6], []):
            sent = {**other, "kv_transfer_params": {"prompt_token_ids": wrong}}
            assert (await client.post("/v1/chat/completions", json=sent)).status_code == 400


async def test_invocations_go_where_their_body_is_for(model: Path) -> None:
    async with served(model) as (client, _mesh):
        kinds = [
            (await client.post("/invocations", json=body)).json()["object"]
            for body in (CHAT, {"prompt": "a", "max_tokens": 1, "messages": None})
        ]
        assert kinds == ["chat.completion", "text_completion"]
        for wrong in (b"{}", b'{"messages": null}', b"[]", b"{", b'"' * 3):
            refused = await client.post("/invocations", content=wrong, headers={"content-type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_that_says_it_is_something_else_than_json_is_refused(model: Path) -> None:
    async with served(model) as (client, mesh):
        body = b'{"prompt": "a", "max_tokens": 1}'
        statuses = {
            kind: (await client.post("/v1/completions", content=body, headers={"content-type": kind})).status_code
            for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json")
        }
        assert set(statuses.values()) == {200}
        assert (await client.post("/v1/completions", content=body)).status_code == 200
        num_submitted = len(mesh.submitted)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "json", ""):
            refused = await client.post("/v1/completions", content=body, headers={"content-type": kind})
            assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert len(mesh.submitted) == num_submitted


async def test_reasoning_is_limited_only_where_a_token_ends_it(model: Path) -> None:
    async with served(model) as (client, _mesh):
        unlimited = await client.post("/v1/chat/completions", json={**CHAT, "thinking_token_budget": -1})
        assert unlimited.status_code == 200
        for budget, message in ((4, "cannot be limited"), (-2, "at least -1")):
            refused = await client.post("/v1/chat/completions", json={**CHAT, "thinking_token_budget": budget})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "thinking_token_budget")
            assert message in error["message"]


async def test_a_server_may_say_what_requests_do_not(model: Path) -> None:
    settings = GatewayConfig(force_include_usage=True, return_tokens_as_token_ids=True)
    async with ready_gateway(model, gateway=settings) as (client, _mesh, _):
        asked = {**CHAT, "logprobs": True, "stream": True}
        chunks = data_events((await client.post("/v1/chat/completions", json=asked)).text)
        assert all("usage" in chunk for chunk in chunks)
        told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
        assert told
        assert all(token["token"].startswith("token_id:") for each in told for token in each["content"])
        by_text = {"prompt": [70], "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": False}
        response = (await client.post("/v1/completions", json=by_text)).json()
        assert response["choices"][0]["logprobs"]["tokens"] == ["g"]


async def test_a_gateway_may_be_shown_below_a_path(model: Path) -> None:
    async with ready_gateway(model, gateway=GatewayConfig(root_path="/llm/")) as (client, _mesh, _):
        for path, status in (("/v1/models", 200), ("/llm/v1/models", 200), ("/llmv1/models", 404), ("/llm", 404)):
            assert (await client.get(path)).status_code == status
        below = await client.post("/llm/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert below.json()["object"] == "text_completion"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "at most"),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids", "more than 65536"),
        ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, "allowed_token_ids", "combined"),
        ({"bad_words": [" "]}, "bad_words", "blank"),
        ({"bad_words": ["a"] * 257}, "bad_words", "256 words"),
        ({"bad_words": ["a" * 5000]}, "bad_words", "4096 characters"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs `logprobs`"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "with `stream`"),
    ],
)
async def test_what_cannot_be_done_is_refused(model: Path, fields: dict[str, Any], param: str, message: str) -> None:
    async with served(model) as (client, mesh):
        for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "a"})):
            error = (await client.post(f"/v1/{path}", json={**body, **fields})).json()["error"]
            assert error["param"] == param
            assert message in error["message"]
        assert mesh.submitted == []
