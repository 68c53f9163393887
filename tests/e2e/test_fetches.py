"""A prefix is copied from where it is kept, on real processes: the same bits, seen by whoever asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.conversations import ask, computed_at, fetched_turn
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.mesh import running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

#: A prompt of 4,000 tokens takes it about a second.
SHAPE = CheckpointShape(hidden_size=256, intermediate_size=1024, num_layers=4, max_position_embeddings=16384)


async def test_a_next_turn_is_computed_beside_who_keeps_its_prefix_and_is_busy(tmp_path: Path) -> None:
    """All that the first turn left is copied to another instance, and the answer's bits are those computed anew."""
    model = write_checkpoint(tmp_path / "model", architecture="qwen3", shape=SHAPE, seed=1)
    settings = {"SCHEDULER_BUNDLE": "fcfs", "WORKER_DETERMINISTIC": "true", "WORKER_MAX_MODEL_LEN": "16384"}
    with running_mesh(tmp_path, model=model, prefill=2, settings=settings) as mesh:
        turn = await fetched_turn(mesh, SHAPE.vocab_size, num_other_tokens=12_000)
        assert turn.detail == f"3,968 of 4,100 tokens from {turn.holder_id}"
        assert turn.fetched_id == turn.computed_id != turn.holder_id
        assert turn.warm == turn.cold
        mesh.wait_until_idle()
        assert mesh.total("prefix_cache_fetched_tokens") == 3968
        assert mesh.total("prefix_cache_fetched_bytes") == 3968 * 2 * 2 * 16 * 4 * 4
        assert "KV fetched from other instances: 3,968 tokens" in mesh.pdmesh("status")
        assert mesh.total("num_stale_prefixes") == 0


async def test_a_next_turn_finds_its_prefix_after_its_holder_was_drained(tmp_path: Path) -> None:
    """The prefix was copied to the other instance, whose answer has the bits of the one computed anew."""
    model = write_checkpoint(tmp_path / "model", architecture="qwen3", shape=SHAPE, seed=1)
    settings = {"SCHEDULER_BUNDLE": "fcfs", "WORKER_DETERMINISTIC": "true", "WORKER_MAX_MODEL_LEN": "16384"}
    first, rest = random_prompts([2000, 100], SHAPE.vocab_size, 3)
    with running_mesh(tmp_path, model=model, prefill=0, decode=0, mixed=2, settings=settings) as mesh:
        async with mesh.client() as client:
            cold, _ = await ask(mesh, client, [*first, *rest], 16, salt="cold")
            client.headers["x-session-id"] = "an agent"
            _, record = await ask(mesh, client, first, 1)
            holder_id = computed_at(record)
            mesh.pdmesh("drain", holder_id)
            warm, record = await ask(mesh, client, [*first, *rest], 16)
            (listed,) = (await client.get("/v1/sessions")).json()["data"]
            shown = (await client.get("/v1/sessions/an agent")).json()
        assert (listed["id"], listed["turns"], listed["reused_tokens"]) == (shown["id"], 2, 1920)
        assert computed_at(record) != holder_id
        assert warm == cold
        assert mesh.total("prefix_cache_fetched_tokens") == 1920
        assert mesh.total("num_stale_prefixes") == 0
        (session,) = json.loads(mesh.pdmesh("sessions", "list", "-o", "json"))["sessions"]
        assert (session["state"], session["num_turns"], session["num_reused_tokens"]) == ("between", 2, 1920)
        assert computed_at(record) in session["cached_on"]
        assert mesh.total("session_reused_tokens") == mesh.total("session_possible_tokens") == 1920
        mesh.pdmesh("sessions", "end", session["session"][:6])
        assert "ended since" in mesh.pdmesh("sessions", "show", session["session"][:6])
