"""``/v1/embeddings`` as OpenAI's client sees it, in front of a scripted mesh."""

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from pdmesh.config import GatewayConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, PromptLogprobs, TokenOut, unpack_token_ids
from pdmesh_gateway.proto import pdmesh_pb2 as pb
from pdmesh_gateway.proto import pdmesh_pb2_grpc as pb_grpc
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.running_gateway import running_gateway
from pdmesh_testing.scripted_mesh import Script, ScriptedMesh, echo_prompt, scripted_mesh, token_out

pytestmark = pytest.mark.anyio

CONTEXT = 64

#: "b" as a token.
B = ord("b") - ord("!")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return write_checkpoint(directory, architecture="qwen3", max_position_embeddings=CONTEXT, pools=True)


@asynccontextmanager
async def served(
    model: Path, script: Script = echo_prompt, **settings: Any
) -> AsyncGenerator[tuple[openai.AsyncOpenAI, httpx.AsyncClient, ScriptedMesh]]:
    async with (
        ready_gateway(model, script, gateway=GatewayConfig(**settings)) as (http, mesh, running),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client, http, mesh


def normalised(*values: float) -> Any:
    length = math.hypot(*values)
    return pytest.approx([value / length for value in values], rel=1e-6)


async def test_the_openai_client_gets_embeddings_of_texts_and_of_token_ids(model: Path) -> None:
    async with served(model) as (client, _http, mesh):
        response = await client.embeddings.create(model="tiny", input=["ab", "abc"])  # which asks for base64
        assert [each.embedding for each in response.data] == [normalised(2, B), normalised(3, B + 1)]
        assert [each.index for each in response.data] == [0, 1]
        assert (response.usage.prompt_tokens, response.usage.total_tokens, response.model) == (5, 5, "tiny")
        assert {submit.generation.params.max_tokens for submit in mesh.submitted} == {1}

        one = await client.embeddings.create(model="tiny", input="ab", encoding_format="float")
        assert [each.embedding for each in one.data] == [normalised(2, B)]
        ids = await client.embeddings.create(model="tiny", input=[B - 1, B])
        assert ids.data[0].embedding == one.data[0].embedding
        several = await client.embeddings.create(model="tiny", input=[[B - 1, B], [1, 2, 3]])
        assert [each.embedding for each in several.data] == [normalised(2, B), normalised(3, 3)]


async def test_more_inputs_than_may_be_under_way_are_embedded_part_by_part(model: Path) -> None:
    async with served(model, max_concurrent_requests=16) as (client, _http, mesh):
        inputs = [[1] * length for length in range(1, 11)]
        response = await client.embeddings.create(model="tiny", input=inputs)
        assert [each.embedding for each in response.data] == [normalised(length, 1) for length in range(1, 11)]
        assert len({submit.generation.request_id for submit in mesh.submitted}) == 10
        assert [len(unpack_token_ids(submit.generation.token_ids)) for submit in mesh.submitted] == [*range(1, 11)]


async def test_dimensions_are_those_that_the_model_was_trained_for(model: Path) -> None:
    async with served(model) as (client, _http, _mesh):
        with pytest.raises(openai.BadRequestError, match="was not trained for fewer"):
            await client.embeddings.create(model="tiny", input="ab", dimensions=1)
    async with served(model, embeddings="matryoshka") as (client, _http, _mesh):
        response = await client.embeddings.create(model="tiny", input="ab", dimensions=1)
        assert response.data[0].embedding == [1.0]  # it is normalised once it is cut
        with pytest.raises(openai.BadRequestError, match="from 1 to"):
            await client.embeddings.create(model="tiny", input="ab", dimensions=100_000)


async def test_a_model_that_is_not_for_embeddings_says_so(model: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", max_position_embeddings=CONTEXT)
    async with served(other) as (client, _http, _mesh):
        with pytest.raises(openai.BadRequestError, match=r"does not provide embeddings: .* gateway\.embeddings to on"):
            await client.embeddings.create(model="other", input="ab")
    async with served(other, embeddings="on") as (client, _http, _mesh):
        assert (await client.embeddings.create(model="other", input="ab")).data[0].embedding == normalised(2, B)
    (model_of_means := tmp_path / "means").mkdir()
    write_checkpoint(model_of_means, max_position_embeddings=CONTEXT, pools=True)
    (model_of_means / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    async with served(model_of_means, embeddings="on") as (client, _http, _mesh):
        with pytest.raises(openai.BadRequestError, match="other pooling is not supported"):
            await client.embeddings.create(model="means", input="ab")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Missing required parameter: 'input'"),
        ({"input": []}, "must not be empty"),
        ({"input": ["a"] * 2049}, "1 to 2048 are allowed"),
        ({"input": ""}, "must not be empty"),
        ({"input": ["a", [1]], "encoding_format": "int8"}, "must be float or base64"),
        ({"input": ["a", 1]}, "must be a string or a list"),
        ({"input": [1, 10_000]}, "out of vocabulary"),
        ({"input": "a" * 100}, "maximum context length is 64 tokens"),
        ({"input": "a", "model": "gpt"}, "does not exist"),
    ],
)
async def test_bad_requests_are_refused_by_field(model: Path, fields: dict[str, Any], message: str) -> None:
    async with served(model) as (_client, http, mesh):
        response = await http.post("/v1/embeddings", json=fields)
        assert response.status_code in (400, 404)
        assert message in response.json()["error"]["message"]
        assert not mesh.submitted
        cut = await http.post("/v1/embeddings", json={"input": "ab" * 100, "truncate_prompt_tokens": 3})
        assert cut.json()["usage"]["prompt_tokens"] == 3


async def test_an_instance_that_draws_a_token_instead_is_an_error_and_no_vector(model: Path) -> None:
    def draws(generation: Generation) -> list[TokenOut | PromptLogprobs]:
        return [token_out(generation, 0, 5, finish_reason=FinishReason.LENGTH)]

    async with served(model, draws) as (_client, http, _mesh):
        response = await http.post("/v1/embeddings", json={"input": "ab"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "generation_failed"


async def test_the_same_over_grpc(model: Path) -> None:
    async with scripted_mesh() as mesh, running_gateway(model, mesh.address) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        async with grpc.aio.insecure_channel(running.facts["grpc_address"]) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            inputs = [pb.EmbedInput(text="ab"), pb.EmbedInput(token_ids=pb.TokenIds(ids=[1, 2, 3]))]
            response = await stub.Embed(pb.EmbedRequest(request_id="mine", inputs=inputs))
            assert [list(each.values) for each in response.embeddings] == [normalised(2, B), normalised(3, 3)]
            assert (response.request_id, response.usage.prompt_tokens) == ("mine", 5)
            for bad in (pb.EmbedRequest(), pb.EmbedRequest(inputs=inputs, dimensions=1)):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Embed(bad)
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
