"""A long prompt that several instances compute in turn: real processes, KV between them, and the tokens of one."""

from collections.abc import Generator
from dataclasses import dataclass

import httpx
import pytest

from pdmesh.testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh.testing.exactness import Reference, complete, mismatches, random_prompts, reference
from pdmesh.testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

#: Not as fast as it could be: there are chunks enough for everyone.
SHAPE = CheckpointShape(hidden_size=128, intermediate_size=512, num_layers=6, num_heads=8)
SAMPLING = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 11, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]

    async def computed_by(self, client: httpx.AsyncClient, prompt: tuple[int, ...]) -> set[str | None]:
        """The instances that computed a prompt which is asked for now."""
        body = {"model": self.mesh.model, "prompt": list(prompt), "max_tokens": 1}
        response = (await client.post("/v1/completions", json=body)).raise_for_status()
        record = self.mesh.request_record(response.json()["id"])
        return {entry.instance_id for entry in record.entries if entry.what == "chunk"}


@pytest.fixture(scope="module", params=[2, 3])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("relay")
    checkpoint = write_checkpoint(folder / "model", shape=SHAPE, seed=1)
    references = [
        reference(checkpoint, prompt, 12) for prompt in random_prompts([3000, 5003], SHAPE.vocab_size, seed=7)
    ]
    settings = {"POLICY_LONG_PROMPT_TOKENS": "1000", "POLICY_PREFILL_STEP_S": "0.02", "POLICY_RELAY_IMPROVEMENT": "0"}
    with running_mesh(folder, model=checkpoint, prefill=request.param, settings=settings) as mesh:
        yield Served(mesh, references)
        mesh.wait_until_idle()


@pytest.mark.timeout(300)
async def test_greedy_tokens_and_logprobs_equal_transformers(served: Served) -> None:
    async with served.mesh.client() as client:
        alone = await mismatches(client, served.mesh.model, served.references, concurrency=1)
        crowd = await mismatches(client, served.mesh.model, served.references * 2, concurrency=4)
        computed_by = await served.computed_by(client, served.references[1].prompt)
    assert alone + crowd == []
    assert len(computed_by) > 1, "nobody helped"


@pytest.mark.timeout(300)
async def test_a_seed_draws_what_it_draws_where_nobody_helps(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = served.references[1].prompt
    async with served.mesh.client() as client:
        together = await complete(client, served.mesh.model, prompt, 24, **SAMPLING)
    settings = {"POLICY_RELAY_MEMBERS": "1"}
    folder = tmp_path_factory.mktemp("alone")
    checkpoint = write_checkpoint(folder / "model", shape=SHAPE, seed=1)
    with running_mesh(folder, model=checkpoint, settings=settings) as mesh:
        async with mesh.client() as client:
            alone = await complete(client, mesh.model, prompt, 24, **SAMPLING)
    assert together.token_ids == alone.token_ids
    assert max(abs(a - b) for a, b in zip(together.logprobs, alone.logprobs, strict=True)) < 1e-4
