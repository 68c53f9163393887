"""What all four dialects make of histories, of calls that are cut, and of tools that a template does not show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import grpc.aio
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from pdmesh.wire.messages import Generation, unpack_token_ids
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gateway import saying
from pdmesh_testing.running_gateway import RunningGateway
from pdmesh_testing.tokenizers import CHAT_TEMPLATE, TOOL_TEMPLATE

pytestmark = pytest.mark.anyio

ARGUMENTS = '{"q": "ab}\\n\\n", "n": 7}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q", "n"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return write_checkpoint(directory, max_position_embeddings=4096, template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows no tools."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return write_checkpoint(directory, max_position_embeddings=4096, template=CHAT_TEMPLATE)


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "Hi."}], "tools": [tool], **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def streamed_chat(client: httpx.AsyncClient, **fields: Any) -> Any:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}], "tools": [tool], **fields}
    content, arguments, reason = "", "", None
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none") as api:
        async for chunk in await api.chat.completions.create(**body, stream=True):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    arguments += call.function.arguments or ""
    return content, arguments, reason


async def response(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    answer = await client.post("/v1/responses", json={"input": "Hi.", "tools": [tool], **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def message(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    tool = {"name": "look", "input_schema": SCHEMA}
    body = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "Hi."}], "tools": [tool]}
    answer = await client.post("/v1/messages", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def streamed_message(client: httpx.AsyncClient, **fields: Any) -> Any:
    tool = {"name": "look", "input_schema": SCHEMA}
    body: Any = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "Hi."}], "tools": [tool]}
    async with (
        anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="-", max_retries=0) as api,
        api.messages.stream(**{**body, **fields}) as stream,
    ):
        return await stream.get_final_message()


async def generated(running: RunningGateway, given: pb.Chat | None = None, **sampling: Any) -> list[Any]:
    tool = pb.Tool(name="look", parameters=json.dumps(SCHEMA))
    asked = given or pb.Chat(messages=[pb.Message(role="user", content="Hi.")], tools=[tool])
    async with grpc.aio.insecure_channel(running.facts["grpc_address"]) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(chat=asked, sampling=pb.SamplingOptions(**sampling))
        return [response async for response in stub.Generate(request)]


@pytest.mark.parametrize("stop", ["}", '"n"', "7", "\\n\\n", "</tool_call>", "look", "\n"])
async def test_stop_strings_do_not_act_within_calls_in_any_dialect(model: Path, stop: str) -> None:
    async with saying(model, CALL) as (client, _, running):
        choice = await chat(client, stop=[stop])
        _, streamed, reason = await streamed_chat(client, stop=[stop])
        made = await response(client, stop=[stop])
        if stop.strip():
            told = await message(client, stop_sequences=[stop])
            final = await streamed_message(client, stop_sequences=[stop])
            for content, why in (
                (told["content"], told["stop_reason"]),
                (final.to_dict()["content"], final.stop_reason),
            ):
                assert [block["input"] for block in content] == [json.loads(ARGUMENTS)]
                assert why == "tool_use"
        responses = await generated(running, stop=[stop])
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == (ARGUMENTS, "tool_calls")
    assert (streamed, reason) == (ARGUMENTS, "tool_calls")
    [item] = made["output"]
    assert (made["status"], item["status"], item["arguments"]) == ("completed", "completed", ARGUMENTS)
    assert "".join(event.arguments for each in responses for event in each.events) == ARGUMENTS
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_a_stop_token_within_a_call_says_that_the_call_was_cut(model: Path) -> None:
    stop_id = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("7")
    async with saying(model, CALL) as (client, _, running):
        choice = await chat(client, stop_token_ids=[stop_id])
        _, streamed, reason = await streamed_chat(client, extra_body={"stop_token_ids": [stop_id]})
        named = await chat(
            client, stop_token_ids=[stop_id], tool_choice={"type": "function", "function": {"name": "look"}}
        )
        responses = await generated(running, stop_token_ids=[stop_id])
    assert choice["finish_reason"] == named["finish_reason"] == reason == "length"
    assert ARGUMENTS.startswith(streamed)
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("max_tokens", [1, 11, 22])
@pytest.mark.parametrize("before", ["", "So. ", f"{CALL}\n"], ids=["nothing", "text", "a call"])
async def test_markup_of_a_cut_call_is_no_text_in_any_dialect(model: Path, before: str, max_tokens: int) -> None:
    num_before = len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(before).ids)
    most, text = num_before + max_tokens, before.strip() if before == "So. " else ""
    async with saying(model, before + CALL) as (client, _, running):
        choice = await chat(client, max_tokens=most)
        content, _, reason = await streamed_chat(client, max_tokens=most)
        made = await response(client, max_output_tokens=most)
        told = await message(client, max_tokens=most)
        final = await streamed_message(client, max_tokens=most)
        responses = await generated(running, max_tokens=most)
    assert choice["finish_reason"] == reason == "length"
    assert (choice["message"]["content"] or "").strip() == content.strip() == text
    said = [part["text"] for item in made["output"] if item["type"] == "message" for part in item["content"]]
    assert (made["status"], "".join(said).strip()) == ("incomplete", text)
    for blocks in (told["content"], final.to_dict()["content"]):
        assert "".join(block["text"] for block in blocks if block["type"] == "text").strip() == text
    assert told["stop_reason"] == final.stop_reason == "max_tokens"
    assert "".join(each.text for each in responses).strip() == text
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


CUT = '{"q": "Par'


def histories() -> Mapping[str, Any]:
    """The same history in each dialect: instructions everywhere, a refusal, and a call that was cut."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": CUT}}
    chat_messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "Go on."},
    ]
    items = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": CUT, "status": "incomplete"},
        {"role": "user", "content": "Go on."},
    ]
    blocks = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}, {"type": "text", "text": "No."}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": CUT}]},
        {"role": "user", "content": "Go on."},
    ]
    grpc_chat = pb.Chat(
        messages=[
            pb.Message(role="system", content="Be kind."),
            pb.Message(role="user", content="Hi."),
            pb.Message(role="assistant", content="No."),
            pb.Message(role="developer", content="Be brief."),
            pb.Message(role="user", content="Look."),
            pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="c", name="look", arguments=CUT)]),
            pb.Message(role="user", content="Go on."),
        ]
    )
    return {
        "chat": {"messages": chat_messages, "tools": None},
        "response": {"instructions": "Be kind.", "input": items, "tools": None},
        "message": {"system": "Be kind.", "messages": blocks, "tools": None},
        "grpc": grpc_chat,
    }


async def test_a_history_is_the_same_prompt_in_every_dialect(plain: Path) -> None:
    given = histories()
    async with saying(plain, "Well.") as (client, mesh, running):
        await chat(client, **given["chat"])
        await response(client, **given["response"])
        await message(client, **given["message"])
        await generated(running, given["grpc"])
        prompts = [prompt_of(plain, submit.generation) for submit in mesh.submitted]
    assert len(prompts) == 4
    assert len(set(prompts)) == 1
    assert prompts[0] == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
        "No.<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n"
        "<|im_start|>assistant\n"
        f'<tool_call>\n{{"name": "look", "arguments": {CUT}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def prompt_of(model: Path, generation: Generation) -> str:
    ids = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens].tolist()
    text: str = Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    return text


async def test_tools_that_a_template_does_not_show_are_told_and_called(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with saying(plain, CALL) as (client, mesh, running):
        choice = await chat(client)
        made = await response(client, tool_choice="required")
        told = await message(client)
        responses = await generated(running)
        await chat(client, tool_choice="none")
        prompts = [prompt_of(plain, submit.generation) for submit in mesh.submitted]
        grammars = [submit.generation.params.grammar for submit in mesh.submitted]
    assert capsys.readouterr().out.count("does not list tools") == 1
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"
    assert made["output"][0]["arguments"] == ARGUMENTS
    assert told["content"][0]["input"] == json.loads(ARGUMENTS)
    assert "".join(event.arguments for each in responses for event in each.events) == ARGUMENTS
    assert all("<tools>" in prompt and "<tool_call>" in prompt for prompt in prompts[:4])
    assert all("look" in grammar for grammar in grammars[:4])
    assert "<tools>" not in prompts[4]


async def test_tools_without_parameters_are_held_to_an_empty_object(model: Path) -> None:
    async with saying(model, "No.") as (client, mesh, running):
        await chat(client, tools=[{"type": "function", "function": {"name": "now"}}])
        await chat(client, tools=[{"type": "function", "function": {"name": "now", "parameters": None}}])
        await response(client, tools=[{"type": "function", "name": "now"}])
        await response(client, tools=[{"type": "function", "name": "now", "parameters": None}])
        await message(client, tools=[{"name": "now"}])
        user = [pb.Message(role="user", content="Hi.")]
        await generated(running, pb.Chat(messages=user, tools=[pb.Tool(name="now")]))
        grammars = [submit.generation.params.grammar for submit in mesh.submitted]
        await chat(client, tools=[{"type": "function", "function": {"name": "now", "parameters": {}}}])
        assert mesh.submitted[-1].generation.params.grammar != grammars[0]
    assert len(grammars) == 6
    assert len(set(grammars)) == 1
    assert r"\"additionalProperties\": false" in grammars[0]
