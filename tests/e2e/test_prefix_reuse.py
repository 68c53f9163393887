"""Turns of conversations on real processes: what is reused gives what is computed, and belongs to one tenant."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import complete, mismatches, random_prompts, reference
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(600)]

SHAPE = CheckpointShape()
SAMPLING = {"temperature": 1.2, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.1}

#: Pools that prefill, decode and do both; the rest takes longer.
POOLS = {"1P+1D": (1, 1, 0), "mixed": (0, 0, 1), "2P+1D": (2, 1, 0), "3P+2D": (3, 2, 0)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


@pytest.fixture(scope="module", params=slow_beyond(1, POOLS), ids=list(POOLS))
def mesh(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunningMesh]:
    prefill, decode, mixed = POOLS[request.param]
    with running_mesh(
        tmp_path_factory.mktemp("reuse"), model=checkpoint, prefill=prefill, decode=decode, mixed=mixed
    ) as mesh:
        yield mesh
        mesh.wait_until_idle()
        assert_never_stale(mesh)


def assert_never_stale(mesh: RunningMesh) -> None:
    """No instance was asked for KV that it did not keep, or gave any up unasked."""
    for name, text in mesh.metrics().items():
        for line in text.splitlines():
            assert not line.startswith("pdmesh:num_stale_prefixes_total") or line.endswith(" 0.0"), f"{name}: {line}"
    assert "evicted cached KV without a command" not in mesh.logs()


@pytest.mark.parametrize("seed", [5])
async def test_warm_tokens_and_logprobs_equal_transformers(mesh: RunningMesh, checkpoint: Path, seed: int) -> None:
    """Each prompt is asked for cold, warm and in a crowd; a next turn repeats it and its answer, and goes on."""
    stems = random_prompts([129, 300, 517], SHAPE.vocab_size, seed)
    asked = [reference(checkpoint, stem, 40) for stem in stems]
    turns = [
        reference(checkpoint, [*each.prompt, *each.token_ids, *rest], 24)
        for each in asked
        for rest in random_prompts([1, 90, 128], SHAPE.vocab_size, seed + 1)
    ]
    async with mesh.client() as client:
        cold = await mismatches(client, mesh.model, asked, concurrency=1)
        warm = await mismatches(client, mesh.model, [*asked, *turns], concurrency=1)
        crowd = await mismatches(client, mesh.model, [*asked, *turns] * 2, concurrency=16)
        assert cold + warm + crowd == []
        assert await cached(client, mesh, turns[-1].prompt) >= 512


async def test_a_seed_draws_the_same_tokens_warm_and_cold(mesh: RunningMesh) -> None:
    (prompt,) = random_prompts([400], SHAPE.vocab_size, 8)
    async with mesh.client() as client:
        salts = ("a", "b", "a", "b", "b")
        answers = [await complete(client, mesh.model, prompt, 40, cache_salt=salt, **SAMPLING) for salt in salts]
    assert len({answer.token_ids for answer in answers}) == 1


async def cached(client: httpx.AsyncClient, mesh: RunningMesh, prompt: Any, **fields: Any) -> int:
    """How many of a prompt's tokens were there already."""
    headers = fields.pop("headers", {})
    body = {"model": mesh.model, "prompt": list(prompt), "max_tokens": 2, "ignore_eos": True, **fields}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    number: int = usage["prompt_tokens_details"]["cached_tokens"]
    return number


# --- whose KV it is ---


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    """A mesh with two tenants."""
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("key-of-a\nkey-of-b\n")
    with running_mesh(folder, model=None, settings={**STAND_IN, "SECURITY_API_KEYS_FILE": str(keys)}) as mesh:
        yield mesh
        mesh.wait_until_idle()
        assert_never_stale(mesh)


@asynccontextmanager
async def tenant(mesh: RunningMesh, name: str) -> AsyncGenerator[httpx.AsyncClient]:
    async with mesh.client() as client:
        client.headers["Authorization"] = f"Bearer key-of-{name}"
        yield client


def a_prompt(seed: int, num_tokens: int = 400) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(33, 90) for _ in range(num_tokens)]


async def test_tenants_share_nothing(guarded: RunningMesh) -> None:
    prompt = a_prompt(1)
    async with tenant(guarded, "a") as a, tenant(guarded, "b") as b:
        assert await cached(a, guarded, prompt) == 0
        assert await cached(b, guarded, prompt) == 0  # of a stranger's
        assert await cached(b, guarded, prompt) == 384  # of its own
        assert await cached(a, guarded, prompt) == 384
        for salt in ("x", "key-of-a", "a"):  # a stranger's salt is of no use
            assert await cached(a, guarded, prompt, cache_salt=salt) == 0
            assert await cached(b, guarded, prompt, cache_salt=salt) == 0
            assert await cached(a, guarded, prompt, cache_salt=salt) == 384


async def test_prompt_logprobs_are_computed_and_neither_reused_nor_kept(guarded: RunningMesh) -> None:
    prompt = a_prompt(2)
    async with tenant(guarded, "a") as client:
        for _ in range(2):
            assert await cached(client, guarded, prompt, echo=True, logprobs=1) == 0
        assert await cached(client, guarded, prompt) == 0
        assert await cached(client, guarded, prompt, echo=True, logprobs=1) == 0


SALTS: list[object] = [5, 1.5, True, [], ["a"], {}, {"a": 1}, "", "\x00" * 3, "a" * 10_000_000, "\U0001f600"]


@pytest.mark.parametrize("salt", SALTS, ids=range(len(SALTS)))
async def test_a_hostile_salt_is_refused_or_taken_as_text(guarded: RunningMesh, salt: object) -> None:
    """As vLLM does: text, and not empty. Whatever it is, nobody else notices."""
    async with tenant(guarded, "a") as client:
        body = {"model": guarded.model, "prompt": a_prompt(3, 130), "max_tokens": 2, "cache_salt": salt}
        response = await client.post("/v1/completions", json=body)
        is_text = isinstance(salt, str) and salt != ""
        assert response.status_code == (200 if is_text else 400), response.text
        if is_text:
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for lone in (b'"\\ud800"', b"null"):
            raw = json.dumps({**body, "cache_salt": 0}).encode().replace(b'"cache_salt": 0', b'"cache_salt": ' + lone)
            response = await client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400), response.text


# --- what is lost ---


@pytest.mark.slow
async def test_a_killed_decode_instance_costs_what_it_had_drawn(tmp_path: Path) -> None:
    """The prompt is kept where it was computed, and so is not computed again."""
    prompt = a_prompt(4, 3000)
    with running_mesh(tmp_path, model=None, decode=2, settings={**STAND_IN, "WORKER_MAX_MODEL_LEN": "8192"}) as mesh:
        async with mesh.client() as client:
            body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            undisturbed = (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
            drawn: list[int] = []
            request_id = ""
            asked = body | {"cache_salt": "fresh", "stream": True}
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    had_begun, request_id = len(drawn) >= 40, chunk["id"]
                    drawn += chunk["choices"][0]["token_ids"]
                    if len(drawn) >= 40 and not had_begun:
                        (decoding,) = [i for i in (await mesh.state()).instances if i.num_decoding]
                        os.kill(decoding.pid, signal.SIGKILL)
            assert drawn == undisturbed
            record = mesh.request_record(request_id)
            starts = [entry.figures["start"] for entry in record.entries if entry.what == "chunk"]
            assert starts.count(0.0) == 1, starts  # of the first time
            assert max(starts) >= 2944


@pytest.mark.slow
async def test_a_scheduler_that_is_started_again_knows_what_is_kept(tmp_path: Path) -> None:
    """Instances tell it as they register; what they keep is found at once, and nothing is refused."""
    prompts = [a_prompt(seed) for seed in range(10, 15)]
    with running_mesh(tmp_path, model=None, settings=STAND_IN) as mesh:
        async with mesh.client() as client:
            for prompt in prompts:
                assert await cached(client, mesh, prompt) == 0
            pid = mesh.pids()["scheduler"]
            os.kill(pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(mesh.wait_until_replaced, "scheduler", pid)
            assert [await cached(client, mesh, prompt) for prompt in prompts] == [384] * len(prompts)
        assert_never_stale(mesh)
