"""A published chat model as clients use it: dialects, typed answers, tools, a long chat; default dtype."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import httpx
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from pdmesh.engine.files import load_model_info, resolve_model
from pdmesh.engine.runner import TorchEngine
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_testing.exactness import complete, engine_reference, mismatches
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.real_models import CACHE, real_model, token_ids

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_TURNS, MAX_TOKENS = 10, 24


@dataclass(frozen=True)
class Served:
    """A mesh, and one engine alone that computes in the same way."""

    model: Path
    directory: Path
    mesh: RunningMesh
    engine: TorchEngine
    tokenizer: ModelTokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    model = real_model("smollm2")
    directory = resolve_model(str(model))
    engine = TorchEngine(directory, num_blocks=128, num_threads=1, deterministic=True, ordered=True)
    settings = {"WORKER_DETERMINISTIC": "true", "POLICY_CHUNK_TOKENS": "97", "SCHEDULER_BUNDLE": "fcfs"}
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=model, settings=settings) as mesh:
        yield Served(model, directory, mesh, engine, ModelTokenizer.load(directory))
        mesh.wait_until_idle()


async def test_a_mesh_says_what_one_engine_says_bit_for_bit(served: Served) -> None:
    texts = [(ROOT / name).read_text() for name in ("README.md", "LICENSE", "docs/terms.md")]
    prompts = [token_ids(served.model, text)[:length] for text, length in zip(texts, (33, 200, 433), strict=True)]
    references = [engine_reference(served.engine, prompt, MAX_TOKENS) for prompt in prompts]
    async with served.mesh.client() as client:
        found = await mismatches(client, served.mesh.model, references * 2, concurrency=4, tolerance=0.0)
    assert found == []


async def test_an_easy_question_is_answered(served: Served) -> None:
    async with served.mesh.client() as client:
        answer = await complete(client, served.mesh.model, token_ids(served.model, "The capital of France is"), 3)
    assert answer.text.startswith(" Paris")


QUESTION = "Name three colours of a rainbow."


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_all_four_dialects_give_the_same_answer(served: Served) -> None:
    mesh, messages = served.mesh, [{"role": "user", "content": QUESTION}]
    greedy = {"model": mesh.model, "temperature": 0}
    prompt = await served.tokenizer.render_chat(messages)
    async with mesh.client() as client:
        chat = await post(client, "/v1/chat/completions", **greedy, messages=messages, max_tokens=MAX_TOKENS)
        plain = await post(client, "/v1/completions", **greedy, prompt=prompt, max_tokens=MAX_TOKENS)
        response = await post(client, "/v1/responses", **greedy, input=QUESTION, max_output_tokens=MAX_TOKENS)
        message = await post(client, "/v1/messages", **greedy, messages=messages, max_tokens=MAX_TOKENS)
        streamed = await streamed_chat(client, **greedy, messages=messages, max_tokens=MAX_TOKENS)
    text = chat["choices"][0]["message"]["content"]
    assert len(text) > 20
    assert plain["choices"][0]["text"] == text
    assert response["output"][0]["content"][0]["text"] == text
    assert message["content"] == [{"type": "text", "text": text}]
    assert streamed == text
    counts = {
        chat["usage"]["prompt_tokens"],
        plain["usage"]["prompt_tokens"],
        response["usage"]["input_tokens"],
        message["usage"]["input_tokens"] + message["usage"].get("cache_read_input_tokens", 0),
    }
    assert len(counts) == 1


async def streamed_chat(client: httpx.AsyncClient, **body: Any) -> str:
    pieces: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


class Trip(pydantic.BaseModel):
    """What a typed client asks for."""

    city: Annotated[str, pydantic.Field(max_length=12)]
    kind: Literal["train", "plane"]
    days: Annotated[list[Annotated[int, pydantic.Field(ge=1, le=31)]], pydantic.Field(max_length=3)]


async def test_typed_answers_fit_their_type(served: Served) -> None:
    texts: dict[int, set[str | None]] = {seed: set() for seed in range(4)}

    async def ask(client: openai.AsyncOpenAI, seed: int) -> None:
        completion = await client.chat.completions.parse(
            model=served.mesh.model,
            messages=[{"role": "user", "content": "Plan a trip to a city, as JSON."}],
            response_format=Trip,
            temperature=1.0,
            seed=seed,
            max_tokens=120,
        )
        assert completion.choices[0].message.parsed is not None
        texts[seed].add(completion.choices[0].message.content)

    base_url = f"{served.mesh.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client, anyio.create_task_group() as tasks:
        for seed in (*texts, *texts):
            tasks.start_soon(ask, client, seed)
    assert all(len(same) == 1 for same in texts.values())


async def test_a_call_of_a_tool_fits_its_parameters(served: Served) -> None:
    """The model's own template shows no tools: the system message does."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "How is the weather in Paris for 3 days?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    async with served.mesh.client() as client:
        answer = await post(client, "/v1/chat/completions", **body, model=served.mesh.model)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"
    assert set(arguments) == {"city", "days"}
    assert isinstance(arguments["city"], str)
    assert arguments["days"] <= 9


TOPICS = ("Paris", "bread", "the sea", "trains", "cats", "rain", "books", "stars", "bees", "tea")


async def test_a_chat_of_ten_turns_is_that_of_one_engine_and_finds_its_past(served: Served) -> None:
    tokenizer = Tokenizer.from_file(str(served.directory / "tokenizer.json"))
    (end, *_) = load_model_info(served.directory).eos_token_ids
    messages: list[dict[str, Any]] = []
    num_cached = [0]
    async with served.mesh.client() as client:
        for topic in TOPICS:
            messages.append({"role": "user", "content": f"Tell me in a short sentence about {topic}."})
            prompt = tokenizer.encode(await served.tokenizer.render_chat(messages)).ids
            expected = list(engine_reference(served.engine, prompt, MAX_TOKENS).token_ids)
            expected = expected[: expected.index(end)] if end in expected else expected
            answer = await post(
                client,
                "/v1/chat/completions",
                model=served.mesh.model,
                messages=messages,
                temperature=0,
                max_tokens=MAX_TOKENS,
            )
            text = answer["choices"][0]["message"]["content"]
            assert text == tokenizer.decode(expected), topic
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": text})
    assert len(messages) == 2 * NUM_TURNS
    assert num_cached == sorted(num_cached)
    assert num_cached[-1] >= 256


async def test_pdmesh_up_takes_the_name_of_a_model(served: Served, tmp_path: Path) -> None:
    """As `pdmesh up smollm2` on a machine that has the file in its cache and reaches no hub."""
    cached = tmp_path / "cache/pdmesh/models"
    cached.mkdir(parents=True)
    (cached / served.model.name).symlink_to(served.model)
    assert served.model.is_relative_to(CACHE)
    with running_mesh(tmp_path, model=Path("smollm2"), prefill=0, decode=0, mixed=1) as mesh:
        assert mesh.model == "smollm2"
        answer = mesh.pdmesh("chat", "-m", "What is 2 + 2?", "--temperature", "0", "--max-tokens", "16")
        assert "4" in answer.partition("[")[0]
