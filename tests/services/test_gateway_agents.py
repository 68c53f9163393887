"""An agent's turn in the dialects of agents: a call of a tool, its result, and the answer."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import Tokenizer

from pdmesh.wire.messages import Generation, PromptLogprobs, TokenOut, unpack_token_ids
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import ScriptedMesh, saying_tokens, scripted_mesh
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

pytestmark = pytest.mark.anyio

ARGUMENTS = {"city": "Oslo \u2603", "days": [1, 2]}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": ' + json.dumps(ARGUMENTS) + "}\n</tool_call>"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(directory, max_position_embeddings=4096, template=TOOL_TEMPLATE)
    return directory


@asynccontextmanager
async def served(model: Path) -> AsyncGenerator[tuple[ScriptedMesh, RunningGateway]]:
    """A model that calls a tool until it sees a result."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def script(generation: Generation) -> Sequence[TokenOut | PromptLogprobs]:
        prompt = tokenizer.decode(unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens].tolist())
        text = "It rains." if "<tool_response>" in prompt else CALL
        end_id = generation.params.eos_token_ids[0]
        return saying_tokens([*tokenizer.encode(text).ids, end_id], end_id)(generation)

    async with scripted_mesh(script) as mesh, running_gateway(model, mesh.address) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        yield mesh, running


async def test_a_turn_with_anthropics_client(model: Path) -> None:
    async with (
        served(model) as (mesh, running),
        anthropic.AsyncAnthropic(base_url=running.url, api_key="-", max_retries=0) as client,
    ):
        tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}]
        asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        whole = await client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=tools)
        async with client.messages.stream(model="tiny", max_tokens=200, messages=asked, tools=tools) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            text, call = message.content
            assert text.type == "text"
            assert text.text.strip() == "I look."
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("weather", ARGUMENTS)
            assert message.stop_reason == "tool_use"
        assert mesh.submitted[0].generation.num_prompt_tokens == mesh.submitted[1].generation.num_prompt_tokens
        results: list[Any] = [{"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "rain"}]  # type: ignore[union-attr]
        asked += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        answer = await client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=tools)
        assert answer.content[0].type == "text"
        assert (answer.content[0].text, answer.stop_reason) == ("It rains.", "end_turn")


async def test_a_turn_with_openais_responses(model: Path) -> None:
    async with (
        served(model) as (_mesh, running),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client,
    ):
        tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA}, {"type": "web_search"}]
        whole = await client.responses.create(model="tiny", input="How is the weather?", tools=tools)
        async with client.responses.stream(model="tiny", input="How is the weather?", tools=tools) as stream:
            streamed = await stream.get_final_response()
        for response in (whole, streamed):
            message, call = response.output
            assert message.type == "message"
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments), call.status) == ("weather", ARGUMENTS, "completed")
            assert response.status == "completed"
        call = whole.output[1]
        assert call.type == "function_call"
        result: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        answer = await client.responses.create(model="tiny", input=result, tools=tools, previous_response_id=whole.id)
        assert answer.output_text == "It rains."
        # The whole conversation sent again, as agents do that keep it themselves.
        again = await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "How is the weather?"}, *whole.output, *result],  # type: ignore[list-item]
            tools=tools,
            store=False,
        )
        assert again.output_text == "It rains."
