"""The HTTP edge as clients see it, in front of a scripted mesh."""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import openai
import pytest

from pdmesh.apikeys import ApiKey, entry_of, hash_key
from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import FinishReason, RejectReason
from pdmesh.wire.messages import Generation, MeshStatus, MetricFamily, PromptLogprobs, Submit, TokenOut
from pdmesh_gateway.gateway_session import GatewaySession
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.scripted_mesh import READY, echo_prompt, token_out

pytestmark = pytest.mark.anyio

CONTEXT = 512


def events(text: str) -> list[Any]:
    """The data of server-sent events, which must be all there is."""
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def test_a_chat_stream_has_the_shape_that_clients_know(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        response = await client.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": "hé"}],
                "max_tokens": 8,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            headers={"X-Request-Id": "my-id"},
        )
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "my-id"
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}\.[0-9a-f]{8}", usage["id"])
    for chunk in [*chunks, usage]:
        assert chunk["id"] == usage["id"]
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "tiny"
        assert isinstance(chunk["created"], int)
    first, *rest = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(rest) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).startswith("user\nh")


async def test_a_completion_stream_has_the_shape_that_clients_know(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        response = await client.post(
            "/v1/completions",
            json={"prompt": "abc", "max_tokens": 6, "stream": True, "return_token_ids": True, "logprobs": 1},
        )
        plain = await client.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 6, "return_token_ids": True, "logprobs": 1}
        )
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}\.[0-9a-f]{8}", chunks[0]["id"])
    [choice] = plain.json()["choices"]
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one["text"] for one in streamed) == choice["text"] == "abcabc"
    assert [token_id for one in streamed for token_id in one["token_ids"]] == choice["token_ids"]
    assert streamed[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    for key, whole in choice["logprobs"].items():
        assert [value for one in streamed for value in one["logprobs"][key]] == whole
    assert choice["finish_reason"] == streamed[-1]["finish_reason"] == "length"


async def test_each_prompt_says_how_much_its_client_asked_for_before_it(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        prompts = [[5, 6, 7], [5, 6], [5]]
        await client.post("/v1/completions", json={"prompt": prompts, "n": 2, "max_tokens": 1})
        assert sorted({submit.num_tokens_before for submit in mesh.submitted}) == [0, 6, 10]


async def test_the_openai_client_works_unmodified(model: Path) -> None:
    async with (
        ready_gateway(model) as (_client, mesh, running),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client,
    ):
        assert [card.id async for card in client.models.list()] == ["tiny"]
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello, hello"}],
            max_completion_tokens=10,
            n=2,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts = ["", ""]
        finished: list[int] = []
        usage = None
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason == "length":
                    finished.append(choice.index)
        assert texts[0] == texts[1] != ""
        assert sorted(finished) == [0, 1]
        assert usage is not None
        assert usage.completion_tokens == 20
        assert [submit.generation.params.seed for submit in mesh.submitted] == [7, 8]

        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "é"}], logprobs=True, top_logprobs=2, max_tokens=7
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 7
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).startswith(b"<|im_start|>user\n\xc3")

        completion = await client.completions.create(
            model="tiny", prompt=["abcd", "xyz"], max_tokens=7, stop=["da"], logprobs=1, echo=True
        )
        assert [choice.text for choice in completion.choices] == ["abcdabc", "xyzxyzxyzx"]
        assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="a", temperature=-1)


async def test_echo_gives_prompt_logprobs_as_evaluation_harnesses_read_them(model: Path) -> None:
    prompts = [[10, 11, 12, 13], [20, 21]]
    async with ready_gateway(model) as (client, mesh, _running):
        for max_tokens in (1, 0):
            response = await client.post(
                "/v1/completions",
                json={"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0},
            )
            body = response.json()
            for prompt, choice in zip(prompts, body["choices"], strict=True):
                logprobs = choice["logprobs"]
                assert len(logprobs["tokens"]) == len(prompt) + max_tokens
                assert logprobs["token_logprobs"][0] is None
                assert logprobs["top_logprobs"][0] is None
                assert all(value == -0.125 for value in logprobs["token_logprobs"][1:])
                assert logprobs["text_offset"][0] == 0
                assert choice["text"] == "".join(logprobs["tokens"])
            assert body["usage"]["completion_tokens"] == 2 * max_tokens
        assert all(submit.generation.params.prompt_logprobs == 1 for submit in mesh.submitted)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("skip", [True, False])
async def test_text_offsets_agree_with_the_text(model: Path, echo: bool, skip: bool) -> None:
    """Special tokens that are not shown take no room, nor do bytes that do not end a character."""
    async with ready_gateway(model) as (client, _mesh, _running):
        prompt = "a<|im_start|>b\u00e9c<|im_end|>d"
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "logprobs": 1,
            "echo": echo,
            "skip_special_tokens": skip,
            "ignore_eos": True,
        }
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
    text, logprobs = choice["text"], choice["logprobs"]
    assert ("<|im_start|>" in text) is not skip
    ends = [*logprobs["text_offset"][1:], len(text)]
    pieces = [text[start:end] for start, end in zip(logprobs["text_offset"], ends, strict=True)]
    expected = [
        "" if (token.startswith("<|") and skip) or token.startswith("\ufffd") else token for token in logprobs["tokens"]
    ]
    assert [piece.strip("\u00e9") for piece in pieces] == expected
    assert "".join(pieces) == text
    assert text.count("\u00e9") == 1 + echo
    *chunks, _done = events(streamed.text)
    assert [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]] == logprobs["text_offset"]


async def test_stop_strings_end_a_generation_and_cancel_the_rest(model: Path) -> None:
    def endless(generation: Generation) -> list[TokenOut]:
        tokens = echo_prompt(generation)
        return [token for token in tokens if isinstance(token, TokenOut) and token.finish_reason is None]

    async with ready_gateway(model, endless) as (client, mesh, _running):
        for include_stop, text in ((False, "a"), (True, "abcdab")):
            response = await client.post(
                "/v1/completions",
                json={
                    "prompt": "abcd",
                    "max_tokens": 100,
                    "stop": ["cdabc", "bcdab", "bca"],  # the second completes first
                    "include_stop_str_in_output": include_stop,
                },
            )
            [choice] = response.json()["choices"]
            assert choice["text"] == text
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "bcdab")
        await mesh.until(lambda: len(mesh.cancelled) == 2)


async def test_a_stop_token_is_named_and_not_shown(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        ids = (await client.post("/tokenize", json={"prompt": "xyz"})).json()["tokens"]
        response = await client.post(
            "/v1/completions", json={"prompt": "xyz", "max_tokens": 9, "stop_token_ids": [ids[-1]]}
        )
    [choice] = response.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])
    assert "z" not in choice["text"]


async def test_the_model_card_shows_what_requests_that_leave_sampling_out_are_drawn_by(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.5, "top_k": 30}))
    async with ready_gateway(model) as (client, mesh, _running):
        [card] = (await client.get("/v1/models")).json()["data"]
        assert card["sampling_defaults"] == {"temperature": 0.5, "top_k": 30}
        for own in ({}, {"temperature": 0, "top_k": 5}):
            await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1, **own})
    drawn = [(each.generation.params.temperature, each.generation.params.top_k) for each in mesh.submitted]
    assert drawn == [(0.5, 30), (0, 5)]


async def test_tokenize_and_detokenize_are_inverse(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        response = await client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})
        body = response.json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == CONTEXT
        back = await client.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": "héllo"}
        chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        text = (await client.post("/detokenize", json={"tokens": chat.json()["tokens"]})).json()["prompt"]
        assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


async def test_examples_of_the_document_are_answered(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        paths = (await client.get("/openapi.json")).json()["paths"]
        bodies = {path: each["post"]["requestBody"]["content"] for path, each in paths.items() if _has_body(each)}
        assert len(bodies) > 8
        del bodies["/v1/embeddings"]  # the scripted mesh embeds nothing
        for path, body in bodies.items():
            answer = await client.post(path, json=body["application/json"]["example"])
            assert answer.status_code == 200, (path, answer.text)


def _has_body(methods: dict[str, Any]) -> bool:
    return "requestBody" in methods.get("post", {})


async def test_probes_documents_and_metrics(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        for path in ("/health", "/ready", "/live", "/ping", "/version", "/docs", "/openapi.json", "/v1/models/tiny"):
            assert (await client.get(path)).status_code == 200, path
        for name in ("docs.js", "docs.css", "icon.svg"):
            file = await client.get(f"/docs/{name}")
            assert (file.status_code, file.headers["x-content-type-options"]) == (200, "nosniff")
        assert (await client.get("/favicon.ico")).headers["content-type"].startswith("image/svg+xml")
        document = (await client.get("/openapi.json")).json()
        assert "guided_json" in document["x-refused-fields"]
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert (fields["temperature"]["default"], fields["max_tokens"]["default"]) == (1, 16)
        metrics = (await client.get("/metrics")).text
        for prefix in ("pdmesh", "vllm"):
            assert f'{prefix}:time_to_first_token_seconds_count{{model_name="tiny"}} 1.0' in metrics
            assert f'{prefix}:generation_tokens_total{{model_name="tiny"}} 3.0' in metrics
            assert f'{prefix}:kv_cache_usage_perc{{model_name="tiny"}} 0.25' in metrics
            for gauge in ("num_requests_waiting", "num_requests_running", "lora_requests_info", "cache_config_info"):
                assert f"\n{prefix}:{gauge}" in metrics
        mesh.set_state(replace_state(ready=False, reason="no decode instance"))
        while (await client.get("/ready")).status_code == 200:
            pass
        health = await client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")
        assert "no decode instance" in error_of(health)["message"]
        assert (await client.get("/live")).status_code == 200


def replace_state(**changes: Any) -> MeshStatus:
    return msgspec.structs.replace(READY, **changes)


CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


#: path, body, status, param, a pattern of the message
BAD_REQUESTS: list[tuple[str, Any, int, str, str]] = [
    ("completions", {"prompt": "a", "model": "other"}, 404, "model", "`other` does not exist"),
    ("completions", {"prompt": ""}, 400, "prompt", "must not be empty"),
    ("completions", {"prompt": []}, 400, "prompt", "must not be empty"),
    ("completions", {}, 400, "prompt", "Missing required parameter"),
    ("completions", {"prompt": ["a", 1]}, 400, "prompt", "it must be a string or a list"),
    ("completions", {"prompt": [999_999]}, 400, "prompt", "out of vocabulary"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "out of vocabulary"),
    ("completions", {"prompt": [65] * 600}, 400, "prompt", "512 tokens.*600 tokens"),
    ("completions", {"prompt": "a" * 100_000}, 400, "prompt", "512 tokens.*at least [0-9]+ tokens"),
    ("completions", {"prompt": [65] * 12, "max_tokens": 501}, 400, "prompt", r"512 tokens.*513 tokens \(12 in"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ("completions", {"prompt": "a", "max_tokens": 10**25}, 400, "prompt", "maximum context length"),
    ("completions", {"prompt": "a", "max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1"),
    ("completions", {"prompt": "a", "max_tokens": 0, "max_completion_tokens": 600}, 400, "prompt", "512 tokens"),
    (
        "completions",
        {"prompt": "a", "seed": 2**63},
        400,
        "seed",
        "at most 9223372036854775807, got 9223372036854775808",
    ),
    ("completions", {"prompt": "a", "n": 0}, 400, "n", "at least 1"),
    ("completions", {"prompt": "a", "n": 129}, 400, "n", "at most 128"),
    ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of", "must equal `n`"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs", "at most 20"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "empty string"),
    ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream"),
    ("completions", {"prompt": "a", "request_id": "a b"}, 400, "request_id", "characters"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "must be"),
    ("chat/completions", {"messages": []}, 400, "messages", "must not be empty"),
    ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages", "role"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs `logprobs`"),
    ("chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template", "does not render"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "is not a valid function"),
    ("chat/completions", {**CHAT, "tools": [TOOL, TOOL]}, 400, "tools", "two tools named"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "has no tool to call"),
    ("chat/completions", {**CHAT, "tool_choice": "some"}, 400, "tool_choice", "must be"),
    ("chat/completions", {**CHAT, "maxtokens": 1}, 400, "maxtokens", "supplied: maxtokens. Did you mean `max_tokens`"),
    ("chat/completions", {**CHAT, "audio": {"voice": "x"}}, 400, "audio", "not supported"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages",
        "accepts text only",
    ),
]


async def test_bad_requests_get_a_clear_error(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        for path, body, status, param, message in BAD_REQUESTS:
            response = await client.post(f"/v1/{path}", json=body)
            error = error_of(response)
            assert (response.status_code, error["param"]) == (status, param), error
            assert re.search(message, error["message"]), error
            assert error["type"] == "invalid_request_error"
        assert mesh.submitted == []


async def test_fields_of_benchmarks_and_clients_are_accepted(model: Path) -> None:
    fields: dict[str, Any] = {
        "ignore_eos": True,
        "min_tokens": 2,
        "repetition_penalty": 1.0,
        "top_k": 5,
        "min_p": 0.1,
        "logprobs": None,
        "stop_token_ids": [],
        "seed": 1,
        "n": 1,
        "user": "me",
        "priority": 3,
        "request_id": "mine",
        "response_format": {"type": "text"},
        "max_tokens": 3,
    }
    async with ready_gateway(model) as (client, mesh, _running):
        response = await client.post("/v1/chat/completions", json={**CHAT, **fields, "max_completion_tokens": 2})
        assert response.json()["usage"]["completion_tokens"] == 2
        assert response.headers["x-request-id"] == "mine"
        again = await client.post("/v1/completions", json={"prompt": "ab", **fields})
        assert again.headers["x-request-id"] == "mine"
        first, second = mesh.submitted
        assert [submit.generation.label for submit in mesh.submitted] == ["mine", "mine"]
        assert response.json()["id"] == f"chatcmpl-{first.generation.request_id}"
        assert again.json()["id"] == f"cmpl-{second.generation.request_id}"
        assert first.generation.request_id != second.generation.request_id
        assert (first.priority, first.generation.params.eos_token_ids) == (3, ())


async def test_unknown_fields_are_passed_over_counted_and_named(model: Path) -> None:
    body = {**CHAT, "max_tokens": 1, "colour": 1, "shape": None, "nice": {"a": 1}, "audio": None}
    async with ready_gateway(model) as (client, _mesh, _running):
        response = await client.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "colour, nice")
        tokenized = await client.post("/tokenize", json={"prompt": "a", "colour": 1})
        assert (tokenized.status_code, tokenized.headers["x-ignored-fields"]) == (200, "colour")
        refused = await client.post("/v1/chat/completions", json={**body, "temperature": 5})
        assert (refused.status_code, refused.headers["x-ignored-fields"]) == (400, "colour, nice")
        assert "\npdmesh:ignored_fields_total 5.0\n" in (await client.get("/metrics")).text


async def test_default_lengths(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        await client.post("/v1/completions", json={"prompt": [65] * 12})
        await client.post("/v1/completions", json={"prompt": [65] * 12, "max_tokens": None})
        await client.post("/v1/completions", json={"prompt": [65] * 510})
        assert [submit.generation.params.max_tokens for submit in mesh.submitted] == [16, 500, 2]


async def test_keys_guard_the_api_and_not_the_probes(model: Path) -> None:
    async with ready_gateway(model, security=SecurityConfig(api_key="secret")) as (client, _mesh, _running):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                response = await client.request(method, path, headers=headers)
                assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        assert (await client.get("/health")).status_code == 200
        allowed = await client.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert allowed.status_code == 200


async def test_wrong_methods_and_paths(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD")):
            response = await client.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)
        unknown = await client.get("/v1/nothing")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "not_found")


async def test_limits_answer_413_408_and_429(model: Path) -> None:
    config = GatewayConfig(max_body_bytes=1000, body_timeout_s=0.2, max_concurrent_requests=8)  # a quarter for one
    async with ready_gateway(model, gateway=config) as (client, _mesh, running):
        big = await client.post("/v1/completions", content=b" " * 1001)
        assert (big.status_code, error_of(big)["code"]) == (413, "body_too_large")

        async def growing() -> AsyncGenerator[bytes]:
            for _ in range(11):
                yield b" " * 100

        big = await client.post("/v1/completions", content=growing())
        assert big.status_code == 413
        host, port = running.facts["http_address"].split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:  # a body that never ends
            await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join([part async for part in stream])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer
        many = await client.post("/v1/completions", json={"prompt": "a", "n": 3})
        assert many.status_code == 400
        ok = await client.post("/v1/completions", json={"prompt": "a", "n": 2})
        assert ok.status_code == 200


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RejectReason.OVERLOADED, 429),
        (RejectReason.QUEUE_TIMEOUT, 503),
        (RejectReason.NO_INSTANCE, 503),
        (RejectReason.TOO_LONG, 400),
        (RejectReason.INVALID, 400),
    ],
)
async def test_the_schedulers_refusals_become_statuses(model: Path, reason: RejectReason, status: int) -> None:
    async with ready_gateway(model) as (client, mesh, _running):

        def refuse(generation: Generation) -> list[TokenOut]:
            mesh.refuse(generation, reason, retry_after_s=2.5)
            return []

        mesh.script = refuse
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == status
        assert error_of(response)["message"] == "no room"
        assert response.headers.get("retry-after") == (None if status == 400 else "3")


#: Of a refusal for want of time, which the reject cache remembers for an hour.
CLOSING = {"retry_after_s": 2.5, "reject_ttl_s": 3600.0}


async def test_what_was_just_refused_is_refused_at_the_door_and_nothing_else(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [ApiKey(name=name, hash=hash_key(name)) for name in ("floods", "quiet")]
    path.write_text("".join(map(entry_of, keys)))
    async with ready_gateway(model, security=SecurityConfig(api_keys_file=path)) as (client, mesh, _running):

        def refuse_floods(generation: Generation) -> list[TokenOut | PromptLogprobs]:
            if mesh.submitted[-1].tenant == "quiet":
                return echo_prompt(generation)
            mesh.refuse(generation, **CLOSING)
            return []

        async def ask(key: str, path: str = "/v1/completions", *, ttft_ms: str = "900", **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-slo-ttft-ms": ttft_ms}
            return await client.post(path, json={"max_tokens": 2, **body}, headers=headers)

        mesh.script = refuse_floods
        first, second = [await ask("floods", prompt=prompt) for prompt in ("abc", "xyz")]
        assert (first.status_code, first.headers["retry-after"]) == (429, "3")
        assert (second.status_code, second.headers["retry-after"], second.content) == (429, "3", first.content)
        assert len(mesh.submitted) == 1, "the reject cache refused the second"
        assert (await ask("quiet", prompt="abc")).status_code == 200
        others = [
            await ask("floods", prompt="abc", ttft_ms="60000"),
            await ask("floods", prompt="abc" * 50),
            await ask("floods", prompt="abc", priority=1),
            await ask("floods", prompt="abc", n=2),
            await ask("floods", "/v1/chat/completions", messages=[{"role": "user", "content": "abc"}]),
        ]
        assert [response.status_code for response in others] == [429] * 5
        assert len({submit.generation.request_id for submit in mesh.submitted}) == 8, "all of these were asked about"
        wrong = [await ask("floods", prompt="abc", ttft_ms="soon"), await ask("floods", prompt="abc", priority="hi")]
        assert [response.status_code for response in wrong] == [400, 400]
        metrics = (await client.get("/metrics")).text
        assert 'pdmesh:request_refusal_seconds_count{model_name="tiny"} 7.0' in metrics
        num_before = len(mesh.submitted)
        of_one = [await ask("floods", prompt=prompt) for prompt in (["a"], [9, 8])]
        assert [response.status_code for response in of_one] == [429] * 2
        assert len(mesh.submitted) == num_before, "a list of one prompt is that prompt"


@pytest.mark.parametrize("prompts", [["a", "b" * 40], [[97], [98] * 20]])
async def test_prompts_that_are_asked_for_at_once_close_the_door_to_nobody(model: Path, prompts: list[Any]) -> None:
    """The last of them would wait for the first, which are taken back with it."""
    async with ready_gateway(model) as (client, mesh, _running):

        def refuse_the_second(generation: Generation) -> list[TokenOut | PromptLogprobs]:
            if len(mesh.submitted) != 2:
                return [] if len(mesh.submitted) == 1 else echo_prompt(generation)
            mesh.refuse(generation, **CLOSING)
            return []

        mesh.script = refuse_the_second
        several = {"max_tokens": 1, "prompt": prompts}
        refused = await client.post("/v1/completions", json=several)
        assert refused.status_code == 429
        shortest = client.build_request("POST", "/v1/completions", json={"max_tokens": 1, "prompt": ""})
        text = "x" * (len(refused.request.content) - len(shortest.content))  # a body of the same size
        assert (await client.post("/v1/completions", json={"max_tokens": 1, "prompt": text})).status_code == 200
        assert (await client.post("/v1/completions", json=several)).status_code == 200


async def test_targets_reach_the_scheduler_and_the_goodput(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        body = {"prompt": "abc", "max_tokens": 2, "slo_ttft_ms": 60_000, "slo_tpot_ms": 30_000}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        headers = {"x-slo-ttft-ms": "0.001"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert [(submit.slo_ttft_s, submit.slo_tpot_s) for submit in mesh.submitted] == [
            (60.0, 30.0),
            (1e-6, 30.0),  # the header wins
            (None, None),
        ]
        metrics = (await client.get("/metrics")).text
        met = re.findall(r'pdmesh:request_slo_total\{met="(\w+)",.*\} (.+)', metrics)
        assert sorted(met) == [("false", "1.0"), ("true", "1.0")]


@pytest.mark.parametrize("value", ["-5", "nan", "inf", "soon", "0"])
async def test_a_bad_target_in_a_header_is_refused_by_name(model: Path, value: str) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-slo-tpot-ms": value})
        assert response.status_code == 400
        assert error_of(response)["param"] == "x-slo-tpot-ms"
        response = await client.post("/v1/completions", content=b'{"prompt": "a", "slo_ttft_ms": NaN}')
        assert response.status_code == 400
        assert error_of(response)["param"] == "slo_ttft_ms"
        assert not mesh.submitted


async def test_a_prompt_crosses_once_for_all_its_choices(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Submit] = []
    submit = GatewaySession.submit

    def spy(link: GatewaySession, message: Submit) -> None:
        sent.append(message)
        submit(link, message)

    monkeypatch.setattr(GatewaySession, "submit", spy)
    prompts = [[1 + i] * 500 for i in range(4)]
    async with ready_gateway(model) as (client, mesh, _running):
        response = await client.post(
            "/v1/completions", json={"prompt": prompts, "n": 32, "max_tokens": 1, "return_token_ids": True, "seed": 7}
        )
        assert [choice["token_ids"] for choice in response.json()["choices"]] == [
            [1 + i] for i in range(4) for _ in range(32)
        ]
        assert sum(len(message.generation.token_ids) for message in sent) == 4 * 4 * 500
        assert [s.generation.params.seed for s in mesh.submitted] == [7 + i for i in range(32)] * 4
        assert len({s.generation.request_id for s in mesh.submitted}) == 128


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1, 2]] * 65, "n": 64}, "n"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": [[1] * 500] * 32, "n": 128}, "n"),
    ],
)
async def test_what_could_never_run_is_refused_before_it_is_built(
    model: Path, body: dict[str, Any], param: str
) -> None:
    async with ready_gateway(model, gateway=GatewayConfig(max_queued_bytes=8_000_000)) as (client, mesh, _running):
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert not mesh.submitted


async def test_tokenizing_has_the_limits_of_a_prompt(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        for path, body in (
            ("/tokenize", {"prompt": "word " * 200_000}),
            ("/tokenize", {"messages": [{"role": "user", "content": "word " * 200_000}]}),
            ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}),
        ):
            response = await client.post(path, json=body)
            assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 400_000 + b" HTTP/1.1\r\n",
        b"GET /live HTTP/1.1\r\nx: " + b"a" * 400_000 + b"\r\n",
        b"GET /live HTTP/1.1\r\n" + b"x: y\r\n" * 60_000,
    ],
)
async def test_an_endless_head_is_refused(model: Path, sent: bytes) -> None:
    async with ready_gateway(model) as (client, _mesh, running):
        host, port = running.facts["http_address"].split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            answer = b""
            with anyio.fail_after(20), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.send(sent)
                while True:
                    answer += await stream.receive()
            assert not answer or answer.startswith(b"HTTP/1.1 431 ")
        assert (await client.get("/live")).status_code == 200


async def test_endless_trailers_end_the_connection(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, running):
        host, port = running.facts["http_address"].split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            with anyio.fail_after(20), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.send(head)
                while True:  # until it is closed
                    await stream.send(b"x: " + b"y" * 10_000 + b"\r\n")
        assert (await client.get("/live")).status_code == 200


async def test_idle_uploads_keep_nobody_out(model: Path) -> None:
    config = GatewayConfig(max_queued_bytes=4_000_000, max_body_bytes=500_000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 500000\r\n\r\n"
    async with ready_gateway(model, gateway=config) as (client, _mesh, running), AsyncExitStack() as stack:
        host, port = running.facts["http_address"].split(":")
        for _ in range(16):
            stream = await stack.enter_async_context(await anyio.connect_tcp(host, int(port)))
            await stream.send(head + b" " * 100_000)
        for _ in range(5):
            response = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            assert response.status_code == 200


@pytest.mark.parametrize("depth", [900, 985, 990, 995, 1000, 1005, 3000])
async def test_arguments_nested_deep_are_no_failure_of_ours(model: Path, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    start, end = '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":', "}}]}]}"
    async with ready_gateway(model) as (client, _mesh, _running):
        for arguments in (nested, json.dumps(nested)):
            for path in ("/v1/chat/completions", "/tokenize"):
                response = await client.post(path, content=start + arguments + end)
                assert response.status_code in (200, 400), response.text
        for field in ("metadata", "response_format", "chat_template_kwargs", "tools"):
            value = f"[{nested}]" if field == "tools" else nested
            body = f'{{"messages":[{{"role":"user"}}],"max_tokens":1,"{field}":{value}}}'
            response = await client.post("/v1/chat/completions", content=body)
            assert response.status_code in (200, 400), response.text


async def test_templates_of_requests_are_rendered_where_they_are_trusted(model: Path) -> None:
    async with ready_gateway(model, gateway=GatewayConfig(trust_request_templates=True)) as (client, _mesh, _running):
        body = {**CHAT, "max_tokens": 2, "chat_template": "{{ messages[0].content }}", "return_token_ids": True}
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await client.post("/v1/chat/completions", json=body)).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
        assert statuses == [200] * 4
        response = await client.post("/v1/chat/completions", json={**CHAT, "chat_template": "{% for"})
        assert (response.status_code, error_of(response)["param"]) == (400, "chat_template")


PROMPT = {"prompt": "abc", "max_tokens": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "10.1.2.3"}, 200),
        ({"host": "gateway:8000"}, 200),
        ({"host": "llm.example.com"}, 200),
        ({"host": "rebound.example.net:8000"}, 403),
        ({"host": "127.0.0.1.example.net"}, 403),
        ({"host": "[nonsense"}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        ({"origin": "http://llm.example.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "https://pages.example.org"}, 200),
    ],
)
async def test_without_keys_strangers_pages_are_kept_out(model: Path, headers: dict[str, str], status: int) -> None:
    config = GatewayConfig(allowed_hosts="llm.example.com", cors_origins="https://pages.example.org")
    async with ready_gateway(model, gateway=config) as (client, mesh, _running):
        response = await client.post("/v1/completions", json=PROMPT, headers=headers)
        assert response.status_code == status, response.text
        assert bool(mesh.submitted) == (status == 200)
        assert (await client.get("/health", headers=headers)).status_code == 200  # it tells nothing


async def test_a_key_is_enough_whatever_the_page(model: Path) -> None:
    async with ready_gateway(model, security=SecurityConfig(api_key="k")) as (client, _mesh, _running):
        headers = {"host": "llm.example.com", "origin": "https://pages.example.org", "authorization": "Bearer k"}
        response = await client.post("/v1/completions", json=PROMPT, headers=headers)
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


async def test_a_browser_is_told_which_pages_may_read(model: Path) -> None:
    config = GatewayConfig(cors_origins="https://a.example, https://b.example")
    async with ready_gateway(model, gateway=config, security=SecurityConfig(api_key="k")) as (client, _mesh, _running):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        response = await client.options("/v1/completions", headers={"origin": "https://b.example", **asked})
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == "https://b.example"
        assert response.headers["access-control-allow-headers"] == "authorization"
        response = await client.options("/v1/completions", headers={"origin": "https://c.example", **asked})
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
        response = await client.post("/v1/completions", json=PROMPT, headers={"origin": "https://a.example"})
        assert response.status_code == 401  # which the page may read
        assert response.headers["access-control-allow-origin"] == "https://a.example"


async def test_keys_have_names_scopes_and_limits(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [
        ApiKey(name="alice", hash=hash_key("a"), requests_per_minute=2, min_slo_ttft_ms=200, min_priority=0, share=3),
        ApiKey(name="bob", hash=hash_key("b"), scopes=frozenset({"tokenize"})),
    ]
    path.write_text("".join(map(entry_of, keys)))
    async with ready_gateway(model, security=SecurityConfig(api_keys_file=path)) as (client, mesh, _running):

        async def ask(key: str, **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
            return await client.post("/v1/completions", json={**PROMPT, **more}, headers=headers)

        for refused in (await ask("a", slo_ttft_ms=100), await ask("a", headers={"x-slo-ttft-ms": "1"})):
            assert (refused.status_code, error_of(refused)["param"]) == (400, "slo_ttft_ms")
        assert error_of(await ask("a", priority=-1))["param"] == "priority"
        assert [(await ask("a", slo_ttft_ms=200)).status_code for _ in range(3)] == [200, 200, 429]
        assert (await ask("a")).headers["retry-after"]
        refused = await ask("b")
        assert (refused.status_code, error_of(refused)["code"]) == (403, "missing_scope")
        response = await client.post("/tokenize", json={"prompt": "a"}, headers={"authorization": "Bearer b"})
        assert response.status_code == 200
        assert [(submit.tenant, submit.share) for submit in mesh.submitted] == [("alice", 3)] * 2


async def test_a_grammar_that_becomes_too_complex_is_the_clients_to_change(model: Path) -> None:
    def fail(generation: Generation) -> list[TokenOut]:
        return [token_out(generation, 0, 70), token_out(generation, 1, 71, finish_reason=FinishReason.ERROR)]

    async with ready_gateway(model, fail) as (client, _mesh, _running):
        held = {"prompt": "a", "structured_outputs": {"regex": "[a-z]+"}}
        whole = await client.post("/v1/completions", json=held)
        assert (whole.status_code, error_of(whole)["code"]) == (400, "grammar_too_complex")
        assert "at token 2" in error_of(whole)["message"]
        free = await client.post("/v1/completions", json={"prompt": "a"})
        assert free.status_code == 500


async def test_metrics_are_of_the_moment_even_if_the_scheduler_says_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh_gateway.gateway_session.REFRESH_LIMIT_S", 30.0)
    async with ready_gateway(model) as (client, mesh, _):
        bounds = (("_bucket", {"model_name": "m", "le": "+Inf"}, 3.0), ("_sum", {"model_name": "m"}, 17.0))
        steps = MetricFamily("pdmesh:iteration_tokens_total", "Tokens of a step", "histogram", bounds)
        [instance] = READY.instances
        busy = msgspec.structs.replace(instance, num_taken_blocks=50, block_size=16)
        mesh.state = msgspec.structs.replace(
            READY, instances=(busy,), num_waiting=3, num_parked=1, max_model_len=400, metrics=(steps,)
        )
        text = ""
        for _ in range(4):  # the scheduler tells nothing of it by itself; answers from before may be under way
            text = (await client.get("/metrics")).text
            if 'kv_cache_usage_perc{model_name="tiny"} 0.5' in text:
                break
        for line in (
            'kv_cache_usage_perc{model_name="tiny"} 0.5',
            'num_requests_waiting_by_reason{model_name="tiny",reason="capacity"} 2.0',
            'num_requests_waiting_by_reason{model_name="tiny",reason="deferred"} 1.0',
            'iteration_tokens_total_sum{model_name="m"} 17.0',
            'cache_config_info{kv_cache_max_concurrency="4.00",kv_cache_size_tokens="1600",num_gpu_blocks="100"} 1.0',
        ):
            assert f"\npdmesh:{line}\n" in text
            assert f"\nvllm:{line}\n" in text
        monkeypatch.setattr("pdmesh_gateway.gateway_session.REFRESH_LIMIT_S", 0.01)
        mesh.answers_heartbeats = False
        mesh.state = READY
        assert '\nvllm:kv_cache_usage_perc{model_name="tiny"} 0.5\n' in (await client.get("/metrics")).text
