"""Fields of requests are obeyed, refused by name, or ignored and named, in every dialect and at any depth."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdmesh.errors import RequestRejected
from pdmesh_gateway.answer_grammars import asked_for
from pdmesh_gateway.http import unknown
from pdmesh_gateway.http.body import INLINE_BYTES, decode_body
from pdmesh_gateway.http.messages.messages_protocol import CountTokensRequest, MessagesRequest
from pdmesh_gateway.http.messages.messages_requests import fields_of as fields_of_messages
from pdmesh_gateway.http.responses.responses_protocol import InputTokensRequest, ResponsesRequest
from pdmesh_gateway.http.responses.responses_requests import fields_of as fields_of_responses
from pdmesh_gateway.http.unknown import OTHERS
from pdmesh_gateway.protocol.chat_protocol import ChatRequest
from pdmesh_gateway.protocol.completions_protocol import CompletionRequest
from pdmesh_gateway.protocol.embeddings_protocol import EmbeddingRequest
from pdmesh_gateway.protocol.tokens_protocol import DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hi"}]

#: The fields that each request needs.
NEEDED: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {"model": "tiny", "messages": HELLO},
    CompletionRequest: {"model": "tiny", "prompt": "Hi"},
    ResponsesRequest: {"model": "tiny", "input": "Hi"},
    MessagesRequest: {"model": "tiny", "messages": HELLO, "max_tokens": 4},
    EmbeddingRequest: {"model": "tiny", "input": "Hi"},
    TokenizeRequest: {"model": "tiny", "prompt": "Hi"},
    DetokenizeRequest: {"model": "tiny", "tokens": [1]},
    CountTokensRequest: {"model": "tiny", "messages": HELLO},
    InputTokensRequest: {"model": "tiny", "input": "Hi"},
}


async def decoded(
    kind: type[msgspec.Struct], fields: dict[str, Any], *, padding: int = 0
) -> tuple[Any, tuple[str, ...]]:
    body = json.dumps({**NEEDED[kind], **fields}).encode() + b" " * padding
    return await decode_body(kind, body, max_values=1_000_000)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
#: Fields that change how an answer is drawn, or its form, and that only some endpoints have.
DRAWING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "max_completion_tokens": 5,
    "n": 2,
    "best_of": 2,
    "logit_bias": {"5": 1},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 2,
    "ignore_eos": True,
    "logprobs": True,
    "stop_token_ids": [5],
    "bad_words": ["a"],
    "allowed_token_ids": [5],
    "truncate_prompt_tokens": 5,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
    "echo": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "thinking_token_budget": 0,
    "reasoning_effort": "low",
    "cache_salt": "a",
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "dimensions": 8,
    "documents": [{"text": "a"}],
}

#: request type → fields that it refuses, beside those of other servers
REFUSED: dict[type[msgspec.Struct], dict[str, Any]] = {
    ResponsesRequest: {**DRAWING, "max_tokens": 5, "messages": HELLO, "prompt": "a", "system": "a", "thinking": {}},
    MessagesRequest: {
        **{name: value for name, value in DRAWING.items() if name != "output_format"},
        **{"stop": ["a"], "min_p": 0.1, "repetition_penalty": 1.2, "max_output_tokens": 5, "instructions": "a"},
        **{"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "input": "a", "prompt": "a"},
        **{"chat_template_kwargs": {"a": 1}, "previous_response_id": "a", "include": ["a"], "functions": [{}]},
    },
    ChatRequest: {
        **{"output_format": {"type": "json_schema", "schema": SCHEMA}, "max_output_tokens": 5, "stop_sequences": ["a"]},
        **{"output_config": {"effort": "low"}, "system": "a", "instructions": "a", "input": "a", "prompt": "a"},
        **{"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "thinking": {"type": "enabled"}},
        **{"dimensions": 8, "background": True, "include": ["a"], "tokens": [1], "encoding_format": "base64"},
    },
    CompletionRequest: {
        **{"messages": HELLO, "max_output_tokens": 5, "stop_sequences": ["a"], "tools": [{"name": "f"}], "system": "a"},
        **{"tool_choice": "required", "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "input": "a"},
        **{"output_format": {"type": "json_schema"}, "top_logprobs": 2, "suffix": "a", "thinking_token_budget": 5},
    },
    EmbeddingRequest: {"messages": HELLO, "prompt": "a", "tools": [{"name": "f"}], "system": "a", "instructions": "a"},
    TokenizeRequest: {"input": "a", "instructions": "a", "system": "a", "text": {}, "previous_response_id": "a"},
    CountTokensRequest: {"input": "a", "instructions": "a", "prompt": "a", "chat_template_kwargs": {"a": 1}},
    InputTokensRequest: {"messages": HELLO, "system": "a", "prompt": "a", "documents": [{}], "chat_template": "a"},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, fields in REFUSED.items() for name, value in fields.items()],
    ids=[f"{kind.__name__}-{name}" for kind, fields in REFUSED.items() for name in fields],
)
async def test_a_field_that_another_endpoint_obeys_is_refused_by_name(
    kind: type[msgspec.Struct], name: str, value: Any
) -> None:
    for padding in (0, INLINE_BYTES):
        with pytest.raises(RequestRejected, match=f"`{name}` is not supported by this server") as refused:
            await decoded(kind, {name: value}, padding=padding)
        assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("kind", NEEDED)
@pytest.mark.parametrize("name", sorted(OTHERS))
async def test_a_field_of_other_servers_is_refused_unless_it_asks_for_nothing(
    kind: type[msgspec.Struct], name: str
) -> None:
    with pytest.raises(RequestRejected, match=f"`{name}` is not supported by this server"):
        await decoded(kind, {name: "no such value"})
    for value in (None, *OTHERS[name]):
        assert (await decoded(kind, {name: value}))[1] == ()


def test_the_list_that_is_kept_by_hand_has_no_field_of_ours() -> None:
    ours = {name for kind in NEEDED for name in kind.__struct_fields__}
    assert ours.isdisjoint(OTHERS)


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, "max_completion_tokens", "max_output_tokens"),
        (ResponsesRequest, "response_format", "text"),
        (ResponsesRequest, "structured_outputs", "text"),
        (ResponsesRequest, "guided_json", "text"),
        (ResponsesRequest, "reasoning_effort", "reasoning"),
        (ResponsesRequest, "messages", "input"),
        (ResponsesRequest, "system", "instructions"),
        (MessagesRequest, "max_output_tokens", "max_tokens"),
        (MessagesRequest, "stop", "stop_sequences"),
        (MessagesRequest, "response_format", "output_config"),
        (MessagesRequest, "instructions", "system"),
        (MessagesRequest, "enable_thinking", "thinking"),
        (MessagesRequest, "functions", "tools"),
        (ChatRequest, "max_output_tokens", "max_tokens"),
        (ChatRequest, "output_format", "response_format"),
        (ChatRequest, "stop_sequences", "stop"),
        (ChatRequest, "thinking", "chat_template_kwargs"),
        (ChatRequest, "function_call", "tool_choice"),
        (CompletionRequest, "n_predict", "max_tokens"),
        (ChatRequest, "format", "structured_outputs"),
        (ChatRequest, "stopping_strings", "stop"),
        (ChatRequest, "min_new_tokens", "min_tokens"),
        (MessagesRequest, "system_prompt", "system"),
        (CompletionRequest, "messages", "prompt"),
        (EmbeddingRequest, "prompt", "input"),
    ],
)
async def test_a_refusal_names_what_the_endpoint_has_instead(
    kind: type[msgspec.Struct], name: str, instead: str
) -> None:
    with pytest.raises(RequestRejected, match=f"`{name}` is not supported by this server. Use `{instead}`.$"):
        await decoded(kind, {name: "x"})


NOTHING: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "bad_words": [],
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "response_format": {"type": "text"},
    "structured_outputs": {},
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
    "encoding_format": "float",
    "truncate_prompt_tokens": None,
}


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
async def test_values_that_ask_for_nothing_pass(kind: type[msgspec.Struct]) -> None:
    fields = {name: value for name, value in NOTHING.items() if name != "logprobs" or kind is not CompletionRequest}
    assert (await decoded(kind, fields))[1] == ()


@pytest.mark.parametrize("kind", [MessagesRequest, ResponsesRequest, ChatRequest])
async def test_bookkeeping_of_other_endpoints_is_ignored_and_named(kind: type[msgspec.Struct]) -> None:
    fields = {
        "user": "me",
        "store": True,
        "verbosity": "low",
        "prompt_cache_key": "a",
        "client_metadata": {"a": "b"},
        "max_tool_calls": 3,
        "truncation": "auto",
        "service_tier": "auto",
        "stream_options": {"include_usage": True},
        "request_id": "a",
        "colour": "red",
    }
    _, ignored = await decoded(kind, fields)
    assert ignored == tuple(name for name in fields if name not in kind.__struct_fields__)


@pytest.mark.parametrize("kind", [CountTokensRequest, InputTokensRequest, TokenizeRequest, EmbeddingRequest])
async def test_a_request_that_draws_nothing_may_say_how_to_draw(kind: type[msgspec.Struct]) -> None:
    """Clients count the tokens of the very body that they are about to send."""
    fields = {"temperature": 0.5, "stream": True, "stop": ["a"], "n": 2, "logit_bias": {"1": 1}, "metadata": {}}
    _, ignored = await decoded(kind, fields)
    assert set(ignored) == fields.keys()


def chat(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **message}]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


#: request type, fields, path of the refused one, hint
REFUSED_WITHIN: list[tuple[type[msgspec.Struct], dict[str, Any], str, str]] = [
    (ChatRequest, {"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex", ""),
    (ChatRequest, {"response_format": {"type": "json_object", "grammar": "a"}}, "response_format.grammar", ""),
    (CompletionRequest, {"response_format": {"type": "json_object", "value": {}}}, "response_format.value", ""),
    (ChatRequest, {"response_format": {"type": "json_object", "pattern": "a"}}, "response_format.pattern", ""),
    (ChatRequest, {"structured_outputs": {"json_schema": {}}}, "structured_outputs.json_schema", "json"),
    (CompletionRequest, {"structured_outputs": {"schema": {}}}, "structured_outputs.schema", "json"),
    (
        ResponsesRequest,
        {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
        "text.format.json_schema",
        "schema",
    ),
    (ResponsesRequest, {"text": {"format": {"type": "json_object", "regex": "a"}}}, "text.format.regex", ""),
    (ResponsesRequest, {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", ""),
    (MessagesRequest, {"thinking": {"type": "enabled", "max_tokens": 5}}, "thinking.max_tokens", ""),
    (
        MessagesRequest,
        {"output_config": {"format": {"type": "json_schema", "regex": "a"}}},
        "output_config.format.regex",
        "",
    ),
    (
        MessagesRequest,
        {"output_format": {"type": "json_schema", "json_schema": {}}},
        "output_format.json_schema",
        "schema",
    ),
    (ChatRequest, chat({"prefix": True}), "messages[0].prefix", ""),
    (ChatRequest, chat({"partial": True}), "messages[0].partial", ""),
    (ChatRequest, chat({"images": ["a"]}), "messages[0].images", ""),
    (MessagesRequest, chat({"prefix": True}), "messages[0].prefix", ""),
    (TokenizeRequest, chat({"prefix": True}), "messages[0].prefix", ""),
    (CountTokensRequest, chat({"partial": True}), "messages[0].partial", ""),
    (ResponsesRequest, {"input": [*HELLO, {**HELLO[0], "prefix": True}]}, "input[1].prefix", ""),
    (InputTokensRequest, {"input": [{"type": "message", **HELLO[0], "partial": True}]}, "input[0].partial", ""),
    (ChatRequest, function(input_schema={}), "tools[0].function.input_schema", "parameters"),
    (TokenizeRequest, function(input_schema={}), "tools[0].function.input_schema", "parameters"),
    (
        ResponsesRequest,
        {"tools": [{"type": "function", "name": "f", "input_schema": {}}]},
        "tools[0].input_schema",
        "parameters",
    ),
    (
        InputTokensRequest,
        {"tools": [{"type": "function", "name": "f", "input_schema": {}}]},
        "tools[0].input_schema",
        "parameters",
    ),
    (MessagesRequest, {"tools": [{"name": "f", "parameters": {}}]}, "tools[0].parameters", "input_schema"),
    (CountTokensRequest, {"tools": [{"name": "f", "parameters": {}}]}, "tools[0].parameters", "input_schema"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "path", "instead"), REFUSED_WITHIN, ids=[str(i) for i in range(len(REFUSED_WITHIN))]
)
async def test_a_field_within_that_changes_the_answer_is_refused_by_its_path(
    kind: type[msgspec.Struct], fields: dict[str, Any], path: str, instead: str
) -> None:
    for padding in (0, INLINE_BYTES):
        with pytest.raises(RequestRejected) as refused:
            await decoded(kind, fields, padding=padding)
        hint = f" Use `{instead}`." if instead else ""
        assert refused.value.message == f"`{path}` is not supported by this server.{hint}"
        assert (refused.value.status, refused.value.param) == (400, path)


#: request type, fields, the names of the ignored ones
IGNORED_WITHIN: list[tuple[type[msgspec.Struct], dict[str, Any], str]] = [
    (ChatRequest, chat({"annotations": [], "id": "m", "refusal": None}), "messages.annotations messages.id"),
    (ChatRequest, {"messages": [{**HELLO[0], "weight": 1}] * 3}, "messages.weight"),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}] * 2}]},
        "messages.content.cache_control",
    ),
    (
        ChatRequest,
        {"response_format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}},
        "response_format.name response_format.strict",
    ),
    (
        ChatRequest,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "title": "t"}}},
        "response_format.json_schema.title",
    ),
    (ChatRequest, {"stream": True, "stream_options": {"include_timing": True}}, "stream_options.include_timing"),
    (CompletionRequest, {"stream": True, "stream_options": {"include_timing": True}}, "stream_options.include_timing"),
    (ResponsesRequest, {"stream": True, "stream_options": {"include_timing": True}}, "stream_options.include_timing"),
    (
        ChatRequest,
        {"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f", "examples": []}}]},
        "tools.cache_control tools.function.examples",
    ),
    (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools.defer_loading"),
    (ResponsesRequest, {"reasoning": {"effort": "low", "generate_summary": "auto"}}, "reasoning.generate_summary"),
    (ResponsesRequest, {"text": {"format": {"type": "text"}, "voice": "x"}}, "text.voice"),
    (MessagesRequest, {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools.defer_loading"),
    (MessagesRequest, {"output_config": {"effort": "low", "task_budget": {}}}, "output_config.task_budget"),
    (MessagesRequest, {"tool_choice": {"type": "auto", "colour": 1}}, "tool_choice.colour"),
    (MessagesRequest, chat({"content": [{"type": "text", "text": "a", "colour": 1}]}), "messages.content.colour"),
    (CountTokensRequest, {"system": [{"type": "text", "text": "a", "colour": 1}]}, "system.colour"),
    (ResponsesRequest, {"input": [{**HELLO[0], "colour": 1}] * 2}, "input.colour"),
    (
        InputTokensRequest,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "colour": 1}]}]},
        "input.content.colour",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "names"), IGNORED_WITHIN, ids=[str(i) for i in range(len(IGNORED_WITHIN))])
async def test_other_fields_within_are_ignored_and_named(
    kind: type[msgspec.Struct], fields: dict[str, Any], names: str
) -> None:
    for padding in (0, INLINE_BYTES):
        assert (await decoded(kind, fields, padding=padding))[1] == tuple(names.split())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessagesRequest, chat({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]})),
        (MessagesRequest, {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
        (MessagesRequest, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (MessagesRequest, {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 3}]}),
        (ChatRequest, {"tools": [{"type": "web_search", "user_location": {}}]}),
        (ResponsesRequest, {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}),
        (ResponsesRequest, {"input": [{"type": "web_search_call", "id": "w", "action": {"query": "a"}}]}),
        (
            ResponsesRequest,
            {
                "input": [
                    {
                        **{"type": "message", "id": "m", "role": "assistant", "status": "completed"},
                        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
                    }
                ]
            },
        ),
    ],
)
async def test_what_ordinary_clients_send_is_not_named(kind: type[msgspec.Struct], fields: dict[str, Any]) -> None:
    assert (await decoded(kind, fields))[1] == ()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessagesRequest, {"speed": "fast"}),
        (ChatRequest, {"speed": "fast"}),
        (ChatRequest, {"models": ["a", "b"]}),
        (ChatRequest, {"mode": "chat"}),
        (CompletionRequest, {"mode": "chat"}),
        (ResponsesRequest, {"mode": "chat"}),
        (MessagesRequest, {"mode": "chat"}),
        (EmbeddingRequest, {"mode": "chat"}),
        (ChatRequest, {"users": ["a"]}),
        (ChatRequest, {"users": "a"}),
        (ResponsesRequest, {"tool": {"name": "f"}}),
        (ChatRequest, {"tool": "f"}),
        (ChatRequest, {"request_ids": "a"}),
        (EmbeddingRequest, {"dimension": "all"}),
        (ChatRequest, {"max_tokens": 5, "maxTokens": 5}),
        (ChatRequest, {"temperatur": "warm"}),
        (CountTokensRequest, {"tool": "f"}),
    ],
    ids=str,
)
async def test_a_name_that_resembles_ours_is_not_misspelt_if_its_value_does_not_fit(
    kind: type[msgspec.Struct], fields: dict[str, Any]
) -> None:
    _, ignored = await decoded(kind, fields)
    assert ignored == tuple(name for name in fields if name not in kind.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "fields", "meant"),
    [
        (ChatRequest, {"maxTokens": 5}, "max_tokens"),
        (ChatRequest, {"max-tokens": 5.0}, "max_tokens"),
        (CompletionRequest, {"temprature": 1}, "temperature"),
        (ResponsesRequest, {"max_output_token": 5}, "max_output_tokens"),
        (ResponsesRequest, {"instruction": "a"}, "instructions"),
        (MessagesRequest, {"stopSequences": ["a"]}, "stop_sequences"),
        (MessagesRequest, {"toolchoice": {"type": "any"}}, "tool_choice"),
        (EmbeddingRequest, {"dimension": 8}, "dimensions"),
        (ChatRequest, {"responseFormat": {"type": "json_object"}}, "response_format"),
        (ChatRequest, {"logits_bias": {"5": 1}}, "logit_bias"),
        (TokenizeRequest, {"add_special_token": False}, "add_special_tokens"),
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"schema_": {}}}}, "schema"),
        (ChatRequest, {"response_format": {"type": "json_schema", "jsonSchema": {"schema": {}}}}, "json_schema"),
        (ChatRequest, {"stream_options": {"includeUsage": True}}, "include_usage"),
        (ChatRequest, function(paramters=SCHEMA), "parameters"),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "parameter": SCHEMA}]}, "parameters"),
        (MessagesRequest, {"tools": [{"name": "f", "inputSchema": SCHEMA}]}, "input_schema"),
    ],
    ids=str,
)
async def test_a_misspelt_field_is_refused_with_the_right_name(
    kind: type[msgspec.Struct], fields: dict[str, Any], meant: str
) -> None:
    with pytest.raises(
        RequestRejected, match=rf"Unrecognized request argument supplied: .*\. Did you mean `{meant}`\?$"
    ):
        await decoded(kind, fields)


WHOLE: list[tuple[type[msgspec.Struct], dict[str, Any], Any]] = [
    (ChatRequest, {"max_tokens": 16.0}, 16),
    (ChatRequest, {"max_completion_tokens": 1e3}, 1000),
    (ChatRequest, {"n": 2.0}, 2),
    (ChatRequest, {"top_k": -1.0}, -1),
    (ChatRequest, {"seed": 7.0}, 7),
    (ChatRequest, {"top_logprobs": 3.0}, 3),
    (ChatRequest, {"min_tokens": 0.0}, 0),
    (ChatRequest, {"stop_token_ids": [5.0, 6]}, [5, 6]),
    (CompletionRequest, {"max_tokens": 16.0}, 16),
    (CompletionRequest, {"logprobs": 2.0}, 2),
    (CompletionRequest, {"prompt": [5.0, 6]}, [5, 6]),
    (CompletionRequest, {"prompt": [[5.0], [6, 7.0]]}, [[5], [6, 7]]),
    (ResponsesRequest, {"max_output_tokens": 16.0}, 16),
    (ResponsesRequest, {"top_logprobs": 2.0}, 2),
    (MessagesRequest, {"max_tokens": 16.0}, 16),
    (MessagesRequest, {"top_k": 5.0}, 5),
    (EmbeddingRequest, {"dimensions": 8.0}, 8),
    (EmbeddingRequest, {"input": [5.0, 6.0]}, [5, 6]),
    (DetokenizeRequest, {"tokens": [5.0, 6]}, [5, 6]),
]


@pytest.mark.parametrize(("kind", "fields", "value"), WHOLE, ids=[str(i) for i in range(len(WHOLE))])
async def test_whole_numbers_may_be_written_as_floats(
    kind: type[msgspec.Struct], fields: dict[str, Any], value: Any
) -> None:
    [name] = fields
    for padding in (0, INLINE_BYTES):
        got = getattr((await decoded(kind, fields, padding=padding))[0], name)
        assert json.dumps(got) == json.dumps(value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"max_tokens": 16.5}),
        (ChatRequest, {"max_tokens": "16"}),
        (CompletionRequest, {"prompt": [5.0, 6.5]}),
        (ResponsesRequest, {"max_output_tokens": 0.1}),
        (MessagesRequest, {"max_tokens": 1.5, "colour": 1}),
        (EmbeddingRequest, {"dimensions": True}),
    ],
)
async def test_other_numbers_are_refused_by_name(kind: type[msgspec.Struct], fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match=rf"Invalid value for `{next(iter(fields))}"):
        await decoded(kind, fields)


async def test_free_values_stay_as_they_are_written() -> None:
    """A template may print them."""
    fields = {
        "max_tokens": 4.0,
        "chat_template_kwargs": {"a": 1.0},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": 1.0}}}],
        "response_format": {"type": "json_object", "schema": {"const": 1.0}},
        "temperature": 1.0,
    }
    request, _ = await decoded(ChatRequest, fields)
    for value in (request.chat_template_kwargs, request.tools, request.response_format.schema, request.temperature):
        assert ("1.0" in json.dumps(value), type(request.max_tokens)) == (True, int)


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\ud83d", "\ufffd"),
        (r"\ud83d in the middle", "\ufffd in the middle"),
        (r"\ud83d\u0041", "\ufffdA"),
        (r"\ude00", "\ufffd"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\\\ud83d", "\\\ufffd"),
        (r"\uD83D\uDE00 \uD83D", "\U0001f600 \ufffd"),
        (r"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (r"\ud83d\"", '\ufffd"'),
    ],
)
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_half_a_surrogate_pair_is_read_as_a_replacement_character(escaped: str, text: str, padding: int) -> None:
    """JavaScript's clients send what is left of an emoji that they cut."""

    async def value_of(kind: type[msgspec.Struct], template: str) -> Any:
        body = (template.replace("TEXT", escaped) + " " * padding).encode()
        return (await decode_body(kind, body, max_values=100))[0]

    assert (await value_of(CompletionRequest, '{"prompt": "TEXT"}')).prompt == text
    if not padding:  # NaN is no JSON: it is read in small bodies, so that its field can be named
        assert (await value_of(CompletionRequest, '{"temperature": NaN, "prompt": "TEXT"}')).prompt == text
    chat_body = '{"colour": 1, "messages": [{"role": "user", "content": "TEXT"}]}'
    assert (await value_of(ChatRequest, chat_body)).messages[0].content == text
    assert (await value_of(ResponsesRequest, '{"input": [{"role": "user", "content": "TEXT"}]}')).input[0][
        "content"
    ] == text
    anthropic = (
        '{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}]}'
    )
    assert (await value_of(MessagesRequest, anthropic)).messages[0].content[0].text == text
    assert (await value_of(EmbeddingRequest, '{"input": ["TEXT", "a"]}')).input == [text, "a"]


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\\ud83d', b'{"prompt": "\\ud8', b'{"prompt": "\\uzzzz"}', b'{"prompt": "a']
)
async def test_a_text_that_is_cut_is_still_no_json(body: bytes) -> None:
    with pytest.raises(RequestRejected, match="could not parse the JSON") as refused:
        await decode_body(CompletionRequest, body, max_values=9)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"type": "json_schema"}, "`{}.schema` is missing."),
        ({"type": "json_schema", "schema": [1]}, "`{}` has a schema that is not a JSON object."),
        ({"type": "json_schema", "schema": "{"}, "`{}` has a schema that is not JSON: "),
        (
            {"type": "json_schema", "schema": {"items": {"minItems": 10**6}}},
            "`{}` has a schema whose `minItems` is over",
        ),
        ({"type": "json_schema", "schema": {"const": "x" * 70_000}}, "`{}` has a schema of over"),
        ({"type": "xml"}, "`{}.type` is 'xml': use "),
    ],
)
@pytest.mark.parametrize("where", ["text.format", "output_config.format", "output_format"])
async def test_errors_of_a_format_name_the_dialects_own_field(wanted: dict[str, Any], message: str, where: str) -> None:
    outer, _, inner = where.partition(".")
    fields = {outer: {inner: wanted} if inner else wanted}
    kind = ResponsesRequest if outer == "text" else MessagesRequest
    request, _ = await decoded(kind, fields)

    def grammar() -> None:
        asked_for(fields_of_responses(request) if outer == "text" else fields_of_messages(request))

    with pytest.raises(RequestRejected) as refused:
        grammar()
    assert refused.value.message.startswith(message.format(where))
    assert refused.value.param == where


async def test_a_json_object_of_responses_is_held_to_its_schema() -> None:
    wanted = {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}
    request, ignored = await decoded(ResponsesRequest, wanted)
    asked = asked_for(fields_of_responses(request))
    assert asked is not None
    assert (asked.param, asked.schema, ignored) == ("text.format", SCHEMA, ())


async def test_long_names_of_unknown_fields_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def resembling(name: str, _kind: object) -> tuple[()]:
        looked_up.append(name)
        return ()

    monkeypatch.setattr(unknown, "_resembling", resembling)
    await decoded(CompletionRequest, {"x" * 50_000: 1})
    assert [len(name) for name in looked_up] == [100]
