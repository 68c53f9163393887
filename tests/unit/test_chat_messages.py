"""What chats hold: messages as OpenAI's API, and as other servers, have them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdmesh.errors import RequestRejected
from pdmesh.grammars import schema_problem
from pdmesh_gateway.grpc_chat import conversation_of
from pdmesh_gateway.http.chat_endpoint import conversation_of as chat_conversation_of
from pdmesh_gateway.http.chat_endpoint import template_messages
from pdmesh_gateway.http.messages.messages_protocol import CountTokensRequest
from pdmesh_gateway.http.messages.messages_requests import conversation_of as messages_conversation_of
from pdmesh_gateway.http.openai_tools import chat_tools
from pdmesh_gateway.http.responses.responses_protocol import ResponsesRequest
from pdmesh_gateway.http.responses.responses_requests import conversation_of as responses_conversation_of
from pdmesh_gateway.http.responses.responses_requests import items_of
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.protocol.chat_protocol import ChatMessage, ChatRequest
from pdmesh_gateway.protocol.tokens_protocol import TokenizeRequest
from pdmesh_gateway.schemas import arguments_schema, obeyed

pytestmark = pytest.mark.anyio

SAYS: dict[str, Any] = {"role": "assistant", "content": None}


def message_of(given: dict[str, Any], skipped: set[str] | None = None) -> dict[str, Any]:
    messages = msgspec.json.decode(json.dumps([given]), type=list[ChatMessage])
    [message] = template_messages(messages, set() if skipped is None else skipped)
    return message


def calling(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"q": "x', '{"q": "x'),
        ('{"q": "x"', '{"q": "x"'),
        ('{"q', '{"q'),
        ("{", "{"),
        ('{"q": "\\ud83d', '{"q": "\\ud83d'),
        ('{"q": 1}}', '{"q": 1}}'),
        ("[1, 2]", "[1, 2]"),
        ('"text"', '"text"'),
        ("look up", "look up"),
        ("", {}),
        ("null", {}),
        (None, {}),
        ("{}", {}),
        (' {"q": "x"} ', {"q": "x"}),
        ({"q": "x"}, {"q": "x"}),
        ([1, 2], "[1,2]"),
    ],
)
def test_a_call_that_was_cut_is_part_of_a_history_in_every_dialect(given: Any, arguments: Any) -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given, "status": "incomplete"}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": given}
    says, asks = {"role": "assistant", "content": [block]}, {"role": "user", "content": "a"}
    items = msgspec.convert({"input": [item]}, ResponsesRequest)
    blocks = msgspec.convert({"model": "m", "messages": [says, asks]}, CountTokensRequest)
    messages = [
        message_of({**SAYS, "tool_calls": [calling(given)]}),
        responses_conversation_of(items, items_of(items.input), lambda _: None).messages[0],
        messages_conversation_of(blocks).messages[0],
    ]
    if isinstance(given, str):
        call = pb.ToolCall(id="c", name="f", arguments=given)
        messages += conversation_of(pb.Chat(messages=[pb.Message(role="assistant", tool_calls=[call])])).messages
    assert [message["tool_calls"] for message in messages] == [[calling(arguments)]] * len(messages)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]}, {"content": "a\nNo."}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "Yes.", "refusal": None}, {"content": "Yes."}),
        ({"content": []}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "tool_calls": None, "function_call": None}, {"content": "a"}),
        ({"content": "a", "reasoning": "hm"}, {"content": "a", "reasoning_content": "hm"}),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "a"},
                ]
            },
            {"content": "a", "reasoning_content": "hm"},
        ),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "hm", "signature": "s"}]},
            {"content": "a", "reasoning_content": "hm"},
        ),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]}, {"content": "a"}),
        (
            {"function_call": {"name": "f", "arguments": '{"q": 1}'}},
            {"content": "", "tool_calls": [{**calling({"q": 1}), "id": "f"}]},
        ),
        (
            {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "text"}}]},
            {"content": "", "tool_calls": [calling({"input": "text"}, "patch")]},
        ),
        (
            {"tool_calls": [{"id": "c", "index": 0, "function": {"name": "f", "arguments": "{}"}}]},
            {"content": "", "tool_calls": [{**calling({}), "index": 0}]},
        ),
    ],
)
def test_an_answer_of_this_or_another_server_is_part_of_a_history(given: Any, expected: Any) -> None:
    assert message_of({"role": "assistant", **given}) == {"role": "assistant", **expected}


def test_the_result_of_a_call_as_it_was_before_there_were_several() -> None:
    message = message_of({"role": "function", "name": "f", "content": "r"})
    assert message == {"role": "tool", "name": "f", "tool_call_id": "f", "content": "r"}


def test_unknown_parts_of_an_answer_are_skipped_and_named() -> None:
    skipped: set[str] = set()
    message = message_of(
        {"role": "assistant", "content": [{"type": "tool_trace"}, {"type": "text", "text": "a"}]}, skipped
    )
    assert (message["content"], skipped) == ("a", {"tool_trace"})


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system", "developer"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_what_no_text_stands_for_is_refused(role: str, kind: str) -> None:
    with pytest.raises(RequestRejected, match=f"type '{kind}'; this model accepts text only"):
        message_of({"role": role, "content": [{"type": kind}]})


@pytest.mark.parametrize(
    ("function", "takes_none"),
    [
        ({"name": "now"}, True),
        ({"name": "now", "parameters": None}, True),
        ({"name": "now", "description": "The time.", "strict": True}, True),
        ({"name": "now", "parameters": {"type": "object", "properties": {}}}, True),
        ({"name": "now", "parameters": {"type": "object", "properties": {}, "required": []}}, True),
        ({"name": "now", "parameters": {"properties": {}, "type": "object", "title": "NowArguments"}}, True),
        ({"name": "now", "parameters": {"properties": {}, "$schema": "http://json-schema.org/draft-07/schema#"}}, True),
        ({"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}, True),
        ({"name": "now", "parameters": {}}, False),
        ({"name": "now", "parameters": {"type": "object"}}, False),
    ],
)
def test_a_tool_without_parameters_takes_an_empty_object(function: dict[str, Any], takes_none: bool) -> None:
    [tool], _ = chat_tools([{"type": "function", "function": function}])
    schema = obeyed(arguments_schema(tool.parameters), schema_problem).schema
    assert (schema.get("additionalProperties"), schema.get("properties")) == (
        (False, {}) if takes_none else (None, None)
    )
    assert tool.for_template()["function"]["parameters"]["type"] == "object"
    parameters = "" if (given := function.get("parameters")) is None else json.dumps(given)
    [over_grpc] = conversation_of(
        pb.Chat(messages=[pb.Message(role="user")], tools=[pb.Tool(name="now", parameters=parameters)])
    ).tools
    assert over_grpc.parameters == tool.parameters


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
async def test_no_reasoning_effort_turns_thinking_off(kind: Any, fields: Any, expected: Any) -> None:
    request = msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}, kind)
    serving: Any = SimpleNamespace(config=SimpleNamespace(max_messages=1))
    assert (await chat_conversation_of(request, request.messages, serving)).variables == expected
