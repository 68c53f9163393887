"""Anthropic's dialect: what requests come to, and answers whole and streamed."""

from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pdmesh.errors import RequestRejected
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.dialects import MESSAGES
from pdmesh_gateway.http.messages.anthropic_errors import error_body, status_of
from pdmesh_gateway.http.messages.messages_protocol import CountTokensRequest, MessagesRequest
from pdmesh_gateway.http.messages.messages_rendering import MessagesRendering
from pdmesh_gateway.http.messages.messages_requests import conversation_of, fields_of
from pdmesh_gateway.http.unknown import known_fields
from pdmesh_gateway.items import ChoiceItems, ItemEvent
from pdmesh_testing.answers import EndedGeneration, answer_events, job_in
from pdmesh_testing.examples import examples
from pdmesh_testing.sse import named_events

JOB = job_in(MESSAGES)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Answered(ChoiceItems):
    """A choice whose items come all at once."""

    def __init__(self, events: list[ItemEvent]) -> None:
        super().__init__()
        self.events = events

    def advance(self, delta: Delta) -> list[ItemEvent]:
        return self.events


def rendering(answer: ChoiceItems | None = None, *, is_clamped: bool = False) -> MessagesRendering:
    return MessagesRendering([answer or ChoiceItems()], model="m", job=JOB, is_clamped=is_clamped)


def streamed(events: list[ItemEvent], **options: Any) -> Message:
    """What the client's own accumulation makes of a stream, each event of which is valid by its types."""
    generation: Any = EndedGeneration(JOB)
    out = rendering(**options)
    sse = out.head(generation)
    for event in events:
        sse += out.events([event], Delta(index=0), generation)
    sse += out.tail(generation)
    snapshot: Any = None
    bufs: dict[int, bytes] = {}
    names: list[str] = []
    for name, data in named_events(sse.decode()):
        names.append(name)
        event = EVENT.validate_python(data, strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=bufs)
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks = [name.removeprefix("content_block_") for name in names[1:-2]]
    open_block = None
    for name in blocks:  # one after the other
        assert (open_block is None) == (name == "start")
        open_block = None if name == "stop" else name
    assert open_block is None
    return Message.model_validate(snapshot.to_dict())


def whole(events: list[ItemEvent], **options: Any) -> Message:
    generation: Any = EndedGeneration(JOB)
    response = rendering(Answered(events), **options).response([Delta(index=0)], generation)
    return Message.model_validate_json(msgspec.json.encode(response), strict=True)


TEXTS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)


def cut_up(text: str) -> list[str]:
    return [text[:3], text[3:10], text[10:]]


PIECES = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning"]), TEXTS)
    | st.tuples(
        st.sampled_from(["f", "g"]),
        st.dictionaries(st.text(max_size=3), st.integers(0, 9) | st.text(max_size=5), max_size=3).map(
            lambda value: cut_up(msgspec.json.encode(value).decode())
        ),
    ),
    max_size=5,
)


@settings(max_examples=examples(60))
@given(pieces=PIECES, end=st.sampled_from([("stop", None), ("stop", "END"), ("stop", 7), ("length", None)]))
def test_streamed_and_whole_answers_are_the_same(
    pieces: list[tuple[str, list[str]]], end: tuple[str, int | str | None]
) -> None:
    events = answer_events(pieces, *end)
    assert streamed(events) == whole(events)


@pytest.mark.parametrize("num_pieces", [0, 1, 2])
def test_a_call_that_was_cut_has_what_there_is(num_pieces: int) -> None:
    events = answer_events([("f", ['{"a": "whole", "b": [1, ', '"not who'][:num_pieces])], "length", None)
    assert streamed(events) == whole(events)
    [block] = whole(events).content
    assert block.type == "tool_use"
    assert block.input == ({}, {"a": "whole", "b": [1]}, {"a": "whole", "b": [1]})[num_pieces]


@pytest.mark.parametrize(
    ("pieces", "end", "is_clamped", "stop_reason", "stop_sequence"),
    [
        ([("text", ["a"])], ("stop", None), False, "end_turn", None),
        ([("text", ["a"])], ("stop", 5), False, "end_turn", None),
        ([("text", ["a"])], ("stop", "."), False, "stop_sequence", "."),
        ([("f", ["{}"])], ("stop", None), False, "tool_use", None),
        ([("f", ["{}"])], ("length", None), False, "max_tokens", None),
        ([], ("length", None), True, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(pieces: Any, end: Any, is_clamped: bool, stop_reason: str, stop_sequence: str | None) -> None:
    message = streamed(answer_events(pieces, *end), is_clamped=is_clamped)
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)
    assert whole(answer_events(pieces, *end), is_clamped=is_clamped) == message


def request(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    return msgspec.convert(known_fields(body, MessagesRequest)[0], MessagesRequest)


def test_blocks_become_the_messages_that_templates_know() -> None:
    conversation = conversation_of(
        request(
            system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "system", "content": "And brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "c"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}},
                        {"type": "tool_use", "id": "call_2", "name": "f", "input": {"x": 2}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "one"},
                        {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "two"}]},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
        )
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert conversation.messages == [
        {"role": "system", "content": "Be kind.\nAnd brief."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", **call},
                {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": {"x": 2}}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "user", "content": "and?"},
    ]
    assert conversation.add_generation_prompt
    assert not conversation.continue_final_message


def messages_of(*contents: Any) -> list[dict[str, Any]]:
    """The messages that a user's and an assistant's contents come to, one after the other."""
    given = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return conversation_of(request(messages=given)).messages


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "Page."}


@pytest.mark.parametrize(
    ("block", "text", "skipped"),
    [
        ({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}, "", True),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "E"}],
            },
            "",
            True,
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
            },
            "",
            True,
        ),
        (
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": {
                    "type": "web_fetch_result",
                    "url": "u",
                    "content": {"type": "document", "source": TEXT_SOURCE, "title": "t"},
                },
            },
            "Page.",
            True,
        ),
        (
            {
                "type": "code_execution_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": {
                    "type": "code_execution_result",
                    "stdout": "4",
                    "stderr": "",
                    "return_code": 0,
                    "content": [],
                },
            },
            "4",
            True,
        ),
        (
            {
                "type": "text_editor_code_execution_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": {"type": "text_editor_code_execution_view_result", "file_type": "text", "content": "x = 1"},
            },
            "x = 1",
            True,
        ),
        ({"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}}, "", True),
        (
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "Found."}]},
            "Found.",
            True,
        ),
        ({"type": "compaction", "content": "What was said."}, "What was said.", True),
        ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, "", True),
        ({"type": "text", "text": "Cited.", "citations": [{"type": "web_search_result_location"}]}, "Cited.", False),
        ({"type": "redacted_thinking", "data": "x"}, "", False),
    ],
)
def test_what_servers_tools_leave_in_an_answer_is_skipped_but_for_its_text(
    block: dict[str, Any], text: str, skipped: bool
) -> None:
    given = request(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "Before."}, block]},
            {"role": "user", "content": "b"},
        ]
    )
    conversation = conversation_of(given)
    assert conversation.messages[1] == {"role": "assistant", "content": "\n".join(filter(None, ["Before.", text]))}
    assert conversation.warnings == ((f"blocks of type {block['type']} are skipped",) if skipped else ())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "tool_reference", "tool_name": "get_weather"}], "get_weather"),
        (
            [
                {
                    "type": "search_result",
                    "source": "https://docs.example",
                    "title": "Docs",
                    "content": [{"type": "text", "text": "It works."}],
                    "citations": {"enabled": True},
                }
            ],
            "Docs\nhttps://docs.example\nIt works.",
        ),
        ([{"type": "document", "source": TEXT_SOURCE, "title": "t"}], "Page."),
        ([{"type": "document", "source": {"type": "content", "content": "Inline."}}], "Inline."),
        (
            [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Inline."}]}}],
            "Inline.",
        ),
    ],
)
def test_results_of_tools_are_what_of_them_is_text(content: Any, text: str) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    *_, told = messages_of("a", [call], [{"type": "tool_result", "tool_use_id": "c", "content": content}])
    assert told == {"role": "tool", "tool_call_id": "c", "content": text}


def test_parts_of_a_turn_come_in_any_order() -> None:
    call, text = {"type": "tool_use", "id": "c", "name": "f", "input": {}}, {"type": "text", "text": "t"}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    for answer in ([text, call], [call, text], [thought, text, call], [thought, call, text]):
        for after in ([result, text], [text, result]):
            _, message, *rest = messages_of("a", answer, after)
            assert message["content"] == "t"
            assert message["tool_calls"][0]["function"]["name"] == "f"
            assert sorted(each["role"] for each in rest) == ["tool", "user"]


def test_an_answer_that_is_begun_goes_on() -> None:
    conversation = conversation_of(
        request(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "("}])
    )
    assert conversation.continue_final_message
    assert not conversation.add_generation_prompt


def test_tools_of_others_are_skipped() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    conversation = conversation_of(
        request(
            tools=[
                {"name": "f", "description": "d", "input_schema": schema},
                {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "strict": True},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            ],
            tool_choice={"type": "tool", "name": "g", "disable_parallel_tool_use": True},
        )
    )
    assert [(tool.name, tool.parameters, tool.strict) for tool in conversation.tools] == [
        ("f", schema, False),
        ("g", {"type": "object"}, True),
    ]
    assert (conversation.tool_choice.mode, conversation.tool_choice.allowed) == ("required", ("g",))
    assert not conversation.parallel_tool_calls


def test_structured_answers_and_stops() -> None:
    given_format = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": given_format, "effort": "high"}}, {"output_format": given_format}):
        wanted = fields_of(request(**fields)).response_format
        assert wanted is not None
        assert wanted.schema == {"type": "object"}
    assert fields_of(request(stop_sequences=["a", "b"])).stop == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, "must be user or assistant, got 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}, "text only"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use", "id": "a"}]}]}, "text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "text only"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "without `id` or"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                ]
            },
            "Add its tool_result",
        ),
        ({"tool_choice": {"type": "tool"}}, "`tool_choice` is 'tool'"),
        ({"output_format": {"type": "xml"}}, "use json_schema"),
        ({"stop_sequences": [" "]}, "blank"),
    ],
)
def test_what_cannot_be_understood_is_refused(fields: dict[str, Any], message: str) -> None:
    def read() -> None:
        conversation_of(request(**fields))
        fields_of(request(**fields))

    with pytest.raises(RequestRejected, match=message):
        read()


def test_counting_needs_no_max_tokens() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert conversation_of(msgspec.convert(body, CountTokensRequest)).messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("status", "code", "seen", "kind"),
    [
        (400, "invalid_value", 400, "invalid_request_error"),
        (401, "invalid_api_key", 401, "authentication_error"),
        (403, None, 403, "permission_error"),
        (404, None, 404, "not_found_error"),
        (405, None, 405, "invalid_request_error"),
        (413, None, 413, "request_too_large"),
        (429, "rate_limit_exceeded", 429, "rate_limit_error"),
        (429, "overloaded", 529, "overloaded_error"),
        (500, None, 500, "api_error"),
        (503, "unavailable", 529, "overloaded_error"),
        (504, None, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, code: str | None, seen: int, kind: str) -> None:
    error = RequestRejected("why", status=status, code=code)
    assert status_of(error) == seen
    assert msgspec.json.decode(error_body(error, "id")) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": "id",
    }
