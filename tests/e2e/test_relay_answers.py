"""What a client is told of a prompt that several instances computed in turn: all that one instance tells of it."""

import os
import signal
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest

from pdmesh.testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh.testing.exactness import random_prompts
from pdmesh.testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

SHAPE = CheckpointShape(hidden_size=128, intermediate_size=512, num_layers=6, num_heads=8)
PROMPTS = random_prompts([3000, 5003], SHAPE.vocab_size, seed=7)
SEEDED = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 11}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@dataclass(frozen=True)
class Served:
    alone: RunningMesh
    together: RunningMesh

    async def answers(self, *, helped: bool = True, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a mesh with one prefill instance says, and one in which somebody ``helped``, or nobody."""
        async with self.alone.client() as client:
            alone = await ask(client, self.alone, **fields)
        async with self.together.client() as client:
            together = await ask(client, self.together, **fields)
        num_helpers = helpers_of(self.together, together["id"], together["choices"])
        assert (num_helpers > 0) == helped, f"{num_helpers} helped"
        return alone, together


async def ask(client: httpx.AsyncClient, mesh: RunningMesh, **fields: Any) -> dict[str, Any]:
    body = {"model": mesh.model, "prompt": PROMPTS[1], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def helpers_of(mesh: RunningMesh, name: str, choices: list[Any]) -> int:
    """How many more than its leader computed any choice's prompt."""
    names = [name] if len(choices) == 1 else [f"{name}-{index}" for index in range(len(choices))]
    entries = [mesh.request_record(each).entries for each in names]
    return max(len({entry.instance_id for entry in of if entry.what == "chunk"}) - 1 for of in entries)


@pytest.fixture(scope="module", params=[2, 3])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("relay")
    checkpoint = write_checkpoint(folder / "model", shape=SHAPE, seed=1)
    settings = {"POLICY_LONG_PROMPT_TOKENS": "1000", "POLICY_PREFILL_STEP_S": "0.02", "POLICY_RELAY_IMPROVEMENT": "0"}
    with (
        running_mesh(folder / "alone", model=checkpoint, settings=settings) as alone,
        running_mesh(folder / "together", model=checkpoint, prefill=request.param, settings=settings) as together,
    ):
        yield Served(alone, together)
        together.wait_until_idle()


def assert_same_choices(alone: dict[str, Any], together: dict[str, Any]) -> None:
    assert together["usage"] == alone["usage"]
    for expected, got in zip(alone["choices"], together["choices"], strict=True):
        assert {**got, "logprobs": None} == {**expected, "logprobs": None}
        if expected["logprobs"] is not None:
            assert_same_logprobs(expected["logprobs"], got["logprobs"])


def assert_same_logprobs(expected: dict[str, Any], got: dict[str, Any]) -> None:
    for field in ("tokens", "text_offset"):
        assert got[field] == expected[field]
    missing = [position for position, value in enumerate(got["token_logprobs"]) if value is None]
    assert missing == [position for position, value in enumerate(expected["token_logprobs"]) if value is None]
    assert got["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)
    for expected_top, got_top in zip(expected["top_logprobs"][1:], got["top_logprobs"][1:], strict=True):
        assert sorted(got_top.values()) == pytest.approx(sorted(expected_top.values()), abs=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"n": 2, **SEEDED}], ids=["greedy", "two choices"])
async def test_who_asks_for_a_prompts_logprobs_gets_all_of_them(served: Served, fields: dict[str, Any]) -> None:
    alone, together = await served.answers(helped=False, echo=True, logprobs=2, **fields)
    assert_same_choices(alone, together)
    for choice in together["choices"]:
        assert choice["logprobs"]["token_logprobs"].index(None) == 0
        assert choice["logprobs"]["token_logprobs"].count(None) == 1, "of others than the first token"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "temperature": 0},
        {"n": 2, "logprobs": 1, **SEEDED},
        {"logprobs": 1, "temperature": 0, **PENALTIES},
        {"logprobs": 2, **SEEDED, **PENALTIES},
    ],
    ids=["echo", "two choices", "penalties", "seed and penalties"],
)
async def test_answers_equal_those_of_one_instance(served: Served, fields: dict[str, Any]) -> None:
    assert_same_choices(*await served.answers(**fields))


@pytest.mark.timeout(300)
async def test_stop_strings(served: Served) -> None:
    async with served.alone.client() as client:
        undisturbed = await ask(client, served.alone, max_tokens=24, temperature=0)
    text = undisturbed["choices"][0]["text"]
    alone, together = await served.answers(max_tokens=24, temperature=0, stop=[text[len(text) // 2 :][:3]])
    assert_same_choices(alone, together)
    assert together["choices"][0]["finish_reason"] == "stop"


@pytest.mark.timeout(300)
async def test_who_hangs_up_in_the_middle_leaves_no_blocks_at_any_member(served: Served) -> None:
    mesh = served.together
    async with mesh.client() as client:
        for wait_s in (0.1, 0.3, 0.6):
            with anyio.move_on_after(wait_s):
                await ask(client, mesh, temperature=0)
            await anyio.to_thread.run_sync(mesh.wait_until_idle)
    assert_same_choices(*await served.answers(temperature=0, logprobs=1))


@pytest.mark.timeout(300)
async def test_a_member_that_dies_in_the_middle_changes_no_answer(served: Served) -> None:
    mesh = served.together
    names = [name for name in mesh.pids() if name.startswith("prefill")]
    got: list[dict[str, Any]] = []

    async def generate() -> None:
        async with mesh.client() as client:
            got.append(await ask(client, mesh, logprobs=1, **SEEDED))

    for name, wait_s in zip(names, (0.4, 0.7, 0.2), strict=False):
        pid = mesh.pids()[name]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await anyio.sleep(wait_s)  # into its prefill, on most machines
            os.kill(pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(mesh.wait_until_replaced, name, pid)
    async with served.alone.client() as client:
        expected = await ask(client, served.alone, logprobs=1, **SEEDED)
    for each in got:
        assert_same_choices(expected, each)
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
