"""The responses API: what requests come to, answers whole and streamed, and what is kept of them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdmesh.errors import RequestRejected
from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.answer_format import FORMATS, AnswerFormat, Calls
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.dialects import RESPONSES
from pdmesh_gateway.http.responses.background_responses import MAX_EVENT_BYTES, PIECE_BYTES, EventLog
from pdmesh_gateway.http.responses.response_store import KEPT_S, ResponseStore, StoredResponse
from pdmesh_gateway.http.responses.responses_endpoint import _begun
from pdmesh_gateway.http.responses.responses_logprobs import TextLogprobs
from pdmesh_gateway.http.responses.responses_protocol import ResponseObject, ResponsesRequest
from pdmesh_gateway.http.responses.responses_rendering import ResponsesRendering
from pdmesh_gateway.http.responses.responses_requests import (
    ItemObject,
    conversation_of,
    fields_of,
    items_of,
    num_top_logprobs_of,
)
from pdmesh_gateway.items import ChoiceItems, ItemEvent
from pdmesh_gateway.reasoning import ReasoningStart
from pdmesh_gateway.tools.format import CallableTool
from pdmesh_testing.answers import EndedGeneration, Pieces, answer_events, job_in
from pdmesh_testing.examples import examples
from pdmesh_testing.sse import named_events

JOB = job_in(RESPONSES)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def rendering(kept: list[ResponseObject] | None = None) -> ResponsesRendering:
    request = msgspec.convert({"input": "hi", "tools": [{"type": "web_search"}]}, ResponsesRequest)
    begun = _begun(request, JOB, model="m", store=True)
    return ResponsesRendering([ChoiceItems()], begun, ([] if kept is None else kept).append)


def streamed_bytes(events: list[ItemEvent]) -> str:
    generation: Any = EndedGeneration(JOB)
    out = rendering()
    sse = out.head(generation)
    for event in events:
        sse += out.events([event], Delta(index=0), generation)
    return (sse + out.tail(generation)).decode()


def checked(sse: str) -> list[Any]:
    """Events as the client's own types, each valid, numbered without gaps, and about items that are open."""
    events: list[Any] = []
    for number, (_, data) in enumerate(named_events(sse)):
        assert data["sequence_number"] == number
        events.append(EVENT.validate_python(data))
        strict = type(events[-1]).model_validate_json(msgspec.json.encode(data), strict=True)
        assert strict == events[-1]
    return events


def accumulated(events: list[Any]) -> list[dict[str, Any]]:
    """The items that a client makes of the deltas; what the ``done`` events say must be the same."""
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    text = ""
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            open_item = event.item.model_dump()
            assert (event.output_index, event.item.status) == (len(items), "in_progress")
            text = ""
            continue
        assert open_item is not None
        assert event.output_index == len(items)
        if event.type == "response.output_item.done":
            assert event.item.id == open_item["id"]
            item = event.item.model_dump()
            assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
            items.append(item)
            open_item = None
            continue
        assert event.item_id == open_item["id"]
        if event.type.endswith(".delta"):
            text += event.delta
        elif event.type.endswith("text.done"):
            assert event.text == text
        elif event.type.endswith("arguments.done"):
            assert event.arguments == text
        elif event.type == "response.content_part.done":
            assert event.part.text == text
        else:
            assert (event.type, event.part.text) == ("response.content_part.added", "")
    assert open_item is None
    return items


TEXTS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)
PIECES = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning"]), TEXTS)
    | st.tuples(st.sampled_from(["f", "g"]), st.sampled_from([['{"a":', " 1}"], ["{}"], ['{"a'], []])),
    max_size=5,
)


@settings(max_examples=examples(60))
@given(pieces=PIECES, finish_reason=st.sampled_from(["stop", "length"]))
def test_streamed_and_whole_answers_are_the_same(pieces: Pieces, finish_reason: str) -> None:
    events = answer_events(pieces, finish_reason)
    stream = checked(streamed_bytes(events))
    assert [event.type for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1].type == ("response.completed" if finish_reason == "stop" else "response.incomplete")
    items = accumulated(stream)
    last: Response = stream[-1].response
    assert [item.model_dump() for item in last.output] == items
    generation: Any = EndedGeneration(JOB)
    kept: list[ResponseObject] = []
    whole = rendering(kept)
    whole.events(events, Delta(index=0), generation)
    encoded = msgspec.json.encode(whole.ended(generation))
    assert Response.model_validate_json(encoded, strict=True) == last
    assert [msgspec.json.encode(response) for response in kept] == [encoded]
    assert stream[0].response.id == last.id == "resp_0123.abcd"


def test_what_was_cut_says_so() -> None:
    def statuses(pieces: Pieces) -> list[str | None]:
        return [item["status"] for item in accumulated(checked(streamed_bytes(answer_events(pieces, "length"))))]

    assert statuses([("reasoning", ["a"]), ("text", ["b"])]) == ["completed", "incomplete"]
    assert statuses([("f", ["{}"]), ("g", ['{"a'])]) == ["completed", "incomplete"]
    assert statuses([("f", ["{}"]), ("g", ["{}"])]) == ["completed", "completed"]


class Names:
    """A tokenizer whose tokens are called by their ids."""

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d" % token_id


@pytest.mark.parametrize("num_chars", [1, 3, 7, 50, 500])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_each_token_of_the_text_is_told_once_with_its_log_probability(num_chars: int, is_streamed: bool) -> None:
    said = ["<think>so</think>", "I look <to", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "and go on."]
    text = "".join(said)
    starts = range(0, len(text), num_chars)
    deltas = [
        Delta(index=0, text=text[at:][:num_chars], token_ids=[at], text_offsets=[at], logprobs=[TokenLogprobs(-at, ())])
        for at in starts
    ]
    end = Delta(index=0, token_ids=[999], text_offsets=[len(text)], logprobs=[None], finish_reason="stop")
    answer_format = AnswerFormat(tools=FORMATS["hermes"], reasons=True, textless_ids={})
    calls = Calls(tools=(CallableTool(name="f", schema={"type": "object"}),), required=False, most=2)
    answer = ChoiceItems(lambda writer: answer_format.parser(writer, ReasoningStart.POSSIBLE, calls))
    names: Any = Names()
    begun = _begun(msgspec.convert({"input": "hi"}, ResponsesRequest), JOB, model="m", store=False)
    kept: list[ResponseObject] = []
    out = ResponsesRendering([answer], begun, kept.append, TextLogprobs(names))
    generation: Any = EndedGeneration(JOB)
    if is_streamed:
        sse = b"".join([out.head(generation), *(out.chunk(delta, generation) for delta in [*deltas, end])])
        events = checked((sse + out.tail(generation)).decode())
        response = events[-1].response
        told = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
        done = [token for event in events if event.type == "response.output_text.done" for token in event.logprobs]
        assert [token.token for token in told] == [token.token for token in done]
    else:
        collected = Delta(index=0, text=text)
        for delta in [*deltas, end]:
            collected.extend(delta)
        response = Response.model_validate_json(msgspec.json.encode(out.response([collected], generation)), strict=True)
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    texts = [part for part in parts if part.type == "output_text"]
    assert [part.text for part in texts] == [said[1], said[3]]
    first, last = len(said[0]), len(text) - len(said[3])
    one = [at for at in starts if first - num_chars < at < first + len(said[1])]
    expected = [one, [at for at in starts if at > last - num_chars and at not in one]]
    assert [[-token.logprob for token in part.logprobs or ()] for part in texts] == expected


def test_a_stream_that_fails_says_so_twice() -> None:
    generation: Any = EndedGeneration(JOB)
    out = rendering()
    sse = out.head(generation)
    for event in answer_events([("text", ["ab"])], "stop")[:2]:
        sse += out.events([event], Delta(index=0), generation)
    sse += out.failure(RequestRejected("it broke", status=500, code="x"))
    *_, error, failed = checked(sse.decode())
    assert (error.type, error.message, error.code) == ("error", "it broke", "x")
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "it broke")


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "hi", **fields}, ResponsesRequest)


def conversation(**fields: Any) -> Any:
    asked = request(**fields)
    return conversation_of(asked, items_of(asked.input), lambda _: None)


def test_items_become_the_messages_that_templates_know() -> None:
    kept: dict[str, ItemObject] = {"msg_1": {"type": "message", "role": "assistant", "content": "kept"}}
    asked = request(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "And brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "item_reference", "id": "msg_1"},
            {"role": "user", "content": "b"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "text"},
            {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": '{"x'},
        ],
    )
    built = conversation_of(asked, items_of(asked.input), kept.get)
    assert built.messages == [
        {"role": "system", "content": "Be kind.\nAnd brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "kept"},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": {"input": "text"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "f", "arguments": '{"x'}}],
        },
    ]


def test_a_developer_stays_one_until_a_template_says_otherwise() -> None:
    told = [{"role": "user", "content": "a"}, {"role": "developer", "content": "Be brief."}]
    assert conversation(input=told).messages == told
    assert conversation(input=[{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}]).messages == [
        {"role": "developer", "content": "a\nb"}
    ]


def test_items_of_a_turn_come_in_any_order() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}
    for items in ([call, text], [text, call]):
        [message] = conversation(input=items).messages
        assert (message["content"], len(message["tool_calls"])) == ("t", 1)


@pytest.mark.parametrize(
    ("parts", "text", "warned"),
    [
        ([{"type": "refusal", "refusal": "No."}], "No.", False),
        (
            [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "No."}],
            "a\nNo.",
            False,
        ),
        ([{"type": "text", "text": "a"}], "a", False),
        (
            [{"type": "widget", "content": [{"type": "text", "text": "in"}]}, {"type": "text", "text": "a"}],
            "in\na",
            True,
        ),
        ([{"type": "tool_trace"}], "", True),
        ([], "", False),
    ],
)
def test_parts_of_an_answer_are_its_text(parts: list[dict[str, Any]], text: str, warned: bool) -> None:
    built = conversation(input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}])
    assert built.messages[1] == {"role": "assistant", "content": text}
    assert bool(built.warnings) is warned


def test_tools_choices_and_forms() -> None:
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "web_search"},
    ]
    built = conversation(tools=tools, tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert [(tool.name, tool.parameters, tool.strict) for tool in built.tools] == [("f", {"type": "object"}, True)]
    assert (built.tool_choice.mode, built.tool_choice.allowed, built.tool_choice.is_named) == ("required", ("f",), True)
    assert not built.parallel_tool_calls
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert conversation(tools=tools, tool_choice=some).tool_choice.allowed == ("f",)
    assert conversation(reasoning={"effort": "none"}).variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    wanted = fields_of(request(text={"format": schema})).response_format
    assert wanted is not None
    assert wanted.json_schema is not None
    assert wanted.json_schema.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [{"role": "robot", "content": "a"}]}, r"`input\[0\].role` must be one of"),
        ({"input": [{"role": "user"}]}, "must be a string or a list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "text only"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id` must be a string"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "call_id` must be a string"),
        ({"input": [{"type": "item_reference", "id": "gone"}]}, "Item with id 'gone' not found"),
        ({"tools": [{"type": "function"}]}, "missing required field `name`"),
        ({"tool_choice": {"type": "web_search"}}, "`tool_choice` must be"),
        ({"top_logprobs": 21}, "`top_logprobs` must be at most 20"),
    ],
)
def test_what_cannot_be_understood_is_refused(fields: dict[str, Any], message: str) -> None:
    def read() -> None:
        conversation(**fields)
        fields_of(request(**fields))
        num_top_logprobs_of(request(**fields))

    with pytest.raises(RequestRejected, match=message):
        read()


def kept(response_id: str, num_bytes: int = 0) -> StoredResponse:
    return StoredResponse(
        response_id=response_id,
        thread=response_id,
        response=b"x" * num_bytes,
        input_items=b"[]",
        conversation=b"[]",
        output_items={f"msg_{response_id}": b"{}"},
    )


def test_each_key_sees_its_own_responses() -> None:
    store = ResponseStore(100_000, clock=lambda: 0.0)
    store.put("alice", kept("a"))
    assert store.get("alice", "a") == kept("a")
    assert store.item("alice", "msg_a") == b"{}"
    assert store.get("bob", "a") is None
    assert store.item("bob", "msg_a") is None
    store.put("alice", kept("a"))  # as a response that is cancelled when it has just ended
    assert store.num_bytes == kept("a").num_bytes
    assert not store.delete("bob", "a")
    assert store.delete("alice", "a")
    assert store.get("alice", "a") is None
    assert store.num_bytes == 0


def test_responses_are_kept_for_an_hour() -> None:
    now_s = 0.0
    store = ResponseStore(100_000, clock=lambda: now_s)
    store.put("alice", kept("a"))
    now_s = KEPT_S + 1
    assert store.get("alice", "a") is None
    assert store.item("alice", "msg_a") is None
    store.put("bob", kept("b"))
    assert store.num_bytes == kept("b").num_bytes


def test_who_keeps_most_gives_way() -> None:
    store = ResponseStore(10 * kept("x").num_bytes, clock=lambda: 0.0)
    store.put("quiet", kept("mine"))
    for i in range(100):
        store.put("floods", kept(f"r{i}"))
    assert store.get("quiet", "mine") is not None
    assert store.get("floods", "r99") is not None
    assert store.get("floods", "r0") is None
    store.put("floods", kept("huge", 1_000_000))
    assert store.get("floods", "huge") is None
    assert store.get("quiet", "mine") is not None


@settings(max_examples=examples(60))
@given(
    puts=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 3000), st.booleans()), max_size=40
    )
)
def test_what_is_kept_stays_within_its_memory(puts: list[tuple[str, int, int, bool]]) -> None:
    store = ResponseStore(5000, clock=lambda: 0.0)
    there: dict[tuple[str, str], int] = {}
    for number, (tenant, name, num_bytes, deletes) in enumerate(puts):
        response_id = f"r{number}"
        store.put(tenant, kept(response_id, num_bytes))
        there[tenant, response_id] = kept(response_id, num_bytes).num_bytes
        if deletes:
            store.delete(tenant, f"r{name}")
        there = {key: size for key, size in there.items() if store.get(*key) is not None}
        assert store.num_bytes == sum(there.values()) <= 5000


def log_of(*sizes: int) -> EventLog:
    log = EventLog()
    for size in sizes:
        log.add(b"x" * size + b"\n\n")
    return log


def test_events_are_kept_with_their_response_if_there_is_room_for_both() -> None:
    store = ResponseStore(5000, clock=lambda: 0.0)
    store.put_events("alice", "a", log_of(100))  # it is not kept
    assert store.num_bytes == 0
    store.put("alice", kept("a"))
    store.put_events("alice", "a", log_of(100))
    assert store.num_bytes == kept("a").num_bytes + 102
    store.put("alice", kept("b"))
    store.put_events("alice", "b", log_of(4900))
    whole = store.get("alice", "b")
    assert whole is not None
    assert whole.events is None
    assert store.num_bytes == 2 * kept("a").num_bytes + 102
    store.delete("alice", "a")
    store.delete("alice", "b")
    assert store.num_bytes == 0


@pytest.mark.anyio
async def test_the_latest_events_are_told_in_pieces() -> None:
    log = log_of(*[10_000] * 200)
    assert log.num_bytes <= MAX_EVENT_BYTES
    log.end()
    pieces = [piece async for piece in log.read(150)]
    assert b"".join(pieces) == (b"x" * 10_000 + b"\n\n") * 50
    assert max(map(len, pieces)) <= PIECE_BYTES + 10_002
    with pytest.raises(RequestRejected, match="no longer kept"):
        await anext(log.read(0))
    assert [piece async for piece in log.read(500)] == []
