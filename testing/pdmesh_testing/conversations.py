"""Conversations on a running mesh whose next turns find KV of earlier ones: in the tier, or on another instance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from pdmesh.core.sessions.session_state import NUM_PAUSES
from pdmesh.kv_layout import GRANULE_TOKENS
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


async def turns_after_tools(
    mesh: RunningMesh, vocab_size: int, num_tokens: int, pause_s: float, num_rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Ask turns of a session and of a conversation without a name, ``pause_s`` apart, and return times to first tokens.

    The first prompts have ``num_tokens`` and one more, answers one token, and each turn adds a granule. So all turns
    compute as many tokens if all granules before are cached. Once the session's pauses are known, other prompts fill
    the cache in every other pause, until a part of it is left; keys tell whether they did. AssertionError if a turn
    computed more, if the session's KV was not back before, or if a token differs without reuse.
    """
    new = iter(random_prompts([num_tokens + 1] * 400, vocab_size, 5))
    contexts, names = {kind: next(new) for kind in ("named", "unnamed")}, {"named": {"prompt_cache_key": "tool"}}
    asked: list[tuple[list[int], list[int]]] = []
    ttft_s: dict[tuple[str, bool], list[float]] = {}

    async def turn(prompt: list[int], **fields: str) -> tuple[float, list[int], int]:
        body = {"model": mesh.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        began_s = time.perf_counter()
        answer = (await client.post("/v1/completions", json=body | fields, timeout=300)).json()
        took_s, details = time.perf_counter() - began_s, answer["usage"]["prompt_tokens_details"]
        return took_s, answer["choices"][0]["token_ids"], (details or {}).get("cached_tokens", 0)

    async with mesh.client() as client:
        for number in range(NUM_PAUSES + 1 + 2 * num_rounds):
            is_full = number > NUM_PAUSES and number % 2 == 0
            until_s = anyio.current_time() + pause_s * (number > 0)
            while is_full and anyio.current_time() < until_s - 0.4 * pause_s:
                await turn(next(new))
            await anyio.sleep_until(until_s)
            for kind, context in contexts.items():
                num_loaded = mesh.total("kv_offload_loaded_tokens")
                took_s, drawn, num_cached = await turn([*context], **names.get(kind, {}))
                asked.append(([*context], drawn))
                if number > NUM_PAUSES:
                    num_missing = len(context) - num_cached
                    assert num_missing == GRANULE_TOKENS + len(context) % GRANULE_TOKENS, f"{num_cached} cached: {kind}"
                    is_back = mesh.total("kv_offload_loaded_tokens") - num_loaded < num_tokens / 2
                    assert is_back or kind == "unnamed", "the turn loaded its KV itself"
                    ttft_s.setdefault((kind, is_full), []).append(took_s)
                context += [*drawn, *next(new)[: GRANULE_TOKENS - 1]]
        for prompt, drawn in asked:
            assert (await turn(prompt, cache_salt=f"{len(prompt)}"))[1] == drawn, "a token differs"
    assert mesh.total("num_stale_prefixes") == 0
    assert mesh.total("session_loaded_tokens") > 0
    return ttft_s
