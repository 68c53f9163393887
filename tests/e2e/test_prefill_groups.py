"""A long prompt that several instances compute, in turn or at once: KV between processes, and the answer of one."""

import os
import secrets
import signal
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from pdmesh.cli.request_view import computed_again
from pdmesh.wire.messages import GroupStatus, RequestRecord
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import Reference, complete, mismatches, random_prompts, reference
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(300)]

#: Not as fast as it could be: there are chunks enough for everyone.
SHAPE = CheckpointShape(hidden_size=128, intermediate_size=512, num_layers=6, num_heads=8)
PROMPTS = random_prompts([2000, 3503], SHAPE.vocab_size, seed=7)
SETTINGS = {"POLICY_LONG_PROMPT_TOKENS": "1000", "POLICY_PREFILL_STEP_S": "0.02", "POLICY_GROUP_IMPROVEMENT": "0"}

SEEDED = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 11}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), shape=SHAPE, seed=1)


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return [reference(checkpoint, prompt, 12) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningMesh]:
    """A mesh in which there is nobody to help."""
    with running_mesh(tmp_path_factory.mktemp("alone"), model=checkpoint, settings=SETTINGS) as mesh:
        yield mesh


#: How many prefill instances, how they share a prompt, and whether they copy KV from each other's caches.
GROUPS = {
    "2 that read peers": (2, "pipelined", True),
    "3": (3, "pipelined", False),
    "3 at once": (3, "parallel", False),
    "3 at once that read peers": (3, "parallel", True),
}


@pytest.fixture(scope="module", params=slow_beyond(0, ((group,) for group in GROUPS.values())), ids=list(GROUPS))
def together(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunningMesh]:
    folder, (number, schedule, peer_reads) = tmp_path_factory.mktemp("together"), request.param
    settings = SETTINGS | {"POLICY_SEQUENCE_PARALLEL": schedule, "TRANSFER_PEER_READS": str(peer_reads).lower()}
    with running_mesh(folder, model=checkpoint, prefill=number, settings=settings) as mesh:
        yield mesh
        mesh.wait_until_idle()
        assert (mesh.peer_read_bytes() > 0) == peer_reads


def groups(*names: str) -> pytest.MarkDecorator:
    slow = slow_beyond(0, ((GROUPS[name],) for name in names))
    return pytest.mark.parametrize("together", slow, indirect=True, ids=names)


three, either = groups("3"), groups("3", "3 at once", "3 at once that read peers")


async def ask(mesh: RunningMesh, **fields: Any) -> dict[str, Any]:
    """What is computed here is computed anew, whoever asked for it before."""
    body = {"model": mesh.model, "prompt": PROMPTS[1], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    body["cache_salt"] = secrets.token_hex()
    async with mesh.client() as client:
        response = await client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def helpers_of(mesh: RunningMesh, answer: dict[str, Any]) -> int:
    """How many more than its leader computed any choice's prompt."""
    name, choices = answer["id"], answer["choices"]
    names = [name] if len(choices) == 1 else [f"{name}-{index}" for index in range(len(choices))]
    entries = [mesh.request_record(each).entries for each in names]
    return max(len({entry.instance_id for entry in of if entry.what == "chunk"}) - 1 for of in entries)


def assert_shared(mesh: RunningMesh, answer: dict[str, Any]) -> None:
    """Its prompt was computed by several, by the schedule that the mesh was told to use."""
    chunks = [entry for entry in mesh.request_record(answer["id"]).entries if entry.what == "chunk"]
    assert len({entry.instance_id for entry in chunks}) > 1, "nobody helped"
    by_parallel = mesh.environ["PDMESH_POLICY_SEQUENCE_PARALLEL"] == "parallel"
    assert any("in a parallel step" in entry.detail for entry in chunks) == by_parallel


@dataclass(frozen=True)
class Meshes:
    alone: RunningMesh
    together: RunningMesh

    async def answers(self, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a mesh with one prefill instance says, and one in which somebody helped."""
        expected, got = await ask(self.alone, **fields), await ask(self.together, **fields)
        num_helpers = helpers_of(self.together, got)
        assert num_helpers > 0, "nobody helped"
        return expected, got


@pytest.fixture
def meshes(alone: RunningMesh, together: RunningMesh) -> Meshes:
    return Meshes(alone, together)


def assert_same_choices(alone: dict[str, Any], together: dict[str, Any]) -> None:
    """The same but for how much was reused: what helpers have kept of a prompt whose leader has died is."""
    assert {**together["usage"], "prompt_tokens_details": None} == {**alone["usage"], "prompt_tokens_details": None}
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


async def test_greedy_tokens_and_logprobs_equal_transformers(
    together: RunningMesh, references: list[Reference]
) -> None:
    async with together.client() as client:
        one_by_one = await mismatches(client, together.model, references, concurrency=1)
        crowd = await mismatches(client, together.model, references * 2, concurrency=4)
    assert one_by_one + crowd == []
    assert_shared(together, await ask(together, max_tokens=1))


async def test_a_seed_draws_what_it_draws_where_nobody_helps(alone: RunningMesh, together: RunningMesh) -> None:
    drawn = []
    for mesh in (alone, together):
        async with mesh.client() as client:
            drawn.append(await complete(client, mesh.model, PROMPTS[1], 24, **SEEDED, repetition_penalty=1.1))
    expected, got = drawn
    assert got.token_ids == expected.token_ids
    assert max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True)) < 1e-4


# What clients are told beside tokens goes the same ways for two as for three.


@three
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"n": 2, **SEEDED}], ids=["greedy", "two choices"])
async def test_who_asks_for_a_prompts_logprobs_gets_all_of_them(meshes: Meshes, fields: dict[str, Any]) -> None:
    alone, together = await meshes.answers(echo=True, logprobs=2, **fields)
    assert_same_choices(alone, together)
    for choice in together["choices"]:
        assert choice["logprobs"]["token_logprobs"].index(None) == 0
        assert choice["logprobs"]["token_logprobs"].count(None) == 1, "of others than the first token"


@three
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
async def test_answers_equal_those_of_one_instance(meshes: Meshes, fields: dict[str, Any]) -> None:
    assert_same_choices(*await meshes.answers(**fields))


@three
async def test_stop_strings(meshes: Meshes) -> None:
    undisturbed = await ask(meshes.alone, max_tokens=24, temperature=0)
    text = undisturbed["choices"][0]["text"]
    alone, together = await meshes.answers(max_tokens=24, temperature=0, stop=[text[len(text) // 2 :][:3]])
    assert_same_choices(alone, together)
    assert together["choices"][0]["finish_reason"] == "stop"


def num_done_in_vain(record: RequestRecord) -> int:
    """Prompt tokens done when a helper was lost, behind the first that neither its leader nor who is left has."""
    num_tokens, lost_ids = 0, set[str]()
    for at, entry in enumerate(record.entries):
        if entry.what != "continues without":  # a busy one may be thought lost, too
            continue
        lost_ids.add(entry.detail.split(",")[0])
        done = sorted(
            (int(chunk.figures["start"]), int(chunk.figures["start"] + chunk.figures["num_tokens"]), chunk.instance_id)
            for chunk in record.entries[:at]
            if chunk.what == "chunk"
        )
        end = next((int(each.detail.split()[2]) for each in record.entries[at:] if each.what == "has"), 0)
        for start, stop, instance_id in done:
            if start <= end and instance_id not in lost_ids:
                end = max(end, stop)
        num_tokens += len({token for start, stop, _ in done for token in range(max(start, end), stop)})
    return num_tokens


async def group_of(mesh: RunningMesh, num_tokens: int = 0) -> GroupStatus:
    """The group that computes a prompt, once there is one and so many of its tokens are planned."""
    with anyio.fail_after(60):
        while True:
            for group in (await mesh.state()).groups:
                if group.num_planned_tokens >= num_tokens:
                    return group


@either
async def test_who_hangs_up_in_the_middle_leaves_no_blocks_at_any_member(meshes: Meshes) -> None:
    for num_tokens in (0, 1000, 2000):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, meshes.together, temperature=0))
            await group_of(meshes.together, num_tokens)
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(meshes.together.wait_until_idle)
    assert_same_choices(*await meshes.answers(temperature=0, logprobs=1))


async def killed_meanwhile(meshes: Meshes, place: int) -> RequestRecord:
    """What became of a request one of whose group was killed; its answer is that of a mesh in which nobody helps."""
    mesh = meshes.together
    got: list[dict[str, Any]] = []

    async def generate() -> None:
        got.append(await ask(mesh, logprobs=1, **SEEDED))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        name = (await group_of(mesh, 1000)).member_ids[place]
        pid = mesh.pids()[name]
        os.kill(pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(mesh.wait_until_replaced, name, pid)
    assert_same_choices(await ask(meshes.alone, logprobs=1, **SEEDED), got[0])
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
    return mesh.request_record(got[0]["id"])


def whats(record: RequestRecord) -> set[str]:
    return {entry.what for entry in record.entries}


@either
async def test_a_prompt_whose_leader_dies_in_the_middle_begins_again(meshes: Meshes) -> None:
    records = [await killed_meanwhile(meshes, 0)]
    while "restarted" not in whats(records[-1]) and len(records) < 5:
        records.append(await killed_meanwhile(meshes, 0))  # on a busy machine a kill may come after the last chunk
    assert "restarted" in whats(records[-1]), records


@either
@pytest.mark.parametrize("place", [1, 2], ids=["helper", "other helper"])
async def test_without_a_helper_that_dies_in_the_middle_the_others_go_on(meshes: Meshes, place: int) -> None:
    record = await killed_meanwhile(meshes, place)
    assert "restarted" not in whats(record)
    assert computed_again(record) <= num_done_in_vain(record), "more than what was behind a hole"
