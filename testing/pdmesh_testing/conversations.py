"""Conversations on a running mesh whose next turns find KV of earlier ones: in the tier, or on another instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from pdmesh.wire.messages import RequestRecord
from pdmesh_testing.exactness import mismatches, random_prompts, reference
from pdmesh_testing.mesh import RunningMesh

Choice = dict[str, Any]

#: For the other prompts to be placed.
BUSY_LIMIT_S = 60.0


async def ask(
    mesh: RunningMesh, client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, salt: str = "ours"
) -> tuple[Choice, RequestRecord]:
    """Return the greedy choice, with its log-probabilities, and the record of its request."""
    body = {
        "model": mesh.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 3,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    response = await client.post("/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    choice: Choice = response.json()["choices"][0]
    record = await anyio.to_thread.run_sync(mesh.request_record, response.json()["id"])
    return choice, record


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedTurn:
    """A turn of 4,100 tokens whose first 4,000 a busy instance, the holder, had cached.

    ``cold`` is the answer before anything was cached, ``warm`` the answer afterwards. ``computed_id`` computed the rest
    of the prompt, and ``fetched_id`` fetched KV. ``detail`` is the record's text on the fetch.
    """

    cold: Choice
    warm: Choice
    holder_id: str
    computed_id: str
    fetched_id: str | None
    detail: str


async def fetched_turn(mesh: RunningMesh, vocab_size: int, *, num_other_tokens: int) -> FetchedTurn:
    """Ask a turn while prompts of ``num_other_tokens`` keep the holder of its prefix busy: 2P, and fcfs."""
    turns: list[FetchedTurn] = []
    async with mesh.client() as client, anyio.create_task_group() as tasks:
        turns.append(await _turn_beside_others(mesh, client, tasks, vocab_size, num_other_tokens))
    return turns[0]


async def _turn_beside_others(
    mesh: RunningMesh, client: httpx.AsyncClient, tasks: TaskGroup, vocab_size: int, num_other_tokens: int
) -> FetchedTurn:
    first, rest, between, *others = random_prompts([4000, 100, 200, *[num_other_tokens] * 2], vocab_size, 3)
    second = [*first, *rest]
    cold, _ = await ask(mesh, client, second, 16, salt="cold")
    _, record = await ask(mesh, client, first, 1)
    holder_id, busy = computed_at(record), set[str]()
    # Instances take turns: the next request goes to the holder.
    await ask(mesh, client, between, 1)
    for number, other in enumerate(others, 1):
        tasks.start_soon(ask, mesh, client, other, 1)
        with anyio.fail_after(BUSY_LIMIT_S):
            while len(busy := await _computing(mesh)) < number:  # noqa: ASYNC110  # of another process
                await anyio.sleep(0.01)
        if holder_id in busy:
            break
    assert holder_id in busy
    warm, record = await ask(mesh, client, second, 16)
    (fetched,) = [entry for entry in record.entries if entry.what == "fetched"]
    return FetchedTurn(
        cold=cold,
        warm=warm,
        holder_id=holder_id,
        computed_id=computed_at(record),
        fetched_id=fetched.instance_id,
        detail=fetched.detail,
    )


async def _computing(mesh: RunningMesh) -> set[str]:
    """Return the prefill instances with tokens to compute."""
    instances = (await mesh.state()).instances
    return {each.instance_id for each in instances if each.role == "prefill" and each.num_queued_tokens}


def computed_at(record: RequestRecord) -> str:
    """Return the instance that computed a prompt alone."""
    (instance_id,) = {entry.instance_id for entry in record.entries if entry.what == "chunk"}
    assert instance_id is not None
    return instance_id


async def turns_from_the_tier(mesh: RunningMesh, checkpoint: Path, vocab_size: int, num_users: int) -> None:
    """Serve conversations of more users than the cache holds, first one by one and then concurrently.

    AssertionError if answers differ from transformers', or if too few tokens were loaded from the tier.
    """
    stems = random_prompts([400] * num_users, vocab_size, 3)
    asked = [reference(checkpoint, stem, 40) for stem in stems]
    turns = [
        reference(checkpoint, [*each.prompt, *each.token_ids, *rest], 24)
        for each, rest in zip(asked, random_prompts([50] * num_users, vocab_size, 4), strict=True)
    ]
    async with mesh.client() as client:
        one_by_one = await mismatches(client, mesh.model, [*asked, *turns], concurrency=1)
        num_loaded_tokens = mesh.total("kv_offload_loaded_tokens")
        crowd = await mismatches(client, mesh.model, [*turns, *asked] * 2, concurrency=6)
    assert one_by_one + crowd == []
    assert num_loaded_tokens >= num_users * 128
    assert mesh.total("kv_offload_lost_granules") == 0
    assert mesh.total("num_stale_prefixes") == 0
