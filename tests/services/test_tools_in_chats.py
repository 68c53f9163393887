"""Tools and reasoning as clients of chats see them, in front of a mesh that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from pdmesh.config import GatewayConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, PromptLogprobs, TokenOut, unpack_token_ids
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gateway import ready_gateway, saying
from pdmesh_testing.scripted_mesh import ScriptedMesh, silence, token_out
from pdmesh_testing.tokenizers import TOOL_TEMPLATE, add_special_tokens

pytestmark = pytest.mark.anyio

END_ID = 258
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP = {"type": "function", "function": {"name": "stop", "strict": True}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Paris?"}], "tools": [WEATHER, STOP]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts end within its reasoning, unless that is turned off."""
    end = "<|im_start|>assistant\n"
    template = TOOL_TEMPLATE.replace(end, end + "<think>{% if enable_thinking is false %}</think>{% endif %}\n")
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", template=template)


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(client: httpx.AsyncClient, **fields: Any) -> Any:
    """The same, put together as OpenAI's client does it."""
    async with (
        openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none") as api,
        api.chat.completions.stream(**{**CHAT, **fields}) as stream,
    ):
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


def calls_in(message: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


async def test_calls_are_told_whole_and_streamed(model: Path) -> None:
    async with saying(model, TWO) as (client, _, _):
        whole = await ask(client)
        parts = await streamed(client)
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == ("I look.\n", "tool_calls")
    assert calls_in(message) == [("get_weather", '{"city": "Paris"}'), ("stop", "{}")]
    assert all(call["id"].startswith("call_") and len(call["id"]) == 29 for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert (parts.message.content, parts.finish_reason) == ("I look.\n", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in parts.message.tool_calls] == calls_in(message)


async def test_the_first_delta_of_a_call_names_it_and_later_ones_add_to_it(model: Path) -> None:
    async with saying(model, "") as (client, mesh, _):
        mesh.script = silence
        choices = [choice async for choice in dripped(model, mesh, client, CALL)]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    first, *later = deltas
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
    assert first["id"].startswith("call_")
    assert len(later) > 5  # arguments come as they are drawn
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)
    assert "".join(call["function"].get("arguments", "") for call in deltas) == '{"city": "Paris"}'
    assert not any(choice["delta"].get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == "tool_calls"


async def dripped(model: Path, mesh: ScriptedMesh, client: httpx.AsyncClient, text: str) -> AsyncGenerator[Any]:
    """The choices of a stream, each of whose tokens is drawn when the one before was told."""
    token_ids = ids_of(model, text)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(draw, mesh, token_ids, 0)  # a response begins with its first token
        asked = {**CHAT, "stream": True, "return_token_ids": True}  # a chunk for each token, whatever it is
        async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = response.aiter_lines()
            for num_told in range(len(token_ids) + 1):
                if num_told > 1:
                    await draw(mesh, token_ids, num_told - 1)
                while not (line := await anext(lines)).startswith("data: {"):
                    pass
                yield json.loads(line[6:])["choices"][0]


def ids_of(model: Path, text: str) -> list[int]:
    """The tokens of an answer, and its end."""
    return [*Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids, END_ID]


async def draw(mesh: ScriptedMesh, token_ids: list[int], index: int) -> None:
    generation = (await mesh.next_submit()).generation
    finish = FinishReason.STOP if token_ids[index] == END_ID else None
    mesh.send_tokens(token_out(generation, index, token_ids[index], finish_reason=finish))


async def test_markers_of_calls_make_no_chunks(model: Path) -> None:
    token_ids, told = ids_of(model, CALL), list[Any]()
    async with saying(model, "") as (client, mesh, _), anyio.create_task_group() as tasks:
        mesh.script = silence
        tasks.start_soon(draw, mesh, token_ids, 0)
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    told.append(json.loads(line[6:])["choices"][0])
                    if len(told) == 1:  # the role, told with the first token, which is a marker's
                        for index in range(1, len(token_ids)):
                            await draw(mesh, token_ids, index)
    role, *rest = told
    assert role["delta"]["role"] == "assistant"
    assert rest
    assert all(choice["delta"].get("tool_calls") or choice["finish_reason"] for choice in rest)


async def test_a_call_by_name_ends_with_stop_and_a_cut_one_with_length(model: Path) -> None:
    async with saying(model, CALL) as (client, mesh, _):
        named = await ask(client, tool_choice={"type": "function", "function": {"name": "get_weather"}})
        cut = await ask(client, max_tokens=55)
        none = await ask(client, tool_choice="none")
        prompts = [len(unpack_token_ids(submit.generation.token_ids)) for submit in mesh.submitted]
        grammars = [submit.generation.params.grammar for submit in mesh.submitted]
    assert (named["finish_reason"], named["message"]["content"]) == ("stop", None)
    assert cut["finish_reason"] == "length"
    [(name, arguments)] = calls_in(cut["message"])
    assert name == "get_weather"
    assert '{"city": "Paris"}'.startswith(arguments)
    assert arguments
    assert none["message"]["content"] == CALL  # nobody asked for calls, so that is text
    assert "get_weather" in grammars[0]
    assert "stop" not in grammars[0].split("lark_grammar")[1].split("arguments")[0]
    assert not grammars[2]
    assert prompts[2] < prompts[1]  # without tools


async def test_calls_and_results_go_to_the_template(model: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rom"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "17 degrees"}]},
    ]
    async with saying(model, "Warm.") as (client, _, _):
        answer = await ask(client, messages=messages)
        body = {"messages": messages, "tools": [WEATHER]}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        prompt = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Warm.", "stop")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>' in prompt
    assert "<tool_response>\n17 degrees\n</tool_response>" in prompt
    assert "system\nBe brief." in prompt
    assert '"description": "Weather of a city."' in prompt


async def test_templates_have_what_families_ask_for(tmp_path: Path) -> None:
    """A description, properties, and the tool that a result is of; of Llama's, no two calls in an answer."""
    template = "{% for tool in tools or [] %}{{ tool.function.name + tool.function.description }}"
    template += "{{ tool.function.parameters.properties | length }}{% endfor %}{% for m in messages %}"
    template += "{% if m.role == 'tool' %}{{ m.name + m.content }}{% endif %}"
    template += "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    template += "{% if m.tool_calls is defined and m.tool_calls | length > 1 %}"
    template += (
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endfor %}<tool_call>"
    )
    model = write_checkpoint(tmp_path / "tiny", template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "stop", "arguments": ""}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "done"}]
    async with saying(model, CALL) as (client, mesh, _):
        await ask(client, messages=messages, tools=[STOP])
        assert "{0,0}" not in mesh.submitted[0].generation.params.grammar
        assert "{0,1}" in mesh.submitted[0].generation.params.grammar
        body = {"messages": messages, "tools": [STOP]}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        prompt = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert prompt == "stop0stop{}stopdone<tool_call>"


async def test_a_call_goes_on_under_its_id_where_it_was_moved(model: Path) -> None:
    token_ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(CALL).ids
    async with saying(model, CALL) as (client, mesh, _):
        mesh.script, say = silence, mesh.script
        ids: set[str] = set()
        arguments = ""
        async with anyio.create_task_group() as tasks:

            async def begin() -> None:
                first = (await mesh.next_submit()).generation
                mesh.send_tokens(*(token_out(first, index, token_ids[index]) for index in range(60)))

            tasks.start_soon(begin)
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
                async for line in response.aiter_lines():
                    choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
                    for call in choices[0]["delta"].get("tool_calls", []) if choices else []:
                        ids.update({call["id"]} if "id" in call else ())
                        arguments += call["function"].get("arguments", "")
                    if arguments and mesh.script is silence:
                        mesh.script = say
                        mesh.lose(mesh.submitted[0].generation, "killed")
    assert len(ids) == 1
    assert arguments == '{"city": "Paris"}'


async def test_reasoning_is_told_apart_and_counted(thinking: Path) -> None:
    text = f"They ask.\n</think>\n\nI look.\n{CALL}"
    async with saying(thinking, text) as (client, mesh, _):
        response = await client.post("/v1/chat/completions", json=CHAT)
        usage = response.json()["usage"]
        message = response.json()["choices"][0]["message"]
        hidden = (await ask(client, include_reasoning=False))["message"]
        parts = await streamed(client)
        await ask(client, response_format={"type": "json_object"}, tools=None)
        off = await ask(client, tools=None, chat_template_kwargs={"enable_thinking": False})
        grammar = mesh.submitted[-2].generation.params.grammar
    assert message["reasoning_content"] == message["reasoning"] == "They ask.\n"
    assert message["content"] == hidden["content"] == "I look.\n"
    assert calls_in(message) == [("get_weather", '{"city": "Paris"}')]
    assert hidden["reasoning"] is hidden["reasoning_content"] is None
    num_tokens = len(Tokenizer.from_file(str(thinking / "tokenizer.json")).encode("They ask.\n</think>").ids)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert parts.message.content == "I look.\n"
    assert parts.message.reasoning_content == "They ask.\n"
    assert "</think>" in grammar
    assert off["message"]["content"] == text


def with_special_tokens(folder: Path, template: str, *tokens: str) -> Path:
    """A checkpoint whose tokenizer has these special tokens too."""
    model = write_checkpoint(folder / "tiny", template=template)
    path = model / "config.json"
    vocab_size = add_special_tokens(model, *tokens).get_vocab_size()
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": vocab_size}))
    return model


async def test_markers_that_are_special_tokens_are_read_and_other_special_tokens_hidden(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}"
    template += (
        "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.id }}{{ call.function }}{% endfor %}{% endfor %}"
    )
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[PAD]", "<think>", "</think>")
    model = with_special_tokens(tmp_path, template, *tokens)
    text = '<think>so[PAD]</think>I look.[PAD][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
    async with saying(model, text) as (client, mesh, _):
        whole = await ask(client)
        parts = await streamed(client)
        plain = await ask(client, tools=None)
        raw = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 200})
        grammar = mesh.submitted[0].generation.params.grammar
        messages = [{"role": "assistant", "tool_calls": [{**whole["message"]["tool_calls"][0]}]}]
        tokenized = (await client.post("/tokenize", json={"messages": messages, "tools": [WEATHER]})).json()["tokens"]
        prompt = (await client.post("/detokenize", json={"tokens": tokenized})).json()["prompt"]
    for message in (whole["message"], json.loads(parts.message.model_dump_json())):
        assert (message["content"], message["reasoning"]) == ("I look.", "so")
        assert calls_in(message) == [("get_weather", '{"city": "Rome"}')]
    assert plain["message"]["content"] == 'I look.get_weather{"city": "Rome"}'  # who asks for no tools sees no markers
    assert raw.json()["choices"][0]["text"] == 'soI look.get_weather{"city": "Rome"}'
    assert "<[" in grammar  # by its number
    assert "assistant" + whole["message"]["tool_calls"][0]["id"][-9:] in prompt  # as Mistral's templates want ids


def of_set(strict: bool) -> dict[str, Any]:
    """The format of an answer that no grammar holds in full."""
    return {
        "name": "x",
        "strict": strict,
        "schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    }


def chat_format(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": wanted}


async def test_a_constraint_that_is_dropped_is_named_and_a_strict_one_is_refused(model: Path) -> None:
    def requests(strict: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
        held = {"response_format": chat_format(of_set(strict)), "max_tokens": 9}
        yield "/v1/chat/completions", {"messages": CHAT["messages"], **held}, "response_format"
        yield "/v1/completions", {"prompt": "a", **held}, "response_format"
        text = {"format": {"type": "json_schema", **of_set(strict)}}
        yield "/v1/responses", {"input": "a", "text": text}, "text.format"

    async with saying(model, '["a"]') as (client, _, _):
        for path, body, param in requests(strict=False):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-pdmesh-warning"].startswith(f"`{param}` is not checked against #/uniqueItems (")
        for path, body, param in requests(strict=True):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert "#/uniqueItems" in response.json()["error"]["message"]


async def test_one_keyword_that_cannot_be_obeyed_leaves_the_rest_of_a_tools_schema(model: Path) -> None:
    parameters = {
        "type": "object",
        "properties": {"m": {"type": "array", "uniqueItems": True}, "k": {"const": "v"}},
        "required": ["m", "k"],
    }
    fields = {"messages": CHAT["messages"], "tool_choice": "required"}
    tool = {"name": "f", "parameters": parameters}
    grammars: list[str] = []

    def record(generation: Generation) -> list[TokenOut | PromptLogprobs]:
        grammars.append(generation.params.grammar)
        return [token_out(generation, 0, END_ID, finish_reason=FinishReason.STOP)]

    async with ready_gateway(model, record) as (client, _, _running):
        body = {**fields, "tools": [{"type": "function", "function": tool}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.headers["x-pdmesh-warning"].startswith(
            "tool 'f' is not checked against #/properties/m/uniqueItems ("
        )
        assert '\\"const\\": \\"v\\"' in grammars[0]
        strict = {**fields, "tools": [{"type": "function", "function": {**tool, "strict": True}}]}
        response = await client.post("/v1/chat/completions", json=strict)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def hostile_tools() -> Iterator[Any]:
    """Tools that no model is to be held to, or that are none."""
    deep: Any = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    schemas: list[Any] = [
        deep,
        {"type": "string"},
        {"type": "object", "required": 7},
        {"type": "object", "properties": [1]},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)("}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": -3, "maxLength": "x"}}},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
        {"type": "object", "properties": {"a": {"enum": [f"v{i}" for i in range(3000)]}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "((((a{1,50}){1,50}){1,50}){1,50}"}}},
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"properties": {"a": {"type": ["string", 7]}}},
        {"properties": {"</tool_call>\n": {"type": "string"}, '"}': {}}},
        {"properties": {"a": {"enum": []}, "b": {"anyOf": []}, "c": {"anyOf": "x"}, "d": {"enum": {"a": 1}}}},
    ]
    for schema in schemas:
        for strict in (False, True):
            for required in ("auto", "required"):
                tool = {"name": "f", "parameters": schema, "strict": strict}
                yield {"tools": [{"type": "function", "function": tool}], "tool_choice": required}
    for name in ("", "a b", "x" * 200, '"', "</tool_call>", "\n"):
        yield {"tools": [{"type": "function", "function": {"name": name}}]}
    yield {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(300)]}
    yield {"tools": [{"type": 7}, {"type": None}, {}]}
    for choice in (7, {}, {"type": "function"}, {"type": "allowed_tools", "mode": "auto", "tools": [7]}, "always"):
        yield {**CHAT, "tool_choice": choice}
    yield {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}
    yield {**CHAT, "tool_choice": {"type": "function", "function": {"name": "none"}}}


@pytest.mark.parametrize("tool_format", ["hermes", "llama", "mistral", "mistral_list", "qwen_coder"])
@pytest.mark.slow
async def test_hostile_tools_are_refused_or_held_to_an_object(model: Path, tool_format: str) -> None:
    async with ready_gateway(model, gateway=GatewayConfig(tool_format=tool_format)) as (client, _mesh, _running):
        for fields in hostile_tools():
            body = {"messages": CHAT["messages"], "max_tokens": 2, **fields}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400), (fields, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["param"] in ("tools", "tool_choice", "messages"), response.text
            elif "auto" in fields and fields["strict"]:
                assert "x-pdmesh-warning" not in response.headers
