"""The next turns of sessions after an instance was drained, got another role, was restarted or killed.

Each turn finds the KV of the turn before, and the tokens are the ones of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.to_thread import run_sync

from pdmesh.errors import PdmeshError
from pdmesh_gateway.session_names import FINAL_HEADER, HEADERS
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.conversations import turns_after_tools
from pdmesh_testing.exactness import complete, random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]

#: A prompt of 4,000 tokens takes it about a second, so that a copy is cheaper.
SHAPE = CheckpointShape(hidden_size=256, intermediate_size=1024, num_layers=4, max_position_embeddings=16384)
TOKEN_BYTES = 2 * 4 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim

NUM_SESSIONS, NUM_TURNS = 3, 2
FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS = 2200, 140, 40
GRANULE_TOKENS = 128

#: Instances that prefill, decode and do both.
POOLS = {"mixed": (0, 0, 2), "1P+1D": (1, 1, 0), "2P+2D": (2, 2, 0)}

#: Roles of instances that change, and the least share of the KV that the next turn finds.
OTHER_ROLE = {"prefill": "decode", "decode": "prefill", "mixed": "decode"}
CASES = [
    ("mixed", "drain", 0.95),
    ("mixed", "role", 0.95),
    ("mixed", "rolling", 0.95),
    ("mixed", "failover, drain", 0.95),
    ("2P+2D", "drain", 0.95),
    ("2P+2D", "role", 0.95),
    ("1P+1D", "rolling", 0.95),
    ("1P+1D", "kill prefill-0", 0.9),
    ("1P+1D", "kill decode-0", 0.9),
    ("2P+2D", "kill prefill-0 decode-0, prefill-1 decode-1", 0.9),
]


class Agent:
    """A session whose turns continue its last prompt and answer. ``answers`` has the tokens of each."""

    def __init__(self, number: int, salt: str) -> None:
        self._name = f"{salt} {number}"
        self._salt = salt
        self._parts = random_prompts([FIRST_TOKENS, *[NEXT_TOKENS] * 10], SHAPE.vocab_size, number)
        self.context: list[int] = []
        self.answers: list[list[int]] = []

    async def turn(self, mesh: RunningMesh, client: httpx.AsyncClient) -> tuple[int, int]:
        """Ask the next turn. Return its cached tokens, and the whole granules of the previous prompt in tokens."""
        num_before = max(0, len(self.context) - ANSWER_TOKENS) // GRANULE_TOKENS * GRANULE_TOKENS
        self.context += self._parts[len(self.answers)]
        body = {
            "model": mesh.model,
            "prompt": self.context,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "cache_salt": self._salt,
        }
        response = await client.post("/v1/completions", json=body, headers={"x-session-id": self._name})
        assert response.status_code == 200, response.text
        answer = response.json()
        self.answers.append(answer["choices"][0]["token_ids"])
        self.context += self.answers[-1]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], num_before


async def turns(agents: list[Agent], mesh: RunningMesh, client: httpx.AsyncClient) -> float:
    """Ask one turn of each agent. Return which share of the previous prompts was cached."""
    found = [await agent.turn(mesh, client) for agent in agents]
    return sum(cached for cached, _ in found) / max(1, sum(before for _, before in found))


async def num_instances(mesh: RunningMesh) -> int:
    """Return how many instances the scheduler knows; none while it starts."""
    try:
        return len((await mesh.state()).instances)
    except PdmeshError:
        return 0


async def replace(mesh: RunningMesh, name: str) -> None:
    """Kill a process, and wait until the next one is there and the scheduler knows as many instances as before."""
    number, pid = await num_instances(mesh), mesh.pids()[name]
    os.kill(pid, signal.SIGKILL)
    await run_sync(mesh.wait_until_replaced, name, pid)
    # The scheduler hears of a loss a little later.
    await anyio.sleep(2.0)
    while await num_instances(mesh) < number:  # noqa: ASYNC110  # of another process
        await anyio.sleep(0.2)


async def disturb(mesh: RunningMesh, what: str) -> AsyncIterator[str]:
    """Kill the named instances, restart all, or do this to one instance after the other. Yield after each time.

    The first of two instances in a row is back when the second one is killed, and no turn comes between.

    Before a failover's other part, the scheduler is killed and started again.
    """
    if what.startswith("failover, "):
        await replace(mesh, "scheduler")
        what = what.removeprefix("failover, ")
    if what == "rolling":
        await run_sync(mesh.pdmesh, "restart", "--rolling")
        yield "all"
        return
    if what.startswith("kill "):
        for names in what.removeprefix("kill ").split(", "):
            *firsts, last = names.split(" ")
            for name in firsts:
                await replace(mesh, name)
            pid = mesh.pids()[last]
            os.kill(pid, signal.SIGKILL)
            yield names
            await run_sync(mesh.wait_until_replaced, last, pid)
        return
    for instance in (await mesh.state()).instances:
        name, role = str(instance.instance_id), str(instance.role)
        if what == "drain":
            await run_sync(mesh.pdmesh, "drain", name)
            yield name
            await run_sync(mesh.pdmesh, "undrain", name)
        else:
            await run_sync(mesh.pdmesh, "role", name, OTHER_ROLE[role])
            yield name
            await run_sync(mesh.pdmesh, "role", name, role)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", shape=SHAPE, seed=1)


@pytest.mark.parametrize(("pools", "what", "least"), CASES, ids=[f"{pools}-{what}" for pools, what, _ in CASES])
async def test_the_next_turns_find_the_kv_of_the_turns_before(
    model: Path, tmp_path: Path, pools: str, what: str, least: float
) -> None:
    prefill, decode, mixed = POOLS[pools]
    settings = {"WORKER_MAX_MODEL_LEN": "16384"}
    agents = [Agent(number, what) for number in range(NUM_SESSIONS)]
    undisturbed = [Agent(number, "undisturbed") for number in range(NUM_SESSIONS)]
    shares: dict[str, float] = {}
    with running_mesh(tmp_path, model=model, prefill=prefill, decode=decode, mixed=mixed, settings=settings) as mesh:
        async with mesh.client() as client:
            for _ in range(NUM_TURNS):
                shares["before"] = await turns(agents, mesh, client)
            async for name in disturb(mesh, what):
                shares[name] = await turns(agents, mesh, client)
            for _ in agents[0].answers:
                await turns(undisturbed, mesh, client)
        assert [agent.answers for agent in agents] == [agent.answers for agent in undisturbed]
        assert min(shares.values()) >= least, shares
        assert mesh.total("num_stale_prefixes") == 0


#: Tokens of a cache that others fill in pauses of a session.
CACHED_TOKENS = 6_000


async def test_kv_is_back_from_the_tier_before_the_next_turn(model: Path, tmp_path: Path) -> None:
    settings = {
        "WORKER_KV_CACHE_BYTES": str(CACHED_TOKENS * TOKEN_BYTES),
        "WORKER_KV_OFFLOAD_HOST_BYTES": str(20 * CACHED_TOKENS * TOKEN_BYTES),
        "WORKER_MAX_MODEL_LEN": "8192",
    }
    with running_mesh(tmp_path, model=model, mixed=1, settings=settings) as mesh:
        await turns_after_tools(mesh, SHAPE.vocab_size, num_tokens=FIRST_TOKENS, pause_s=8.0, num_rounds=1)


async def test_a_new_scheduler_keeps_the_share_of_a_tenant_whose_session_pauses(model: Path, tmp_path: Path) -> None:
    """After the scheduler was killed, another tenant fills the cache; the session knows its turns and has its KV."""
    keys = tmp_path / "keys"
    keys.write_text("quiet\nloud\n")
    settings = {
        "WORKER_KV_CACHE_BYTES": str(CACHED_TOKENS * TOKEN_BYTES),
        "WORKER_MAX_MODEL_LEN": "8192",
        "SECURITY_API_KEYS_FILE": str(keys),
    }
    quiet, undisturbed = Agent(1, "quiet"), Agent(1, "undisturbed")
    with running_mesh(tmp_path, model=model, mixed=1, settings=settings) as mesh:
        async with mesh.client() as client, mesh.client() as loud:
            client.headers["authorization"], loud.headers["authorization"] = "Bearer quiet", "Bearer loud"
            for _ in range(2):
                await turns([quiet], mesh, client)
            await replace(mesh, "scheduler")
            for prompt in random_prompts([1500] * 8, SHAPE.vocab_size, 7):
                await complete(loud, mesh.model, prompt, 1)
            assert (await client.get("/v1/sessions/quiet 1")).json()["turns"] == 2
            share = await turns([quiet], mesh, client)
            for _ in quiet.answers:
                await turns([undisturbed], mesh, client)
    assert share >= 0.95
    assert quiet.answers == undisturbed.answers


#: Requests of the test of names, and tokens of each answer: 10,000 tokens.
NUM_STEMS, NUM_ASKED, NUM_DRAWN = 10, 100, 100


def named(number: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return headers and fields that name a session, another kind for each number of a dozen."""
    headers = [
        {own: f"agent {number % 5}"} | ({} if parent is None else {parent: f"parent {number % 3}"})
        for own, parent in HEADERS
    ]
    headers[0] |= {FINAL_HEADER: "true"}
    kinds = [*((each, {}) for each in headers), ({}, {"user": "u" * 4096}), ({}, {"prompt_cache_key": f"{number % 5}"})]
    return kinds[number % len(kinds)]


async def test_names_of_every_kind_and_leases_change_no_token(model: Path, tmp_path: Path) -> None:
    """Greedy and seeded answers, while the contexts exceed the cache and so whole sessions wait."""
    stems = random_prompts([900] * NUM_STEMS, SHAPE.vocab_size, 1)
    rests = random_prompts([60 + number for number in range(NUM_ASKED)], SHAPE.vocab_size, 2)
    prompts = [[*stems[number % NUM_STEMS], *rest] for number, rest in enumerate(rests)]
    settings = {"WORKER_KV_CACHE_BYTES": str(6_000 * TOKEN_BYTES), "WORKER_MAX_MODEL_LEN": "2048"}
    with running_mesh(tmp_path, model=model, prefill=1, decode=1, settings=settings) as mesh:

        async def answers(*, names: bool) -> list[tuple[int, ...]]:
            found: dict[int, tuple[int, ...]] = {}

            async def ask(number: int) -> None:
                headers, fields = named(number) if names else ({}, {})
                draws = {"temperature": 0.8, "seed": number} if number % 2 else {}
                salt: dict[str, object] = {"cache_salt": f"{names}"}
                if names and number % 3:
                    salt["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
                async with at_once, mesh.client() as client:
                    client.headers.update(headers)
                    answer = await complete(client, mesh.model, prompts[number], NUM_DRAWN, **salt, **fields, **draws)
                found[number] = answer.token_ids

            at_once = anyio.Semaphore(8)
            async with anyio.create_task_group() as tasks:
                for number in range(NUM_ASKED):
                    tasks.start_soon(ask, number)
            return [found[number] for number in range(NUM_ASKED)]

        without, with_names = await answers(names=False), await answers(names=True)
        assert with_names == without
        assert sum(map(len, without)) == NUM_ASKED * NUM_DRAWN
        assert mesh.total("session_possible_tokens") > 0
